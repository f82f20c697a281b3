"""One split as its source has it: named columns of cells, read as a stream of Arrow batches.

A cell is a string, a list of strings, or None where the source has nothing: labels keep the source's own spelling
until every split has been seen, so that "1", 1 and 1.0 can be told from a word, whatever the file format.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from compress.errors import DataError

Cell = str | list[str | None] | None
Row = TypeVar("Row")

SHOWN = 40
"""Columns that a message lists."""
SAMPLE_ROWS = 1000
SAMPLE_CHARACTERS = 4_000_000
BATCH_ROWS = 10_000
BATCH_CHARACTERS = 16_000_000


@dataclass(frozen=True)
class Rows:
    """A split not yet read.

    place    how messages call it: a file name, or a hub data set and split
    columns  the source's column names; numbers from "1" where it has none
    sample   the first rows' cells, by column: what detection may look at
    read     streams the chosen columns: batches of a `line` column, then one column per choice, in the order asked;
             strings, or lists of strings for a column whose sample has lists
    classes  class names the source declares for a column, in the order of their ids
    unit     what `line` counts: "line" of a text file, or "row"
    """

    place: str
    columns: tuple[str, ...]
    sample: Mapping[str, Sequence[Cell]]
    read: Callable[[tuple[str, ...]], Iterator[pa.RecordBatch]]
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unit: str = "line"
    headerless: bool = False
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The last part of the place: what notes call the split."""
        return self.place.rpartition("/")[2]

    def listing(self) -> str:
        """The columns with an example each, one a line: for messages that ask the user to choose."""
        shown = [f"  {name}: {_example(self.sample[name])}" for name in self.columns[:SHOWN]]
        more = len(self.columns) - SHOWN
        return "\n".join([*shown, *([f"  and {more:,} more"] if more > 0 else [])])

    def lists(self, column: str) -> bool:
        return any(isinstance(cell, list) for cell in self.sample[column])


def _example(cells: Sequence[Cell]) -> str:
    cell = next((cell for cell in cells if cell), "")
    text = repr(cell)
    return text if len(text) <= 60 else f"{text[:57]}..."


def at(unit: str, numbers: Sequence[int], total: int | None = None) -> str:
    """`lines 3, 7, 12`: where rows are, the first five of them named."""
    count = len(numbers) if total is None else total
    named = ", ".join(str(number) for number in numbers[:5])
    more = f" and {count - 5} more" if count > 5 else ""
    return f"{unit}{'s' if count > 1 else ''} {named}{more}"


def sampled(rows: Iterable[Row], size: Callable[[Row], int]) -> list[Row]:
    """The first rows of a stream, as many as detection needs, `size` telling the characters of one."""
    first: list[Row] = []
    total = 0
    for row in itertools.islice(rows, SAMPLE_ROWS):
        first.append(row)
        total += size(row)
        if total > SAMPLE_CHARACTERS:
            break
    return first


def batches(
    rows: Iterable[tuple[int, Sequence[Cell]]], lists: Sequence[bool], *, place: str, unit: str
) -> Iterator[pa.RecordBatch]:
    """Numbered rows as Arrow batches, bounded in rows and in characters; `lists` tells list columns from strings."""
    types = [pa.list_(pa.string()) if several else pa.string() for several in lists]
    schema = pa.schema([("line", pa.int64()), *((str(n), kind) for n, kind in enumerate(types))])
    for chunk in _chunks(rows):
        lines = [line for line, _ in chunk]
        columns = list(zip(*(cells for _, cells in chunk), strict=True))
        for several, column in zip(lists, columns, strict=True):
            _one_type(column, lines, several=several, place=place, unit=unit)
        arrays = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
        yield pa.record_batch([pa.array(lines, pa.int64()), *arrays], schema=schema)


def characters(cells: Iterable[Cell]) -> int:
    """About how much memory the cells of a row take, in characters: a cell is at least one, however empty."""
    return sum(1 if cell is None else len(cell) + 1 if isinstance(cell, str) else characters(cell) for cell in cells)


def _chunks(rows: Iterable[tuple[int, Sequence[Cell]]]) -> Iterator[list[tuple[int, Sequence[Cell]]]]:
    chunk: list[tuple[int, Sequence[Cell]]] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += characters(row[1])
        if len(chunk) >= BATCH_ROWS or size >= BATCH_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _one_type(column: Sequence[Cell], lines: Sequence[int], *, several: bool, place: str, unit: str) -> None:
    wrong = list if not several else str
    for line, cell in zip(lines, column, strict=True):
        if isinstance(cell, wrong):
            found, expected = ("a list", "text") if wrong is list else ("text", "a list")
            raise DataError(
                f"{place}, {unit} {line}: a cell is {found} where earlier rows have {expected}. "
                "Write every row of a column the same way."
            )


def as_cells(column: pa.ChunkedArray, names: tuple[str, ...] | None = None) -> pa.ChunkedArray:
    """A typed Arrow column as cells: class ids become `names` (-1: no label, null), numbers their decimal spelling.

    Raises pyarrow.ArrowNotImplementedError for what is neither a scalar nor a list of scalars.
    """
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    several = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if names is None:
        return column.cast(pa.list_(pa.string()) if several else pa.string())
    if not several:
        return _named(column, names)
    chunks = [
        pa.ListArray.from_arrays(_offsets(chunk), _named(chunk.flatten(), names), mask=chunk.is_null())
        for chunk in column.cast(pa.list_(kind.value_type)).chunks
    ]
    return pa.chunked_array(chunks, pa.list_(pa.string()))


def _named(ids: pa.Array | pa.ChunkedArray, names: tuple[str, ...]) -> pa.Array | pa.ChunkedArray:
    ids = ids.cast(pa.int64())
    return pc.take(pa.array(names, pa.string()), pc.if_else(pc.less(ids, 0), None, ids))


def _offsets(lists: pa.ListArray) -> pa.Array:
    lengths = pc.fill_null(pc.list_value_length(lists), 0)
    return pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths).cast(pa.int32())])
