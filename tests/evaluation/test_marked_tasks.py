"""Distil question answering and tagging from files to a bundle that predicts, with a loss of every kind."""

import json
from pathlib import Path
from typing import Any

import pytest

import compress
from compress.kinds import Kind
from compress.records.run_report import Report
from tests import command, marked, tiny

pytestmark = pytest.mark.usefixtures("hastened")
QUICK = {
    "hinton": ("stages.0.steps=40",),
    "distilbert": ("stages.0.steps=40",),
    "tinybert": (
        *("student.layers=1", "student.hidden=16", "student.ffn=32", "student.heads=4"),
        *("stages.0.steps=2", "stages.1.steps=4", "stages.1.max_length=32"),
    ),
}
TEACHER = ("teacher.steps=150", "teacher.batch=16", "teacher.lr=5e-3", "teacher.max_length=32", "teacher.evaluate=1")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data of both kinds, a checkpoint, and the cache in which their fine-tuned teachers stay."""
    folder = tmp_path_factory.mktemp("marked")
    tiny.checkpoint(folder / "teacher")
    for kind, write, end in (("qa", marked.questions, "json"), ("tagging", marked.sentences, "conll")):
        for seed, (split, count) in enumerate({"train": 120, "dev": 40, "test": 20}.items(), start=1):
            write(folder / kind / f"{split}.{end}", count=count, seed=seed)
    return folder


@pytest.fixture
def distil(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Distil a bundle, check what every report has, and return both."""
    monkeypatch.setenv("COMPRESS_HOME", str(shared / "home"))

    def run(kind: Kind, recipe: str) -> tuple[Any, Report]:
        bundle = tiny.call(
            compress.distill,
            teacher=str(shared / "teacher"),
            recipe=recipe,
            data=str(shared / kind),
            out=tmp_path / "run",
            overrides=[*TEACHER, *QUICK[recipe], "stages.0.max_length=32", "stages.0.batch=16", "stages.0.lr=5e-3"],
            precision="fp32",
            gate="warn",
        )
        report = Report.from_json(bundle.path / "report.json")
        assert (report.kind, report.metric, report.split, report.split_rows) == (kind, "f1", "test", 20)
        assert {row.role for row in report.rows} == {"baseline", "teacher", "student"}
        log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
        assert any("eval_f1" in line and "eval_agreement" in line for line in log)
        assert report.of_role("teacher")[0].score["f1"] > 0.9  # type: ignore[operator]
        return bundle, report

    return run


@pytest.mark.parametrize("kind", ["qa", "tagging"])
def test_tinybert(kind: Kind, distil: Any) -> None:
    distil(kind, "tinybert")


def test_question_answering(distil: Any) -> None:
    bundle, report = distil("qa", "hinton")
    student = report.of_role("student")[-1]
    assert student.score["f1"] > max(row.score["f1"] for row in report.of_role("baseline"))
    context = "the story that a Good plot this film"
    right, none = bundle.predict([("what is the film ?", context), ("never so , too ?", context)])
    assert (right.text, context[right.start : right.end]) == ("Good", "Good")
    assert 1 / 13 < right.score <= 1
    assert (none.text, none.start, none.end) == ("", 0, 0)
    told = command.run("predict", str(bundle.path), "what is the film ?", "--pair", context)
    assert told.out.startswith("Good\t")


def test_tagging(distil: Any) -> None:
    bundle, report = distil("tagging", "distilbert")
    assert report.of_role("student")[-1].score["f1"] > 0.8
    text = "this Film a   good actor"
    (found,) = bundle.predict([text])
    assert [(mark.label, mark.text, mark.start, mark.end) for mark in found.marks] == [
        ("WORK", "Film", 5, 9),
        ("QUALITY", "good", 14, 18),
    ]
    assert all(1 / 5 < mark.score <= 1 for mark in found.marks)
    assert "WORK: Film" in command.run("predict", str(bundle.path), text).out
