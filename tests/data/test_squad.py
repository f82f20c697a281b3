"""Questions from SQuAD's json: what is detected, mended, held out and refused."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import pandas
import pytest
from datasets import Dataset, Value

from compress.data import TaskData, load_task
from compress.errors import DataError
from tests import marked
from tests.data.conftest import Folder


def asked(context: str, *questions: Mapping[str, Any]) -> dict[str, Any]:
    return {"context": context, "qas": [{"id": str(n), "question": f"q{n}?", **q} for n, q in enumerate(questions)]}


def answer(text: str, start: int) -> dict[str, Any]:
    return {"text": text, "answer_start": start}


def squad(*paragraphs: Mapping[str, Any]) -> str:
    return json.dumps({"version": "x", "data": [{"title": "t", "paragraphs": list(paragraphs)}]}, ensure_ascii=False)


YES = asked("Café 🙂 in Paris.", {"answers": [answer("Paris", 10)]})


def loaded(folder: Folder, files: Mapping[str, str], **options: Any) -> TaskData:
    return load_task(folder(files), **options)


def test_read_squad(folder: Folder) -> None:
    first = asked(
        "Café 🙂 in Paris, Café 🙂.",
        {"answers": [answer("Paris", 10), answer("Paris", 10), answer("in Paris", 7)]},
        {"answers": [], "is_impossible": True, "plausible_answers": [answer("Café", 0)]},
    )
    data = loaded(folder, {"train.json": squad(first), "dev.json": squad(YES), "test.json": squad(YES)})
    assert (data.task.kind, data.task.text, data.task.metric) == ("qa", ("question", "context"), "f1")
    assert (data.task.labels, data.task.outputs, data.task.unanswerable) == ((), 2, True)
    one, none = data.train
    assert one == {
        "id": "0",
        "question": "q0?",
        "context": "Café 🙂 in Paris, Café 🙂.",
        "answers": ["Paris", "in Paris"],
        "starts": [10, 7],
    }
    assert (none["answers"], none["starts"]) == ([], [])
    assert data.test is not None
    assert not any(".json" in note for note in data.notes)


def test_answerable_questions_only(folder: Folder) -> None:
    data = loaded(folder, {"train.json": squad(YES), "dev.json": squad(YES)}, metric="exact")
    assert not data.task.unanswerable
    assert data.task.metric == "exact"


def test_misplaced_answers(folder: Folder) -> None:
    context = "one two one two one"
    moved = asked(context, {"answers": [answer("one", 9)]}, {"answers": [answer(" two ", 3)]})
    data = loaded(folder, {"train.json": squad(moved), "dev.json": squad(moved)})
    assert [row["starts"] for row in data.train] == [[8], [4]]
    assert [row["answers"] for row in data.train] == [["one"], ["two"]]


def test_lost_answers(folder: Folder) -> None:
    lost = asked("one two", {"answers": [answer("three", 0)]}, {"answers": [answer("three", 0), answer("two", 4)]})
    data = loaded(folder, {"train.json": squad(lost), "dev.json": squad(YES)})
    assert [row["answers"] for row in data.train] == [["two"]]
    assert data.notes[:1] == ("train.json: left out 1 questions, whose answers are not in their contexts",)


@pytest.mark.parametrize(
    "none",
    [
        {"answers": [answer("", -1)]},
        {"answers": [answer(" ", 0)], "is_impossible": False},
        {"answers": [answer("in", 7)], "is_impossible": "true"},
        {"answers": [answer("in", 7)], "is_impossible": 1},
    ],
)
def test_empty_answers_and_marks_written_otherwise_mean_no_answer(none: Mapping[str, Any], folder: Folder) -> None:
    asks = asked("Café 🙂 in Paris.", {"answers": [answer("Paris", 10)]}, none)
    data = loaded(folder, {"train.json": squad(asks), "dev.json": squad(YES)})
    assert (data.task.unanswerable, data.train["answers"][:]) == (True, [["Paris"], []])
    assert not any("left out" in note for note in data.notes)


def test_single_answers_outside_of_a_list(folder: Folder) -> None:
    row = {"question": "q?", "context": "so 12 in 1234", "answers": {"text": "12", "answer_start": 3}}
    lines = json.dumps(row) + "\n" + json.dumps(row | {"answers": {"text": "34", "answer_start": 11}})
    data = loaded(folder, {"train.jsonl": lines, "dev.jsonl": lines})
    assert (data.train["answers"][:], data.train["starts"][:]) == ([["12"], ["34"]], [[3], [11]])


@pytest.mark.parametrize("kind", [None, "qa"])
def test_questions_in_csv_whether_or_not_the_kind_is_named(kind: Any, folder: Folder) -> None:
    text = "question,context,answers.text,answers.answer_start,is_impossible\n"
    text += "q?,in Paris,['Paris'],[3],False\nq2?,in Rome,['Rome'],[3],True\n"
    data = loaded(folder, {"train.csv": text, "dev.csv": text}, kind=kind)
    assert data.train["answers"][:] == [["Paris"], []]


def test_test_split_without_answers(folder: Folder) -> None:
    blank = asked("Hidden.", {"answers": []}, {})
    data = loaded(folder, {"train.json": squad(YES), "dev.json": squad(YES), "test.json": squad(blank)})
    assert data.test is None
    assert data.notes[:1] == ("skipped test.json: it has no answers",)
    with pytest.raises(DataError, match="nothing to learn"):
        loaded(folder, {"train.json": squad(blank), "dev.json": squad(YES)})


def test_unanswerable_questions_only_in_test(folder: Folder) -> None:
    none = asked("x", {"answers": [], "is_impossible": True})
    data = loaded(folder, {"train.json": squad(YES), "dev.json": squad(YES), "test.json": squad(YES, none)})
    assert not data.task.unanswerable
    assert "test: 1 of 2 questions have no answer" in data.notes[0]


def test_validation_is_held_out_by_paragraph(tmp_path: Path) -> None:
    file = marked.questions(tmp_path / "train.json", count=80)
    data = load_task(str(file))
    apart = set(data.train["context"][:]), set(data.validation["context"][:])
    assert not apart[0] & apart[1]
    assert (len(data.train), len(data.validation)) == (72, 8)
    assert "held out 8 of 80 training rows" in data.notes[0]
    again = load_task(str(file), seed=1)
    assert again.validation["context"][:] != data.validation["context"][:]
    assert again.fingerprint != data.fingerprint
    assert load_task(str(file)).fingerprint == data.fingerprint


def test_many_articles_are_held_out_whole(folder: Folder) -> None:
    articles = [
        {"title": str(n), "paragraphs": [asked(f"{n}.", {"answers": [answer(f"{n}", 0)]})] * 3} for n in range(30)
    ]
    data = load_task(folder({"train.json": json.dumps({"data": articles})}))
    assert (len(data.train), len(data.validation)) == (81, 9)


def test_a_file_for_each_split(tmp_path: Path) -> None:
    one, other = (marked.questions(tmp_path / name, seed=n) for n, name in enumerate(("dev-v2.0.json", "mlqa.json")))
    data = load_task(f"train={one},test={other}")
    assert data.name == "dev-v2.0.json + mlqa.json"
    assert data.test is not None
    assert (len(data.train) + len(data.validation), len(data.test)) == (20, 20)


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({"train.json": '{"data": [{"paragraphs": [}]}'}, r"train.json, line 1: not JSON"),
        ({"train.json": '{"paragraphs": 1}'}, r"train.json: expected an object with 'data' \(list\)"),
        ({"train.json": '{"data": [{"paragraphs": [{"qas": []}]}]}'}, r"data\[0\].paragraphs\[0\]: .* 'context'"),
        (
            {"train.json": '{"data": [{"paragraphs": [{"context": "x", "qas": [{"answers": [{"text": 1}]}]}]}]}'},
            r"qas\[0\].answers\[0\]: expected an object with 'text'",
        ),
        ({"train.json": squad(asked("x", {"answers": [answer("y", 0)]}))}, "has no question whose answer"),
        ({"train.json": squad(YES)}, "too few texts to hold some out"),
        ({"dev.json": squad(YES)}, r"no training split. .* or --data train=.*dev\.json"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(files: Mapping[str, str], match: str, folder: Folder) -> None:
    with pytest.raises(DataError, match=match):
        load_task(folder(files))


def test_requested_kind(folder: Folder) -> None:
    with pytest.raises(DataError, match="SQuAD"):
        load_task(folder({"train.json": '[{"text": "a", "label": "b"}]'}), kind="qa")
    with pytest.raises(DataError, match="expected the json of SQuAD, or tables with the columns question"):
        load_task({"train": pandas.DataFrame({"text": ["a"], "label": ["b"]})}, kind="qa")
    with pytest.raises(DataError, match=r"owner/name: no such file or folder.* the hub cannot be reached"):
        load_task("owner/name", kind="qa")
    with pytest.raises(DataError, match="metric 'accuracy' does not score a qa task"):
        load_task(folder({"train.json": squad(YES), "dev.json": squad(YES)}), metric="accuracy")


ROWS = [
    {"id": "7", "title": "a", "context": "Café 🙂 in Paris, Café 🙂.", "question": "Where?",
     "answers": {"text": ["Paris", "in Paris"], "answer_start": [10, 7]}},
    {"id": "8", "title": "a", "context": "Café 🙂 in Paris, Café 🙂.", "question": "When?",
     "answers": {"text": [], "answer_start": []}},
    {"id": "9", "title": "b", "context": "Bonn.", "question": "Where now?",
     "answers": {"text": ["Köln"], "answer_start": [0]}},
]  # fmt: skip


def as_objects(tmp_path: Path) -> Mapping[str, Dataset]:
    """As `datasets` loads squad and squad_v2 from the hub."""
    answers = {"text": datasets.List(Value("string")), "answer_start": datasets.List(Value("int32"))}
    texts = {name: Value("string") for name in ("id", "title", "context", "question")}
    features = datasets.Features({**texts, "answers": answers})
    return {"train": Dataset.from_list(ROWS, features), "validation": Dataset.from_list(ROWS[:2], features)}


def as_jsonl(tmp_path: Path) -> str:
    for name, rows in (("train", ROWS), ("validation", ROWS[:2])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(tmp_path)


def as_frames(tmp_path: Path) -> Mapping[str, pandas.DataFrame]:
    return {"train": pandas.DataFrame(ROWS), "validation": pandas.DataFrame(ROWS[:2])}


@pytest.mark.parametrize("source", [as_objects, as_jsonl, as_frames])
def test_tables_of_questions(source: Callable[[Path], Any], tmp_path: Path) -> None:
    data = load_task(source(tmp_path))
    assert (data.task.kind, data.task.text, data.task.unanswerable) == ("qa", ("question", "context"), True)
    first, second = data.train.to_list()
    assert (first["id"], first["question"], first["answers"], first["starts"]) == (
        "7", "Where?", ["Paris", "in Paris"], [10, 7],
    )  # fmt: skip
    assert (second["id"], second["answers"]) == ("8", [])
    assert data.notes[0].endswith("left out 1 questions, whose answers are not in their contexts")


def test_articles_are_held_out_as_a_whole(tmp_path: Path) -> None:
    rows = [{**ROWS[0], "id": f"{title}-{n}", "title": f"t{title}"} for title in range(20) for n in range(3)]
    data = load_task({"train": Dataset.from_list(rows)})
    held, learned = ({name.partition("-")[0] for name in split["id"]} for split in (data.validation, data.train))
    assert len(held) == 2
    assert not held & learned


@pytest.mark.parametrize(
    "answers", [{"text": ["Paris"], "answer_start": []}, {"text": ["Paris"], "answer_start": [None]}]
)
def test_answers_without_a_place_are_refused(answers: Mapping[str, Any], tmp_path: Path) -> None:
    rows = [*ROWS, {**ROWS[0], "answers": answers}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(DataError, match=r"train.jsonl, row 4: expected a question, .* as many answers.text"):
        load_task(str(tmp_path))
