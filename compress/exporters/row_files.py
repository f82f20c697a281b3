"""Predict for the rows of a file, a batch at a time, so that memory does not grow with
the file.

    input   any table that can be trained on, read by the same reader (`data.tables`); a
            .txt file of one text per line
    output  .csv, .tsv or .jsonl; .npy, with the vector of each text as a row, packed as
            `data.vector_index` says

In the rows of BEIR's corpus.jsonl, the title precedes the text, as it does in training.
All columns are kept, and these are added: prediction (a label; labels joined by ", "; a
number; the answer to a question; the entities), prediction_score (not for numbers and
entities), for answers prediction_start and prediction_end, in .jsonl prediction_scores
of all labels; and prediction_error where rows are skipped."""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.lib.format import write_array_header_1_0

from compress.data import schema
from compress.data.answers import Outcome
from compress.data.encoder import Text
from compress.data.table_files import SUFFIXES, open_table
from compress.data.tables import Row, Table
from compress.data.task import Task
from compress.data.text_files import Position, stripped_lines
from compress.data.vector_index import (
    VECTOR_TYPES,
    StoredForm,
    load_texts,
    pack,
    read_index,
)
from compress.errors import DataError, did_you_mean
from compress.exporters.predictor import (
    Answering,
    NearestTexts,
    Predictor,
    check_search,
    iterate_batches,
)
from compress.outputs import check_output_file, output_file

WRITTEN = (".csv", ".tsv", ".jsonl", ".npy")
Values = dict[str, Any]
WriteRow = Callable[[Values, Sequence[str]], None]


def predict_file(
    predictor: Answering,
    source: Path,
    target: Path,
    *,
    columns: Sequence[str] | None = None,
    second: str | None = None,
    on_error: Literal["stop", "skip"] = "stop",
    vectors: StoredForm = "float32",
    say: Callable[[int, float], None] = lambda rows, share: None,
    note: Callable[[str], None] = lambda text: None,
) -> tuple[int, int]:
    """Predict for every row of `source` and write `target`; return the numbers of rows,
    and of those skipped.

    columns   of the one or two texts; None: those named like the bundle's, or the only
              one
    second    the second text of every pair, where the rows have only the first
    on_error  stop, or skip, at a row that cannot be read, such as one that is not
              UTF-8; skip writes the error instead
    vectors   the form of the vectors of an .npy file
    say       is called with the number of rows done, and their share of the file
    note      is called with what is guessed about the file, such as its delimiter

    Raises DataError, naming the line, for rows that cannot be read, missing columns,
    and columns that would be overwritten."""
    check_files(source, target)
    suffix = target.suffix.lower()
    if suffix == ".npy" and (
        not predictor.task.vectors or not hasattr(predictor, "logits")
    ):
        raise DataError(
            f"--output {target}: holds vectors, which this model does not predict; "
            "expected .jsonl"
        )
    if suffix != ".npy" and vectors != "float32":
        raise DataError(
            f"--vectors {vectors}: packs the vectors of an .npy file; the output is "
            f"{target}"
        )
    if suffix == ".npy" and on_error == "skip":
        raise DataError(
            f"--output {target}: cannot hold rows without a vector; expected .jsonl "
            "with --on-error skip"
        )
    added = _list_added(predictor.task, suffix, errors=on_error == "skip")
    table, chosen = _open(source, predictor.task, columns, pair=second is not None)
    for guess in table.notes:
        note(guess)
    position = Position()
    header = list[str]()
    done = 0
    skipped = 0
    with (
        output_file(target) as partial,
        _open_writer(partial, suffix, vectors) as write,
    ):
        for batch in iterate_batches(table.rows(chosen, position)):
            rows = [_refuse_lists(row, chosen, table) for row in batch]
            error = next((row.error for row in rows if row.error), "")
            if error and on_error == "stop":
                raise DataError(
                    f"{error} (Nothing was written; --on-error skip skips such rows.)"
                )
            if not header:
                header = [
                    *dict.fromkeys(name for row in rows for name in table.values(row)),
                    *added,
                ]
            texts = [
                _to_text(row.cells, chosen, second) for row in rows if not row.error
            ]
            answers: Iterator[Any] = iter(predictor.predict(texts))
            for row in rows:
                values = table.values(row)
                if taken := [name for name in added if name in values]:
                    raise DataError(
                        f"{table.place}, {table.unit} {row.number}: has {taken[0]!r}, "
                        "which the output adds; rename that column"
                    )
                if row.error:
                    skipped += 1
                    answer: Values = {
                        "prediction_error": row.error.removeprefix(f"{table.place}, ")
                    }
                else:
                    answer = _to_columns(next(answers), added)
                write({**values, **answer}, header)
            done += len(rows)
            say(done, position.tell())
    return done, skipped


