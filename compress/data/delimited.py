"""Open delimited files (csv, tsv, txt) as splits: detect delimiter, quoting and header by stated rules.

A csv file is quoted as in RFC 4180. A tsv or txt file is read without quoting unless all quotation marks of its first
rows wrap whole fields, and it or a sibling needs quoting: a field contains a doubled mark, a tab or a line end, or
every row has a wrapped field. A first row is a header if it has the name of a requested column; or if none of its cells
recurs in its column and a sibling starts with the same row; or if a usual column name in it never recurs; or if a
column below a word has only numbers, or only values that recur. Lines of a txt file without tabs are split if all start
with fastText's `__label__`, or if each ends in a recurring value after its only semicolon. A file without a header
takes the column names of a sibling of the same width; else its columns are numbered from 1.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from compress.data.readers import Cell, RawSplit, count_characters, explain_empty, take_first_rows, to_batches
from compress.data.schema import is_known, number
from compress.data.text_files import LONGEST, lines
from compress.errors import DataError

FASTTEXT: Final = "__label__"
SHOWN_LINES: Final = 100
"""Lines from which the delimiter of a txt file is detected."""
HEADER_CELL = 64
RECURRING_ROWS = 20

_FIELD = r'(?:"[^"]*(?:""[^"]*)*"|[^"\t\r\n]*)'
_CLEAN = re.compile(rf"{_FIELD}(?:(?:\t|\r?\n){_FIELD})*")
_WRAPPED = re.compile(r'"([^"]*(?:""[^"]*)*)"')


@dataclass(frozen=True)
class Look:
    """Hold the first rows of a file and how they were read."""

    path: Path
    delimiter: str
    quoted: bool
    rows: Sequence[Sequence[str]]


class Header(NamedTuple):
    names: tuple[str, ...]
    own: bool
    """True if it is the file's first row."""
    note: str | None = None


def open_texts(paths: Sequence[Path], named: Sequence[str]) -> dict[Path, RawSplit]:
    """Open the delimited files of one folder; `named` are the requested columns, if any."""
    heads = {path: _head(path) for path in paths if path.suffix.lower() != ".csv"}
    clean = {path for path, start in heads.items() if _CLEAN.fullmatch(start)}
    proven = any(map(_needs_quoting, (heads[path] for path in clean)))
    looks = [_look(path, quoted=path not in heads or (proven and path in clean)) for path in paths]
    labelled = Header(("text", "label"), own=False)
    headers = {look.path: labelled if look.delimiter == FASTTEXT else _header(look, looks, named) for look in looks}
    return {
        look.path: _read_delimited(look, headers[look.path] or _borrow_header(look, headers), named) for look in looks
    }


def _head(path: Path) -> str:
    """Read the first lines, up to the last complete quoted field."""
    first = take_first_rows(lines(path), len)
    odd = sum(line.count('"') for line in first) % 2
    while odd and len(first) > 1:
        odd -= first.pop().count('"') % 2
    return "".join(first)


def _needs_quoting(first_lines: str) -> bool:
    fields = [match[1] for match in _WRAPPED.finditer(first_lines)]
    return any(re.search(r'""|[\t\n]', field) for field in fields) or len(fields) >= first_lines.count("\n") > 1


def _look(path: Path, *, quoted: bool) -> Look:
    delimiter = "\t"
    if path.suffix.lower() == ".txt":
        delimiter = delimiter_of(list(itertools.islice(lines(path), SHOWN_LINES))) or delimiter
    if path.suffix.lower() == ".csv":
        start = next(lines(path), "")
        delimiter = next((mark for mark in ",\t;" if mark in start), ",")
    look = Look(path, delimiter, quoted, ())
    rows = [cells for _, cells in take_first_rows(_rows(look), lambda row: count_characters(row[1]))]
    if not rows:
        raise explain_empty(path)
    return replace(look, rows=rows)


def delimiter_of(first: Sequence[str]) -> str:
    """Detect the delimiter of a txt file from its first lines: a tab, a semicolon, FASTTEXT, or "" for whole texts."""
    if any("\t" in line for line in first):
        return "\t"
    if first and all(line.startswith(FASTTEXT) for line in first):
        return FASTTEXT
    ends = {line.rpartition(";")[2].strip() for line in first}
    recur = len(first) >= RECURRING_ROWS and 2 * len(ends) <= len(first)
    return ";" if recur and all(line.count(";") == 1 for line in first) else ""


