"""Text files, opened so that what is wrong with them is said with file, line and byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from compress.errors import DataError


@contextmanager
def opened(path: Path, newline: str = "\n") -> Iterator[TextIO]:
    """A UTF-8 file, without its byte order mark; DataError where it cannot be read or is not UTF-8."""
    try:
        with path.open(encoding="utf-8-sig", newline=newline) as file:
            yield file
    except UnicodeDecodeError as error:
        raise DataError(_not_utf8(path)) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}.") from error


def head(path: Path, size: int = 1 << 16) -> str:
    """The beginning of a file, for a look at what it may be; bytes that are no UTF-8 are replaced."""
    try:
        with path.open("rb") as file:
            return file.read(size).decode("utf-8-sig", errors="replace")
    except OSError:
        return ""


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