def _open(
    source: Path,
    task: Task,
    columns: Sequence[str] | None,
    *,
    pair: bool = False,
    remedy: str = "",
) -> tuple[Table, list[str]]:
    """Open a table, and choose the columns of the one or two texts and that of BEIR's
    titles. Raises DataError."""
    usual = [name for name in task.text if not name.isdigit()]
    table = open_table(source, columns or usual)
    if not table.columns:
        if any(table.rows((), None)):
            raise DataError(table.refusal)
        return table, []
    if columns:
        schema.refuse_unknown(table, columns)
    elif table.headerless and usual:
        first = [cells[0] for cells in table.sample.values() if cells]
        raise DataError(
            f"{source}: cannot tell whether its first row is a header: "
            f"{', '.join(map(repr, first))[:200]}. Name the column of the text: --text "
            f"{first[0]!r} if it is, --text 1 if it is not."
        )
    chosen = choose_columns(
        task, table.columns, source, columns, pair=pair, remedy=remedy
    )
    titled = chosen == ["text"] and {"_id", "title"} <= set(table.columns)
    return table, [*chosen, *(["title"] if titled else [])]


def _refuse_lists(row: Row, chosen: Sequence[str], table: Table) -> Row:
    """Return the row, with an error if it has a list in the place of a text."""
    for name, cell in zip(chosen, row.cells, strict=False):
        if isinstance(cell, list):
            error = (
                f"{table.place}, {table.unit} {row.number}: has a list in {name!r}; "
                "expected text."
            )
            return row._replace(cells=(), error=error)
    return row


def _to_text(
    cells: Sequence[Any], chosen: Sequence[str], second: str | None = None
) -> Text:
    """Return the text, or the pair of texts, of a row; a title precedes its text, and a
    missing text is empty."""
    texts = [cell or "" for cell in cells]
    if chosen[-1] == "title" and chosen[:-1] == ["text"]:
        texts = [f"{texts[1]} {texts[0]}".strip()]
    if second is not None:
        texts.append(second)
    return texts[0] if len(texts) == 1 else (texts[0], texts[1])


def open_index(predictor: Predictor, path: Path, count: int = 5) -> NearestTexts:
    """Open the texts to search: the rows of a file, or the vectors of an .npy file and
    their texts beside it.

    count   how many of the nearest texts to find

    Raises BundleError for a model whose vectors cannot be searched, and DataError for
    files that cannot be read.
    """
    check_search(predictor)
    if path.suffix.lower() != ".npy":
        return NearestTexts.from_texts(
            predictor, list(filter(None, read_texts(path, predictor.task))), count
        )
    packed_NP = read_index(path, predictor.task.width)
    beside = next(
        filter(Path.is_file, map(path.with_suffix, SUFFIXES)), path.with_suffix(".txt")
    )
    texts = load_texts(
        path, len(packed_NP), beside, lambda file: read_texts(file, predictor.task)
    )
    return NearestTexts(predictor, texts, packed_NP, count)


def read_texts(source: Path, task: Task) -> list[str]:
    """Read the lines of a file, or from a table its only column, or the one named
    `text` or like the bundle's text.

    Raises DataError for files that cannot be read, tables without such a column, and
    rows that cannot be read.
    """
    if source.suffix.lower() not in SUFFIXES:
        return stripped_lines(source)
    table, chosen = _open(
        source, task, None, remedy="Rename the column of the texts to 'text'"
    )
    texts = list[str]()
    for row in table.rows(chosen, None):
        checked = _refuse_lists(row, chosen, table)
        if checked.error:
            raise DataError(checked.error)
        texts.append(str(_to_text(checked.cells, chosen)).strip())
    return texts


