"""Text files, opened so that what is wrong with them is said with file, line and byte."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from compress.errors import DataError


@contextmanager
def reading(place: str | Path) -> Iterator[None]:
    """Re-raise what the system says about a file or folder as a DataError that names it."""
    try:
        yield
    except OSError as error:
        if error.strerror is None:  # a library's own, whose message says more
            raise
        raise DataError(f"{error.filename or place}: cannot be read: {error.strerror}.") from error


def refuse_special(path: Path) -> None:
    """Refuse what is no regular file: a pipe or device never ends, or can be read only once."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise DataError(f"{path}: is a folder; expected a file.")
    if not stat.S_ISREG(mode):
        raise DataError(f"{path}: is a pipe, socket or device; data is read more than once: write it to a file first.")


@contextmanager
def opened(path: Path, newline: str = "\n") -> Iterator[TextIO]:
    """A UTF-8 file, without its byte order mark; DataError where it cannot be read or is not UTF-8."""
    try:
        with reading(path):
            refuse_special(path)
            with path.open(encoding="utf-8-sig", newline=newline) as file:
                yield file
    except UnicodeDecodeError as error:
        raise DataError(_not_utf8(path)) from error


def head(path: Path, size: int = 1 << 16) -> str:
    """The beginning of a file, for a look at what it may be; bytes that are no UTF-8 are replaced."""
    with reading(path):
        refuse_special(path)
        with path.open("rb") as file:
            return file.read(size).decode("utf-8-sig", errors="replace")


def _not_utf8(path: Path) -> str:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return (
                    f"{path}, line {number}, byte {error.start + 1}: 0x{line[error.start]:02x} is not UTF-8. "
                    f"Save the file as UTF-8, for example: iconv -f latin1 -t utf-8 {path.name}"
                )
    raise AssertionError("a file that does not decode as a whole has a line that does not")
