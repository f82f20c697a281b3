"""Over a real sshd: the same figures and answers as here, nothing left behind, and messages for every failure."""

import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest

from compress.benchmark.devices import open_device
from compress.benchmark.local import Link
from compress.benchmark.ssh import Address, remote_command
from compress.exporters.int8 import quantize_dynamic
from compress.exporters.onnx import to_onnx
from compress.records.latency import DeviceError, Setting
from tests import tiny
from tests.benchmark.ssh_server import Server, client, needs_sshd, serving

ROWS = [{"input_ids": [2, 9, 14, 3], "attention_mask": [1] * 4, "token_type_ids": [0] * 4}] * 70
HERE: dict[str, Any] = {"python": sys.executable, "say": lambda _: None}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    to_onnx(tiny.bert(layers=1), folder / "fp32.onnx")
    quantize_dynamic(folder / "fp32.onnx", folder / "it's int8.onnx")
    return {"fp32": folder / "fp32.onnx", "int8": folder / "it's int8.onnx"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture
def server(running: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    client(running.folder, key="user", known="known")
    monkeypatch.setenv("PATH", f"{running.folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return running


def measuring() -> int:
    """Runners anywhere on this machine, which is both sides: those on the far one are no children of ours."""
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return sum("runner.py" in " ".join(words) and "/far/" in " ".join(words) for words in commands)


def check_clean(server: Server) -> None:
    assert server.left() == []
    assert measuring() == 0


def check_refused(
    server: Server,
    error: str,
    python: Path | str = sys.executable,
    *,
    timeout: float = 60,
    files: dict[str, Path] | None = None,
) -> None:
    """Expect a DeviceError that matches, when connecting or racing the files, and nothing left behind."""
    with (
        pytest.raises(DeviceError, match=error),
        open_device(f"ssh:{server.where}", say=print, python=str(python), timeout=timeout) as device,
    ):
        device.race(files or {}, [Setting(1, 1, 8)], rounds=2, runs=1)
    check_clean(server)


def script(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(("#!/bin/sh", *lines)) + "\n")
    path.chmod(0o755)
    return path


@needs_sshd
def test_race(server: Server, files: dict[str, Path]) -> None:
    messages: list[str] = []
    settings = [Setting(1, 1, 8), Setting(2, 1, 8)]
    mine = min(os.sched_getaffinity(0))
    with open_device(f"ssh:{server.where}", **{**HERE, "say": messages.append}, affinity=(mine,)) as device:
        found = device.race(files, settings, rounds=2, runs=3)
        facts = device.facts()
        assert len(list(server.temporary.iterdir())) == 1
    assert [(each.name, each.setting) for each in found] == [(name, each) for each in settings for name in files]
    assert all(0 < each.min_ms <= each.p50_ms and each.affinity == str(mine) for each in found)
    assert {"cpu", "cores", "load", "memory", "system", "python"} <= facts.keys()
    assert facts["runtime"].startswith("onnxruntime 1.")
    assert messages[0] == f"ssh:{server.where}: pass 1 of 2, 1 thread, batch 1, 8 tokens"
    check_clean(server)


@needs_sshd
def test_logits_are_equal_and_files_are_sent_once(
    server: Server, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    ask = Link.ask

    def watched(link: Link, body: Path | None = None, **request: Any) -> dict[str, Any]:
        sent.extend([body.name] if body and body.suffix == ".onnx" else [])
        return ask(link, body, **request)

    monkeypatch.setattr(Link, "ask", watched)
    with open_device("local") as device:
        expected = device.logits(files["int8"], ROWS)
    with open_device(f"ssh:{server.where}", **HERE) as device:
        found = device.logits(files["int8"], ROWS)
        device.logits(files["int8"], ROWS[:1])
        device.sustain({"int8": files["int8"]}, Setting(1, 1, 8), seconds=0.1)
    np.testing.assert_array_equal(np.stack(found), np.stack(expected))
    assert sent == ["it's int8.onnx"]
    check_clean(server)


@needs_sshd
def test_weights_in_other_files_are_sent_too(server: Server, files: dict[str, Path], tmp_path: Path) -> None:
    """Two files may use the same name for them."""
    outside = {}
    for name, file in files.items():
        outside[name] = tmp_path / name / "model.onnx"
        outside[name].parent.mkdir()
        whole = onnx.load(file)
        onnx.save_model(whole, outside[name], save_as_external_data=True, location="w.data")
    with open_device(f"ssh:{server.where}", **HERE) as device:
        assert len(device.race(outside, [Setting(1, 1, 8)], rounds=2, runs=1)) == len(files)
        for name, file in files.items():
            found, expected = (np.stack(device.logits(each, ROWS)) for each in (outside[name], file))
            np.testing.assert_array_equal(found, expected)
    check_clean(server)


@needs_sshd
def test_a_lost_connection_leaves_nothing(
    server: Server, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Link.ask

    def dropped(link: Link, body: Path | None = None, **request: Any) -> dict[str, Any]:
        if request["do"] == "ask":
            assert measuring() == 1
            assert link.process.stdin
            link.process.stdin.write(b'{"do": "ask", "name": "int8", "line": {"seconds": 600}}\n')
            link.process.stdin.flush()
            server.drop()
        return ask(link, body, **request)

    monkeypatch.setattr(Link, "ask", dropped)
    check_refused(server, r"^ssh:.*: the connection was lost \(.*\)\. The processes and", files={"int8": files["int8"]})


@needs_sshd
def test_an_interrupt_leaves_nothing(server: Server, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), open_device(f"ssh:{server.where}", **HERE) as device:
        device.logits(files["int8"], ROWS[:1])
        monkeypatch.setattr(Link, "ask", interrupted)
        device.race({"int8": files["int8"]}, [Setting(1, 1, 8)], rounds=2, runs=1)
    check_clean(server)


@needs_sshd
@pytest.mark.parametrize(
    ("key", "known", "error"),
    [
        ("stranger", "known", r"Permission denied.*: it does not accept this user without a password.* ssh-copy-id"),
        ("user", "nobody", r"Host key verification failed.*Connect once yourself"),
        ("user", "false", r"its host key has changed"),
    ],
)
def test_rejected_keys(server: Server, key: str, known: str, error: str) -> None:
    stranger = (server.folder / "stranger.pub").read_text()
    port = server.where.rpartition(":")[2]
    (server.folder / "false").write_text(f"[127.0.0.1]:{port} {stranger}")
    client(server.folder, key=key, known=known)
    check_refused(server, error)


@needs_sshd
def test_python_is_missing_or_silent(server: Server, tmp_path: Path) -> None:
    check_refused(server, r"no /absent/python there .*--python", "/absent/python")
    check_refused(
        server, r"no answer within 1 s .*--timeout", script(tmp_path / "x", "exec cat > /dev/null"), timeout=1
    )


@needs_sshd
def test_runtime_is_missing(server: Server, files: dict[str, Path], tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    error = r"does not load onnxruntime and numpy \(ModuleNotFoundError.* -m pip install"
    check_refused(server, error, tmp_path / "bare" / "bin" / "python", files=files)


@needs_sshd
def test_a_full_disk(server: Server, files: dict[str, Path]) -> None:
    # 16 KB a file
    limited = script(server.folder / "limited", "ulimit -f 32", 'trap "" XFSZ', f'exec {sys.executable} "$@"')
    error = r"fp32\.onnx \(.* MB\) cannot be written there: .*File too large.*Make room"
    check_refused(server, error, limited, files=files)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("pi", "pi", ""),
        ("me@pi.local:2222", "me@pi.local", "2222"),
        ("[fe80::1%eth0]:22", "fe80::1%eth0", "22"),
        ("me@[::1]", "me@::1", ""),
    ],
)
def test_addresses(text: str, host: str, port: str) -> None:
    assert Address.parse(text) == Address(host, port)


def test_the_remote_command_quotes_its_arguments(tmp_path: Path) -> None:
    """A shell that runs the command starts this Python, with the promised number of bytes of source."""
    (tmp_path / "a b").mkdir()
    python = script(tmp_path / "a b" / "py'thon", f'exec {sys.executable} "$@"')
    source = b"print(sys.stdin.read())"
    words = Address.parse("pi:22").command(remote_command(str(python), len(source)), 5)
    assert words[0] == "ssh"
    assert words[-4:-1] == ["22", "--", "pi"]
    assert "BatchMode=yes" in words
    done = subprocess.run(["sh", "-c", words[-1]], input=source + b"the rest", capture_output=True, check=True)
    assert done.stdout == b"the rest\n"