def check_files(source: Path, target: Path) -> None:
    """Raise DataError, before a model is opened, for files that cannot be read or
    written."""
    for path, suffixes, option in (
        (source, SUFFIXES, "input"),
        (target, WRITTEN, "output"),
    ):
        if path.suffix.lower() not in suffixes:
            raise DataError(
                f"--{option} {path}: expected a file that ends in {', '.join(suffixes)}"
            )
    if not source.is_file():
        raise DataError(f"--input {source}: no such file")
    check_output_file(target, "output", "answers.jsonl", [source])


def choose_columns(
    task: Task,
    names: Sequence[str],
    source: Path,
    columns: Sequence[str] | None,
    *,
    pair: bool = False,
    remedy: str = "",
) -> list[str]:
    """Choose the columns of the one or two texts. Raises DataError, with the existing
    columns, where that fails."""
    wanted = list(columns or (task.text[:1] if pair else task.text))
    count = len(task.text) - pair
    if not columns and len(names) == count:
        return list(names)
    if not columns and count == 1 and wanted[0] not in names and "text" in names:
        wanted = ["text"]
    missing = [name for name in wanted if name not in names]
    if missing or len(wanted) != count:
        hint = did_you_mean(missing[0], names) if missing else ""
        what = "the text column" if count == 1 else "both text columns"
        remedy = remedy or f"Name {what} with --text"
        raise DataError(
            f"{source}: has the columns {', '.join(names)}; expected "
            f"{' and '.join(wanted)}.{hint} {remedy}"
        )
    return wanted


def _list_added(task: Task, suffix: str, *, errors: bool) -> list[str]:
    names = ["prediction", *task.columns]
    if suffix == ".jsonl":
        names += task.json_columns
    return [*names, *(["prediction_error"] if errors else [])]


def _to_columns(answer: Outcome, added: Sequence[str]) -> Values:
    return {name: value for name, value in answer.columns().items() if name in added}


def _open_writer(
    path: Path, suffix: str, form: StoredForm
) -> AbstractContextManager[WriteRow]:
    """Return a context with a function that writes a row, given the columns of the
    first one."""
    if suffix == ".npy":
        return _write_vectors(path, form)
    return _write_table(path, suffix)


@contextmanager
def _write_table(path: Path, suffix: str) -> Iterator[WriteRow]:
    """Write .csv, .tsv or .jsonl. The first two have room for no other columns than
    those of the first row, and raise DataError for them."""
    table: Any = None

    def write(row: Values, names: Sequence[str]) -> None:
        nonlocal table
        if suffix == ".jsonl":
            out.write(json.dumps(row, ensure_ascii=False, default=_to_json) + "\n")
            return
        if table is None:
            table = csv.DictWriter(
                out, names, delimiter="\t" if suffix == ".tsv" else ","
            )
            table.writeheader()
        if more := row.keys() - set(table.fieldnames):
            raise DataError(
                f"--output: a later row has the column {min(more)!r}, the first "
                "ones have none; write a .jsonl file, whose rows may differ"
            )
        table.writerow({name: _to_csv(value) for name, value in row.items()})

    with path.open("w", encoding="utf-8", newline="") as out:
        yield write


@contextmanager
def _write_vectors(path: Path, form: StoredForm) -> Iterator[WriteRow]:
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

    def write(row: Values, _: Sequence[str]) -> None:
        nonlocal rows, width
        (packed,) = pack(np.array([row["prediction"]], np.float32), form)
        if not rows:
            width = len(packed)
            write_header()
        file.write(packed.tobytes())
        rows += 1

    with path.open("wb") as file:
        yield write
        file.seek(0)
        write_header()


def _to_csv(value: object) -> object:
    """Write lists and objects as JSON; csv writes anything else as a string."""
    if isinstance(value, bytes):
        return _to_json(value)
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False, default=_to_json)
    return value


def _to_json(value: object) -> str:
    """Write a value that JSON does not have, as parquet files have them: a time, a
    decimal number, bytes."""
    return (
        value.decode(errors="backslashreplace")
        if isinstance(value, bytes)
        else str(value)
    )
