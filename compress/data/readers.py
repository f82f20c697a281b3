"""Open files and tables as splits that are not yet read: named columns of cells, streamed as Arrow batches.

A cell is a string, a list of strings, or None: labels keep the source's spelling until every split is known, so that
"1", 1 and 1.0 can be told from a word in every file format. The fields of an object are columns: `answers.text`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from compress.data.sources import class_folders
from compress.data.text_files import (
    LONGEST,
    TOO_EXPANSIVE,
    head,
    json_object,
    json_objects,
    limit_unpacked,
    lines,
    parse_json,
    reading,
    refuse_special,
    whole,
)
from compress.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

Cell = str | list[str | None] | None
Item = TypeVar("Item")

SHOWN: Final = 40
"""Columns listed in a message."""
SAMPLE_ROWS: Final = 1000
SAMPLE_CHARACTERS: Final = 4_000_000
BATCH_ROWS: Final = 10_000
BATCH_CHARACTERS: Final = 16_000_000
LARGEST_LIST: Final = 64 * 2**20
"""Bytes of a json list, which is read as a whole and takes up to twenty times as much memory."""


@dataclass(frozen=True)
class RawSplit:
    """Describe a split that is not yet read.

    place    its name in messages: a file, or a hub data set and split
    columns  the source's column names; numbers from "1" if it has none
    sample   the cells of the first rows, by column, for detection
    read     streams the given columns as batches of strings, or of lists of strings if the sample has lists
    classes  the class names that the source declares for a column, in the order of their ids
    first    the number of its first row in messages: 2 after a header
    nested   columns of lists of objects or of lists, which cannot be read
    """

    place: str
    columns: tuple[str, ...]
    sample: Mapping[str, Sequence[Cell]]
    read: Callable[[Sequence[str]], Iterator[pa.RecordBatch]]
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    first: int = 1
    headerless: bool = False
    notes: tuple[str, ...] = ()
    nested: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the last part of the place, for notes."""
        return Path(self.place).name

    def examples(self) -> str:
        """List the columns with an example each, one per line, for messages that ask the user to choose."""
        listed = []
        for name in self.columns[:SHOWN]:
            text = repr(next((cell for cell in self.sample[name] if cell), ""))
            listed.append(f"  {name}: {text if len(text) <= 60 else text[:57] + '...'}")
        more = len(self.columns) - SHOWN
        listed += [f"  and {more:,} more"] if more > 0 else []
        return "\n".join([*listed, *(f"  {name}: lists of objects or lists, not read" for name in self.nested[:SHOWN])])

    def has_lists(self, column: str) -> bool:
        return any(isinstance(cell, list) for cell in self.sample[column])


def chunks(
    rows: Iterable[Item], size: Callable[[Item], int], most_rows: int, most_characters: int
) -> Iterator[list[Item]]:
    """Yield lists of rows, bounded in number and in characters; `size` counts the characters of a row."""
    chunk: list[Item] = []
    total = 0
    for row in rows:
        chunk.append(row)
        total += size(row)
        if len(chunk) >= most_rows or total >= most_characters:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


def take_first_rows(rows: Iterable[Item], size: Callable[[Item], int]) -> list[Item]:
    return next(chunks(rows, size, SAMPLE_ROWS, SAMPLE_CHARACTERS), [])


def count_characters(cells: Iterable[Any]) -> int:
    """Estimate the memory of cells in characters; an empty cell counts as one."""
    total = 0
    for cell in cells:
        total += 1 + len(cell) if isinstance(cell, str) else count_characters(cell) if isinstance(cell, list) else 1
    return total


def to_batches(
    rows: Iterable[Sequence[Cell]], names: Sequence[str], sample: Mapping[str, Sequence[Cell]], place: str, first: int
) -> Iterator[pa.RecordBatch]:
    """Write rows of the named columns as Arrow batches. DataError for columns that mix texts and lists."""
    wrong = [str if any(isinstance(cell, list) for cell in sample[name]) else list for name in names]
    types = [pa.list_(pa.string()) if refused is str else pa.string() for refused in wrong]
    for chunk in chunks(rows, count_characters, BATCH_ROWS, BATCH_CHARACTERS):
        for row in chunk:
            if any(map(isinstance, row, wrong)):
                raise DataError(
                    f"{place}, row {first}: a column has both lists and texts. Write every row of a column the same "
                    "way."
                )
            first += 1
        columns = zip(*chunk, strict=True)
        yield pa.record_batch([pa.array(cells, kind) for cells, kind in zip(columns, types, strict=True)], list(names))


