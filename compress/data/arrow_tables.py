"""Read tables as Arrow batches: rows from the reader of text files, parquet files, and
hub data sets.

Cells are text of any Arrow type (string, large_string, string_view, binary in UTF-8,
dictionaries of these), numbers, booleans, times, and lists of these; a struct becomes a
column for each field. Class names are read from the metadata that `datasets` writes
into a file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise, repeat
from operator import truediv
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from compress.data.tables import (
    BATCH_CHARACTERS,
    BATCH_ROWS,
    SAMPLE_ROWS,
    CellKind,
    CellValue,
    Row,
    Table,
    explain_empty,
)
from compress.data.text_files import (
    LONGEST_LINE,
    TOO_EXPANSIVE,
    Position,
    limit_unpacked,
    reading,
    refuse_special,
)
from compress.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset


def open_parquet(path: Path) -> Table:
    """Open a parquet file, which is read one row group at a time. Raises DataError."""
    with reading(path):
        refuse_special(path)
    with _decoding(path):
        types = pq.read_schema(path)
        texts = [field.name for field in types if _is_text(field.type)]
        # A text that many rows share stays in memory once, or a small file could take
        # any amount of it.
        file = pq.ParquetFile(path, read_dictionary=texts)
        groups = [
            file.metadata.row_group(number)
            for number in range(file.metadata.num_row_groups)
        ]
        parts = [
            group.column(number)
            for group in groups
            for number in range(group.num_columns)
        ]
        if any(
            part.total_uncompressed_size > limit_unpacked(part.total_compressed_size)
            for part in parts
        ):
            raise DataError(f"{path}: {TOO_EXPANSIVE}")
        mean = max(
            (group.total_byte_size // max(1, group.num_rows) for group in groups),
            default=0,
        )
        rows_at_once = max(1, min(BATCH_ROWS, BATCH_CHARACTERS // max(1, mean)))

    def stream(columns: list[str]) -> Iterator[pa.Table]:
        row = 1
        with _decoding(path):
            for batch in file.iter_batches(rows_at_once, columns=columns):
                batch.validate(full=True)
                yield from _bound(batch, path, row)
                row += len(batch)

    schema = file.schema_arrow
    return _open_typed(
        str(path),
        schema,
        stream,
        _declared_classes(schema, path),
        file.metadata.num_rows,
    )


def _declared_classes(schema: pa.Schema, path: Path) -> dict[str, tuple[str, ...]]:
    """Read the class names that `datasets` has written into the metadata of a file."""
    written = (schema.metadata or {}).get(b"huggingface")
    if written is None:
        return {}
    try:
        features = json.loads(written)["info"]["features"]
        inner = {name: _item_of(feature) for name, feature in features.items()}
        return {
            name: tuple(map(str, feature["names"]))
            for name, feature in inner.items()
            if "names" in feature
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: its metadata is damaged: {type(error).__name__}: {error}"
        ) from error


def _item_of(feature: Any) -> Mapping[str, Any]:
    """Return the feature of the items of a list, in the old and the new notation of
    `datasets`, or a plain feature."""
    if isinstance(feature, list):
        return _item_of(feature[0])
    if "feature" in feature and "_type" in feature:
        return _item_of(feature["feature"])
    return feature if feature.get("_type") == "ClassLabel" else {}


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: not a parquet file, or a damaged one: {error}. Write or download "
            "it again."
        ) from error


def _bound(batch: pa.RecordBatch, path: Path, row: int) -> Iterator[pa.Table]:
    """Slice rows so that a slice stays small even when no two rows share a text. Raises
    DataError for a cell that is too long."""
    sizes = np.zeros(len(batch), np.int64)
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_dictionary(column.type) and _is_text(column.type.value_type):
            lengths = pc.take(pc.binary_length(column.dictionary), column.indices)
            lengths = pc.fill_null(lengths, 0).to_numpy(zero_copy_only=False)
            if lengths.max(initial=0) > LONGEST_LINE:
                where = f"{path}, row {row + int(lengths.argmax())}, column {name!r}"
                raise DataError(
                    f"{where}: a cell of {lengths.max():,} bytes; expected at most "
                    f"{LONGEST_LINE:,}."
                )
            sizes += lengths
    cuts = np.flatnonzero(np.diff(np.cumsum(sizes) // BATCH_CHARACTERS)) + 1
    for start, end in pairwise([0, *cuts.tolist(), len(batch)]):
        yield pa.Table.from_batches([batch.slice(start, end - start)])


def from_dataset(place: str, split: Dataset) -> Table:
    """Open a Dataset, read from its memory-mapped table."""

    def stream(columns: list[str]) -> Iterator[pa.Table]:
        yield from split.select_columns(columns).with_format("arrow").iter(BATCH_ROWS)

    inner = {
        name: getattr(feature, "feature", feature)
        for name, feature in split.features.items()
    }
    classes = {
        name: tuple(feature.names)
        for name, feature in inner.items()
        if hasattr(feature, "names")
    }
    return _open_typed(place, split.features.arrow_schema, stream, classes, len(split))


def _open_typed(
    place: str,
    schema: pa.Schema,
    stream: Callable[[list[str]], Iterator[pa.Table]],
    classes: Mapping[str, tuple[str, ...]],
    total: int,
) -> Table:
    """Open typed columns that `stream` reads; `total` is the number of rows."""
    if len(set(schema.names)) < len(schema.names):
        raise DataError(
            f"{place}: has several columns of the same name among "
            f"{', '.join(schema.names)}; rename one."
        )
    if twice := [
        name for name, names in classes.items() if len(set(names)) < len(names)
    ]:
        raise DataError(
            f"{place}: two classes of the column {twice[0]!r} have the same name. "
            "Rename one."
        )
    fields = {
        field.name: (field.type, root.name)
        for root in schema
        for field in _fields(root)
    }
    roots = {name: root for name, (kind, root) in fields.items() if _is_readable(kind)}
    unread = {
        name: str(kind) for name, (kind, _) in fields.items() if name not in roots
    }

    def flat(wanted: Sequence[str]) -> Iterator[pa.Table]:
        return map(flatten, stream(list(dict.fromkeys(roots[name] for name in wanted))))

    def cells(table: pa.Table, name: str) -> pa.ChunkedArray:
        try:
            return to_cells(table[name], classes.get(name))
        except pa.ArrowException as error:
            raise DataError(
                f"{place}, column {name!r}: cannot be read: {error}"
            ) from error

    def batches(wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for table in flat(wanted):
            yield from pa.table(
                {name: cells(table, name) for name in wanted}
            ).to_batches()

    def tables(
        wanted: Sequence[str], position: Position | None
    ) -> Iterator[tuple[pa.Table, pa.Table]]:
        done = 0
        for whole in stream(schema.names):
            table = flatten(whole)
            done += len(whole)
            if position is not None:
                position.tell = partial(truediv, done, total)
            yield whole, pa.table({name: cells(table, name) for name in wanted})

    def rows(wanted: Sequence[str], position: Position | None) -> Iterator[Row]:
        number = 0
        for whole, found in tables(wanted, position):
            columns = [column.to_pylist() for column in found.columns]
            each = zip(*columns, strict=True) if wanted else repeat((), len(whole))
            for values, row in zip(whole.to_pylist(), each, strict=True):
                number += 1
                yield Row(number, values, row)

    first = next(flat(list(roots)), None) if roots else None
    sample: dict[str, list[CellValue]] = {}
    for name in roots:
        try:
            sample[name] = (
                []
                if first is None
                else cells(first.slice(0, SAMPLE_ROWS), name).to_pylist()
            )
        except DataError:
            kind = fields[name][0]
            items = kind.value_type if pa.types.is_dictionary(kind) else kind
            if not _is_binary(items):
                raise
            unread[name] = f"{items}, not UTF-8"
    return Table(
        place,
        tuple(sample),
        sample,
        rows,
        batches,
        tables,
        kinds={
            name: kind
            for name in sample
            if name not in classes and (kind := _kind(fields[name][0]))
        },
        classes=classes,
        nested=unread,
        refusal="" if first is not None and first.num_rows else explain_empty(place),
    )


def _fields(field: pa.Field) -> Iterator[pa.Field]:
    """Yield the fields of a struct, and of structs in it, named as `Table.flatten`
    names them."""
    if not pa.types.is_struct(field.type):
        yield field
        return
    for part in field.flatten():
        yield from _fields(part)


def flatten(table: pa.Table) -> pa.Table:
    """Replace structs by a column for each of their fields, also within structs."""
    while any(pa.types.is_struct(field.type) for field in table.schema):
        table = table.flatten()
    return table


def _is_one_of(kind: pa.DataType, *names: str) -> bool:
    """Check whether a type is one of these, named as in `pyarrow.types`."""
    return any(getattr(pa.types, f"is_{name}")(kind) for name in names)


def _is_text(kind: pa.DataType) -> bool:
    """Check for text: a string, or bytes, of any of Arrow's types."""
    strings = _is_one_of(kind, "string", "large_string", "string_view")
    return strings or _is_binary(kind)


