"""Predict for the rows of a file, a batch at a time, so that memory does not grow with the file.

    .csv .tsv   with a header line; the delimiter of a .csv is the most frequent of , ; | and tab in its header
    .jsonl      an object per line
    .txt        a text per line; input only
    .npy        the vector of each text as a row, packed as `data.vector_index` says; output only

In the rows of BEIR's corpus.jsonl, the title precedes the text, as it does in training. All columns are kept, and these
are added: prediction (a label; labels joined by ", "; a number; the answer to a
question; the entities), prediction_score (not for numbers and entities), for answers prediction_start and
prediction_end, in .jsonl prediction_scores of all labels; and prediction_error where rows are skipped.
"""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.lib.format import write_array_header_1_0

from compress.data.encoder import Text
from compress.data.task import Task
from compress.data.text_files import LONGEST, reading, stripped_lines
from compress.data.vector_index import TYPES, Form, load_texts, pack, read_index
from compress.errors import DataError, did_you_mean
from compress.exporters.predictor import (
    Answer,
    Answering,
    Marked,
    Nearest,
    NearestTexts,
    Outcome,
    Predictor,
    Vector,
    check_search,
    iterate_batches,
)
from compress.io import atomic_file

TABLES = (".csv", ".tsv", ".jsonl")
READ, WRITTEN = (".txt", *TABLES), (*TABLES, ".npy")
DELIMITERS = ",;\t|"
Row = dict[str, Any]


def predict_file(
    predictor: Answering,
    source: Path,
    target: Path,
    *,
    columns: Sequence[str] | None = None,
    second: str | None = None,
    on_error: Literal["stop", "skip"] = "stop",
    vectors: Form = "float32",
    say: Callable[[int, float], None] = lambda rows, share: None,
) -> tuple[int, int]:
    """Predict for every row of `source` and write `target`; return the numbers of rows, and of those skipped.

    columns   of the one or two texts; None: those named like the bundle's, or the only one
    second    the second text of every pair, where the rows have only the first
    on_error  stop, or skip, at a row that is not UTF-8, not an object, or has no text; skip writes the error instead
    vectors   the form of the vectors of an .npy file
    say       is called with the number of rows done, and their share of the file

    Raises DataError, naming the line, for rows that cannot be read, missing columns, and columns that would be
    overwritten.
    """
    check_files(source, target)
    suffix = target.suffix.lower()
    if suffix == ".npy" and (predictor.task.kind != "embedding" or not hasattr(predictor, "logits")):
        raise DataError(f"--output {target}: holds vectors, which this model does not predict; expected .jsonl")
    if suffix != ".npy" and vectors != "float32":
        raise DataError(f"--vectors {vectors}: packs the vectors of an .npy file; the output is {target}")
    if suffix == ".npy" and on_error == "skip":
        raise DataError(f"--output {target}: cannot hold rows without a vector; expected .jsonl with --on-error skip")
    task, added = predictor.task, _list_added(predictor.task, suffix, errors=on_error == "skip")
    done = skipped = 0
    with source.open("rb") as raw, atomic_file(target) as partial, _open_writer(partial, suffix, vectors) as write:
        size, chosen, header = max(1, source.stat().st_size), None, list[str]()
        for batch in iterate_batches(_read(raw, source, on_error)):
            if chosen is None:
                found = [row for _, row, error in batch if not error]
                names = list(found[0]) if found else ["text"]
                chosen, header = choose_columns(task, names, source, columns, pair=second is not None), [*names, *added]
            answers = _answer(predictor, batch, chosen, second, source=source, on_error=on_error)
            for (number, row, _), (answer, error) in zip(batch, answers, strict=True):
                if taken := [name for name in added if name in row]:
                    raise DataError(
                        f"{source}: line {number:,}: has {taken[0]!r}, which the output adds; rename that column"
                    )
                skipped += bool(error)
                write({**row, **({"prediction_error": error} if error else _to_columns(answer, added))}, header)
            done += len(batch)
            say(done, raw.tell() / size)
    return done, skipped


def open_index(predictor: Predictor, path: Path, count: int = 5) -> NearestTexts:
    """Open the texts to search: the rows of a file, or the vectors of an .npy file and their texts beside it.

    count   how many of the nearest texts to find

    Raises BundleError for a model whose vectors cannot be searched, and DataError for files that cannot be read.
    """
    check_search(predictor)
    if path.suffix.lower() != ".npy":
        return NearestTexts.from_texts(predictor, list(filter(None, read_texts(path, predictor.task))), count)
    packed_NP = read_index(path, predictor.task.width)
    beside = next(filter(Path.is_file, map(path.with_suffix, READ)), path.with_suffix(".txt"))
    texts = load_texts(path, len(packed_NP), beside, lambda file: read_texts(file, predictor.task))
    return NearestTexts(predictor, texts, packed_NP, count)


