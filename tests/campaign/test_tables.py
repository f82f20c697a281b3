"""Random tables: rows and labels are those that were written, and what training reads `predict` reads.

The truth is what the test writes; where pandas reads the dialect too, its cells are compared as well.
"""

import csv
import io
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from compress.data import load_task
from compress.data.answers import AnswerColumns, Prediction, join_columns, label_schema
from compress.data.encoder import Text
from compress.data.task import Task, TaskData
from compress.exporters.row_files import predict_file
from tests.campaign.cases import WHOLE, Record, draw, record

TABLES = 750 if WHOLE else 40
"""Tables of each family of formats."""
ROWS = 24
WORDS = ("film", "a", "plot", "Größe", "映画", "naïve", "so-so", "2020", "don't", "the", "l'amour", "#1", "x=y", "😀")


@dataclass(frozen=True)
class Labels:
    """Hold the labels of a column as they are written, and the task that the stated rules make of them."""

    written: Sequence[Any]
    kind: str
    names: tuple[str, ...]
    read: Sequence[Any]
    """For each row the class, the number, or the names of the labels."""


@dataclass(frozen=True)
class Echo:
    """Take the texts that a model would be given."""

    task: Task
    texts: list[Text]
    rows_per_batch = 10

    def predict(self, texts: Sequence[Text]) -> list[Prediction]:
        self.texts.extend(texts)
        return [Prediction("x", 1.0, {"x": 1.0}) for _ in texts]

    def answer_columns(self, texts: Sequence[Text]) -> AnswerColumns:
        return join_columns(self.predict(texts))

    def answer_schema(self) -> pa.Schema:
        return label_schema(["x"])


def draw_texts(rng: random.Random, marks: Sequence[str]) -> list[str]:
    """Draw different texts of several words, with some of these marks between them."""
    texts = []
    for n in range(ROWS):
        words = [*rng.choices(WORDS, k=rng.randint(3, 7)), f"row {n}"]
        between = [rng.choice(marks) if marks and rng.random() < 0.25 else " " for _ in words]
        texts.append("".join(map("".join, zip(words, between, strict=True))).strip())
    return texts


def classes(names: Sequence[str], rng: random.Random) -> Labels:
    """Draw a class for each row; every class occurs. Classes are sorted, numbers by value."""
    drawn = [*names, *(rng.choice(names) for _ in range(ROWS - len(names)))]
    rng.shuffle(drawn)
    ordered = sorted(names)
    if all(name[0].isdigit() for name in names):
        ordered = sorted(ordered, key=float)
    return Labels(drawn, "classification", tuple(ordered), drawn)


NAMES: Mapping[str, Sequence[Sequence[str]]] = {
    "words": [("neg", "pos"), ("yes", "no", "a, b"), ("True", "False"), ("O'Neill", "Ü")],
    "codes": [("0110", "110", "0012", "12"), ("1e3", "1000", "12e2"), ("01.10", "01.1", "2.0")],
    "missing": [("nan", "None", "NA", "word")],
}
SPELLINGS: Sequence[Sequence[str]] = [("1.10", "1.1", "2.0"), ("1", "1.0", "2")]


def draw_labels(rng: random.Random, *, typed: bool) -> Labels:
    """Draw a column of labels in one of the forms that have a rule."""
    forms = ["words", "codes", "missing", "ints", "floats", "fractions", "lists", "flags", "single"]
    form = rng.choice(forms if typed else [*forms, "spellings", "bars"])
    if form in {*NAMES, "spellings"}:
        return classes(rng.choice([*NAMES.get(form, SPELLINGS)]), rng)
    if form in {"ints", "floats"}:
        plain = classes(("3", "7", "20"), rng)
        return replace(plain, written=[int(each) if form == "ints" else float(each) for each in plain.read])
    if form == "fractions":
        numbers = [round(rng.uniform(-3, 3), 2) + 0.001 for _ in range(ROWS)]
        return Labels(numbers, "regression", (), numbers)
    if form == "single":
        plain = classes(("left", "right"), rng)
        sets = [frozenset([each]) for each in plain.read]
        return Labels([[each] for each in plain.read], "multilabel", plain.names, sets)
    return draw_several(rng, form)


