"""Open delimited files (csv, tsv, txt) as tables: how the lines are split is decided in
`dialects`; here, the header.

Rules. A tsv or txt file is read without quoting unless all quotation marks of
its first rows wrap whole cells, and it or a sibling needs quoting: a cell contains a
doubled mark, a tab or a line end, or every row has a wrapped cell. A first row is a
header if it has the name of a requested column; if none of its cells recurs in its
column and a sibling starts with the same row; if a usual column name in it never
recurs; or if a word in it stands above only numbers, or only recurring values. A file
without a header takes the column names of a sibling of the same width; else its columns
are numbered from 1. An unnamed first column, such as an index, and empty columns at the
end are allowed and numbered. A row that repeats the header is refused. A column whose
first cells are all lists in the notation of JSON or Python, such as ['a', 'b'], is a
column of lists. The lines of a txt file that are not split are the column `text`.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from compress.data.dialects import (
    FASTTEXT,
    RECURRING_ROWS,
    Dialect,
    TextLine,
    detect_csv,
    detect_txt,
    first_lines,
    read_lines,
)
from compress.data.schema import is_known, number
from compress.data.tables import (
    CellValue,
    NotPlainError,
    Row,
    Table,
    count_characters,
    explain_empty,
    kind_of,
    take_first_rows,
    to_cell,
)
from compress.data.text_files import Position, lines
from compress.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import RecordBatch

WORTH_ARROW: Final = 2**20
"""Bytes of the smallest file for which importing pyarrow pays off."""
DELIMITED: Final = (".tsv", ".csv", ".txt")
FIXED_SUFFIXES: Final = {"": ("text",), FASTTEXT: ("text", "label")}
"""The columns of files with one text per line, and of fastText's files."""
HEADER_CELL: Final = 64
LONGEST_LITERAL: Final = 100_000
"""The most characters of a list written as text that is parsed."""
ADJACENT_STRINGS: Final = re.compile(r"""['"]\s+['"]""")
"""Strings without a comma between them, as numpy prints; Python would join them."""

_FIELD = r'(?:"[^"]*(?:""[^"]*)*"|[^"\t\r\n]*)'
_CLEAN = re.compile(rf"{_FIELD}(?:(?:\t|\r?\n){_FIELD})*")
_WRAPPED = re.compile(r'"([^"]*(?:""[^"]*)*)"')
_SEPARATORS = re.compile(r"[,;|\t^~:\x01\x1c-\x1f\u00a6]")


@dataclass(frozen=True)
class Look:
    """Hold the first rows of a file and how they were read; `error` is about the first
    row that cannot be read."""

    path: Path
    dialect: Dialect
    rows: Sequence[Sequence[str]]
    error: str = ""
    notes: tuple[str, ...] = ()


class Header(NamedTuple):
    names: tuple[str, ...]
    own: bool
    """True if it is the file's first row."""
    note: str | None = None


def open_texts(paths: Sequence[Path], named: Sequence[str]) -> dict[Path, Table]:
    """Open the delimited files of one folder; `named` are the requested columns, if
    any."""
    heads = {path: _head(path) for path in paths if path.suffix.lower() != ".csv"}
    clean = {path for path, start in heads.items() if _CLEAN.fullmatch(start)}
    proven = any(map(_needs_quoting, (heads[path] for path in clean)))
    looks = [_look(path, quoted=proven and path in clean) for path in paths]
    headers = {look.path: _header(look, looks, named) for look in looks}
    return {
        look.path: _open(
            look, headers[look.path] or _borrow_header(look, headers), named
        )
        for look in looks
    }


def _head(path: Path) -> str:
    """Read the first lines, up to the last complete quoted cell."""
    first = take_first_rows(lines(path, checked=False), len)
    odd = sum(line.count('"') for line in first) % 2
    while odd and len(first) > 1:
        odd -= first.pop().count('"') % 2
    return "".join(first)


def _needs_quoting(first_lines: str) -> bool:
    fields = [match[1] for match in _WRAPPED.finditer(first_lines)]
    return (
        any(re.search(r'""|[\t\n]', field) for field in fields)
        or len(fields) >= first_lines.count("\n") > 1
    )


def _look(path: Path, *, quoted: bool) -> Look:
    note = ""
    mark = '"' if quoted else ""
    if path.suffix.lower() == ".csv":
        dialect, note = detect_csv(path)
    elif path.suffix.lower() == ".txt":
        delimiter = detect_txt(first_lines(path))
        dialect = Dialect(delimiter, mark if delimiter == "\t" else "")
    else:
        dialect = Dialect("\t", mark)
    found = take_first_rows(
        read_lines(path, dialect), lambda row: count_characters(row.cells)
    )
    if found and found[0].error and dialect.delimiter not in FIXED_SUFFIXES:
        raise DataError(found[0].error)
    error = next((row.error for row in found if row.error), "")
    notes = (f"{path.name}: {note}",) if note else ()
    return Look(
        path, dialect, [row.cells for row in found if not row.error], error, notes
    )


