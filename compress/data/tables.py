"""Read rows of files as tables of named columns: a row at a time for `predict`, in Arrow batches for training.

This module and those it imports read text files without Arrow, so that `predict` starts fast.

Stated rules. A cell is a string, a list of strings, or None. Labels keep the spelling of the file; whether a column
has numbers or strings is known from its type, or in JSON from its first rows, and unknown in csv, tsv and txt. The
fields of an object are columns: `meta.stars`. JSON is an object per line; a list of objects, perhaps the only list in
an object; columns, as lists or as objects of cells by row; or rows by their names, as pandas writes them. Columns of
lists of objects or of lists are not read; a message names them.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar

from compress.data.text_files import (
    Position,
    check_line,
    first_bytes,
    head,
    json_object,
    lines,
    parse_json,
    whole,
)
from compress.errors import DataError

if TYPE_CHECKING:
    from pyarrow import RecordBatch

Cell = str | list[str | None] | None
CellKind = Literal["number", "text"]
Record = Mapping[str, Any]
Item = TypeVar("Item")

SUFFIXES: Final = (".tsv", ".csv", ".txt", ".jsonl", ".ndjson", ".json", ".parquet")
UNLABELLED: Final = "unsup"
"""IMDb's folder of texts without a class."""
SHOWN: Final = 40
"""Columns listed in a message."""
SAMPLE_ROWS: Final = 1000
SAMPLE_CHARACTERS: Final = 4_000_000
LARGEST_LIST: Final = 64 * 2**20
"""Bytes of a json list, which is read as a whole and takes up to twenty times as much memory."""


class Row(NamedTuple):
    """Hold a row of a table.

    number  its line, item or row in the file: `Table.unit` says which
    record  what the file has in every column, by name or in their order; objects stay objects
    cells   the requested columns, in their order
    error   why the row cannot be read, with its place; it then has no cells
    """

    number: int
    record: Record | Sequence[str]
    cells: Sequence[Cell] = ()
    error: str = ""


class NumberedRecord(NamedTuple):
    """Hold an object of a file and its number, or the error why it cannot be read."""

    number: int
    record: Record
    error: str = ""


@dataclass(frozen=True)
class Table:
    """Describe a table, of which only the first rows have been read.

    place    its name in messages: a file, or a hub data set and split
    columns  the source's column names; numbers from "1" if it has none
    sample   the cells of the first rows, by column, for detection
    rows     reads all rows with the cells of the given columns; rows that cannot be read have an error
    batches  reads the given columns as Arrow batches, where that is faster than row by row
    kinds    the columns of numbers, and of strings, where the source tells them apart
    classes  the class names that the source declares for a column, in the order of their ids
    first    the number of its first row in messages: 2 after a header
    unit     what `Row.number` counts: line, item or row
    notes    what was guessed
    nested   the columns that cannot be read, with an example each
    refusal  why there is nothing to train on: no rows, or an error in the first rows
    """

    place: str
    columns: tuple[str, ...]
    sample: Mapping[str, Sequence[Cell]]
    rows: Callable[[Sequence[str], Position | None], Iterator[Row]]
    batches: Callable[[Sequence[str]], Iterator[RecordBatch]] | None = None
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
        """Read columns as batches of strings, or of lists of strings if the sample has lists.

        Raises DataError for a row that cannot be read.
        """
        if self.batches is not None:
            return self.batches(columns)
        from compress.data.arrow_tables import to_batches

        return to_batches(self, columns)

    def values(self, row: Row) -> Record:
        """Return what the file has in every column of a row, by name."""
        return row.record if isinstance(row.record, Mapping) else dict(zip(self.columns, row.record, strict=False))

    def check(self) -> Table:
        """Return the table. Raises DataError if it has no rows, or some that cannot be read among the first."""
        if self.refusal:
            raise DataError(self.refusal)
        return self

    def examples(self) -> str:
        """List the columns with an example each, one per line, for messages that ask the user to choose."""
        listed = []
        for name in self.columns[:SHOWN]:
            text = repr(next((cell for cell in self.sample[name] if cell), ""))
            listed.append(f"  {name}: {text if len(text) <= 60 else text[:57] + '...'}")
        more = len(self.columns) - SHOWN
        listed += [f"  and {more:,} more"] if more > 0 else []
        return "\n".join([*listed, *(f"  {name}: lists of objects or lists, not read" for name in self.nested)])

    def has_lists(self, column: str) -> bool:
        return any(isinstance(cell, list) for cell in self.sample[column])


