"""Score rankings, and train on whole queries."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

import compress
from compress.data import load_task
from compress.errors import ObjectiveError
from compress.evaluation.evaluator import Evaluator
from compress.evaluation.ranking import query_scores
from compress.papers import monobert
from compress.pruning.importance import answer_loss
from compress.slicing.shape import Shape
from compress.training.objective import Objective
from tests import learning, marked, tiny


@pytest.fixture
def data(tmp_path: Path) -> Any:
    for n, (split, count) in enumerate({"train": 60, "dev": 24, "test": 20}.items()):
        marked.rankings(tmp_path / "data" / f"{split}.tsv", count=count, seed=n)
    return load_task(str(tmp_path / "data"), kind="ranking")


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