def _is_binary(kind: pa.DataType) -> bool:
    return _is_one_of(
        kind, "binary", "large_binary", "binary_view", "fixed_size_binary"
    )


def _is_list(kind: pa.DataType) -> bool:
    return _is_one_of(
        kind, "list", "large_list", "fixed_size_list", "list_view", "large_list_view"
    )


def _is_number(kind: pa.DataType) -> bool:
    return _is_one_of(kind, "floating", "integer", "decimal")


def _is_readable(kind: pa.DataType) -> bool:
    """Check whether a column has text, numbers, booleans, times, or lists of these."""
    if _is_list(kind):
        return not pa.types.is_nested(kind.value_type) and _is_readable(kind.value_type)
    if pa.types.is_dictionary(kind):
        return _is_readable(kind.value_type)
    plain = _is_one_of(kind, "boolean", "null", "temporal")
    return plain or _is_text(kind) or _is_number(kind)


def _kind(kind: pa.DataType) -> CellKind | None:
    """Return whether a column, or the items of its lists or dictionary, are numbers or
    text."""
    if _is_list(kind) or pa.types.is_dictionary(kind):
        return _kind(kind.value_type)
    if _is_number(kind) or pa.types.is_boolean(kind):
        return "number"
    return "text" if _is_text(kind) else None