def draw_several(rng: random.Random, form: str) -> Labels:
    """Draw several labels for each row, as lists, joined by bars, or as flags."""
    several = [["a"], ["b", "c"], ["a", "b", "c"]]
    several += [rng.sample(["a", "b", "c"], k=rng.randint(1, 3)) for _ in range(ROWS - 3)]
    sets = [frozenset(each) for each in several]
    if form == "flags":
        places = [frozenset(str("abc".index(name)) for name in each) for each in several]
        return Labels(
            [[int(name in each) for name in "abc"] for each in several], "multilabel", ("0", "1", "2"), places
        )
    written = ["|".join(each) for each in several] if form == "bars" else several
    return Labels(written, "multilabel", ("a", "b", "c"), sets)


def spell(value: Any, rng: random.Random) -> str:
    """Write a label into a text file."""
    if isinstance(value, list):
        return json.dumps(value) if rng.random() < 0.5 else str(value)
    return str(value)


def as_csv(rng: random.Random, path: Path, names: Sequence[str], rows: Sequence[Sequence[str]]) -> pd.DataFrame | None:
    """Write a csv file in a random dialect; return what pandas reads where it knows the dialect."""
    delimiter = rng.choice(",,;\t|")
    end, encoding = rng.choice(["\n", "\n", "\r\n"]), rng.choice(["utf-8", "utf-8", "utf-8-sig", "utf-16"])
    quoting = rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
    dialect = rng.choice(["plain", "plain", "sep", "backslash", "spaces", "index", "trailing"])
    out = io.StringIO()
    if dialect == "sep":
        out.write(f"sep={delimiter}{end}")
    table = [list(names), *map(list, rows)]
    if dialect == "index":
        table = [["" if n == 0 else str(n), *row] for n, row in enumerate(table)]
    if dialect == "trailing":
        table = [[*row, ""] for row in table]
    if dialect == "spaces":
        quoted = [['"' + cell.replace('"', '""') + '"' for cell in row] for row in table]
        out.write("".join(f"{delimiter} ".join(row) + end for row in quoted))
    elif dialect == "backslash":
        quoted = [['"' + cell.replace('"', '\\"') + '"' for cell in row] for row in table]
        out.write("".join(delimiter.join(row) + end for row in quoted))
    else:
        csv.writer(out, delimiter=delimiter, quoting=quoting, lineterminator=end).writerows(table)
    path.write_bytes(out.getvalue().encode(encoding))
    if dialect not in {"plain", "index", "trailing"}:
        return None
    return pd.read_csv(path, sep=delimiter, dtype=str, keep_default_na=False, encoding=encoding, index_col=False)


def write_csv(rng: random.Random, folder: Path) -> tuple[Path, list[str], Labels, pd.DataFrame | None]:
    labels = draw_labels(rng, typed=False)
    texts = draw_texts(rng, [", ", "; ", " | ", ' "x" ', "\n", ' "', ",", "  ", "\t", ": "])
    rows = [[text, spell(label, rng)] for text, label in zip(texts, labels.written, strict=True)]
    path = folder / "rows.csv"
    frame = as_csv(rng, path, ["text", "label"], rows)
    if frame is not None:  # pandas writes line ends as they are in the file
        assert [text.replace("\r\n", "\n") for text in frame["text"]] == texts
    return path, texts, labels, frame


def write_lines(rng: random.Random, folder: Path) -> tuple[Path, list[str], Labels, None]:
    """Write a tsv or txt file without quoting, in which marks are text."""
    labels = draw_labels(rng, typed=False)
    texts = draw_texts(rng, [", ", "; ", " | ", ' "x" ', ' "', ",", "  ", ' " '])
    if rng.random() < 0.5:
        texts = [f'"{text}' if rng.random() < 0.2 else text for text in texts]
        texts[0] = f'"{texts[0]}'
    end = rng.choice(["\n", "\r\n", "\r"])
    path = folder / f"rows.{rng.choice(['tsv', 'txt'])}"
    rows = [("text", "label"), *((text, spell(each, rng)) for text, each in zip(texts, labels.written, strict=True))]
    path.write_bytes("".join("\t".join(row) + end for row in rows).encode(rng.choice(["utf-8", "utf-8-sig"])))
    return path, texts, labels, None


