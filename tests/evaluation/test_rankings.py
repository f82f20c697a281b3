"""Score rankings and distil rerankers, from a table of queries and passages to a certified bundle."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

import compress
from compress.data import load_task
from compress.data.task import Task
from compress.data.tokenize import encode
from compress.errors import ObjectiveError, RecipeError
from compress.evaluation import metrics
from compress.evaluation.evaluator import Evaluator
from compress.evaluation.ranking import query_scores
from compress.exporters.artifact import Bundle
from compress.papers import monobert
from compress.pruning.importance import answer_loss
from compress.records.run_report import Report
from compress.slicing.shape import Shape
from compress.training.objective import Objective
from tests import command, learning, marked, tiny

TEACHER = ("teacher.steps=150", "teacher.batch=20", "teacher.lr=5e-3", "teacher.max_length=32", "teacher.evaluate=1")
FEW = ("teacher.steps=4", "teacher.max_length=32", "stages.0.steps=4", "stages.0.max_length=32", "stages.0.batch=20")
QUICK = ("stages.0.steps=60", "stages.0.max_length=32", "stages.0.batch=20", "stages.0.lr=5e-3")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("rankings")
    for n, (split, count) in enumerate({"train": 60, "dev": 24, "test": 20}.items()):
        marked.rankings(folder / "data" / f"{split}.tsv", count=count, seed=n)
    return {"data": str(folder / "data"), "home": str(folder / "home"), "teacher": tiny.checkpoint(folder / "teacher")}


@pytest.fixture
def data(places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COMPRESS_HOME", places["home"])
    return load_task(places["data"], kind="ranking")


def distilled(places: dict[str, str], recipe: str, out: Path, *overrides: str) -> Any:
    return tiny.call(
        compress.distill,
        teacher=places["teacher"],
        recipe=recipe,
        data=places["data"],
        kind="ranking",
        out=out,
        overrides=[*TEACHER, *(overrides or QUICK)],
        precision="fp32",
    )


@pytest.fixture
def evaluator(data: Any) -> Evaluator:
    return Evaluator.from_split(data.task, data.validation, tiny.tokenizer(), 32)


def said(evaluator: Evaluator, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(len(evaluator.rows), 1)).astype(np.float32)


def test_scores(evaluator: Evaluator) -> None:
    logits = said(evaluator)
    queries = evaluator.split["query"][:]
    found: list[dict[int, float]] = [{} for _ in range(24)]
    judged: list[dict[int, float]] = [{} for _ in range(24)]
    for row, (query, label) in enumerate(zip(queries, evaluator.split["label"][:], strict=True)):
        found[query][row], judged[query][row] = float(logits[row, 0]), label
    expected = {name: float(values.mean()) for name, values in query_scores(found, judged).items()}
    assert evaluator.scores(logits) == pytest.approx(expected)
    each = evaluator.example_scores(logits)
    assert each is not None
    assert (len(evaluator), each.shape, each.mean()) == (24, (24,), pytest.approx(expected["ndcg@10"]))
    low, high = evaluator.interval(logits)
    assert low < expected["ndcg@10"] < high
    assert evaluator.by_class(logits) == ()


def test_subsamples_hold_whole_queries(evaluator: Evaluator) -> None:
    few = evaluator.subsample(50)
    assert (len(few), len(few.rows), len(few.split)) == (10, 50, 50)
    assert few.rows["labels"][:] == few.split["label"][:]
    logits = said(evaluator)
    whole = evaluator.example_scores(logits)
    assert whole is not None
    for part, kept in evaluator.leave_groups_out(logits, 4, 100):
        assert (len(part), len(part.rows), len(kept)) == (18, 90, 90)
        scores = part.example_scores(kept)
        assert scores is not None
        assert scores.tolist() == [whole[query] for query in sorted(set(part.split["query"][:]))]


def test_agreement_and_changes(evaluator: Evaluator) -> None:
    one = said(evaluator)
    moved = one + np.arange(24).repeat(5)[:, None]  # all passages of a query alike
    assert evaluator.agreement(one, moved) == evaluator.agreement(one, one) == 1.0
    assert evaluator.count_changed(one, moved) == 0
    assert evaluator.distance(moved, one) == pytest.approx(0, abs=1e-9)
    assert evaluator.agreement(one, -one) == 0.0
    assert evaluator.count_changed(one, -one) == 24
    assert evaluator.distance(one, -one) > 1
    swapped = one.copy()
    order = np.argsort(-swapped[:5, 0])
    swapped[order[[0, 1]]] = swapped[order[[1, 0]]]
    assert evaluator.agreement(one, swapped) == pytest.approx(1 - 1 / 10 / 24)
    assert evaluator.count_changed(one, swapped) == 1


def test_baselines(data: Any) -> None:
    found = data.task.baselines(data, data.validation)
    assert list(found) == ["random order", "BM25"]
    assert found["random order"] == data.task.majority(data, data.validation)
    by_chance = sum(1 / np.log2(rank + 1) for rank in range(1, 6)) / 5
    assert found["random order"]["ndcg@10"] == pytest.approx(by_chance, abs=0.15)
    assert found["BM25"]["ndcg@10"] < 0.8


def test_losses_over_queries_need_batches_of_queries() -> None:
    shape = Shape.from_config(tiny.bert(1).config)
    for kind, loss in (("ranking", "lce.relevance"), ("regression", "bert.labels")):
        objective = Objective([compress.Term("bert.labels")], shape, shape, kind=kind)  # type: ignore[arg-type]
        assert [term.name for term in objective.terms] == [loss]
    step = compress.Distillation(tiny.bert(1), tiny.bert(1), [compress.Term("margin_mse.margins")])
    with pytest.raises(ObjectiveError, match="needs query"):
        step(**tiny.batch())


def rows() -> Dataset:
    """Rows of eight queries with two to six passages, of which the first is relevant."""
    found = learning.rows(32)
    query = np.repeat(np.arange(8), [4, 2, 6, 3, 5, 4, 6, 2])
    relevance = [[float(n == 0 or query[n] != query[n - 1])] for n in range(32)]
    return found.remove_columns("labels").add_column("query", query.tolist()).add_column("labels", relevance)


def step() -> compress.Distillation:
    student, teacher = (tiny.bert(1, seed=seed, **learning.NO_DROPOUT) for seed in (1, 2))
    shapes = (Shape.from_config(model.config) for model in (student, teacher))
    terms = [compress.Term("margin_mse.margins"), compress.Term("listnet.top_one"), compress.Term("bert.labels", 0.1)]
    return compress.Distillation(student, teacher, Objective(terms, *shapes, kind="ranking"))


@pytest.mark.parametrize("micro_batch", [None, 8])
def test_resume_a_stage_on_queries(micro_batch: int | None, tmp_path: Path) -> None:
    stage = learning.stage(batch=16, micro_batch=micro_batch, checkpoint=2, steps=7, evaluate=0)
    asked = list[set[int]]()

    def watch(module: Any, args: Any, batch: Any) -> None:
        asked.append(set(batch["query"].tolist()))
        assert len(batch["query"]) <= (micro_batch or 16)

    whole, again = step(), step()
    whole.register_forward_pre_hook(watch, with_kwargs=True)
    facts = learning.train(whole, stage, tmp_path / "whole", data=rows())
    assert facts.steps == 7
    assert all(sum(query in part for part in asked[:4]) <= 2 for query in range(8))
    halved = step()
    learning.interrupt(halved, 5 * (2 if micro_batch else 1) - 1)
    with pytest.raises(KeyboardInterrupt):
        learning.train(halved, stage, tmp_path / "halved", data=rows())
    learning.train(again, stage, tmp_path / "halved", data=rows())
    for name, tensor in learning.weights(whole).items():
        assert torch.equal(tensor, learning.weights(again)[name])


def test_importance() -> None:
    model, batch = tiny.bert(1), learning.collate()([rows()[n] for n in range(6)])
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    expected = 6 * monobert.relevance(logits, batch["labels"], None)
    assert answer_loss(model, batch, "labels", None).item() == pytest.approx(expected.item(), rel=1e-5)


def test_distil_a_reranker(places: dict[str, str], data: Any, tmp_path: Path, hastened: None) -> None:
    bundle = distilled(places, "margin-mse", tmp_path / "run")
    assert bundle.task == Task("ranking", ("query", "passage"), "relevance", (), "ndcg@10")
    report = Report.from_json(bundle.path / "report.json")
    assert (report.kind, report.metric, report.split, report.split_rows, report.unit) == (
        "ranking", "ndcg@10", "test", 20, "queries",
    )  # fmt: skip
    random, words, teacher, fp32, int8 = report.rows
    assert (random.name, words.name) == ("random order", "BM25")
    assert teacher.score["ndcg@10"] > 0.95 and int8.score["ndcg@10"] > 0.9  # type: ignore[operator]
    assert min(each.score["ndcg@10"] for each in (fp32, int8)) > max(  # type: ignore[type-var]
        each.score["ndcg@10"] for each in (random, words)
    )
    assert fp32.agreement is not None and 0 < fp32.agreement < 1
    (proof,) = report.certificates
    assert (proof.metric, proof.certified, proof.rows) == ("ndcg@10", True, 24)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert any("eval_ndcg@10" in line and "eval_agreement" in line for line in log)
    assert any("margin_mse.margins" in line for line in log)
    assert any("lce.relevance" in line for line in log)
    right, wrong = bundle.predict([("a film ?", "a good plot"), ("a film ?", "a the plot")])
    assert right.score > wrong.score
    told = command.run("predict", str(bundle.path), "a film ?", "--pair", "a good plot", "--precision", "fp32")
    (answer,) = bundle.predict([("a film ?", "a good plot")], precision="fp32")
    assert told.out.split("\t")[0].strip() == f"{answer.score:.4f}"
    card = (bundle.path / "README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: text-ranking" in card
    assert "a query (query) and a passage (passage)" in card
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    scores = library.CrossEncoder(str(bundle.path)).predict([("a film ?", "a good plot")])
    assert float(scores[0]) == pytest.approx(answer.score, abs=1e-5)


def test_scores_in_the_data_teach_what_their_model_teaches(
    places: dict[str, str], data: Any, tmp_path: Path, hastened: None
) -> None:
    model = tiny.bert(1, initializer_range=0.1).eval()
    teacher = tiny.checkpoint(tmp_path / "teacher", model)
    for name in ("train", "dev", "test"):
        lines = (Path(places["data"]) / f"{name}.tsv").read_text().splitlines()
        (tmp_path / "one.tsv").write_text("\n".join(lines))
        split = load_task(f"train={tmp_path / 'one.tsv'},validation={tmp_path / 'one.tsv'}", kind="ranking").train
        scores = metrics.logits(model, encode(split, tiny.tokenizer(), 32), learning.collate())[:, 0]
        scored = [f"{line}\t{cell}" for line, cell in zip(lines, ["teacher_score", *scores.tolist()], strict=True)]
        (tmp_path / "scored").mkdir(exist_ok=True)
        (tmp_path / "scored" / f"{name}.tsv").write_text("\n".join(scored))

    def distil(source: str | Path, out: str, *changes: str) -> Bundle:
        return tiny.call(
            compress.distill, teacher=teacher, recipe="margin-mse", data=str(source), out=tmp_path / out,
            overrides=[*QUICK, "stages.0.steps=8", *changes], precision="fp32", gate="warn",
        )  # fmt: skip

    live, recorded = distil(places["data"], "live"), distil(tmp_path / "scored", "recorded")
    weights = [load_file(bundle.path / "model.safetensors") for bundle in (live, recorded)]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=1e-4, rtol=1e-3)
    row = recorded.report().teacher_row
    assert (row.name, row.parameters) == ("the scores in scored", None)
    assert row.score == pytest.approx(live.report().teacher_row.score)
    assert recorded.report().shipped.agreement == pytest.approx(live.report().shipped.agreement, abs=0.01)
    with pytest.raises(RecipeError, match="this teacher has only logits"):
        distil(tmp_path / "scored", "hidden", "stages.0.objective=[{loss: tinybert.hidden, layers: uniform}]")


@pytest.mark.slow
def test_commands_of_the_page(
    places: dict[str, str], data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hastened: None
) -> None:
    """As they stand there, on a small folder of BEIR's layout, with a tiny teacher and few steps."""
    marked.beir(tmp_path / "beir" / "scifact")
    checkpoint = tiny.checkpoint(tmp_path / "minilm")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "reranker.md").read_text(encoding="utf-8")
    lines = [
        line.replace("--teacher minilm", f"--teacher {checkpoint}") for line in re.findall("^compress .+", page, re.M)
    ]
    assert [line.split()[1] for line in lines] == ["inspect", "distill", "quantize", "predict"]
    short = [word for each in FEW for word in ("--set", each)]
    for line in lines:
        more = [*short, "--gate", "warn"] if "distill" in line else []
        told = command.run(*shlex.split(line)[1:], *more)
        assert told.code == 0, told.err
    assert re.match(r"-?\d+\.\d{4}", told.out)
    (code,) = re.findall("```python\n(.+?)```", page, re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["best"] in names["passages"]
    report = Report.from_json(tmp_path / "runs" / "reranker" / "bundle" / "report.json")
    assert (report.data, report.kind, report.unit) == ("scifact", "ranking", "queries")


@pytest.mark.parametrize("recipe", ["listnet", "hinton"])
def test_other_recipes(recipe: str, places: dict[str, str], data: Any, tmp_path: Path, hastened: None) -> None:
    bundle = distilled(places, recipe, tmp_path / "run")
    report = Report.from_json(bundle.path / "report.json")
    student = report.of_role("student")[0]
    assert student.score["ndcg@10"] > 0.9  # type: ignore[operator]