def to_cells(
    column: pa.ChunkedArray, names: tuple[str, ...] | None = None
) -> pa.ChunkedArray:
    """Turn a typed Arrow column into cells: class ids become `names` (null for -1, no
    label), numbers become strings."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not _is_list(column.type):
        return _texts(column) if names is None else _name_classes(column, names)
    parts = []
    for chunk in column.chunks:
        lists = chunk.cast(pa.list_(chunk.type.value_type))
        items = lists.flatten()
        lengths = pc.fill_null(pc.list_value_length(lists), 0)
        offsets = pa.concat_arrays(
            [pa.array([0], pa.int32()), pc.cumulative_sum(lengths).cast(pa.int32())]
        )
        texts = _texts(items) if names is None else _name_classes(items, names)
        parts.append(pa.ListArray.from_arrays(offsets, texts, mask=lists.is_null()))
    return pa.chunked_array(parts, pa.list_(pa.string()))


def _texts(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Convert a column to strings: bytes are decoded as UTF-8, NaN becomes a missing
    value."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)
    if _is_binary(column.type) and not pa.types.is_binary(column.type):
        column = column.cast(pa.binary())
    return column.cast(pa.string())


def _name_classes(
    ids: pa.Array | pa.ChunkedArray, names: tuple[str, ...]
) -> pa.Array | pa.ChunkedArray:
    ids = ids.cast(pa.int64())
    return pc.take(pa.array(names, pa.string()), pc.if_else(pc.less(ids, 0), None, ids))
