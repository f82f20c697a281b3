"""Predict for the rows of a file, a batch at a time, so that memory does not grow with
the file.

    input   any table that can be trained on, read by the same reader (`data.tables`); a
            .txt file with one text per line
    output  .csv, .tsv, .jsonl or .parquet; .npy, with the vector of each text as a row,
            packed as described in `data.vector_index`

In the rows of BEIR's corpus.jsonl, the title precedes the text, as in training.
All columns are kept, and these are added: prediction (a label; labels joined by ", "; a
number; the answer to a question; the entities), prediction_score (not for numbers and
entities), for answers prediction_start and prediction_end, in .jsonl and .parquet
prediction_scores of all labels; and prediction_error where rows are skipped."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from compress.data import schema
from compress.data.answers import AnswerColumns
from compress.data.encoder import Text
from compress.data.table_files import SUFFIXES, is_table_file, open_table
from compress.data.tables import (
    BATCH_CHARACTERS,
    NotPlainError,
    Row,
    Table,
    chunks,
    count_characters,
)
from compress.data.task import Task
from compress.data.text_files import Position, stripped_lines
from compress.data.vector_index import StoredForm, load_texts, read_index
from compress.errors import DataError, did_you_mean
from compress.exporters.predictor import (
    ROWS_PER_BATCH,
    Answering,
    NearestTexts,
    Predictor,
    check_search,
)
from compress.exporters.row_writers import open_writer, take
from compress.exporters.shared_rows import RowShare
from compress.outputs import check_output_file, output_file
from compress.progress import Say

WRITTEN = (".csv", ".tsv", ".jsonl", ".parquet", ".npy")


def predict_file(
    predictor: Answering,
    source: Path,
    target: Path,
    *,
    columns: Sequence[str] | None = None,
    second: str | None = None,
    on_error: Literal["stop", "skip"] = "stop",
    vectors: StoredForm = "float32",
    share: RowShare | None = None,
    say: Callable[[int, float], None] = lambda rows, share: None,
    note: Say = lambda text: None,
) -> tuple[int, int]:
    """Predict for every row of `source` and write `target`; return the numbers of all
    rows and of skipped rows.

    columns   of the one or two texts; None: those named like the bundle's, or the only
              one
    second    the second text of every pair, where the rows have only the first
    on_error  whether to stop at, or skip, a row that cannot be read, such as one that
              is not UTF-8, or whose text cannot be answered; skip writes the error
              instead
    vectors   the form of the vectors of an .npy file
    share     which rows this process answers, if there are several processes; the first
              one writes the file, and the others return the numbers of their rows
    say       called with the number of rows done, and their share of the file
    note      called with guesses about the file, such as its delimiter

    Raises DataError, naming the line, for rows that cannot be read, missing columns,
    and columns that would be overwritten."""
    check_files(source, target)
    suffix = target.suffix.lower()
    _check_vectors(predictor, target, vectors, skips=on_error == "skip")
    added = _list_added(predictor.task, suffix, errors=on_error == "skip")
    table, chosen = _open(source, predictor.task, columns, pair=second is not None)
    for guess in table.notes:
        note(guess)
    position = Position()
    reader = RowReader(table, chosen, second, predictor.rows_per_batch)
    batches = enumerate(_check(reader.read(position), table, added, on_error))
    if share is not None and not share.writes:
        return _answer_share(predictor, share, batches)
    header = list[str]()
    done = 0
    skipped = 0
    with (
        output_file(target) as partial,
        open_writer(partial, suffix, vectors, predictor) as write,
    ):
        for number, batch in batches:
            if not header:
                names = dict.fromkeys(name for group in batch for name in group.columns)
                header = [*names, *added]
            answers = None
            if share is not None and not share.owns(number):
                answers = share.collect(number)
            rows = batch
            if answers is None:
                rows, answers = _answer(predictor, batch, table)
                (rows,) = _check(iter([rows]), table, added, on_error)
            kept = {name: answers[name] for name in answers if name in added}
            write(_add_answers(rows, kept, f"{table.place}, "), header)
            done += sum(group.count for group in rows)
            skipped += sum(len(group.errors) for group in rows)
            say(done, position.tell())
    if share is not None:
        share.finish()
    return done, skipped


def _check_vectors(
    predictor: Answering, target: Path, vectors: StoredForm, *, skips: bool
) -> None:
    """Raise DataError for a file of vectors that cannot be written, and for a form of
    vectors if the output is not .npy."""
    if target.suffix.lower() != ".npy":
        if vectors != "float32":
            raise DataError(
                f"--vectors {vectors}: packs the vectors of an .npy file; the output "
                f"is {target}"
            )
        return
    if not predictor.task.vectors or not hasattr(predictor, "logits"):
        raise DataError(
            f"--output {target}: holds vectors, which this model does not predict; "
            "expected .jsonl"
        )
    if skips:
        raise DataError(
            f"--output {target}: cannot hold rows without a vector; expected .jsonl "
            "with --on-error skip"
        )


def _check(
    batches: "Iterator[list[RowGroup]]",
    table: Table,
    added: Sequence[str],
    on_error: Literal["stop", "skip"],
) -> "Iterator[list[RowGroup]]":
    """Yield the batches. Raises DataError for columns that the output adds, and with
    `stop` for rows that cannot be read."""
    for batch in batches:
        errors = [error for group in batch for error in group.errors]
        if errors and on_error == "stop":
            raise DataError(
                f"{errors[0]} (Nothing was written; --on-error skip skips such rows.)"
            )
        for group in batch:
            group.check_names(added, table)
        yield batch


def _answer(
    predictor: Answering, batch: "list[RowGroup]", table: Table
) -> "tuple[list[RowGroup], AnswerColumns]":
    """Predict for the texts of a batch; return its rows, with an error where a text
    cannot be answered, and the answers to the others."""
    with suppress(DataError):
        return batch, predictor.answer_columns(_list_texts(batch))
    rows = [row for group in batch for row in group.split()]
    for place, row in enumerate(rows):
        try:
            predictor.answer_columns(row.texts)
        except DataError as error:
            where = f"{table.place}, {table.unit} {row.first}: {error}."
            rows[place] = replace(row, texts=(), errors=(where,))
    return rows, predictor.answer_columns(_list_texts(rows))


def _answer_share(
    predictor: Answering,
    share: RowShare,
    batches: "Iterable[tuple[int, list[RowGroup]]]",
) -> tuple[int, int]:
    """Answer the batches of this process for the first process; return the numbers of
    all rows and of skipped rows."""
    from compress.exporters.arrow_columns import to_table

    types = predictor.answer_schema()
    done = 0
    skipped = 0
    for number, batch in batches:
        if not share.owns(number):
            continue
        if not share.has(number):
            with suppress(DataError):  # which the first process names
                answers = predictor.answer_columns(_list_texts(batch))
                share.leave(number, to_table(answers, types))
        done += sum(group.count for group in batch)
        skipped += sum(len(group.errors) for group in batch)
    return done, skipped


def _list_texts(batch: "Sequence[RowGroup]") -> list[Text]:
    return [text for group in batch for text in group.texts]


def _add_answers(
    batch: "Sequence[RowGroup]", answers: AnswerColumns, place: str
) -> Iterator[dict[str, Any]]:
    """Yield the columns of each group with its answer columns, or with its errors,
    without their repeated location."""
    start = 0
    for group in batch:
        end = start + len(group.texts)
        added = {name: take(column, start, end) for name, column in answers.items()}
        if group.errors:
            errors = [error.removeprefix(place) for error in group.errors]
            added = {"prediction_error": errors}
        yield {**group.columns, **added}
        start = end


def _open(
    source: Path,
    task: Task,
    columns: Sequence[str] | None,
    *,
    pair: bool = False,
    remedy: str = "",
) -> tuple[Table, list[str]]:
    """Open a table, and choose the columns of the one or two texts and of BEIR's
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
    return table, choose_columns(
        task, table.columns, source, columns, pair=pair, remedy=remedy
    )