def _header(look: Look, looks: Sequence[Look], named: Sequence[str]) -> Header | None:
    """Return the header of a file by the rules at the top, or None. Raises DataError
    for a title above the header."""
    if look.dialect.delimiter in FIXED_SUFFIXES or not look.rows:
        fixed = FIXED_SUFFIXES.get(look.dialect.delimiter)
        return Header(fixed, own=False) if fixed else None
    first = look.rows[0]
    names = tuple(cell.strip() for cell in first)
    by_number = bool(named) and all(name.isdigit() for name in named)
    # one number may also be the label of a first row without a header
    required = all if by_number else any
    if required(name in names for name in named):
        return Header(names, own=True)
    if len(first) > 2 and names[0] and not any(names[1:]):
        raise DataError(
            f"{look.path}: only the first of {len(first)} cells of its first row is "
            f"filled ({names[0][:60]!r}). Remove the lines above the header."
        )
    # a header may be repeated
    rest = [row for row in look.rows[1:] if row != first or len(first) == 1]
    below = [[row[n] for row in rest if n < len(row)] for n in range(len(first))]
    fresh = [cell not in column for cell, column in zip(first, below, strict=True)]
    if by_number or any(len(cell) > HEADER_CELL for cell in first):
        return None
    same = all(fresh) and any(
        other.path != look.path and other.rows[:1] == [first] for other in looks
    )
    if same or any(
        is_known(name) and is_fresh for name, is_fresh in zip(names, fresh, strict=True)
    ):
        return Header(names, own=True)
    note = f"{look.path.name}: took the first row for a header ({', '.join(names)})"
    found = any(
        _is_title(cell, column) for cell, column in zip(first, below, strict=True)
    )
    return Header(names, own=True, note=note) if found else None


def _is_title(cell: str, below: Sequence[str]) -> bool:
    """Check whether the first cell can only be the column's title: a word above
    numbers, or above values that recur."""
    if not cell.strip() or number(cell) is not None or len(below) < 3:
        return False
    if all(number(value) is not None for value in below):
        return True
    return (
        len(below) >= RECURRING_ROWS
        and cell not in below
        and min(Counter(below).values()) > 1
    )


def _borrow_header(look: Look, headers: Mapping[Path, Header | None]) -> Header | None:
    """Return the header of a sibling of the same width, if any."""
    for sibling, header in headers.items():
        if header and look.rows and len(header.names) == len(look.rows[0]):
            note = (
                f"{look.path.name} has no header: took the column names of "
                f"{sibling.name}"
            )
            return Header(header.names, own=False, note=note)
    return None


