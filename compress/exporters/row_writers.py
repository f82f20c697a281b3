"""Write rows to a file a batch at a time: .csv, .tsv, .jsonl, .parquet and .npy.

A batch is a list of groups of rows with the same columns. A column is a sequence of
Python values, an Arrow array, or as `data.answers.AnswerColumns` says. Columns are
written as a whole: one call turns a whole column into JSON, not each row.
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import write_array_header_1_0

from compress.data.vector_index import VECTOR_TYPES, StoredForm, pack
from compress.errors import DataError
from compress.exporters.predictor import Answering

ColumnGroup = Mapping[str, Any]
"""Columns by name."""
WriteBatch = Callable[[Iterable[ColumnGroup], Sequence[str]], None]
"""Write groups of rows, given the names of all columns of the first batch."""


def open_writer(
    path: Path, suffix: str, form: StoredForm, predictor: Answering
) -> AbstractContextManager[WriteBatch]:
    """Return a context manager for a function that writes batches.

    form       of the vectors of an .npy file
    predictor  whose answers are written
    """
    if suffix == ".npy":
        return _write_vectors(path, form)
    if suffix == ".jsonl":
        return _write_objects(path)
    if suffix == ".parquet":
        return _write_parquet(path, predictor)
    return _write_table(path, "\t" if suffix == ".tsv" else ",")


def take(column: Any, start: int, end: int) -> Any:
    """Return the part of a column from one row to another."""
    if isinstance(column, Mapping):
        return {label: values[start:end] for label, values in column.items()}
    return column[start:end]


@contextmanager
def _write_objects(path: Path) -> Iterator[WriteBatch]:
    """Write .jsonl: one object per line; names may differ from row to row."""

    def write(groups: Iterable[ColumnGroup], _: Sequence[str]) -> None:
        for group in groups:
            out.write("\n".join([*_dump_objects(group), ""]))

    with path.open("w", encoding="utf-8", newline="") as out:
        yield write


@contextmanager
def _write_table(path: Path, delimiter: str) -> Iterator[WriteBatch]:
    """Write .csv or .tsv. Raises DataError for a column that the first batch lacks."""
    first = True

    def write(groups: Iterable[ColumnGroup], names: Sequence[str]) -> None:
        nonlocal first
        if first:
            table.writerow(names)
            first = False
        for group in groups:
            _refuse_later(group, names)
            cells = {name: _to_cells(column) for name, column in group.items()}
            missing = [""] * len(next(iter(cells.values())))
            columns = [cells.get(name, missing) for name in names]
            table.writerows(zip(*columns, strict=True))

    with path.open("w", encoding="utf-8", newline="") as out:
        table = csv.writer(out, delimiter=delimiter)
        yield write


@contextmanager
def _write_parquet(path: Path, predictor: Answering) -> Iterator[WriteBatch]:
    """Write .parquet, with the types of the first batch. Raises DataError for a column
    that the first batch lacks, or has with another type."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from compress.exporters.arrow_columns import to_table

    most_rows = 65_536  # of a row group
    most_bytes = 64 * 2**20
    types = predictor.answer_schema().append(pa.field("prediction_error", pa.string()))
    writer: Any = None
    waiting = list[pa.Table]()

    def write(groups: Iterable[ColumnGroup], names: Sequence[str]) -> None:
        nonlocal writer
        tables = []
        for group in groups:
            _refuse_later(group, names)
            tables.append(to_table(group, types))
        if writer is not None:
            tables.insert(0, writer.schema.empty_table())
        try:
            joined = pa.concat_tables(tables, promote_options="default")
        except pa.ArrowException as error:
            raise DataError(
                f"--output: a column has other types in later rows ({error}); write a "
                ".jsonl file, whose rows may differ"
            ) from error
        if writer is None:
            known = pa.unify_schemas([types, joined.schema])
            writer = pq.ParquetWriter(path, pa.schema(map(known.field, names)))
            joined = pa.concat_tables(
                [writer.schema.empty_table(), joined], promote_options="default"
            )
        waiting.append(joined)
        rows = sum(map(len, waiting))
        if rows >= most_rows or sum(table.nbytes for table in waiting) >= most_bytes:
            flush()

    def flush() -> None:
        if waiting:
            writer.write_table(pa.concat_tables(waiting))
            waiting.clear()

    try:
        yield write
        if writer is None:
            writer = pq.ParquetWriter(path, predictor.answer_schema())
        flush()
    finally:
        if writer is not None:
            writer.close()


