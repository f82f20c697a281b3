"""What Windows and macOS lack is not taken for granted: each missing piece is taken away here, and the rest works."""

import errno
import fcntl
import importlib
import os
import pkgutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compress import io
from compress.benchmark.remote import agent, runner
from compress.commands import doctor
from compress.data import cache
from compress.errors import RunError
from compress.reporting.format import short_names
from compress.training.run import Run
from compress.training.trainer import peak_rss_mb
from tests import children, forks


def import_without_unix() -> None:
    """Import every module of ours once more, in a process that has those of others."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "compress"]:
        del sys.modules[name]
    for name in ("fcntl", "resource", "termios", "pwd", "grp", "pty", "tty"):
        sys.modules[name] = None  # type: ignore[assignment]  # importing it fails
    package = importlib.import_module("compress")
    for module in pkgutil.walk_packages(package.__path__, "compress."):
        if module.name != "compress.__main__":
            importlib.import_module(module.name)


def test_every_module_imports_without_unix_modules() -> None:
    child = forks.context().Process(target=import_without_unix, daemon=True)
    child.start()
    assert children.finish(child) == 0


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files as Windows has them: no folder is opened, nothing is flushed that cannot be written, bytes are locked."""
    real_open, real_fsync, real_flock = os.open, os.fsync, fcntl.flock

    def open_file(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if isinstance(path, Path) and path.is_dir():
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real_open(path, flags, *rest, **more)

    def fsync(handle: int) -> None:
        if not fcntl.fcntl(handle, fcntl.F_GETFL) & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EBADF, "Bad file descriptor")
        real_fsync(handle)

    def locking(handle: int, way: int, count: int) -> None:
        assert (os.lseek(handle, 0, os.SEEK_CUR), way, count) == (io.BEYOND, 2, 1)
        try:
            real_flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, "Permission denied") from None

    monkeypatch.setattr(io, "WINDOWS", True)
    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(fcntl, "flock", lambda *_: pytest.fail("there is no flock"))
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK=2))


@pytest.mark.usefixtures("windows")
def test_files_and_folders_are_written_whole(tmp_path: Path) -> None:
    with io.atomic_folder(tmp_path / "new" / "folder", sealed=True) as folder:
        (folder / "weights").write_text("1", encoding="utf-8")
    io.verify(tmp_path / "new" / "folder")
    io.write_json(tmp_path / "facts.json", {"a": 1})
    assert io.load_json(tmp_path / "facts.json", "") == {"a": 1}


class _Recipe:
    def to_yaml(self) -> str:
        return "stages: []\n"


@pytest.mark.usefixtures("windows")
def test_a_run_has_one_process(tmp_path: Path) -> None:
    run = Run.open(tmp_path / "run", _Recipe(), {"seed": 0})
    with pytest.raises(RunError, match=f"pid {os.getpid()}"):
        Run.open(tmp_path / "run", _Recipe(), {"seed": 0}, resume=True)
    run.close()
    Run.open(tmp_path / "run", _Recipe(), {"seed": 0}).close()


@pytest.mark.usefixtures("windows")
def test_an_entry_of_the_cache_has_one_maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open file cannot be removed there."""

    def unlink(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", unlink)
    with cache.locked(tmp_path / "entry") as ours, cache.locked(tmp_path / "entry", wait=False) as theirs:
        assert (ours, theirs) == (True, False)
    with cache.locked(tmp_path / "entry", wait=False) as again:
        assert again


def test_unwritable_folders_without_statvfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "statvfs")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(RunError, match="Permission denied"):
        Run.check(tmp_path / "run")


def test_missing_system_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sched_getaffinity", "sched_setaffinity", "sysconf", "sysconf_names", "getloadavg"):
        monkeypatch.delattr(os, name)
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setattr(runner.Path, "exists", lambda _: False)
    assert (peak_rss_mb(), runner.peak_rss_mb()) == (0.0, None)
    assert agent.facts()["cores"] == f"{os.cpu_count()} of {os.cpu_count()}"
    assert (doctor.count_cores(), doctor.measure_memory()) == (os.cpu_count(), (0, 0))


def test_paths_are_named_in_their_own_spelling() -> None:
    assert short_names(["runs/a/bundle", "runs/b/bundle"]) == {"runs/a/bundle": "a/bundle", "runs/b/bundle": "b/bundle"}
    assert short_names(["/x/a", "y/b"]) == {"/x/a": "/x/a", "y/b": "y/b"}
