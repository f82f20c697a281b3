"""What happens to files in a process of the campaign: counted, and at the n-th of it the process is killed."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVENTS = frozenset({"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"})


@dataclass(frozen=True)
class Watch:
    """Call `before` (a work's own changes), then count what the process does to files: a line of `record` each.

    record  flushes are in it as `inode size time`, so that what they made durable is known after a power cut
    last    the process is killed just before this event; 0: never
    """

    record: Path
    last: int = 0
    before: Any = None

    def __call__(self) -> None:
        if self.before is not None:
            self.before()
        handle = os.open(self.record, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        count = 0

        def happens(line: str = "") -> None:
            nonlocal count
            count += 1
            if count == self.last:
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(handle, f"{line}\n".encode())

        def audit(event: str, args: tuple[Any, ...]) -> None:
            if event in EVENTS or (event == "open" and isinstance(args[2], int) and args[2] & os.O_ACCMODE):
                happens()

        def flush(opened: Any, fsync: Any = os.fsync) -> None:
            fsync(opened)
            known = os.fstat(opened if isinstance(opened, int) else opened.fileno())
            happens(f"{known.st_ino} {known.st_size} {known.st_mtime_ns}")

        os.fsync = flush
        sys.addaudithook(audit)


def events(record: Path) -> int:
    """Count the events of a process that ended."""
    return record.read_bytes().count(b"\n")


@dataclass(frozen=True)
class Dies:
    """Call `before`, then be killed in a step of a stage."""

    stage: str
    step: int
    before: Any = None

    def __call__(self) -> None:
        from compress.training.trainer import StepTrainer

        if self.before is not None:
            self.before()
        compute_loss = StepTrainer.compute_loss

        def dying(trainer: StepTrainer, *args: Any, **kwargs: Any) -> Any:
            if (trainer.stage.name, trainer.state.global_step) == (self.stage, self.step):
                os.kill(os.getpid(), signal.SIGKILL)
            return compute_loss(trainer, *args, **kwargs)

        StepTrainer.compute_loss = dying  # type: ignore[method-assign]


@dataclass(frozen=True)
class Waits:
    """Wait until a file is there, then call `before`."""

    file: Path
    before: Any = None

    def __call__(self) -> None:
        while not self.file.exists():
            time.sleep(0.01)
        if self.before is not None:
            self.before()
