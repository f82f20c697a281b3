"""Kinds of task whose teacher answers in a way of its own are distilled from files to a bundle that predicts."""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import compress
from compress.data import load_task
from compress.data.task import Task
from compress.data.tokenize import encode
from compress.errors import RecipeError
from compress.evaluation import metrics
from compress.exporters.artifact import Bundle
from compress.kinds import Kind
from compress.records.run_report import Report
from tests import command, learning, marked, tiny

pytestmark = pytest.mark.usefixtures("hastened")
SIZES = {"train": 120, "dev": 40, "test": 20}


@dataclass(frozen=True)
class Distilled:
    """A kind of task, the file of its data, and what is drawn: as many examples, `smaller` times fewer for training."""

    write: Callable[..., Path]
    ending: str
    recipe: str
    metric: str
    baselines: tuple[str, str]
    student: float
    smaller: int = 1
    losses: tuple[str, ...] = ()


KINDS: dict[Kind, Distilled] = {
    "qa": Distilled(marked.questions, "json", "hinton", "f1", ("majority", "nearest sentence"), 0.5),
    "tagging": Distilled(marked.sentences, "conll", "distilbert", "f1", ("majority", "tag of each word"), 0.8),
    "ranking": Distilled(
        *(marked.rankings, "tsv", "margin-mse", "ndcg@10", ("random order", "BM25"), 0.9),
        smaller=2,
        losses=("margin_mse.margins", "lce.relevance"),
    ),
}
TEACHER = ("teacher.steps=150", "teacher.batch=16", "teacher.lr=5e-3", "teacher.max_length=32", "teacher.evaluate=1")
QUICK = ("stages.0.max_length=32", "stages.0.batch=20", "stages.0.lr=5e-3", "stages.0.steps=60")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data of each kind, a checkpoint, and the cache in which fine-tuned teachers stay."""
    folder = tmp_path_factory.mktemp("kinds")
    tiny.checkpoint(folder / "teacher")
    for kind, of in KINDS.items():
        for seed, (split, count) in enumerate(SIZES.items(), start=1):
            examples = max(count // of.smaller, SIZES["test"])
            of.write(folder / kind / f"{split}.{of.ending}", count=examples, seed=seed)
    return folder


@pytest.fixture(autouse=True)
def cached(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESS_HOME", str(shared / "home"))


@pytest.fixture
def distil(shared: Path, tmp_path: Path) -> Callable[[Kind], Bundle]:
    """Distil a bundle of a kind, and check what the report of every kind has."""

    def run(kind: Kind) -> Bundle:
        of = KINDS[kind]
        bundle: Bundle = tiny.call(
            compress.distill,
            teacher=str(shared / "teacher"),
            recipe=of.recipe,
            data=str(shared / kind),
            kind=kind,
            out=tmp_path / "run",
            overrides=[*TEACHER, *QUICK],
            precision="fp32",
        )
        report = bundle.report()
        assert (report.kind, report.metric, report.split, report.split_rows) == (kind, of.metric, "test", 20)
        *baselines, teacher, fp32, int8 = report.rows
        assert tuple(row.name for row in baselines) == of.baselines
        assert teacher.score[of.metric] > 0.9  # type: ignore[operator]
        for student in (fp32, int8):
            assert student.score[of.metric] > max(of.student, baselines[0].score[of.metric])  # type: ignore[operator,type-var]
        assert fp32.agreement is not None and 0 < fp32.agreement <= 1
        (proof,) = report.certificates
        assert (proof.metric, proof.certified) == (of.metric, True)
        log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
        assert any(f"eval_{of.metric}" in line and "eval_agreement" in line for line in log)
        assert all(any(loss in line for line in log) for loss in of.losses)
        return bundle

    return run


def test_question_answering(distil: Callable[[Kind], Bundle]) -> None:
    bundle = distil("qa")
    context = "the story that a Good plot this film"
    right, none = bundle.predict([("what is the film ?", context), ("never so , too ?", context)])
    assert (right.text, context[right.start : right.end]) == ("Good", "Good")  # type: ignore[union-attr]
    assert 1 / 13 < right.score <= 1  # type: ignore[union-attr]
    assert (none.text, none.start, none.end) == ("", 0, 0)  # type: ignore[union-attr]
    told = command.run("predict", str(bundle.path), "what is the film ?", "--pair", context)
    assert told.out.startswith("Good\t")


def test_tagging(distil: Callable[[Kind], Bundle]) -> None:
    bundle = distil("tagging")
    text = "this Film a   good actor"
    (found,) = bundle.predict([text])
    assert [(mark.label, mark.text, mark.start, mark.end) for mark in found.marks] == [  # type: ignore[union-attr]
        ("WORK", "Film", 5, 9),
        ("QUALITY", "good", 14, 18),
    ]
    assert "WORK: Film" in command.run("predict", str(bundle.path), text).out


def test_ranking(distil: Callable[[Kind], Bundle]) -> None:
    bundle = distil("ranking")
    assert bundle.task == Task("ranking", ("query", "passage"), "relevance", (), "ndcg@10")
    assert bundle.report().unit == "queries"
    right, wrong = bundle.predict([("a film ?", "a good plot"), ("a film ?", "a the plot")])
    assert right.score > wrong.score  # type: ignore[union-attr]
    told = command.run("predict", str(bundle.path), "a film ?", "--pair", "a good plot", "--precision", "fp32")
    (answer,) = bundle.predict([("a film ?", "a good plot")], precision="fp32")
    assert told.out.split("\t")[0].strip() == f"{answer.score:.4f}"  # type: ignore[union-attr]
    card = (bundle.path / "README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: text-ranking" in card
    assert "a query (query) and a passage (passage)" in card
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    scores = library.CrossEncoder(str(bundle.path)).predict([("a film ?", "a good plot")])
    assert float(scores[0]) == pytest.approx(answer.score, abs=1e-5)  # type: ignore[union-attr]


def test_scores_in_the_data_teach_what_their_model_teaches(shared: Path, tmp_path: Path) -> None:
    model = tiny.bert(1, initializer_range=0.1).eval()
    teacher = tiny.checkpoint(tmp_path / "teacher", model)
    (tmp_path / "scored").mkdir()
    for name in SIZES:
        file = shared / "ranking" / f"{name}.tsv"
        split = load_task(f"train={file},validation={file}", kind="ranking").train
        scores = metrics.logits(model, encode(split, tiny.tokenizer(), 32), learning.collate())[:, 0]
        lines = file.read_text().splitlines()
        scored = [f"{line}\t{cell}" for line, cell in zip(lines, ["teacher_score", *scores.tolist()], strict=True)]
        (tmp_path / "scored" / file.name).write_text("\n".join(scored))

    def distil_from(source: Path, out: str, *changes: str) -> Bundle:
        bundle: Bundle = tiny.call(
            compress.distill, teacher=teacher, recipe="margin-mse", data=str(source), out=tmp_path / out,
            overrides=[*QUICK, "stages.0.steps=8", *changes], precision="fp32", gate="warn",
        )  # fmt: skip
        return bundle

    live, recorded = distil_from(shared / "ranking", "live"), distil_from(tmp_path / "scored", "recorded")
    weights = [load_file(bundle.path / "model.safetensors") for bundle in (live, recorded)]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=1e-4, rtol=1e-3)
    row = recorded.report().teacher_row
    assert (row.name, row.parameters) == ("the scores in scored", None)
    assert row.score == pytest.approx(live.report().teacher_row.score)
    assert recorded.report().shipped.agreement == pytest.approx(live.report().shipped.agreement, abs=0.01)
    with pytest.raises(RecipeError, match="this teacher has only logits"):
        distil_from(tmp_path / "scored", "hidden", "stages.0.objective=[{loss: tinybert.hidden, layers: uniform}]")


@pytest.mark.slow
def test_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand there, on a small folder of BEIR's layout, with a tiny teacher and few steps."""
    marked.beir(tmp_path / "beir" / "scifact")
    checkpoint = tiny.checkpoint(tmp_path / "minilm")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "reranker.md").read_text(encoding="utf-8")
    lines = [
        line.replace("--teacher minilm", f"--teacher {checkpoint}") for line in re.findall("^compress .+", page, re.M)
    ]
    assert [line.split()[1] for line in lines] == ["inspect", "distill", "quantize", "predict"]
    # it must know the order of passages: int8 would change that of a model which does not by chance
    short = [word for each in (*TEACHER, *QUICK, "stages.0.steps=200") for word in ("--set", each)]
    for line in lines:
        more = [*short, "--gate", "warn"] if "distill" in line else []
        told = command.run(*shlex.split(line)[1:], *more)
        assert told.code == 0, told.out + told.err
    assert re.match(r"-?\d+\.\d{4}", told.out)
    (code,) = re.findall("```python\n(.+?)```", page, re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["best"] in names["passages"]
    report = Report.from_json(tmp_path / "runs" / "reranker" / "bundle" / "report.json")
    assert (report.data, report.kind, report.unit) == ("scifact", "ranking", "queries")