@dataclass(frozen=True)
class RowGroup:
    """Consecutive rows of a file that have the same columns.

    first    the number of the first row in the file
    count    of the rows
    columns  the content of each column, by name: Python values, or an Arrow array
    texts    the texts to predict for; empty if the rows cannot be read
    errors   why each row cannot be read; empty if they can
    """

    first: int
    count: int
    columns: Mapping[str, Any]
    texts: Sequence[Text]
    errors: Sequence[str] = ()

    def split(self) -> Iterator["RowGroup"]:
        """Yield each row as a group."""
        for at in range(self.count):
            one = slice(at, at + 1)
            columns = {name: column[one] for name, column in self.columns.items()}
            texts = self.texts[one]
            yield RowGroup(self.first + at, 1, columns, texts, self.errors[one])

    def check_names(self, added: Sequence[str], table: Table) -> None:
        """Raise DataError for a column that the output adds."""
        if taken := [name for name in added if name in self.columns]:
            raise DataError(
                f"{table.place}, {table.unit} {self.first}: has {taken[0]!r}, which "
                "the output adds; rename that column"
            )


@dataclass(frozen=True)
class RowReader:
    """Read the rows of a table for prediction.

    chosen          the columns of the one or two texts, and that of BEIR's titles
    second          the second text of every pair, where the rows have only the first
    rows_per_batch  how many rows to read at a time
    """

    table: Table
    chosen: Sequence[str]
    second: str | None
    rows_per_batch: int

    def read(self, position: Position | None) -> Iterator[list[RowGroup]]:
        """Yield the rows in batches, each divided into groups."""
        read = 0
        if not any(map(self.table.has_lists, self.chosen)):
            with suppress(NotPlainError):
                for group in self._read_arrow(position):
                    yield [group]
                    read += group.count
                return
        rows = islice(self.table.rows(self.chosen, position), read, None)
        parts = chunks(
            rows,
            lambda row: count_characters(row.cells),
            most_rows=self.rows_per_batch,
            most_characters=BATCH_CHARACTERS,
        )
        yield from map(self._group, parts)

    def _read_arrow(self, position: Position | None) -> Iterator[RowGroup]:
        number = self.table.first
        for whole, cells in self.table.tables(self.chosen, position):
            for start in range(0, len(whole), self.rows_per_batch):
                part = whole.slice(start, self.rows_per_batch)
                found = cells.slice(start, self.rows_per_batch)
                columns = dict(zip(part.column_names, part.columns, strict=True))
                listed = [each.to_pylist() for each in found.columns]
                texts = to_texts(listed, self.chosen, self.second)
                yield RowGroup(number, len(part), columns, texts)
                number += len(part)

    def _group(self, rows: Sequence[Row]) -> list[RowGroup]:
        """Divide rows where their columns change, and between rows that can and cannot
        be read."""
        checked = [self._refuse_lists(row) for row in rows]
        return [
            self._join(names, list(part))
            for (names, _), part in groupby(checked, self._shape)
        ]

    def _shape(self, row: Row) -> tuple[Sequence[str], bool]:
        record = row.record
        names = (
            tuple(record)
            if isinstance(record, Mapping)
            else self.table.columns[: len(record)]
        )
        return names, bool(row.error)

    def _join(self, names: Sequence[str], rows: Sequence[Row]) -> RowGroup:
        values = [
            row.record.values() if isinstance(row.record, Mapping) else row.record
            for row in rows
        ]
        columns = dict(zip(names, zip(*values, strict=False), strict=False))
        errors = [row.error for row in rows if row.error]
        cells = [] if errors else list(zip(*(row.cells for row in rows), strict=True))
        texts = to_texts(cells, self.chosen, self.second)
        return RowGroup(rows[0].number, len(rows), columns, texts, errors)

    def _refuse_lists(self, row: Row) -> Row:
        """Return the row, with an error if it has a list instead of a text."""
        for name, cell in zip(self.chosen, row.cells, strict=False):
            if isinstance(cell, list):
                error = (
                    f"{self.table.place}, {self.table.unit} {row.number}: has a list "
                    f"in {name!r}; expected text."
                )
                return row._replace(cells=(), error=error)
        return row


