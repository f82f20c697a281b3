"""Tab- and comma-separated text, with or without a header, quoted or not, told from the rows themselves.

Stated rules. A csv file is quoted as RFC 4180 says. A tsv or txt file is read without quoting unless all quotation
marks of its first rows wrap whole fields, and the file or a sibling needs it so: a field with a doubled mark, a tab or
a line end inside, or a wrapped field in every row. A first row is a header when it has the name of a column that the
user asked for; or when no cell of it comes again in its column and a sibling starts with the same row; or when a known
column name in it never comes again; or when a column below a word holds only numbers, or only values that recur.
A file without a header takes the names of a sibling of the same width; else its columns are numbered from 1.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from compress.data.names import is_known, number
from compress.data.rows import Cell, Rows, batches, characters, sampled
from compress.data.text import LONGEST, lines
from compress.errors import DataError

HEADER_CELL = 64
RECURRING_ROWS = 20

_FIELD = r'(?:"[^"]*(?:""[^"]*)*"|[^"\t\r\n]*)'
_CLEAN = re.compile(rf"{_FIELD}(?:(?:\t|\r?\n){_FIELD})*")
_WRAPPED = re.compile(r'"([^"]*(?:""[^"]*)*)"')


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
    quoted = _quoted(paths)
    looks = [_look(path, quoted=path in quoted) for path in paths]
    headers = {look.path: _header(look, looks, named) for look in looks}
    return {look.path: _rows(look, headers[look.path] or _borrowed(look, headers), named) for look in looks}


def _quoted(paths: Sequence[Path]) -> set[Path]:
    """The files to be read with quoting."""
    heads = {path: _head(path) for path in paths if not _is_csv(path)}
    clean = {path for path, head in heads.items() if _CLEAN.fullmatch(head)}
    proven = any(_needs_quoting(heads[path]) for path in clean)
    return {path for path in paths if _is_csv(path)} | (clean if proven else set())


def _is_csv(path: Path) -> bool:
    return path.suffix.lower() == ".csv"


def _head(path: Path) -> str:
    """The first lines, without those of a quoted field that the cut goes through."""
    first = sampled(lines(path), size=len)
    odd = sum(line.count('"') for line in first) % 2
    while odd and len(first) > 1:
        odd -= first.pop().count('"') % 2
    return "".join(first)


def _needs_quoting(head: str) -> bool:
    fields = [match[1] for match in _WRAPPED.finditer(head)]
    return any(re.search(r'""|[\t\n]', field) for field in fields) or len(fields) >= head.count("\n") > 1


def _look(path: Path, *, quoted: bool) -> Look:
    look = Look(path, _delimiter(path), quoted, ())
    rows = [cells for _, cells in sampled(_lines(look), size=lambda row: characters(row[1]))]
    if not rows:
        raise DataError(f"{path} is empty: it needs rows of a text and a label.")
    return replace(look, rows=rows)


def _delimiter(path: Path) -> str:
    if not _is_csv(path):
        return "\t"
    first = next(lines(path), "")
    return next((mark for mark in ",\t;" if mark in first), ",")


def _lines(look: Look) -> Iterator[tuple[int, list[str]]]:
    """The cells of every row that is not blank, with the number of the line it starts on."""
    if look.quoted:
        yield from _quoted_lines(look)
        return
    for line, text in enumerate(lines(look.path), start=1):
        if row := text.rstrip("\r\n"):
            yield line, row.split(look.delimiter)


def _quoted_lines(look: Look) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST))  # one setting per process; we only raise it
    line, size = 1, 0

    def fed() -> Iterator[str]:
        nonlocal size
        for text in lines(look.path, newline=""):
            size += len(text)
            if size > LONGEST:
                raise csv.Error(f"more than {LONGEST:,} characters")
            yield text

    reader = csv.reader(fed(), delimiter=look.delimiter, strict=True)
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
