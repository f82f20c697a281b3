"""Rows that carry their own names: jsonl, json lists, parquet, `datasets` splits and rows already in memory."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from compress.data.rows import BATCH_CHARACTERS, BATCH_ROWS, SAMPLE_ROWS, Cell, Rows, as_cells, batches, sampled
from compress.data.text import (
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
    for number, item in enumerate(parse_json(text, str(path)), start=1):
        yield number, _record(item, f"{path}, item {number}")


def _json_lines(path: Path) -> Iterator[tuple[int, Record]]:
    expected = f" Expected one object a line{', or a list of objects' if path.suffix.lower() == '.json' else ''}."
    for number, line in enumerate(lines(path), start=1):
        if line.strip():
            yield number, _record(parse_json(line, str(path), number, expected), f"{path}, line {number}")


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
