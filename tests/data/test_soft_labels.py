"""Probabilities of labels in a table: read as a teacher's answers, or refused with their rows."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from compress.data import load_task
from compress.data.load import use_labels
from compress.errors import DataError

Row = Mapping[str, Any]


def rows(count: int = 40) -> list[dict[str, Any]]:
    found = []
    for number in range(count):
        p = 0.6 + 0.01 * (number % 30)
        good = number % 2
        shares = {"negative": round(1 - p if good else p, 6), "positive": round(p if good else 1 - p, 6)}
        label = ("negative", "positive")[good]
        found.append({"text": f"a film of {number}", "label": label, "probabilities": shares})
    return found


def write(path: Path, lines: Sequence[Row]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def without(lines: Sequence[Row], name: str) -> list[Row]:
    return [{key: line[key] for key in line if key != name} for line in lines]


def teacher_of(split: Dataset) -> dict[str, list[float]]:
    return {row["text"]: [round(p, 4) for p in np.exp(row["teacher"]).tolist()] for row in split}


def expected(lines: Sequence[Row], split: Dataset) -> dict[str, list[float]]:
    known = {line["text"]: [round(p, 4) for p in line["probabilities"].values()] for line in lines}
    return {text: known[text] for text in split["text"]}


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_probabilities_are_the_answers_of_a_teacher(kind: str, labelled: bool, tmp_path: Path) -> None:
    lines = rows() if labelled else without(rows(), "label")
    path = write(tmp_path / "t.jsonl", lines)
    if kind == "parquet":
        path = str(tmp_path / "t.parquet")
        Dataset.from_list([dict(line) for line in lines]).to_parquet(path)
    data = load_task(path)
    assert data.task.kind == "classification"
    assert data.task.labels == ("negative", "positive")
    for split in (data.train, data.validation):
        assert set(split.column_names) == {"text", "label", "teacher"}
        for text, answers in teacher_of(split).items():
            assert answers == pytest.approx(expected(rows(), split)[text], abs=2e-4)
        assert all(row["label"] == int(np.argmax(row["teacher"])) for row in split)
    assert any("are a teacher's answers" in note for note in data.notes)


def test_flat_columns_are_the_same(tmp_path: Path) -> None:
    lines = ["text,label,probabilities.negative,probabilities.positive"]
    lines += [f"a film of {n},{('negative', 'positive')[n % 2]},{n % 2 ^ 1},{n % 2}" for n in range(30)]
    (tmp_path / "t.csv").write_text("\n".join(lines), encoding="utf-8")
    data = load_task(str(tmp_path / "t.csv"))
    assert np.isfinite(data.train["teacher"][:]).all(), "the logarithm of 0 is not"


def test_a_label_of_one_s_own_stands_beside_the_probabilities(tmp_path: Path) -> None:
    lines = rows()
    lines[3]["label"] = "negative"  # its probabilities say otherwise
    lines[4]["label"] = None
    data = load_task(write(tmp_path / "t.jsonl", lines))
    found = {row["text"]: row["label"] for split in (data.train, data.validation) for row in split}
    assert (found["a film of 3"], found["a film of 4"]) == (0, 0)


def test_texts_without_an_answer_are_left_out(tmp_path: Path) -> None:
    lines = [*rows(), {"text": "strange", "label": None, "probabilities": None}]
    data = load_task(write(tmp_path / "t.jsonl", lines))
    assert len(data.train) + len(data.validation) == 40
    assert "t.jsonl: left out 1 unanswered texts" in data.notes


def test_a_label_that_is_never_the_likeliest_is_kept(tmp_path: Path) -> None:
    lines = rows()
    for line in lines:
        line["probabilities"] = {"awful": 0.0, **line["probabilities"]}
    data = load_task(write(tmp_path / "t.jsonl", lines))
    assert data.task.labels == ("awful", "negative", "positive")
    assert len(data.train[0]["teacher"]) == 3


def broken(probabilities: Any) -> list[dict[str, Any]]:
    lines = rows()
    lines[2]["probabilities"] = probabilities
    return lines


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (broken({"negative": 0.9, "positive": 0.9}), "row 3: probabilities: expected a number from 0 to 1"),
        (broken({"negative": -0.5, "positive": 1.5}), "row 3: probabilities: expected"),
        (broken({"negative": 1.0}), "row 3: probabilities: expected"),
        (broken({"negative": "much", "positive": 0.1}), "expected a number"),
        (broken(None), "row 3: probabilities: there is a label, but no probabilities"),
        ([{**line, "label": f"{line['label']}!"} for line in rows()], "negative!"),
        ([{**line, "probabilities": json.dumps(line["probabilities"])} for line in rows()], "has objects as text"),
    ],
)
def test_what_are_no_probabilities_is_refused(lines: list[Row], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        load_task(write(tmp_path / "t.jsonl", lines))


def test_every_split_needs_them(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", rows())
    test = write(tmp_path / "test.jsonl", without(rows(10), "probabilities"))
    with pytest.raises(DataError, match=r"test.jsonl: has no 'probabilities.negative', but the training split has"):
        load_task(f"train={train},test={test}")
    write(tmp_path / "test.jsonl", [{**line, "text": f"other {line['text']}"} for line in rows(10)])
    data = load_task(f"train={train},test={test}")
    assert data.test is not None
    assert "teacher" in data.test.column_names


def test_other_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="regression was requested"):
        load_task(write(tmp_path / "t.jsonl", rows()), kind="regression")


def test_answers_follow_the_labels_to_a_models_order(tmp_path: Path) -> None:
    data = load_task(write(tmp_path / "t.jsonl", rows()))
    used = use_labels(data, ("POSITIVE", "NEGATIVE"), [1, 0])
    assert used.train["label"][:] == [1 - label for label in data.train["label"][:]]
    assert used.train["teacher"][:] == [answers[::-1] for answers in data.train["teacher"][:]]
    assert used.train["text"][:] == data.train["text"][:]
