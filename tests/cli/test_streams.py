"""Standard output carries the result alone; errors go to standard error; a reader that has read enough ends it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import command, tiny

RUN = (sys.executable, "-m", "compress")
CLOSED = "import os, sys; os.close({number}); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of Windows end otherwise")
@pytest.mark.parametrize("words", ["recipes --json", "recipes tinybert", "--help"])
def test_a_reader_that_has_gone_ends_a_command_quietly(words: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([*RUN, *words.split()], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is Linux's")
@pytest.mark.parametrize("words", ["recipes --json", "recipes tinybert"])
def test_a_full_disk_behind_standard_output_is_an_error(words: str) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([*RUN, *words.split()], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: No space left on device")


@pytest.mark.parametrize("words", ["recipes nope --json", "inspect nope --json", "report nowhere --json"])
def test_errors_go_to_standard_error(words: str) -> None:
    result = command.run(*words.split())
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")


NOISY = """
import os, subprocess, sys
from compress.cli import app, configure_libraries
from compress.config import catalog
def plain(recipe, known=catalog.plain):
    print("a library prints")
    os.write(1, b"a library in C prints\\n")
    subprocess.run(["echo", "a program prints"])
    return known(recipe)
catalog.plain = plain
sys.argv = ["compress", "recipes", *sys.argv[1:]]
app()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no echo")
def test_nothing_but_the_result_is_on_standard_output() -> None:
    ended = subprocess.run([sys.executable, "-c", NOISY, "--json"], capture_output=True, text=True, check=True)
    assert len(json.loads(ended.stdout)["recipes"]) > 1
    assert {"a library prints", "a library in C prints", "a program prints"} <= set(ended.stderr.splitlines())


@pytest.mark.skipif(sys.platform == "win32", reason="streams are closed by the shell")
def test_a_closed_stream_takes_no_file_and_nothing_of_the_other() -> None:
    """Without standard error, its number would be that of the next file, and its text would go to standard output."""
    words = [sys.executable, "-c", CLOSED.format(number=2), "-m", "compress", "recipes", "nope", "--json"]
    ended = subprocess.run(words, stdout=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stdout) == (2, b"")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="standard output has a name on Linux")
def test_standard_output_by_its_name_is_the_same_with_and_without_json(tmp_path: Path) -> None:
    tiny.bundle(tmp_path / "bundle")
    for more in ([], ["--json"]):
        words = [*RUN, "report", "bundle", "--html", "/dev/stdout", *more]
        ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert ended.stdout.startswith("<!doctype html>")
        assert "<html" not in ended.stderr
