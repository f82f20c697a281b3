"""Tab- and comma-separated text, with or without a header, quoted or not, told from the rows themselves.

Stated rules. A csv file is quoted as RFC 4180 says. A tsv or txt file is read without quoting unless every field
with a quotation mark is wrapped and doubled, and the file or a sibling proves it: a doubled mark inside a field, or
a column wrapped in every row. A first row is a header when a sibling starts with the same row, when it has the name
of a column that the user asked for, when it has a known column name that never comes again below, or when a column
below it holds only numbers, or few values that recur, and not its own first cell. A file without a header takes the
names of a sibling of the same width; else its columns are numbered from 1.
"""

from __future__ import annotations

import csv
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]

from compress.data.names import is_known, number
from compress.data.rows import Cell, Rows, batches, sampled
from compress.data.text import opened
from compress.errors import DataError

SUFFIXES = (".tsv", ".csv", ".txt")
FIELD_CHARACTERS = 64 * 2**20
"""The longest field: what goes beyond is an unclosed quotation mark that swallows the file, not a text."""

HEADER_CELL = 64
RECURRING_ROWS = 20


@dataclass(frozen=True)
class Look:
    """What the first rows of a file show."""

    path: Path
    delimiter: str
    quoted: bool
    rows: Sequence[Sequence[str]]


class Header(NamedTuple):
    names: tuple[str, ...]
    own: bool
    """Whether the file's first row is the header."""
    note: str | None = None


def open_files(paths: Sequence[Path], named: Sequence[str]) -> dict[Path, Rows]:
    """The files of one folder as splits not yet read; `named` are the columns the user asks for, if any."""
    looks = _with_quoting([_look(path) for path in paths])
    headers = {look.path: _header(look, looks, named) for look in looks}
    return {look.path: _rows(look, headers[look.path] or _borrowed(look, headers), named) for look in looks}


def _look(path: Path) -> Look:
    delimiter = _delimiter(path)
    quoted = path.suffix.lower() == ".csv"
    return _sample(Look(path, delimiter, quoted, ()))


def _sample(look: Look) -> Look:
    rows = [cells for _, cells in sampled(_lines(look), size=lambda row: sum(map(len, row[1])))]
    if not rows:
        raise DataError(f"{look.path} is empty: it needs rows of a text and a label.")
    return replace(look, rows=rows)


def _delimiter(path: Path) -> str:
    if path.suffix.lower() != ".csv":
        return "\t"
    with opened(path) as file:
        first = file.readline()
    return next((mark for mark in ",\t;" if mark in first), ",")


def _lines(look: Look) -> Iterator[tuple[int, list[str]]]:
    """The cells of every row that is not blank, with the number of the line it starts on."""
    if look.quoted:
        yield from _quoted_lines(look)
        return
    with opened(look.path) as file:
        for line, text in enumerate(file, start=1):
            if row := text.rstrip("\r\n"):
                yield line, row.split(look.delimiter)


def _quoted_lines(look: Look) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(max(csv.field_size_limit(), FIELD_CHARACTERS))  # one setting per process; we only raise it
    line = 1
    with opened(look.path, newline="") as file:
        reader = csv.reader(file, delimiter=look.delimiter, strict=True)
        try:
            for cells in reader:
                if cells:
                    yield line, cells
                line = reader.line_num + 1
        except csv.Error as error:
            raise DataError(
                f"{look.path}: {error}, in the row that starts on line {line}. "
                "Close its quotation mark, or double the marks inside a quoted field."
            ) from error


def _with_quoting(looks: Sequence[Look]) -> list[Look]:
    """The looks again, tsv and txt now read with quoting where it is clear."""
    plain = [look for look in looks if not look.quoted]
    proven = any(_wrapped(look) and _proves_quoting(look) for look in plain)
    return [_sample(replace(look, quoted=True)) if proven and _wrapped(look) else look for look in looks]


def _wrapped(look: Look) -> bool:
    """Whether each field with a quotation mark is wrapped in marks, those inside doubled; unquoted csv never asks."""
    return not look.quoted and all(_is_wrapped(cell) for row in look.rows for cell in row if '"' in cell)