def explain_empty(place: object, what: str = "is empty") -> DataError:
    return DataError(f"{place} {what}; expected rows of a text and a label.")


Record = Mapping[str, Any]


def open_file(path: Path) -> RawSplit:
    """Open a jsonl, json or parquet file, or a folder of classes. All but a json list or table are streamed."""
    place = str(path)
    if path.is_dir():

        def texts() -> Iterator[Record]:
            for folder in class_folders(path):
                for file in sorted(folder.glob("*.txt")):
                    yield {"text": whole(file, "Remove it."), "label": folder.name}

        return from_records(place, texts)
    if path.suffix.lower() == ".parquet":
        return _parquet(path)
    if path.suffix.lower() == ".json" and not _has_object_lines(path):

        def items() -> Iterator[Record]:
            remedy = f"Write one object per line: jq -c '.[]' {shlex.quote(path.name)} > {path.stem}.jsonl"
            value = parse_json(whole(path, remedy, LARGEST_LIST), place)
            rows = value if isinstance(value, list) else _rows_of(json_object(value, place))
            for at, item in enumerate(rows, start=1):
                yield json_object(item, f"{place}, item {at}")

        return from_records(place, items)
    return from_records(place, lambda: (row for _, row in json_objects(lines(path), place)))


def _has_object_lines(path: Path) -> bool:
    """Check whether the first line of a file is an object, and the next one begins another."""
    if not head(path).lstrip().startswith("{"):
        return False
    filled = filter(str.strip, lines(path, longest=LARGEST_LIST))
    first, second = next(filled, ""), next(filled, "")
    try:
        return second.lstrip().startswith("{") and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _rows_of(table: Record) -> Iterable[Any]:
    """Return the rows of an object: its only list of objects; those of its columns, as lists or objects; or itself.

    pandas writes `{"text": {"0": "a text", "1": "another"}, "label": {"0": 1, "1": 0}}`.
    """
    lists = [value for value in table.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if len(lists) == 1:
        return lists[0]
    columns = [list(value.values()) if isinstance(value, dict) else value for value in table.values()]
    if lists or not all(isinstance(column, list) and column for column in columns) or len(set(map(len, columns))) != 1:
        return [table]
    return [dict(zip(table, cells, strict=True)) for cells in zip(*columns, strict=True)]


def from_records(place: str, records: Callable[[], Iterable[Record]]) -> RawSplit:
    """Make a split of mappings from column names to values; every reading calls `records` again."""
    first = take_first_rows(map(_flat, records()), lambda record: count_characters(record.values()))
    if not first:
        raise explain_empty(place)
    nested = {name for record in first for name, value in record.items() if _is_nested(value)}
    columns = tuple(dict.fromkeys(name for record in first for name in record if name not in nested))
    sample = {name: [_cell(record.get(name), place) for record in first] for name in columns}

    def read(wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        rows = (
            [_cell(record.get(name), f"{place}, row {at}, column {name!r}") for name in wanted]
            for at, record in enumerate(map(_flat, records()), start=1)
        )
        return to_batches(rows, wanted, sample, place, 1)

    return RawSplit(place, columns, sample, read, nested=tuple(sorted(nested)))


def _flat(record: Record) -> Record:
    """Replace objects by their fields: {"a": {"b": 1}} -> {"a.b": 1}."""
    if not any(isinstance(value, dict) for value in record.values()):
        return record
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat |= {f"{name}.{key}": field for key, field in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _is_nested(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, list | dict) for item in value))


def _cell(value: object, place: str) -> Cell:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list) and not _is_nested(value):
        return [None if item is None else str(_cell(item, place)) for item in value]
    raise DataError(f"{place}: expected text, a number or a list of these, found {type(value).__name__}.")


