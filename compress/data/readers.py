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
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from compress.data.schema import is_known, number
from compress.data.table import (
    BATCH_CHARACTERS,
    BATCH_ROWS,
    SAMPLE_ROWS,
    Cell,
    Rows,
    as_cells,
    batches,
    characters,
    sampled,
)
from compress.data.text_files import (
    LONGEST,
    TOO_EXPANSIVE,
    head,
    lines,
    parse_json,
    reading,
    refuse_special,
    unpacked_limit,
    whole,
)
from compress.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

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


LARGEST_LIST: Final = 64 * 2**20
"""Bytes of a json list, which is read as a whole: as objects it takes up to twenty times as much."""

Record = Mapping[str, Any]


def open_file(path: Path) -> Rows:
    """A jsonl, json or parquet file as a split not yet read. A json list is read whole; the others stream."""
    if path.suffix.lower() == ".parquet":
        return _parquet(path)
    if path.suffix.lower() == ".json" and _is_list(path):
        return from_records(str(path), lambda: _json_list(path), unit="item")
    return from_records(str(path), lambda: _json_lines(path), unit="line")


def from_records(place: str, records: Callable[[], Iterable[tuple[int, Record]]], *, unit: str) -> Rows:
    """Numbered mappings of column name to value as a split; `records` is called anew for every reading."""
    first = [record for _, record in sampled(records(), size=lambda row: _characters(row[1]))]
    if not first:
        raise DataError(f"{place} is empty: it needs rows of a text and a label.")
    nested = {name for record in first for name, value in record.items() if _is_nested(value)}
    columns = tuple(dict.fromkeys(name for record in first for name in record if name not in nested))
    sample = {name: [_cell(record.get(name), f"{place}, column {name!r}") for record in first] for name in columns}

    def read(wanted: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
        rows = (
            (line, [_cell(record.get(name), f"{place}, {unit} {line}, column {name!r}") for name in wanted])
            for line, record in records()
        )
        lists = [any(isinstance(cell, list) for cell in sample[name]) for name in wanted]
        return batches(rows, lists, place=place, unit=unit)

    return Rows(place, columns, sample, read, unit=unit)


def _is_nested(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, list | dict) for item in value))


def _characters(record: Record) -> int:
    return sum(len(name) + (len(value) if isinstance(value, str | list) else 1) for name, value in record.items())


def _cell(value: object, place: str) -> Cell:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list) and not _is_nested(value):
        return [None if item is None else str(_cell(item, place)) for item in value]
    raise DataError(f"{place}: {type(value).__name__} found, where text, a number or a list of these was expected.")


def _is_list(path: Path) -> bool:
    return head(path).lstrip().startswith("[")


def _json_list(path: Path) -> Iterator[tuple[int, Record]]:
    text = whole(
        path, f"Write one object a line: jq -c '.[]' {shlex.quote(path.name)} > {path.stem}.jsonl", LARGEST_LIST
    )
    for at, item in enumerate(parse_json(text, str(path)), start=1):
        yield at, _record(item, f"{path}, item {at}")


def _json_lines(path: Path) -> Iterator[tuple[int, Record]]:
    expected = f" Expected one object a line{', or a list of objects' if path.suffix.lower() == '.json' else ''}."
    for at, line in enumerate(lines(path), start=1):
        if line.strip():
            yield at, _record(parse_json(line, str(path), at, expected), f"{path}, line {at}")


def _record(item: object, place: str) -> Record:
    if not isinstance(item, dict):
        raise DataError(
            f"{place}: {type(item).__name__} found, where an object of column names and values was expected."
        )
    return item


def _parquet(path: Path) -> Rows:
    with reading(path):
        refuse_special(path)
    with _decoding(path):
        types = pq.read_schema(path)
        texts = [
            field.name for field in types if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
        ]
        # A text that many rows share is held once: written out for each of them, a small file may take any memory.
        file = pq.ParquetFile(path, read_dictionary=texts)
        rows_at_once = _rows_at_once(path, file.metadata)

    def stream(columns: list[str]) -> Iterator[pa.Table]:
        row = 1
        with _decoding(path):
            for batch in file.iter_batches(rows_at_once, columns=columns):
                batch.validate(full=True)
                yield from _bounded(batch, path, row)
                row += len(batch)

    return _typed(str(path), file.schema_arrow, stream, _declared(file.schema_arrow, path))


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a parquet file, or a damaged one: {error}") from error