def read_texts(source: Path, task: Task) -> list[str]:
    """Read the lines of a file, or from a table its only column, or the one named `text` or like the bundle's text.

    Raises DataError for files that cannot be read, tables without such a column, and rows without a text.
    """
    if source.suffix.lower() not in TABLES:
        return stripped_lines(source)
    texts, name = list[str](), ""
    with reading(source), source.open("rb") as raw:
        for number, row, error in _read(raw, source, "stop"):
            if not name:
                remedy = "Rename the column of the texts to 'text'"
                (name,) = choose_columns(task, list(row), source, None, remedy=remedy)
            text = _read_text(row, name)
            if error or text is None:
                raise DataError(f"{source}: line {number:,}: {error or f'has no text in {name!r}'}")
            texts.append(text.strip())
    return texts


def check_files(source: Path, target: Path) -> None:
    """Raise DataError, before a model is opened, for files that cannot be read or written."""
    for path, suffixes, option in ((source, READ, "input"), (target, WRITTEN, "output")):
        if path.suffix.lower() not in suffixes:
            raise DataError(f"--{option} {path}: expected a file that ends in {', '.join(suffixes)}")
    if not source.is_file():
        raise DataError(f"--input {source}: no such file")
    if not target.parent.is_dir() or target.is_dir() or (target.exists() and target.samefile(source)):
        raise DataError(f"--output {target}: expected a new file in an existing folder")


def choose_columns(
    task: Task,
    names: Sequence[str],
    source: Path,
    columns: Sequence[str] | None,
    *,
    pair: bool = False,
    remedy: str = "",
) -> list[str]:
    """Choose the columns of the one or two texts. Raises DataError, with the existing columns, where that fails."""
    wanted = list(columns or (task.text[:1] if pair else task.text))
    count = len(task.text) - pair
    if not columns and len(names) == count:
        return list(names)
    if not columns and count == 1 and wanted[0] not in names and "text" in names:
        wanted = ["text"]
    missing = [name for name in wanted if name not in names]
    if missing or len(wanted) != count:
        hint = did_you_mean(missing[0], names) if missing else ""
        remedy = remedy or f"Name {'the text column' if count == 1 else 'both text columns'} with --text"
        raise DataError(
            f"{source}: has the columns {', '.join(names)}; expected {' and '.join(wanted)}.{hint} {remedy}"
        )
    return wanted


def _read(raw: IO[bytes], source: Path, on_error: str) -> Iterator[tuple[int, Row, str]]:
    """Yield the line's number, its columns, and the error where it cannot be read."""
    kind = source.suffix.lower()
    if kind in (".csv", ".tsv"):
        yield from _read_delimited(raw, source, "\t" if kind == ".tsv" else "")
        return
    for number, line in enumerate(iter(lambda: raw.readline(LONGEST + 2), b""), start=1):
        error, row = "", {}  # type: str, Row
        if len(line) > LONGEST:
            raise DataError(f"{source}: line {number:,}: is longer than {LONGEST:,} bytes")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            row = {"text": text} if kind == ".txt" else json.loads(text or "{}")
            if not isinstance(row, dict):
                error, row = f"holds a {type(row).__name__}; expected an object", {}
        except UnicodeDecodeError as problem:
            error = f"byte {problem.start + 1} (0x{line[problem.start]:02x}) is not UTF-8"
        except (ValueError, RecursionError) as problem:
            error = f"is not JSON ({problem})"
        if error and on_error == "stop":
            raise DataError(f"{source}: line {number:,}: {error}")
        if row or error or kind == ".txt":  # skips empty lines of .jsonl
            yield number, row, error


def _read_delimited(raw: IO[bytes], source: Path, delimiter: str) -> Iterator[tuple[int, Row, str]]:
    header = raw.readline(LONGEST)
    try:
        first = header.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise DataError(f"{source}: line 1: byte {problem.start + 1} is not UTF-8; convert the file") from None
    csv.field_size_limit(LONGEST)
    lines = (line.decode("utf-8", "surrogateescape") for line in iter(lambda: raw.readline(LONGEST), b""))
    delimiter = delimiter or max(DELIMITERS, key=first.count)
    names = next(csv.reader([first], delimiter=delimiter), [])
    if not names or len(set(names)) < len(names):
        raise DataError(f"{source}: line 1: expected a header, with a different name for every column")
    reader = csv.reader(lines, delimiter=delimiter)
    try:
        for cells in reader:
            number = reader.line_num + 1
            if not cells:
                continue
            row = dict(zip(names, cells, strict=False))
            error = ""
            if len(cells) != len(names):
                error = f"has {len(cells)} columns, the header {len(names)}"
            elif any("\udc80" <= c <= "\udcff" for cell in cells for c in cell):
                error, row = "is not UTF-8", {}
            yield number, row, error
    except csv.Error as problem:
        raise DataError(f"{source}: line {reader.line_num + 1:,}: {problem}") from None