def _is_wrapped(cell: str) -> bool:
    return len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in cell[1:-1].replace('""', "")


def _proves_quoting(look: Look) -> bool:
    doubled = any('""' in cell[1:-1] for row in look.rows for cell in row)
    columns = zip(*look.rows, strict=False)
    return doubled or (len(look.rows) > 1 and any(all(_is_wrapped(cell) for cell in column) for column in columns))


def _header(look: Look, looks: Sequence[Look], named: Sequence[str]) -> Header | None:
    first, *rest = look.rows
    names = tuple(cell.strip() for cell in first)
    if set(named) & set(names):
        return Header(names, own=True)
    if (named and all(name.isdigit() for name in named)) or any(len(cell) > HEADER_CELL for cell in first):
        return None
    words = not any(number(cell) is not None for cell in first)
    if words and any(other.path != look.path and other.rows[0] == first for other in looks):
        return Header(names, own=True)
    below = [[row[n] for row in rest if n < len(row)] for n in range(len(first))]
    if any(is_known(name) and cell not in column for name, cell, column in zip(names, first, below, strict=True)):
        return Header(names, own=True)
    if any(_titled(cell, column) for cell, column in zip(first, below, strict=True)):
        note = f"{look.path.name}: took the first row for a header ({', '.join(names)})"
        return Header(names, own=True, note=note)
    return None


def _titled(cell: str, below: Sequence[str]) -> bool:
    """Whether a column's first cell can only be its title: a word over numbers, or over values that all recur."""
    if not cell.strip() or number(cell) is not None or len(below) < 3:
        return False
    if all(number(value) is not None for value in below):
        return True
    return len(below) >= RECURRING_ROWS and cell not in below and min(Counter(below).values()) > 1


def _borrowed(look: Look, headers: Mapping[Path, Header | None]) -> Header | None:
    """The header of a sibling of the same width."""
    for sibling, header in headers.items():
        if header and len(header.names) == len(look.rows[0]):
            note = f"{look.path.name} has no header: its columns are those of {sibling.name}"
            return Header(header.names, own=False, note=note)
    return None


def _rows(look: Look, header: Header | None, named: Sequence[str]) -> Rows:
    names = header.names if header else tuple(str(n + 1) for n in range(min(len(row) for row in look.rows)))
    _no_duplicates(look.path, names)
    skip = int(header is not None and header.own)
    body = look.rows[skip:]
    if not body:
        raise DataError(f"{look.path} has a header and no rows: it needs rows of a text and a label.")
    # Who names columns by number has looked at them: cells after the last one asked for are theirs to ignore.
    lenient = header is None and bool(named)

    def read(columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
        places = [names.index(column) for column in columns]
        cells = max(places) + 1 if lenient else len(names)
        rows = _fitting(itertools.islice(_lines(look), skip, None), look, places, cells=cells, lenient=lenient)
        return batches(rows, [False] * len(columns), place=str(look.path), unit="line")

    sample = {name: [row[n] if n < len(row) else None for row in body] for n, name in enumerate(names)}
    notes = [header.note] if header and header.note else []
    if lenient and any(len(row) > len(names) for row in body):
        notes.append(f"{look.path.name}: some rows have more than {len(names)} cells; the rest is ignored")
    return Rows(str(look.path), names, sample, read, headerless=header is None, notes=tuple(notes))


def _no_duplicates(path: Path, names: Sequence[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"{path}: the header names {', '.join(map(repr, twice))} more than once: rename one of them.")


def _fitting(
    rows: Iterable[tuple[int, list[str]]], look: Look, places: Sequence[int], *, cells: int, lenient: bool
) -> Iterator[tuple[int, Sequence[Cell]]]:
    """The chosen cells of every row; DataError for a row that has not the file's number of cells."""
    for line, row in rows:
        if len(row) < cells or (len(row) > cells and not lenient):
            quoting = "with" if look.quoted else "without"
            raise DataError(
                f"{look.path}, line {line}: {len(row)} cells, not {'at least ' if lenient else ''}{cells} as expected "
                f"(separated by {look.delimiter!r}, {quoting} quoting). Mend the row that begins {row[0][:40]!r}."
            )
        yield line, [row[place] for place in places]