def _rows_at_once(path: Path, metadata: pq.FileMetaData) -> int:
    """How many rows may be decoded together, by what the file says they take. DataError for what no text takes."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    if any(each.total_uncompressed_size > unpacked_limit(each.total_compressed_size) for each in chunks):
        raise DataError(f"{path}: {TOO_EXPANSIVE}")
    mean = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
    return max(1, min(BATCH_ROWS, BATCH_CHARACTERS // max(1, mean)))


def _bounded(batch: pa.RecordBatch, path: Path, row: int) -> Iterator[pa.Table]:
    """The rows in slices that stay small where each has its own copy of its texts. DataError for a cell too long."""
    sizes = np.zeros(len(batch), np.int64)
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_dictionary(column.type) and pa.types.is_string(column.type.value_type):
            lengths = pc.take(pc.binary_length(column.dictionary), column.indices)
            lengths = pc.fill_null(lengths, 0).to_numpy(zero_copy_only=False)
            if lengths.max(initial=0) > LONGEST:
                where = f"{path}, row {row + int(lengths.argmax())}, column {name!r}"
                raise DataError(f"{where}: a cell of {lengths.max():,} bytes; expected at most {LONGEST:,}.")
            sizes += lengths
    cuts = np.flatnonzero(np.diff(np.cumsum(sizes) // BATCH_CHARACTERS)) + 1
    for start, end in pairwise([0, *cuts.tolist(), len(batch)]):
        yield pa.Table.from_batches([batch.slice(start, end - start)])


def _declared(schema: pa.Schema, path: Path) -> Mapping[str, tuple[str, ...]]:
    """The class names that a file which `datasets` wrote keeps in its schema's metadata."""
    if b"huggingface" not in (schema.metadata or {}):
        return {}
    from datasets import Features

    try:
        return _classes(Features.from_arrow_schema(schema))
    except Exception as error:
        raise DataError(f"{path}: its metadata is damaged: {type(error).__name__}: {error}") from error


def from_dataset(place: str, split: Dataset) -> Rows:
    """A split that `datasets` has loaded, read from its memory-mapped table."""

    def stream(columns: list[str]) -> Iterator[pa.Table]:
        yield from split.select_columns(columns).with_format("arrow").iter(BATCH_ROWS)

    return _typed(place, split.features.arrow_schema, stream, _classes(split.features))


def _classes(features: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Class names by column, for class ids and lists of class ids."""
    inner = {name: getattr(feature, "feature", feature) for name, feature in features.items()}
    return {name: tuple(feature.names) for name, feature in inner.items() if hasattr(feature, "names")}


def _typed(
    place: str,
    schema: pa.Schema,
    stream: Callable[[list[str]], Iterator[pa.Table]],
    classes: Mapping[str, tuple[str, ...]],
) -> Rows:
    columns = tuple(field.name for field in schema if _readable(field.type))
    if len(set(schema.names)) < len(schema.names):
        raise DataError(f"{place}: has several columns of one name among {', '.join(schema.names)}: rename one.")

    def as_text(table: pa.Table, name: str) -> pa.ChunkedArray:
        try:
            return as_cells(table[name], classes.get(name))
        except pa.ArrowException as error:
            raise DataError(f"{place}, column {name!r}: cannot be read: {error}") from error

    first = next(stream(list(columns)), None) if columns else None
    if first is None or not first.num_rows:
        raise DataError(f"{place} is empty: it needs rows of a text and a label.")
    sample = {name: as_text(first.slice(0, SAMPLE_ROWS), name).to_pylist() for name in columns}

    def read(wanted: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
        row = 1
        for table in stream(list(wanted)):
            cells = [as_text(table, name) for name in wanted]
            numbers = pa.chunked_array([pa.array(range(row, row + table.num_rows), pa.int64())])
            names = ["line", *(str(n) for n in range(len(wanted)))]
            yield from pa.table([numbers, *cells], names=names).to_batches()
            row += table.num_rows

    return Rows(place, columns, sample, read, classes=classes, unit="row")


def _readable(kind: pa.DataType) -> bool:
    """Whether a column holds text, numbers, or lists of these: what `as_cells` takes."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _readable(kind.value_type) and not pa.types.is_nested(kind.value_type)
    if pa.types.is_dictionary(kind):
        return _readable(kind.value_type)
    texts = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_boolean,
        pa.types.is_floating,
        pa.types.is_integer,
    )
    return pa.types.is_null(kind) or pa.types.is_decimal(kind) or any(is_kind(kind) for is_kind in texts)
