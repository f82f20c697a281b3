"""Open files of rows as tables: csv, tsv, txt, JSON, parquet, and folders of classes.

This module and those it imports read text files without Arrow, so that `predict` starts
fast.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from compress.data.delimited import DELIMITED, open_texts
from compress.data.tables import (
    CellValue,
    Record,
    Row,
    Table,
    count_characters,
    explain_empty,
    kind_of,
    take_first_rows,
    to_cell,
)
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

SUFFIXES: Final = (".tsv", ".csv", ".txt", ".jsonl", ".ndjson", ".json", ".parquet")
UNLABELLED: Final = "unsup"
"""IMDb's folder of texts without a class."""
LARGEST_LIST: Final = 64 * 2**20
"""The most bytes of a JSON list, which is read as a whole and takes up to twenty times
as much memory."""


def is_table_file(path: Path) -> bool:
    """Check whether the name of a file ends like that of a table."""
    return path.suffix.lower() in SUFFIXES


class NumberedRecord(NamedTuple):
    """Hold an object of a file and its number, or the error that says why it cannot be
    read."""

    number: int
    record: Record
    error: str = ""


def open_table(path: Path, named: Sequence[str] = ()) -> Table:
    """Open a file of rows, or a folder of classes; `named` are the requested columns,
    which help to find a header.

    Raises DataError.
    """
    return open_tables([path], named)[path]


def open_tables(paths: Sequence[Path], named: Sequence[str] = ()) -> dict[Path, Table]:
    """Open the files of one folder; those without a header, or without proof of
    quoting, follow their siblings."""
    together = [
        path for path in paths if path.suffix.lower() in DELIMITED and not path.is_dir()
    ]
    opened = open_texts(together, named)
    return {path: opened[path] if path in opened else open_file(path) for path in paths}


def open_file(path: Path) -> Table:
    """Open a jsonl, ndjson, json or parquet file, or a folder of classes. All but json
    lists are streamed."""
    place = str(path)
    if path.is_dir():
        return from_records(place, lambda position: _class_texts(path))
    if path.suffix.lower() == ".parquet":
        from compress.data.arrow_tables import open_parquet

        return open_parquet(path)
    if path.suffix.lower() == ".json" and not _has_object_lines(path):
        return from_records(place, lambda position: _items(path), unit="item")
    return from_records(
        place, lambda position: _object_lines(path, position), unit="line"
    )


def class_folders(folder: Path) -> list[Path]:
    """List the folders with the texts of a class; none if there are fewer than two."""
    entries = (
        sorted(entry for entry in folder.iterdir() if entry.is_dir())
        if folder.is_dir()
        else []
    )
    named = [
        entry
        for entry in entries
        if not entry.name.startswith(".") and entry.name != UNLABELLED
    ]
    classes = [entry for entry in named if next(entry.glob("*.txt"), None)]
    return classes if len(classes) > 1 else []


def _class_texts(folder: Path) -> Iterator[NumberedRecord]:
    files = [
        (each.name, file)
        for each in class_folders(folder)
        for file in sorted(each.glob("*.txt"))
    ]
    for number, (label, file) in enumerate(files, start=1):
        yield NumberedRecord(
            number, {"text": whole(file, "Remove it."), "label": label}
        )


def _object_lines(path: Path, position: Position | None) -> Iterator[NumberedRecord]:
    start = first_bytes(path)
    place = str(path)
    for number, line in enumerate(
        lines(path, checked=False, position=position), start=1
    ):
        if line.isspace():
            continue
        try:
            if "\0" in line or not line.isascii():
                check_line(line, place, number, start)
            value = parse_json(line, place, number, " Expected one object per line.")
            record = (
                value
                if isinstance(value, dict)
                else json_object(value, f"{place}, line {number}")
            )
        except DataError as error:
            yield NumberedRecord(number, {}, str(error))
        else:
            yield NumberedRecord(number, record)