def write_json(rng: random.Random, folder: Path) -> tuple[Path, list[str], Labels, None]:
    labels = draw_labels(rng, typed=True)
    texts = draw_texts(rng, [", ", ' "x" ', "\n", "\u2028", "\t"])
    written: Sequence[Any] = texts
    if rng.random() < 0.15:  # numbers are texts, too
        written = [n * 7 for n in range(ROWS)]
        texts = [str(each) for each in written]
    records = [{"id": n, "text": text, "label": label, "meta": {"at": [n]}}
               for n, (text, label) in enumerate(zip(written, labels.written, strict=True))]  # fmt: skip
    if rng.random() < 0.3:
        records = [{"text": each["text"], "label": each["label"]} for each in records]
        columns = {name: [each[name] for each in records] for name in ("text", "label")}
        by_row = {name: dict(enumerate(cells)) for name, cells in columns.items()}
        whole: Any = rng.choice([records, {"data": records}, columns, by_row, dict(enumerate(records))])
        path = folder / "rows.json"
        path.write_text(json.dumps(whole, indent=rng.choice([None, 1])), encoding="utf-8")
        return path, texts, labels, None
    path = folder / f"rows.{rng.choice(['jsonl', 'ndjson'])}"
    ascii_ = rng.random() < 0.5
    lines = [json.dumps(each, ensure_ascii=ascii_).replace("\u2028", "\\u2028") for each in records]
    path.write_text(rng.choice(["\n", "\n\n"]).join(lines), encoding="utf-8")
    return path, texts, labels, None


def write_parquet(rng: random.Random, folder: Path) -> tuple[Path, list[str], Labels, None]:
    labels = draw_labels(rng, typed=True)
    texts = draw_texts(rng, [", ", ' "x" ', "\n", "\t"])
    types = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary()]
    column = pa.array([text.encode() for text in texts], pa.binary()).cast(rng.choice(types))
    if rng.random() < 0.3:
        column = pa.array(texts).dictionary_encode()
    answers: pa.Array = pa.array(list(labels.written))
    if pa.types.is_string(answers.type) and rng.random() < 0.5:
        answers = rng.choice([answers.dictionary_encode(), answers.cast(pa.binary())])
    extra = pa.array([{"at": n} for n in range(ROWS)])
    path = folder / "rows.parquet"
    pq.write_table(
        pa.table({"text": column, "label": answers, "meta": extra}), path, row_group_size=rng.choice([7, 100])
    )
    return path, texts, labels, None


FAMILIES: Mapping[str, Callable[[random.Random, Path], tuple[Path, list[str], Labels, pd.DataFrame | None]]] = {
    "csv": write_csv, "tsv and txt": write_lines, "json": write_json, "parquet": write_parquet,
}  # fmt: skip


def read_labels(data: TaskData) -> list[Any]:
    names = data.task.labels
    if data.task.kind == "classification":
        return [names[label] for label in data.train["label"]]
    if data.task.kind == "multilabel":
        return [frozenset(name for name, flag in zip(names, row, strict=True) if flag) for row in data.train["label"]]
    return [pytest.approx(label, abs=1e-5) for label in data.train["label"]]


def check_table(rng: random.Random, family: str, folder: Path) -> str:
    """Write a table and read it in both ways; return what differs."""
    path, texts, labels, frame = FAMILIES[family](rng, folder)
    data = load_task(f"train={path},validation={path}")
    if (data.task.kind, data.task.labels) != (labels.kind, labels.names):
        return f"the task is {data.task.kind} of {data.task.labels}, not {labels.kind} of {labels.names}"
    read = [text.replace("\r\n", "\n") for text in data.train["text"]]
    if read != texts:
        return (
            f"training reads other texts: {next(pair for pair in zip(read, texts, strict=False) if len(set(pair)) > 1)}"
        )
    if [*labels.read] != read_labels(data):
        return "training reads other labels"
    echo = Echo(data.task, [])
    predict_file(echo, path, folder / "out.jsonl")
    if echo.texts != data.train["text"][:]:
        return f"predict reads other texts: {echo.texts[:3]}"
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text(encoding="utf-8").split("\n") if line]
    if frame is not None and [row["label"] for row in rows] != list(frame["label"]):
        return "predict keeps other cells than pandas reads"
    return "" if [row["prediction"] for row in rows] == ["x"] * ROWS else "predict leaves out rows"


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_is_trained_on_and_predicted(
    family: str, tmp_path: Path, record_property: Record, home: Path
) -> None:
    faults = {}
    for number in range(TABLES):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            wrong = check_table(draw("tables", family, number), family, folder)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            faults[f"{folder}"] = wrong
    record(record_property, f"tables, {family}", TABLES, faults)