def _parquet(path: Path) -> RawSplit:
    with reading(path):
        refuse_special(path)
    with _decoding(path):
        types = pq.read_schema(path)
        texts = [
            field.name for field in types if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
        ]
        # A text that many rows share stays in memory once, or a small file could take any amount of it.
        file = pq.ParquetFile(path, read_dictionary=texts)
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
        if any(chunk.total_uncompressed_size > limit_unpacked(chunk.total_compressed_size) for chunk in chunks):
            raise DataError(f"{path}: {TOO_EXPANSIVE}")
        mean = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
        rows_at_once = max(1, min(BATCH_ROWS, BATCH_CHARACTERS // max(1, mean)))

    def stream(columns: list[str]) -> Iterator[pa.Table]:
        row = 1
        with _decoding(path):
            for batch in file.iter_batches(rows_at_once, columns=columns):
                batch.validate(full=True)
                yield from _bound(batch, path, row)
                row += len(batch)

    classes: Mapping[str, tuple[str, ...]] = {}
    if b"huggingface" in (file.schema_arrow.metadata or {}):  # written by `datasets`, with class names
        from datasets import Features

        try:
            classes = _classes(Features.from_arrow_schema(file.schema_arrow))
        except Exception as error:  # `datasets` raises anything for damaged JSON
            raise DataError(f"{path}: its metadata is damaged: {type(error).__name__}: {error}") from error
    return _read_typed(str(path), file.schema_arrow, stream, classes)


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: not a parquet file, or a damaged one: {error}. Write or download it again."
        ) from error


def _bound(batch: pa.RecordBatch, path: Path, row: int) -> Iterator[pa.Table]:
    """Slice rows so that they stay small when each has its own copy of its texts. DataError for too long a cell."""
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


def from_dataset(place: str, split: Dataset) -> RawSplit:
    """Make a split of a Dataset, read from its memory-mapped table."""

    def stream(columns: list[str]) -> Iterator[pa.Table]:
        yield from split.select_columns(columns).with_format("arrow").iter(BATCH_ROWS)

    return _read_typed(place, split.features.arrow_schema, stream, _classes(split.features))


def _classes(features: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the class names of columns of class ids, or of lists of them."""
    inner = {name: getattr(feature, "feature", feature) for name, feature in features.items()}
    return {name: tuple(feature.names) for name, feature in inner.items() if hasattr(feature, "names")}


def _read_typed(
    place: str,
    schema: pa.Schema,
    stream: Callable[[list[str]], Iterator[pa.Table]],
    classes: Mapping[str, tuple[str, ...]],
) -> RawSplit:
    if len(set(schema.names)) < len(schema.names):
        raise DataError(f"{place}: has several columns of the same name among {', '.join(schema.names)}; rename one.")
    # the fields of objects are named as by `Table.flatten`
    fields = ((f, root.name) for root in schema for f in (root.flatten() if pa.types.is_struct(root.type) else [root]))
    roots = {field.name: root for field, root in fields if _is_readable(field.type)}
    columns = tuple(roots)

    def flat(wanted: Sequence[str]) -> Iterator[pa.Table]:
        return (table.flatten() for table in stream(list(dict.fromkeys(roots[name] for name in wanted))))

    def cells(table: pa.Table, name: str) -> pa.ChunkedArray:
        try:
            return _cells(table[name], classes.get(name))
        except pa.ArrowException as error:
            raise DataError(f"{place}, column {name!r}: cannot be read: {error}") from error

    first = next(flat(columns), None) if columns else None
    if first is None or not first.num_rows:
        raise explain_empty(place)
    sample = {name: cells(first.slice(0, SAMPLE_ROWS), name).to_pylist() for name in columns}

    def read(wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for table in flat(wanted):
            yield from pa.table({name: cells(table, name) for name in wanted}).to_batches()

    return RawSplit(place, columns, sample, read, classes)


def _is_readable(kind: pa.DataType) -> bool:
    """Check whether a column has text, numbers, or lists of these."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return not pa.types.is_nested(kind.value_type) and _is_readable(kind.value_type)
    if pa.types.is_dictionary(kind):
        return _is_readable(kind.value_type)
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)
    numeric = pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind)
    return text or numeric or pa.types.is_boolean(kind)


def _cells(column: pa.ChunkedArray, names: tuple[str, ...] | None) -> pa.ChunkedArray:
    """Turn a typed Arrow column into cells: class ids become `names` (null for -1, no label), numbers decimals."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not pa.types.is_nested(column.type):
        return column.cast(pa.string()) if names is None else _name_classes(column, names)
    if names is None:
        return column.cast(pa.list_(pa.string()))
    lists = column.cast(pa.list_(column.type.value_type)).combine_chunks()
    lengths = pc.fill_null(pc.list_value_length(lists), 0)
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths).cast(pa.int32())])
    return pa.chunked_array(
        [pa.ListArray.from_arrays(offsets, _name_classes(lists.flatten(), names), mask=lists.is_null())]
    )


def _name_classes(ids: pa.Array | pa.ChunkedArray, names: tuple[str, ...]) -> pa.Array | pa.ChunkedArray:
    ids = ids.cast(pa.int64())
    return pc.take(pa.array(names, pa.string()), pc.if_else(pc.less(ids, 0), None, ids))