def open_table(path: Path, named: Sequence[str] = ()) -> Table:
    """Open a file of rows, or a folder of classes; `named` are the requested columns, which help to find a header.

    Raises DataError.
    """
    return open_tables([path], named)[path]


def open_tables(paths: Sequence[Path], named: Sequence[str] = ()) -> dict[Path, Table]:
    """Open the files of one folder; those without a header, or without proof of quoting, follow their siblings."""
    from compress.data import delimited

    together = [path for path in paths if path.suffix.lower() in delimited.DELIMITED and not path.is_dir()]
    opened = delimited.open_texts(together, named)
    return {path: opened[path] if path in opened else open_file(path) for path in paths}


def open_file(path: Path) -> Table:
    """Open a jsonl, ndjson, json or parquet file, or a folder of classes. All but json lists are streamed."""
    place = str(path)
    if path.is_dir():
        return from_records(place, lambda position: _class_texts(path))
    if path.suffix.lower() == ".parquet":
        from compress.data.arrow_tables import open_parquet

        return open_parquet(path)
    if path.suffix.lower() == ".json" and not _has_object_lines(path):
        return from_records(place, lambda position: _items(path), unit="item")
    return from_records(place, lambda position: _object_lines(path, position), unit="line")


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
            chunk = []
            total = 0
    if chunk:
        yield chunk


def take_first_rows(rows: Iterable[Item], size: Callable[[Item], int]) -> list[Item]:
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


