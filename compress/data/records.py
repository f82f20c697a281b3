"""Rows that carry their own names: jsonl, json lists, parquet, `datasets` splits and rows already in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from compress.data.rows import BATCH_ROWS, SAMPLE_ROWS, Cell, Rows, as_cells, batches, sampled
from compress.data.text import opened
from compress.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

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
    head = [record for _, record in sampled(records(), size=lambda row: _characters(row[1]))]
    if not head:
        raise DataError(f"{place} is empty: it needs rows of a text and a label.")
    nested = {name for record in head for name, value in record.items() if _is_nested(value)}
    columns = tuple(dict.fromkeys(name for record in head for name in record if name not in nested))
    sample = {name: [_cell(record.get(name), f"{place}, column {name!r}") for record in head] for name in columns}

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
    return sum(len(value) for value in record.values() if isinstance(value, str))


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
    with opened(path) as file:
        return next((line.lstrip()[0] for line in file if line.strip()), "") == "["


def _json_list(path: Path) -> Iterator[tuple[int, Record]]:
    with opened(path) as file:
        try:
            items = json.load(file)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {error.lineno}: not JSON: {error.msg}.") from error
    for number, item in enumerate(items, start=1):
        yield number, _record(item, f"{path}, item {number}")


def _json_lines(path: Path) -> Iterator[tuple[int, Record]]:
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                item = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: not JSON: {error.msg}. Expected one object a line"
                    f"{', or a list of objects' if path.suffix.lower() == '.json' else ''}."
                ) from error
            yield number, _record(item, f"{path}, line {number}")


def _record(item: object, place: str) -> Record:
    if not isinstance(item, dict):
        raise DataError(
            f"{place}: {type(item).__name__} found, where an object of column names and values was expected."
        )
    return item


def _parquet(path: Path) -> Rows:
    from datasets import Features

    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a parquet file: {error}") from error
    schema = file.schema_arrow

    def stream(columns: list[str]) -> Iterator[pa.Table]:
        for batch in file.iter_batches(BATCH_ROWS, columns=columns):
            yield pa.Table.from_batches([batch])

    # A file that `datasets` wrote keeps the class names in its schema's metadata.
    features = Features.from_arrow_schema(schema) if b"huggingface" in (schema.metadata or {}) else {}
    return _typed(str(path), schema, stream, _classes(features))


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
    head = next(stream(list(columns)), None) if columns else None
    if head is None or not head.num_rows:
        raise DataError(f"{place} is empty: it needs rows of a text and a label.")
    head = head.slice(0, SAMPLE_ROWS)
    sample = {name: as_cells(head[name], classes.get(name)).to_pylist() for name in columns}

    def read(wanted: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
        row = 1
        for table in stream(list(wanted)):
            cells = [as_cells(table[name], classes.get(name)) for name in wanted]
            lines = pa.chunked_array([pa.array(range(row, row + table.num_rows), pa.int64())])
            names = ["line", *(str(n) for n in range(len(wanted)))]
            yield from pa.table([lines, *cells], names=names).to_batches()
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