def _split_line(text: str, delimiter: str) -> list[str]:
    """Split a line into its cells; for fastText, into the text and its labels joined by `|`."""
    if delimiter != FASTTEXT:
        return text.split(delimiter)
    words = text.split(" ")
    count = next((at for at, word in enumerate(words) if not word.startswith(FASTTEXT)), len(words))
    return [" ".join(words[count:]), "|".join(word.removeprefix(FASTTEXT) for word in words[:count])]


def _rows(look: Look) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the first line, and the cells, of every row that is not blank."""
    if not look.quoted:
        for number, text in enumerate(lines(look.path), start=1):
            if row := text.rstrip("\r\n"):
                yield number, _split_line(row, look.delimiter)
        return
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST))  # global, so only ever raised
    line, size = 1, 0

    def counted_lines() -> Iterator[str]:
        nonlocal size
        for text in lines(look.path, newline=""):
            size += len(text)
            if size > LONGEST:
                raise csv.Error(f"more than {LONGEST:,} characters")
            yield text

    reader = csv.reader(counted_lines(), delimiter=look.delimiter, strict=True)
    try:
        for cells in reader:
            if cells:
                yield line, cells
            line, size = reader.line_num + 1, 0
    except csv.Error as error:
        raise DataError(
            f"{look.path}: {error}, in the row that starts on line {line}. "
            "Close its quotation mark, or double the marks inside a quoted field."
        ) from error


def _header(look: Look, looks: Sequence[Look], named: Sequence[str]) -> Header | None:
    first, *rest = look.rows
    names = tuple(cell.strip() for cell in first)
    if set(named) & set(names):
        return Header(names, own=True)
    if (named and all(name.isdigit() for name in named)) or any(len(cell) > HEADER_CELL for cell in first):
        return None
    below = [[row[n] for row in rest if n < len(row)] for n in range(len(first))]
    fresh = [cell not in column for cell, column in zip(first, below, strict=True)]
    if all(fresh) and any(other.path != look.path and other.rows[0] == first for other in looks):
        return Header(names, own=True)
    if any(is_known(name) and is_fresh for name, is_fresh in zip(names, fresh, strict=True)):
        return Header(names, own=True)
    if any(_is_title(cell, column) for cell, column in zip(first, below, strict=True)):
        return Header(names, own=True, note=f"{look.path.name}: took the first row for a header ({', '.join(names)})")
    return None


def _is_title(cell: str, below: Sequence[str]) -> bool:
    """Check whether the first cell can only be the column's title: a word above numbers, or above values that recur."""
    if not cell.strip() or number(cell) is not None or len(below) < 3:
        return False
    if all(number(value) is not None for value in below):
        return True
    return len(below) >= RECURRING_ROWS and cell not in below and min(Counter(below).values()) > 1


def _borrow_header(look: Look, headers: Mapping[Path, Header | None]) -> Header | None:
    """Return the header of a sibling of the same width, if any."""
    for sibling, header in headers.items():
        if header and len(header.names) == len(look.rows[0]):
            note = f"{look.path.name} has no header: its columns are those of {sibling.name}"
            return Header(header.names, own=False, note=note)
    return None


def _read_delimited(look: Look, header: Header | None, named: Sequence[str]) -> RawSplit:
    place = str(look.path)
    names = header.names if header else tuple(str(n + 1) for n in range(min(len(row) for row in look.rows)))
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{place}: the header names {', '.join(map(repr, twice))} more than once; rename one of them.")
    skip = int(header is not None and header.own)
    body = look.rows[skip:]
    if not body:
        raise explain_empty(place, "has a header but no rows")
    # Users who name columns by number know the file: cells after the last named one are ignored.
    lenient = header is None and bool(named)
    sample = {name: [row[n] if n < len(row) else None for row in body] for n, name in enumerate(names)}

    def read(columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        places = [names.index(column) for column in columns]
        expected = max(places) + 1 if lenient else len(names)

        def rows() -> Iterator[Sequence[Cell]]:
            for line, row in itertools.islice(_rows(look), skip, None):
                if len(row) < expected or (len(row) > expected and not lenient):
                    raise DataError(
                        f"{place}, line {line}: {len(row)} cells, not {'at least ' if lenient else ''}{expected} as "
                        f"expected (separated by {look.delimiter!r}, {'with' if look.quoted else 'without'} quoting). "
                        f"Correct the row that begins {row[0][:40]!r}."
                    )
                yield [row[at] for at in places]

        return to_batches(rows(), columns, sample, place, 1 + skip)

    notes = [header.note] if header and header.note else []
    if lenient and any(len(row) > len(names) for row in body):
        notes.append(f"{look.path.name}: some rows have more than {len(names)} cells, the rest is ignored")
    return RawSplit(place, names, sample, read, first=1 + skip, headerless=header is None, notes=tuple(notes))
