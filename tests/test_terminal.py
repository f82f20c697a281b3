"""Output is safe for any terminal, in any encoding."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from compress.console import Screen, print_note
from compress.terminal import ESCAPED, escape_unencodable, one_line, printable
from tests import command

HOSTILE = "\x1b]0;owned\x07 \x1b[2J \x9b2J \u202egnp.exe \u2028 [bold]x[/] [/nothing] \udcff"


def test_printable_escapes_control_characters() -> None:
    kept = "é 字 👩\u200d💻 שלום\t[a]\n\\x1b"
    assert printable(kept) == kept
    shown = printable(HOSTILE)
    assert shown.isprintable()
    assert json.loads(f'"{shown}"') == HOSTILE
    assert printable("\x1b[2J") == "\\u001b[2J"


def test_one_line_is_short_and_printable() -> None:
    assert one_line("a\n\tb\x00c") == "a b c"
    assert len(one_line("a" * 10_000, 50)) == 50


@pytest.fixture
def screen() -> Screen:
    made = Screen()
    made.file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors=ESCAPED, write_through=True)
    escape_unencodable()
    return made


def shown(screen: Screen) -> str:
    assert isinstance(screen.file, io.TextIOWrapper)
    buffer = screen.file.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode("ascii")


def test_the_screen_escapes_everything(screen: Screen) -> None:
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(f"é — {HOSTILE}")
    for each in (HOSTILE, table):
        screen.print(each)
    print_note(screen, HOSTILE)
    with Progress(TextColumn("{task.description}", markup=False), BarColumn(), console=screen) as bar:
        bar.add_task(HOSTILE, total=2, completed=1)
    out = shown(screen).replace("\n", "")
    assert out.isprintable()
    assert "[bold]x[/] [/nothing]" in out
    assert "+--" in out, "boxes are drawn with what the terminal has"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_json_is_the_same_in_every_encoding(encoding: str) -> None:
    value = ["é — 字 👩", HOSTILE]
    program = (
        "import json; from compress.terminal import escape_unencodable; from compress.cli.options import print_result\n"
        f"escape_unencodable(); print_result(json.dumps({value!a}, ensure_ascii=False))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True,
        env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
    )  # fmt: skip
    assert json.loads(done.stdout.decode(encoding)) == value


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"LC_ALL": "C"}, ["bench", "\udcff\u2014"]),
        ({"PYTHONIOENCODING": "ascii"}, ["recipes", "tinybert"]),
        ({"PYTHONIOENCODING": "cp437"}, ["recipes"]),
    ],
)
def test_other_encodings_end_no_command(settings: dict[str, str], words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "compress", *map(os.fsencode, words)], capture_output=True, check=False,
        env={**os.environ, "PYTHONUTF8": "0", **settings},
    )  # fmt: skip
    assert b"Traceback" not in done.stderr, done.stderr
    assert done.returncode == (2 if words[0] == "bench" else 0)


def test_an_error_does_not_repeat_control_characters(tmp_path: Path) -> None:
    result = command.run("bench", str(tmp_path / "\x1b]0;owned\x07"))
    assert result.code == 2
    assert result.err.rstrip("\n").isprintable()