@contextmanager
def _write_vectors(path: Path, form: StoredForm) -> Iterator[WriteBatch]:
    """Write .npy: a header, whose length does not depend on the number of rows, and the
    packed vectors."""
    rows = 0
    width = 0

    def write_header() -> None:
        kind = VECTOR_TYPES[form]
        shape = (rows, width)
        write_array_header_1_0(
            file, {"descr": kind, "fortran_order": False, "shape": shape}
        )

    def write(groups: Iterable[ColumnGroup], _: Sequence[str]) -> None:
        nonlocal rows, width
        for group in groups:
            column = group["prediction"]
            vectors = column if isinstance(column, np.ndarray) else column.to_pylist()
            packed = pack(np.asarray(vectors, np.float32), form)
            if not rows:
                width = packed.shape[1]
                write_header()
            file.write(packed.tobytes())
            rows += len(packed)

    with path.open("wb") as file:
        yield write
        file.seek(0)
        write_header()


def _refuse_later(group: ColumnGroup, names: Sequence[str]) -> None:
    if more := group.keys() - set(names):
        raise DataError(
            f"--output: a later row has the column {min(more)!r}, the first ones have "
            "none; write a .jsonl file, whose rows may differ"
        )


def _dump_objects(group: ColumnGroup) -> Iterable[str]:
    """Write each row as a JSON object."""
    return _fill_objects({name: _dump_column(column) for name, column in group.items()})


def _fill_objects(columns: Mapping[str, Iterable[str]]) -> Iterable[str]:
    """Write objects from columns whose values are JSON already."""
    names = [_dump(name).replace("%", "%%") for name in columns]
    form = "{" + ", ".join(f"{name}: %s" for name in names) + "}"
    return map(form.__mod__, zip(*columns.values(), strict=True))


def _dump_column(column: Any) -> Iterable[str]:
    """Write each value of a column as JSON."""
    if isinstance(column, Mapping):
        return _dump_objects(column)
    if isinstance(column, np.ndarray) and column.ndim == 2:
        return (_dump(row.tolist()) for row in column)
    values = _to_list(column)
    # one call for all values: JSON strings contain no line ends, so that line ends
    # separate values
    together = _dump(values, ("\n", ": "))
    parts = together[1:-1].split("\n")
    return parts if len(parts) == len(values) else map(_dump, values)


def _dump(value: object, separators: tuple[str, str] = (", ", ": ")) -> str:
    """Write a value as JSON, which has only null for NaN and infinity."""
    dump = partial(json.dumps, ensure_ascii=False, default=_to_json)
    try:
        return dump(value, allow_nan=False, separators=separators)
    except ValueError:
        plain = json.loads(dump(value), parse_constant=lambda _: None)
        return dump(plain, separators=separators)


def _to_list(column: Any) -> Sequence[Any]:
    """Return the Python values of a column."""
    if isinstance(column, np.ndarray):
        return column.tolist()
    return column.to_pylist() if hasattr(column, "to_pylist") else list(column)


def _to_cells(column: Any) -> Sequence[Any]:
    """Return the values of a column as csv writes them."""
    return [_to_csv(value) for value in _to_list(column)]


def _to_csv(value: object) -> object:
    """Write lists and objects as JSON; csv writes anything else as a string."""
    if isinstance(value, bytes):
        return _to_json(value)
    return _dump(value) if isinstance(value, list | dict) else value


def _to_json(value: object) -> str:
    """Write a value of a type that parquet has and JSON lacks: a time, a decimal
    number, bytes."""
    return (
        value.decode(errors="backslashreplace")
        if isinstance(value, bytes)
        else str(value)
    )