def class_folders(folder: Path) -> list[Path]:
    """List the folders with the texts of a class; none if there are fewer than two."""
    entries = sorted(entry for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
    named = [entry for entry in entries if not entry.name.startswith(".") and entry.name != UNLABELLED]
    classes = [entry for entry in named if next(entry.glob("*.txt"), None)]
    return classes if len(classes) > 1 else []


def _class_texts(folder: Path) -> Iterator[NumberedRecord]:
    files = [(each.name, file) for each in class_folders(folder) for file in sorted(each.glob("*.txt"))]
    for number, (label, file) in enumerate(files, start=1):
        yield NumberedRecord(number, {"text": whole(file, "Remove it."), "label": label})


def _object_lines(path: Path, position: Position | None) -> Iterator[NumberedRecord]:
    start = first_bytes(path)
    place = str(path)
    for number, line in enumerate(lines(path, checked=False, position=position), start=1):
        if line.isspace():
            continue
        try:
            if "\0" in line or not line.isascii():
                check_line(line, place, number, start)
            value = parse_json(line, place, number, " Expected one object per line.")
            record = value if isinstance(value, dict) else json_object(value, f"{place}, line {number}")
        except DataError as error:
            yield NumberedRecord(number, {}, str(error))
        else:
            yield NumberedRecord(number, record)


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


def _items(path: Path) -> Iterator[NumberedRecord]:
    place = str(path)
    remedy = f"Write one object per line: jq -c '.[]' {shlex.quote(path.name)} > {path.stem}.jsonl"
    value = parse_json(whole(path, remedy, LARGEST_LIST), place)
    rows = value if isinstance(value, list) else _rows_of(json_object(value, place))
    for number, item in enumerate(rows, start=1):
        try:
            yield NumberedRecord(number, json_object(item, f"{place}, item {number}"))
        except DataError as error:
            yield NumberedRecord(number, {}, str(error))


def _rows_of(table: Record) -> Iterable[Any]:
    """Return the rows of an object: its only list of objects; those of its columns; those by name; or itself.

    pandas writes `{"text": {"0": "a text", "1": "another"}, "label": {"0": 1, "1": 0}}`, and with orient="index"
    `{"0": {"text": "a text", "label": 1}, "1": {"text": "another", "label": 0}}`.
    """
    values = list(table.values())
    lists = [value for value in values if isinstance(value, list) and value and isinstance(value[0], dict)]
    if len(lists) == 1:
        return lists[0]
    if values and all(isinstance(value, dict) for value in values):
        names = [name for value in values for name in value]
        if all(map(str.isdigit, table)) and not all(map(str.isdigit, names)):
            return values
    columns = [list(value.values()) if isinstance(value, dict) else value for value in values]
    if lists or not all(isinstance(column, list) and column for column in columns) or len(set(map(len, columns))) != 1:
        return [table]
    return [dict(zip(table, cells, strict=True)) for cells in zip(*columns, strict=True)]


def from_records(
    place: str, records: Callable[[Position | None], Iterator[NumberedRecord]], unit: str = "row"
) -> Table:
    """Make a table of records; every reading calls `records` again, which yields errors in the place of some."""
    first = take_first_rows(records(None), _size)
    refusal = next((each.error for each in first if each.error), "" if first else explain_empty(place))
    flat = [_flatten(each.record) for each in first if not each.error]
    nested = {name: repr(value) for record in reversed(flat) for name, value in record.items() if _is_nested(value)}
    columns = tuple(dict.fromkeys(name for record in flat for name in record if name not in nested))
    values = {name: [record.get(name) for record in flat] for name in columns}

    def rows(wanted: Sequence[str], position: Position | None) -> Iterator[Row]:
        for number, written, error in records(position):
            if error:
                yield Row(number, {}, (), error)
                continue
            record = _flatten(written)
            cells: list[Cell] = []
            problem = ""
            for name in wanted:
                value = record[name] if name in record else written.get(name)
                if _is_nested(value):
                    found = "has an object, or a list of lists or objects,"
                    problem = f"{place}, {unit} {number}: {found} in {name!r}; expected a text or a number."
                    break
                cells.append(value if isinstance(value, str) else to_cell(value))
            yield Row(number, written, () if problem else cells, problem)

    return Table(
        place,
        columns,
        {name: [to_cell(value) for value in cells] for name, cells in values.items()},
        rows,
        kinds={name: kind for name, cells in values.items() if (kind := kind_of(cells))},
        unit=unit,
        nested=dict(sorted(nested.items())),
        refusal=refusal,
    )


def _size(each: NumberedRecord) -> int:
    return count_characters(each.record.values())


def _flatten(record: Record) -> Record:
    """Replace objects by their fields: {"a": {"b": 1}} -> {"a.b": 1}."""
    if not any(isinstance(value, dict) and value for value in record.values()):
        return record
    flat: dict[str, Any] = {}
    for name, value in record.items():
        fields = _flatten(value) if isinstance(value, dict) and value else None
        flat |= {name: value} if fields is None else {f"{name}.{key}": field for key, field in fields.items()}
    return flat


def _is_nested(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, list | dict) for item in value))


def to_cell(value: object) -> Cell:
    """Write a value of JSON as a cell: numbers as Python does, NaN as a missing value. DataError for objects."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return None if isinstance(value, float) and math.isnan(value) else repr(value)
    if isinstance(value, list):
        return [item if item is None else str(to_cell(item)) for item in value]
    raise DataError(f"{type(value).__name__} is not a cell")


def kind_of(values: Iterable[object]) -> CellKind | None:
    """Return whether all values, or items of lists, are numbers or all are strings; None if there are both or none."""
    items = [item for value in values for item in (value if isinstance(value, list) else [value]) if item is not None]
    if not items:
        return None
    if all(isinstance(item, int | float) for item in items):
        return "number"
    return "text" if all(isinstance(item, str) for item in items) else None
