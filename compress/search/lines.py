"""The journal of a study as whole lines: one that is cut short never stays, and none is taken from its writer.

One line of JSON per operation, appended under a lock: the file `<journal>.lock`, made with O_EXCL, which holds on NFS
from version 3 on. A process that is killed while it has the lock leaves it behind; the others wait `LOCK_GRACE` seconds
for it and then take it over. A line cut short (disk full, power cut) is cut off again before anything is appended,
under the same lock, so that it is never a line that somebody is writing.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from optuna.storages.journal import BaseJournalBackend, JournalFileBackend, JournalFileOpenLock

from compress.search.reach import StorageError

LOCK_GRACE = 15
"""Seconds after which the lock of a journal that nobody releases is taken over."""
_BEGINNING = b'{"op_code"'


class WholeLines(BaseJournalBackend):
    """A journal backend of Optuna's. `path` is absolute and exists; raises StorageError if it is no journal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = JournalFileOpenLock(str(path), grace_period=LOCK_GRACE)
        self.reader = JournalFileBackend(str(path), self.lock)
        with path.open("rb") as file:
            start = file.read(len(_BEGINNING))
        if not _BEGINNING.startswith(start):
            raise StorageError(f"{path}: is not the journal of a study; give another file")

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Those from that number on. Raises StorageError (a line that is no JSON, file gone)."""
        try:
            yield from self.reader.read_logs(log_number_from)
        except ValueError as error:
            raise StorageError(
                f"{self.path}: line {self._first_strange()} cannot be read. Put back a copy of the file that is "
                f"whole, or begin another study"
            ) from error
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be read ({error.strerror})") from error

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """All of them, on the disk, or none. Raises StorageError (disk full, file gone)."""
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        try:
            with self._locked() as file:
                _cut_tail(file)
                _append(file, lines)
        except OSError as error:
            raise StorageError(
                f"{self.path}: cannot be written ({error.strerror}). The study is whole up to here: make space, then "
                f"repeat the command; the trial that was running is run again"
            ) from error

    def mend(self) -> int:
        """Cut off what follows the last whole line; how many bytes that was."""
        with self._locked() as file:
            return _cut_tail(file)

    def _first_strange(self) -> int:
        with self.path.open("rb") as file:
            return next((number for number, line in enumerate(file, 1) if not _is_json(line)), 0)

    @contextmanager
    def _locked(self) -> Iterator[FileIO]:
        self.lock.acquire()
        try:
            # Not created here: a journal that was removed under a study is not begun anew in its middle.
            with FileIO(self.path, "r+", opener=lambda path, flags: os.open(path, flags | os.O_APPEND)) as file:
                yield file
        finally:
            # Held up for longer than the grace, this process lost its lock; its line is whole all the same.
            with suppress(RuntimeError):
                self.lock.release()


def _cut_tail(file: FileIO) -> int:
    size = end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 4096)
        file.seek(start)
        newline = (file.read(end - start) or b"").rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        file.truncate(end)
        os.fsync(file.fileno())
    return size - end


def _append(file: FileIO, lines: bytes) -> None:
    size = file.seek(0, os.SEEK_END)
    try:
        left = memoryview(lines)
        while left:
            left = left[file.write(left) or 0 :]
        os.fsync(file.fileno())
    except OSError:
        file.truncate(size)
        raise


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