def _has_object_lines(path: Path) -> bool:
    """Check whether the first line of a file is an object, and the next one begins
    another."""
    if not head(path).lstrip().startswith("{"):
        return False
    filled = filter(str.strip, lines(path, longest=LARGEST_LIST))
    first = next(filled, "")
    second = next(filled, "")
    try:
        return second.lstrip().startswith("{") and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _items(path: Path) -> Iterator[NumberedRecord]:
    place = str(path)
    remedy = (
        f"Write one object per line: jq -c '.[]' {shlex.quote(path.name)} > "
        f"{path.stem}.jsonl"
    )
    value = parse_json(whole(path, remedy, LARGEST_LIST), place)
    rows = value if isinstance(value, list) else _rows_of(json_object(value, place))
    for number, item in enumerate(rows, start=1):
        try:
            yield NumberedRecord(number, json_object(item, f"{place}, item {number}"))
        except DataError as error:
            yield NumberedRecord(number, {}, str(error))


def _rows_of(table: Record) -> Iterable[Any]:
    """Return the rows of an object: its only list of objects, its columns put together,
    its objects by row name, or itself.

    pandas writes `{"text": {"0": "a text", "1": "another"}, "label": {"0": 1, "1":
    0}}`, and with orient="index" `{"0": {"text": "a text", "label": 1}, "1": {"text":
    "another", "label": 0}}`.
    """
    values = list(table.values())
    lists = [
        value
        for value in values
        if isinstance(value, list) and value and isinstance(value[0], dict)
    ]
    if len(lists) == 1:
        return lists[0]
    if values and all(isinstance(value, dict) for value in values):
        names = [name for value in values for name in value]
        if all(map(str.isdigit, table)) and not all(map(str.isdigit, names)):
            return values
    columns = [
        list(value.values()) if isinstance(value, dict) else value for value in values
    ]
    if (
        lists
        or not all(isinstance(column, list) and column for column in columns)
        or len(set(map(len, columns))) != 1
    ):
        return [table]
    return [
        dict(zip(table, cells, strict=True)) for cells in zip(*columns, strict=True)
    ]


def from_records(
    place: str,
    records: Callable[[Position | None], Iterator[NumberedRecord]],
    unit: str = "row",
) -> Table:
    """Make a table of records. Every reading calls `records` again, which yields an
    error in place of a record that cannot be read."""
    first = take_first_rows(records(None), _size)
    refusal = next(
        (each.error for each in first if each.error),
        "" if first else explain_empty(place),
    )
    flat = [_flatten(each.record) for each in first if not each.error]
    nested = {
        name: repr(value)
        for record in reversed(flat)
        for name, value in record.items()
        if _is_nested(value)
    }
    columns = tuple(
        dict.fromkeys(name for record in flat for name in record if name not in nested)
    )
    values = {name: [record.get(name) for record in flat] for name in columns}

    def rows(wanted: Sequence[str], position: Position | None) -> Iterator[Row]:
        for number, written, error in records(position):
            if error:
                yield Row(number, {}, (), error)
                continue
            record = _flatten(written)
            cells: list[CellValue] = []
            problem = ""
            for name in wanted:
                value = record[name] if name in record else written.get(name)
                if _is_nested(value):
                    found = "has an object, or a list of lists or objects,"
                    problem = (
                        f"{place}, {unit} {number}: {found} in {name!r}; expected a "
                        "text or a number."
                    )
                    break
                cells.append(value if isinstance(value, str) else to_cell(value))
            yield Row(number, written, () if problem else cells, problem)

    return Table(
        place,
        columns,
        {name: [to_cell(value) for value in cells] for name, cells in values.items()},
        rows,
        kinds={
            name: kind for name, cells in values.items() if (kind := kind_of(cells))
        },
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
        flat |= (
            {name: value}
            if fields is None
            else {f"{name}.{key}": field for key, field in fields.items()}
        )
    return flat


def _is_nested(value: object) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(item, list | dict) for item in value)
    )