def _open(look: Look, header: Header | None, named: Sequence[str]) -> Table:
    place = str(look.path)
    own = header is not None and header.own
    body = look.rows[own:]
    if header is None:
        names = tuple(str(n + 1) for n in range(min(map(len, look.rows), default=0)))
    else:
        names = _name_all(header.names, body, place) if own else header.names
    refusal = look.error
    if not body and not refusal:
        refusal = explain_empty(
            place, "has a header but no rows" if own else "is empty"
        )
    # Users who name columns by number know the file: cells after the last named one are
    # ignored.
    lenient = header is None and bool(named)
    columns = {
        name: [row[n] if n < len(row) else None for row in body]
        for n, name in enumerate(names)
    }
    lists = {
        name: parsed
        for name, cells in columns.items()
        if (parsed := _parse_lists(cells)) is not None
    }
    repeated = list(look.rows[0]) if own and len(names) > 1 else None

    def rows(wanted: Sequence[str], position: Position | None) -> Iterator[Row]:
        places = [names.index(column) for column in wanted]
        listed = [at for at, name in enumerate(wanted) if name in lists]
        least = max(places, default=-1) + 1 if lenient else len(names)
        for line, written, error in islice(
            read_lines(look.path, look.dialect, position), int(own), None
        ):
            problem = error
            if not error and (len(written) != least or written == repeated):
                problem = _compare(
                    TextLine(line, written), least, repeated, look, lenient=lenient
                )
            if problem:
                yield Row(line, written, (), problem)
                continue
            cells: list[CellValue] = [written[at] for at in places]
            for at in listed:
                text = written[places[at]]
                value = _parse_list(text)
                if text and value is None:
                    problem = (
                        f"{place}, line {line}: {text[:40]!r} in {wanted[at]!r} is not "
                        "a list; expected one, as in the rows above."
                    )
                cells[at] = to_cell(value)
            yield Row(line, written, cells, problem)

    def batches(
        wanted: Sequence[str], position: Position | None = None
    ) -> Iterator[RecordBatch]:
        if lenient or not lists.keys().isdisjoint(wanted):
            raise NotPlainError
        from compress.data.delimited_batches import read_batches

        first = look.rows[0] if own else None
        return read_batches(
            look.path, look.dialect, names, first, wanted, position=position
        )

    def tables(
        wanted: Sequence[str], position: Position | None
    ) -> Iterator[tuple[pa.Table, pa.Table]]:
        if look.path.stat().st_size < WORTH_ARROW:
            raise NotPlainError
        import pyarrow as pa

        for batch in batches(names, position):
            whole = pa.Table.from_batches([batch])
            yield whole, whole.select(wanted)

    notes = [*look.notes, *([header.note] if header and header.note else [])]
    notes += [
        f"{look.path.name}: {name!r} has lists, written as text" for name in lists
    ]
    if lenient and any(len(row) > len(names) for row in body):
        notes.append(
            f"{look.path.name}: some rows have more than {len(names)} cells, the rest "
            "is ignored"
        )
    return Table(
        place,
        names,
        {
            name: [to_cell(cell) for cell in lists.get(name, cells)]
            for name, cells in columns.items()
        },
        rows,
        batches,
        tables,
        kinds={name: kind for name, cells in lists.items() if (kind := kind_of(cells))},
        first=1 + own + look.dialect.skipped,
        unit="line",
        headerless=header is None,
        notes=tuple(notes),
        refusal=refusal,
    )


def _name_all(
    names: Sequence[str], body: Sequence[Sequence[str]], place: str
) -> tuple[str, ...]:
    """Return the column names; an unnamed first column, and empty ones at the end, are
    numbered.

    Raises DataError for other columns without a name, and for duplicate names.
    """
    last = max((at for at, name in enumerate(names) if name), default=-1)
    for at, name in enumerate(names):
        filled = any(row[at].strip() for row in body if at < len(row))
        if not name and at > 0 and (at < last or filled):
            raise DataError(
                f"{place}: the header has no name for column {at + 1} of {len(names)}. "
                "Name every column, and remove lines above the header."
            )
    if len(names) == 1 and (found := _SEPARATORS.search(names[0])):
        raise DataError(
            f"{place}: its only column is named {names[0][:60]!r}. If its cells are "
            f"separated by {found[0]!r}, rename the file to .csv and write "
            f"sep={found[0]} on a separate first line; else rename the column."
        )
    named = [name or str(at + 1) for at, name in enumerate(names)]
    if twice := [name for name, count in Counter(named).items() if count > 1]:
        raise DataError(
            f"{place}: the header names {', '.join(map(repr, twice))} more than once; "
            "rename one of them."
        )
    return tuple(named)


def _compare(
    row: TextLine,
    least: int,
    header: Sequence[str] | None,
    look: Look,
    *,
    lenient: bool,
) -> str:
    """Return what is wrong with the number of cells of a row, or with a row that
    repeats the header."""
    found = len(row.cells)
    if found < least or (found > least and not lenient):
        return (
            f"{look.path}, line {row.number}: {found} cells, not "
            f"{'at least ' if lenient else ''}{least} as expected ({look.dialect}). "
            f"Correct the row that begins {row.cells[0][:40]!r}."
        )
    if row.cells == header:
        return (
            f"{look.path}, line {row.number}: repeats the header: expected one table "
            "with one header per file. Remove the line, or split the file."
        )
    return ""


def _parse_lists(cells: Sequence[str | None]) -> list[list[Any] | None] | None:
    """Parse a column of lists; None unless every non-empty cell is a list."""
    filled = [cell for cell in cells if cell]
    if not filled or any(_parse_list(cell) is None for cell in filled):
        return None
    return [_parse_list(cell) if cell else None for cell in cells]


def _parse_list(cell: str) -> list[Any] | None:
    """Parse a list of strings and numbers in the notation of JSON or Python; None if
    the text is not a list."""
    text = cell.strip()
    if not (text.startswith("[") and text.endswith("]")) or len(text) > LONGEST_LITERAL:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        try:
            value = None if ADJACENT_STRINGS.search(text) else ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None
    plain = isinstance(value, list) and all(
        item is None or isinstance(item, str | int | float) for item in value
    )
    return value if plain else None