def _answer(
    predictor: Answering,
    batch: Sequence[tuple[int, Row, str]],
    chosen: Sequence[str],
    second: str | None,
    *,
    source: Path,
    on_error: str,
) -> list[tuple[Outcome | None, str]]:
    """Return the answer to each row, or the error."""
    texts, errors = list[Text](), list[str]()
    for number, row, problem in batch:
        found = {name: _read_text(row, name) for name in chosen}
        missing = [name for name, text in found.items() if text is None]
        error = problem or (f"has no text in {missing[0]!r}" if missing else "")
        if error and on_error == "stop":
            raise DataError(f"{source}: line {number:,}: {error}. Nothing was written; --on-error skip skips such rows")
        errors.append(error)
        if not error:
            values = [found[name] or "" for name in chosen] + ([] if second is None else [second])
            texts.append(values[0] if len(values) == 1 else (values[0], values[1]))
    answers: Iterator[Any] = iter(predictor.predict(texts))
    return [(None if error else next(answers), error) for error in errors]


def _read_text(row: Row, name: str) -> str | None:
    """Return the text in a column, in a row of BEIR's corpus after its title; None if it is not a string."""
    text, title = row.get(name), row.get("title")
    if name == "text" and "_id" in row and isinstance(text, str) and isinstance(title, str):
        return f"{title} {text}".strip()
    return text if isinstance(text, str) else None


def _list_added(task: Task, suffix: str, *, errors: bool) -> list[str]:
    names = ["prediction"]
    if task.kind in ("classification", "multilabel", "qa"):
        names.append("prediction_score")
    if task.kind == "qa":
        names += ["prediction_start", "prediction_end"]
    if suffix == ".jsonl" and task.kind in ("classification", "multilabel"):
        names.append("prediction_scores")
    return [*names, *(["prediction_error"] if errors else [])]


def _to_columns(answer: Outcome | None, added: Sequence[str]) -> Row:
    if isinstance(answer, Marked):
        return {"prediction": [asdict(mark) for mark in answer.marks]}
    if isinstance(answer, Answer):
        values: Row = {"prediction": answer.text, "prediction_start": answer.start, "prediction_end": answer.end}
        return {**values, "prediction_score": answer.score}
    assert answer is not None, "rows with an error have no answer"
    if isinstance(answer, Vector):
        return {"prediction": list(answer.numbers)}
    if isinstance(answer, Nearest):
        return {"prediction": [{"text": text, "score": cosine} for text, cosine in answer.texts]}
    if not answer.scores:
        return {"prediction": answer.score}
    columns = {"prediction": answer.label, "prediction_score": answer.score, "prediction_scores": answer.scores}
    return {name: value for name, value in columns.items() if name in added}


@contextmanager
def _open_writer(path: Path, suffix: str, form: Form) -> Iterator[Callable[[Row, Sequence[str]], object]]:
    """Yield a function that writes a row; in tables it writes these names of columns before the first row."""
    if suffix != ".npy":
        table: Any = None

        def write(row: Row, names: Sequence[str]) -> None:
            nonlocal table
            if suffix == ".jsonl":
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
                return
            if table is None:
                table = csv.DictWriter(out, names, delimiter="\t" if suffix == ".tsv" else ",", extrasaction="ignore")
                table.writeheader()
            nested = {name: value for name, value in row.items() if isinstance(value, list | dict)}
            table.writerow(row | {name: json.dumps(value, ensure_ascii=False) for name, value in nested.items()})

        with path.open("w", encoding="utf-8", newline="") as out:
            yield write
        return
    with path.open("wb") as file:
        shape = (0, 0)

        def write_header() -> None:  # its length does not depend on the number of rows
            write_array_header_1_0(file, {"descr": TYPES[form], "fortran_order": False, "shape": shape})

        def write_vector(row: Row, _: Sequence[str]) -> None:
            nonlocal shape
            if not shape[0]:
                write_header()
            (packed,) = pack(np.array([row["prediction"]], np.float32), form)
            file.write(packed.tobytes())
            shape = (shape[0] + 1, len(packed))

        yield write_vector
        file.seek(0)
        write_header()
