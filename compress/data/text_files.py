"""Read text files in bounded memory, with errors that name the file, line and byte.

UTF-8 is read, and UTF-16 and UTF-32 with a byte order mark. Lines end in \\n or \\r\\n,
or in \\r if the beginning of the file has no other line end.
"""

from __future__ import annotations

import codecs
import io
import json
import re
import shlex
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from compress.errors import DataError

LONGEST_LINE: Final = 16 * 2**20
"""The most characters of a line, a cell or a document; a longer one is a file without
line ends, or an attack."""
LARGEST_FILE: Final = 256 * 2**20
"""The most bytes of a file that is read as a whole; SQuAD 2.0 has 42 million."""

SMALL_FILE: Final = 16 * 2**20
MOST_EXPANSION: Final = 100
"""The most that a compressed text above SMALL_FILE may unpack to, as a multiple of its
size: prose has 4, the most repetitive log 50."""
TOO_EXPANSIVE: Final = (
    f"unpacks to more than {MOST_EXPANSION} times its size, which no text does. Unpack "
    "it yourself if you trust it."
)

_MARKS: Final = (  # longer ones first, as UTF-16's begins UTF-32's
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_NO_TEXT: Final = re.compile(rb"PK\x03\x04|\x1f\x8b|version https://git-lfs")
"""The first bytes of zip, of gzip, and of what git-lfs has in place of a file."""
_HEAD: Final = 1 << 16
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass
class Position:
    """Tell how far a file has been read, as a share of it. The function that reads the
    file sets `tell`."""

    tell: Callable[[], float] = lambda: 0.0


def limit_unpacked(packed: int) -> int:
    """Return how many bytes a number of compressed bytes may unpack to."""
    return max(SMALL_FILE, MOST_EXPANSION * packed)


@contextmanager
def reading(place: str | Path) -> Iterator[None]:
    """Re-raise the system's errors about a file or folder as a DataError that names
    it."""
    try:
        yield
    except OSError as error:
        if error.strerror is None:  # raised by a library, with its own message
            raise
        raise DataError(
            f"{error.filename or place}: cannot be read: {error.strerror}. Check its "
            "path and permissions."
        ) from error


def refuse_special(path: Path) -> None:
    """Refuse anything but a regular file: a pipe or device may never end, or be
    readable only once."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise DataError(f"{path}: is a folder, not a file.")
    if not stat.S_ISREG(mode):
        raise DataError(
            f"{path}: is a pipe, socket or device. Data is read several times; write "
            "it to a file first."
        )


def refuse_large(path: Path, remedy: str, most: int = LARGEST_FILE) -> None:
    """Refuse a file that is too large to be read as a whole, as its format requires."""
    refuse_special(path)
    if (size := path.stat().st_size) > most:
        raise DataError(
            f"{path}: has {size:,} bytes; expected at most {most:,}, as it is read as "
            f"a whole. {remedy}"
        )


def whole(path: Path, remedy: str, most: int = LARGEST_FILE) -> str:
    """Read a file as a whole. DataError, with `remedy`, if it is too large."""
    with reading(path):
        refuse_large(path, remedy, most)
    return "".join(lines(path, longest=most))


def lines(
    path: Path,
    newline: str = "\n",
    longest: int = LONGEST_LINE,
    *,
    checked: bool = True,
    position: Position | None = None,
) -> Iterator[str]:
    """Yield the lines of a file with their ends. DataError if it is unreadable, is not
    text, or has too long a line.

    checked   raise DataError for bytes that are not text; without it the caller checks
              each line with `check_line`
    position  is told how much of the file has been read
    """
    with reading(path):
        refuse_special(path)
        size = max(1, path.stat().st_size)
        with io.BufferedReader(path.open("rb", buffering=0), _HEAD) as file:
            if position is not None:
                position.tell = lambda: file.tell() / size
            yield from decode_lines(
                file, str(path), newline=newline, longest=longest, checked=checked
            )
            if position is not None:
                position.tell = lambda: 1.0


def stripped_lines(path: Path) -> list[str]:
    """Read the lines of a file without the white space around them. Raises what `lines`
    does."""
    return [line.strip() for line in lines(path)]


def decode_lines(
    stream: io.BufferedReader[Any],
    place: str,
    *,
    newline: str = "\n",
    longest: int = LONGEST_LINE,
    cut: bool = False,
    checked: bool = True,
) -> Iterator[str]:
    """Yield the lines of a stream with their ends; `cut` yields lines above `longest`
    characters in pieces.

    DataError if it is not text, and for a longer line without `cut`. See `lines` for
    `checked`.
    """
    start = stream.peek(_HEAD)
    if _NO_TEXT.match(start):
        raise DataError(
            f"{place}: is compressed, a workbook, or a pointer of git-lfs, not a text "
            "file. Unpack it, save it as csv, or fetch it: git lfs pull"
        )
    encoding = encoding_of(start)
    if newline == "\n" and b"\r" in start and b"\n" not in start:
        newline = ""
    # Bytes that are not UTF-8 become surrogates, which valid UTF-8 never contains, so
    # that their line is known.
    errors = "surrogateescape" if encoding.startswith("utf-8") else "strict"
    number = 1
    before = 0
    with io.TextIOWrapper(stream, encoding, errors=errors, newline=newline) as text:
        try:
            while line := text.readline(longest + (not cut)):
                ended = line.endswith(("\n", "\r"))
                if not (cut or ended) and len(line) > longest:
                    raise DataError(
                        f"{place}, line {number}: is longer than {longest:,} "
                        "characters. Check that it is text with line ends; break the "
                        "line, or remove it."
                    )
                if checked and ("\0" in line or not line.isascii()):
                    check_line(line, place, number, start, before)
                # the byte order mark of a file that was joined to another
                yield line.removeprefix("\ufeff")
                number, before = (
                    (number + 1, 0)
                    if ended
                    else (number, before + len(line.encode(errors=errors)))
                )
        except UnicodeDecodeError as error:
            raise DataError(
                f"{place}, line {number} or soon after: begins as {encoding}, but is "
                f"not valid: {error.reason}. Download it again, or save it as UTF-8."
            ) from None


def encoding_of(start: bytes) -> str:
    """Return the encoding by the first bytes of a text: UTF-8 without a byte order
    mark."""
    return next((name for mark, name in _MARKS if start.startswith(mark)), "utf-8")


def check_line(
    line: str, place: str, number: int, start: bytes, before: int = 0
) -> None:
    """Raise DataError for NUL bytes, and for bytes that are not UTF-8, and suggest a
    command that converts the file.

    start   the first bytes of the file, which show whether it is UTF-16
    before  bytes of the line before this piece of it
    """
    if "\0" in line:
        endian = next(
            (
                each
                for each, byte in (("LE", start[1:2]), ("BE", start[:1]))
                if byte == b"\0"
            ),
            None,
        )
        name = shlex.quote(Path(place).name)
        command = (
            f"iconv -f UTF-16{endian} -t UTF-8 {name} > new"
            if endian
            else f"tr -d '\\000' < {name} > new"
        )
        raise DataError(
            f"{place}, line {number}: has a NUL byte, so it is "
            f"{'UTF-16' if endian else 'not a text file'}; expected UTF-8. Convert it, "
            f"for example: {command}"
        )
    try:
        line.encode()
    except UnicodeEncodeError as error:
        at = before + len(line[: error.start].encode()) + 1
        byte = ord(line[error.start]) - 0xDC00
        raise DataError(
            f"{place}, line {number}, byte {at}: 0x{byte:02x} is not UTF-8. Save it as "
            f"UTF-8, for example: iconv -f {likely_encoding(byte)} -t UTF-8 "
            f"{shlex.quote(Path(place).name)} > new"
        ) from None


def likely_encoding(byte: int) -> str:
    """Guess the encoding of a text of one byte a character from one that is not ASCII:
    Windows has quotation marks and dashes where Latin-1 has control characters."""
    return "cp1252" if 0x80 <= byte < 0xA0 else "latin1"


def first_bytes(path: Path) -> bytes:
    """Read the first bytes of a file, for `check_line`. Raises DataError."""
    with reading(path):
        refuse_special(path)
        with path.open("rb") as file:
            return file.read(_HEAD)


def head(path: Path) -> str:
    """Read the beginning of a file, to detect its format; bytes that cannot be decoded
    are replaced."""
    start = first_bytes(path)
    return start.decode(encoding_of(start), errors="replace")


class _DuplicateKeyError(Exception):
    """A JSON object has two values of one name, of which Python would keep the last."""


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _DuplicateKeyError(next(name for name in names if names.count(name) > 1))
    return found


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_refuse_duplicates)


def parse_json(
    text: str, place: str, line: int | None = None, expected: str = ""
) -> Any:
    """Parse JSON. DataError if it is invalid, or contains invalid Unicode; `line` is
    its number, if it is one line."""
    try:
        value = _DECODER.decode(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as error:
        problem = f"not JSON: {error.msg}"
        line = line or error.lineno
    except RecursionError:
        problem = "JSON is nested too deeply"
    except _DuplicateKeyError as error:
        problem = f"an object has {str(error)!r} twice; remove one"
    except UnicodeEncodeError as error:
        problem = (
            f"half a surrogate pair, \\u{ord(error.object[error.start]):x}, is not "
            "text; write both halves"
        )
    except ValueError:
        problem = f"a number of more than {sys.get_int_max_str_digits()} digits"
    raise DataError(f"{place}{f', line {line}' if line else ''}: {problem}.{expected}")


def json_objects(
    lines: Iterable[str], place: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the JSON object of each line that is not blank. DataError for
    anything else."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{place}, line {number}"
            value = parse_json(line, place, number, " Expected one object per line.")
            yield where, json_object(value, where)


def json_object(value: object, place: str) -> dict[str, Any]:
    """Return the value if it is an object, else raise DataError."""
    if not isinstance(value, dict):
        found = type(value).__name__
        raise DataError(
            f"{place}: expected an object of column names and values, found {found}."
        )
    return value