def to_texts(
    cells: Sequence[Sequence[Any]], chosen: Sequence[str], second: str | None = None
) -> Sequence[Text]:
    """Return the texts, or pairs of texts, of the chosen columns; a title precedes its
    text, and a missing text becomes empty."""
    if not cells:
        return []
    columns = [[cell or "" for cell in column] for column in cells]
    if chosen[-1] == "title" and chosen[:-1] == ["text"]:
        pairs = zip(*columns, strict=True)
        columns = [[f"{title} {text}".strip() for text, title in pairs]]
    if second is not None:
        columns.append([second] * len(columns[0]))
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))


def open_index(predictor: Predictor, path: Path, count: int = 5) -> NearestTexts:
    """Open the texts to search: the rows of a file, or the vectors of an .npy file with
    their texts in a file next to it.

    count   how many of the nearest texts to find

    Raises BundleError for a model whose vectors cannot be searched, and DataError for
    files that cannot be read.
    """
    check_search(predictor)
    if path.suffix.lower() != ".npy":
        found = [each for each in read_texts(path, predictor.task) if each.text]
        texts = [each.text for each in found]
        ids = [each.id for each in found]
        return NearestTexts.from_texts(predictor, texts, count, ids)
    packed_NP = read_index(path, predictor.task.width)
    beside = next(
        filter(Path.is_file, map(path.with_suffix, SUFFIXES)), path.with_suffix(".txt")
    )
    found = load_texts(
        path, len(packed_NP), beside, lambda file: read_texts(file, predictor.task)
    )
    texts = [each.text for each in found]
    return NearestTexts(predictor, texts, packed_NP, count, [each.id for each in found])


