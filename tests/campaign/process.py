"""Run `compress` in forked processes that a test may kill, spoil, limit and watch."""

import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests import forks, real_fsync

PATIENCE = 180.0
"""Seconds until a command that does not end is a fault."""
CALM = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit code (minus the signal that killed it), what it printed, and what it took."""

    code: int
    out: str
    err: str
    seconds: float
    grown_mb: float
    """Growth of its resident memory at the most; 0 where it was killed."""

    @property
    def sentence(self) -> bool:
        """Whether it ended as a command may that is given something bad: exit code 2, and one paragraph to say so."""
        usage = self.err.startswith("Usage: ")
        one = self.err.strip().count("\n\n") == usage and "Traceback" not in self.out + self.err
        return self.code == 2 and one and len(self.err) < 4000


@dataclass(frozen=True)
class Child:
    process: BaseProcess
    folder: Path
    began: float

    def wait(self, patience: float = PATIENCE) -> Ended:
        """Wait for its end; a process that does not end is killed, and told by code -9 and `seconds`."""
        self.process.join(patience)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        seconds = time.monotonic() - self.began
        said = [self.folder / name for name in ("out", "err")]  # which a child that was killed at once has not made
        out, err = (each.read_text(encoding="utf-8", errors="replace") if each.exists() else "" for each in said)
        grown = self.folder / "grown"
        grown_mb = float(grown.read_text() or 0) if grown.exists() else 0.0  # empty where it was killed at the writing
        shutil.rmtree(self.folder)
        return Ended(self.process.exitcode or 0, out, err, seconds, grown_mb)


def start(
    words: Sequence[str],
    *,
    folder: Path | None = None,
    home: Path | None = None,
    stdin: bytes | Path = b"",
    before: Callable[[], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Child:
    """Start `compress *words` in `folder`, with the caches of `home`, after calling `before` in its process."""
    talk = Path(tempfile.mkdtemp(prefix="campaign-"))
    if isinstance(stdin, bytes):
        (talk / "in").write_bytes(stdin)
        stdin = talk / "in"
    environment = {**os.environ, **CALM, **(environment or {})}
    if home is not None:
        environment["COMPRESS_HOME"] = str(home)
    process = forks.context().Process(target=_command, args=(list(words), environment, folder, stdin, talk, before))
    process.start()
    return Child(process, talk, time.monotonic())


def run(words: Sequence[str], *, patience: float = PATIENCE, **how: object) -> Ended:
    """Run `compress *words` to its end; options as for `start`."""
    return start(words, **how).wait(patience)  # type: ignore[arg-type]


def _command(
    words: list[str],
    environment: Mapping[str, str],
    folder: Path | None,
    stdin: Path,
    talk: Path,
    before: Callable[[], None] | None,
) -> None:
    os.fsync = real_fsync
    os.environ.clear()
    os.environ.update(environment)
    for number, (path, flags) in enumerate(((stdin, os.O_RDONLY), (talk / "out", _NEW), (talk / "err", _NEW))):
        os.dup2(os.open(path, flags, 0o644), number)
    sys.stdin, sys.stdout, sys.stderr = (open(number, mode) for number, mode in enumerate("rww"))  # noqa: SIM115, PTH123
    sys.argv = ["compress", *words]
    if folder is not None:
        os.chdir(folder)
    at_first = _peak_mb()
    try:
        if before is not None:
            before()
        from compress.cli import main

        main()
    finally:
        (talk / "grown").write_text(f"{_peak_mb() - at_first:.1f}")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


_NEW = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
