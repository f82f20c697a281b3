"""Read rows of files as tables of named columns: a row at a time for `predict`, in
Arrow batches for training.

This module and those it imports read text files without Arrow, so that `predict` starts
fast.

Rules. A cell is a string, a list of strings, or None. Labels keep the spelling
of the file; whether a column has numbers or strings is known from its type, or in JSON
from its first rows, and unknown in csv, tsv and txt. The fields of an object are
columns: `meta.stars`. JSON is an object per line; a list of objects, perhaps the only
list in an object; columns, as lists or as objects of cells by row; or rows by their
names, as pandas writes them. Columns of lists of objects or of lists are not read; a
message names them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar

from compress.data.text_files import Position
from compress.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import RecordBatch

CellValue = str | list[str | None] | None
CellKind = Literal["number", "text"]
Record = Mapping[str, Any]
Element = TypeVar("Element")

COLUMNS_SHOWN: Final = 40
"""Columns listed in a message."""
BATCH_ROWS: Final = 10_000
BATCH_CHARACTERS: Final = 16_000_000
SAMPLE_ROWS: Final = 1000
SAMPLE_CHARACTERS: Final = 4_000_000


class NotPlainError(Exception):
    """The rest of a table has to be read row by row."""


class Row(NamedTuple):
    """Hold a row of a table.

    number  its line, item or row in the file: `Table.unit` says which
    record  what the file has in every column, by name or in their order; objects stay
            objects
    cells   the requested columns, in their order
    error   why the row cannot be read, with its place; it then has no cells
    """

    number: int
    record: Record | Sequence[str]
    cells: Sequence[CellValue] = ()
    error: str = ""


def _read_rows(columns: Sequence[str], position: Position | None = None) -> Any:
    """Read no batches of a table that is read row by row."""
    raise NotPlainError


@dataclass(frozen=True)
class Table:
    """Describe a table, of which only the first rows have been read.

    place    its name in messages: a file, or a hub data set and split
    columns  the source's column names; numbers from "1" if it has none
    sample   the cells of the first rows, by column, for detection
    rows     reads all rows with the cells of the given columns; rows that cannot be
             read have an error
    batches  reads the given columns as Arrow batches, where that is faster than row by
             row; NotPlainError where that is not so any more
    tables   reads all rows as Arrow tables, as `batches` does: each as the file has it,
             and the cells of the given columns
    kinds    the columns of numbers, and of strings, where the source tells them apart
    classes  the class names that the source declares for a column, in the order of
             their ids
    first    the number of its first row in messages: 2 after a header
    unit     what `Row.number` counts: line, item or row
    notes    what was guessed
    nested   the columns that cannot be read, with an example each
    refusal  why there is nothing to train on: no rows, or an error in the first rows
    """

    place: str
    columns: tuple[str, ...]
    sample: Mapping[str, Sequence[CellValue]]
    rows: Callable[[Sequence[str], Position | None], Iterator[Row]]
    batches: Callable[[Sequence[str]], Iterator[RecordBatch]] = _read_rows
    tables: Callable[
        [Sequence[str], Position | None], Iterator[tuple[pa.Table, pa.Table]]
    ] = _read_rows
    kinds: Mapping[str, CellKind] = field(default_factory=dict)
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    first: int = 1
    unit: str = "row"
    headerless: bool = False
    notes: tuple[str, ...] = ()
    nested: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""

    @property
    def name(self) -> str:
        """Return the last part of the place, for notes."""
        return Path(self.place).name

    def read(self, columns: Sequence[str]) -> Iterator[RecordBatch]:
        """Read columns as batches of strings, or of lists of strings if the sample has
        lists.

        Raises DataError for a row that cannot be read.
        """
        read = 0
        with suppress(NotPlainError):
            for batch in self.batches(columns):
                yield batch
                read += batch.num_rows
            return
        yield from self._to_batches(columns, read)

    def cells(self, columns: Sequence[str]) -> Iterator[tuple[str, Sequence[Any]]]:
        """Read rows one by one: the place of each in messages, and its cells. Raises
        DataError for one that cannot be read."""
        number = self.first
        for batch in self.read(columns):
            listed = (column.to_pylist() for column in batch.columns)
            for cells in zip(*listed, strict=True):
                yield f"{self.place}, row {number}", cells
                number += 1

    def _to_batches(self, names: Sequence[str], first: int) -> Iterator[RecordBatch]:
        """Write the rows from `first` as Arrow batches. Raises DataError for rows with
        errors, and for columns that mix texts and lists."""
        import pyarrow as pa

        wrong = [str if self.has_lists(name) else list for name in names]
        types = [
            pa.list_(pa.string()) if refused is str else pa.string()
            for refused in wrong
        ]
        rows = islice(self.rows(names, None), first, None)
        for chunk in chunks(
            rows,
            lambda row: count_characters(row.cells),
            most_rows=BATCH_ROWS,
            most_characters=BATCH_CHARACTERS,
        ):
            for row in chunk:
                if row.error:
                    raise DataError(row.error)
                if any(map(isinstance, row.cells, wrong)):
                    raise DataError(
                        f"{self.place}, {self.unit} {row.number}: a column has both "
                        "lists and texts. Write every row of a column the same way."
                    )
            columns = zip(*(row.cells for row in chunk), strict=True)
            arrays = [
                pa.array(cells, kind)
                for cells, kind in zip(columns, types, strict=True)
            ]
            yield pa.record_batch(arrays, list(names))

    def values(self, row: Row) -> Record:
        """Return what the file has in every column of a row, by name."""
        return (
            row.record
            if isinstance(row.record, Mapping)
            else dict(zip(self.columns, row.record, strict=False))
        )

    def check(self) -> Table:
        """Return the table. Raises DataError if it has no rows, or some that cannot be
        read among the first."""
        if self.refusal:
            raise DataError(self.refusal)
        return self

    def examples(self) -> str:
        """List the columns with an example each, one per line, for messages that ask
        the user to choose."""
        listed = []
        for name in self.columns[:COLUMNS_SHOWN]:
            text = repr(next((cell for cell in self.sample[name] if cell), ""))
            listed.append(f"  {name}: {text if len(text) <= 60 else text[:57] + '...'}")
        more = len(self.columns) - COLUMNS_SHOWN
        listed += [f"  and {more:,} more"] if more > 0 else []
        return "\n".join(
            [
                *listed,
                *(
                    f"  {name}: lists of objects or lists, not read"
                    for name in self.nested
                ),
            ]
        )

    def has_lists(self, column: str) -> bool:
        return any(isinstance(cell, list) for cell in self.sample[column])


def chunks(
    rows: Iterable[Element],
    size: Callable[[Element], int],
    most_rows: int,
    most_characters: int,
) -> Iterator[list[Element]]:
    """Yield lists of rows, bounded in number and in characters; `size` counts the
    characters of a row."""
    chunk: list[Element] = []
    total = 0
    for row in rows:
        chunk.append(row)
        total += size(row)
        if len(chunk) >= most_rows or total >= most_characters:
            yield chunk
            chunk = []
            total = 0
    if chunk:
        yield chunk


def take_first_rows(
    rows: Iterable[Element], size: Callable[[Element], int]
) -> list[Element]:
    return next(chunks(rows, size, SAMPLE_ROWS, SAMPLE_CHARACTERS), [])


def count_characters(cells: Iterable[Any]) -> int:
    """Estimate the memory of cells in characters; an empty cell counts as one."""
    total = 0
    for cell in cells:
        total += 1
        if isinstance(cell, str):
            total += len(cell)
        elif isinstance(cell, list):
            total += count_characters(cell)
    return total


def explain_empty(place: object, what: str = "is empty") -> str:
    return f"{place} {what}; expected rows of a text and a label."


def to_cell(value: object) -> CellValue:
    """Write a value of JSON as a cell: numbers as Python does, NaN as a missing value.
    DataError for objects."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return None if isinstance(value, float) and math.isnan(value) else repr(value)
    if isinstance(value, list):
        cells = map(to_cell, value)
        return [cell if cell is None else str(cell) for cell in cells]
    raise DataError(f"{type(value).__name__} is not a cell")


def kind_of(values: Iterable[object]) -> CellKind | None:
    """Return whether all values, or items of lists, are numbers or all are strings, or
    None if there are both or none."""
    items = [
        item
        for value in values
        for item in (value if isinstance(value, list) else [value])
        if item is not None
    ]
    if not items:
        return None
    if all(isinstance(item, int | float) for item in items):
        return "number"
    return "text" if all(isinstance(item, str) for item in items) else None