class NamedText(NamedTuple):
    """A text to search, with the id of its row, or else `line 3` or `row 3`."""

    id: str
    text: str


IDS = ("id", "_id")
"""The columns in which rows have an id; `_id` is BEIR's."""


def read_texts(source: Path, task: Task) -> list[NamedText]:
    """Read the lines of a file; or, from a table, its only column or the column named
    `text` or like the bundle's text, with the ids if it has a column of ids.

    Raises DataError for files that cannot be read, tables without such a column, and
    rows that cannot be read.
    """
    if not is_table_file(source):
        lines = enumerate(stripped_lines(source), 1)
        return [NamedText(f"line {number}", line) for number, line in lines]
    table, chosen = _open(
        source, task, None, remedy="Rename the column of the texts to 'text'"
    )
    found = list[NamedText]()
    for batch in RowReader(table, chosen, None, ROWS_PER_BATCH).read(None):
        for group in batch:
            if group.errors:
                raise DataError(group.errors[0])
            numbers = range(group.first, group.first + group.count)
            ids: Iterable[Any] = [f"{table.unit} {number}" for number in numbers]
            for name in IDS:
                ids = group.columns.get(name, ids)
            for each, text in zip(ids, group.texts, strict=True):
                found.append(NamedText(str(each), str(text).strip()))
    return found


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
    source: Path | str,
    columns: Sequence[str] | None,
    *,
    pair: bool = False,
    remedy: str = "",
) -> list[str]:
    """Choose the columns of the one or two texts, and of BEIR's titles. Raises
    DataError, listing the existing columns, if there is no match."""
    if pair and not task.pair:
        raise DataError("--pair: this model reads one text, not two; leave it out")
    wanted = list(columns or (task.text[:1] if pair else task.text))
    count = len(task.text) - pair
    if not columns and len(names) == count and not set(wanted) & set(names):
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
    if wanted == ["text"] and {"_id", "title"} <= set(names):
        wanted.append("title")
    return wanted


def _list_added(task: Task, suffix: str, *, errors: bool) -> list[str]:
    names = ["prediction", *task.columns]
    if suffix in (".jsonl", ".parquet"):
        names += task.json_columns
    return [*names, *(["prediction_error"] if errors else [])]
