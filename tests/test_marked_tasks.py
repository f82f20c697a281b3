"""Questions and tagged words, from their files to a bundle that answers: every loss and recipe serves them."""

import json
from pathlib import Path
from typing import Any

import pytest

import compress
from compress.data.task import Kind
from compress.records.run_report import Report
from tests import command, marked, tiny

pytestmark = pytest.mark.usefixtures("hastened")
QUICK = {
    "hinton": ("stages.0.steps=40",),
    "distilbert": ("stages.0.steps=40",),
    "tinybert": (
        *("student.layers=1", "student.hidden=16", "student.ffn=32", "student.heads=4"),
        *("stages.0.steps=4", "stages.1.steps=8", "stages.1.max_length=32"),
    ),
}
TEACHER = ("teacher.steps=150", "teacher.batch=16", "teacher.lr=5e-3", "teacher.max_length=32", "teacher.evaluate=1")


def data(kind: Kind, folder: Path) -> str:
    write, end = (marked.questions, "json") if kind == "qa" else (marked.sentences, "conll")
    write(folder / f"train.{end}", count=120, seed=1)
    write(folder / f"dev.{end}", count=40, seed=2)
    write(folder / f"test.{end}", count=20, seed=3)
    return str(folder)


def distilled(kind: Kind, recipe: str, tmp_path: Path) -> Any:
    return tiny.call(
        compress.distill,
        teacher=tiny.checkpoint(tmp_path / "teacher"),
        recipe=recipe,
        data=data(kind, tmp_path / "data"),
        out=tmp_path / "run",
        overrides=[*TEACHER, *QUICK[recipe], "stages.0.max_length=32", "stages.0.batch=16", "stages.0.lr=5e-3"],
        precision="fp32",
        gate="warn",
    )


def measured(kind: Kind, recipe: str, tmp_path: Path) -> tuple[Any, Report]:
    """Distil, and return the bundle with its report, after a look at all that every report has."""
    bundle = distilled(kind, recipe, tmp_path)
    report = Report.from_json(bundle.path / "report.json")
    assert (report.kind, report.metric, report.split) == (kind, "f1", "test")
    assert report.split_rows == 20
    assert {row.role for row in report.rows} == {"baseline", "teacher", "student"}
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert any("eval_f1" in line and "eval_agreement" in line for line in log)
    assert report.of_role("teacher")[0].score["f1"] > 0.9
    return bundle, report


@pytest.mark.parametrize("kind", ["qa", "tagging"])
def test_stages_on_states_and_on_answers(kind: Kind, tmp_path: Path) -> None:
    measured(kind, "tinybert", tmp_path)


def test_questions_are_answered(tmp_path: Path) -> None:
    bundle, report = measured("qa", "hinton", tmp_path)
    student = report.of_role("student")[-1]
    assert student.score["f1"] > max(row.score["f1"] for row in report.of_role("baseline"))
    context = "the story that a Good plot this film"
    right, none = bundle.predict([("what is the film ?", context), ("never so , too ?", context)])
    assert (right.text, context[right.start : right.end]) == ("Good", "Good")
    assert 1 / 13 < right.score <= 1
    assert (none.text, none.start, none.end) == ("", 0, 0)
    told = command.run("predict", str(bundle.path), "what is the film ?", "--pair", context)
    assert told.out.startswith("Good\t")


def test_words_are_marked(tmp_path: Path) -> None:
    bundle, report = measured("tagging", "distilbert", tmp_path)
    assert report.of_role("student")[-1].score["f1"] > 0.8
    text = "this Film a   good actor"
    (found,) = bundle.predict([text])
    assert [(mark.label, mark.text, mark.start, mark.end) for mark in found.marks] == [
        ("WORK", "Film", 5, 9),
        ("QUALITY", "good", 14, 18),
    ]
    assert all(1 / 5 < mark.score <= 1 for mark in found.marks)
    assert "WORK: Film" in command.run("predict", str(bundle.path), text).out
