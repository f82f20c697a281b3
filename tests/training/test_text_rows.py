"""No more of a corpus is encoded than a stage reads, and small corpora are encoded whole."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from compress.data.corpus import Corpus
from compress.training import context as contexts
from compress.training.schedule import TimeLimit
from tests import learning, tiny

TEXTS = ["the film was good and the plot was fun"] * 400
"""Of 11 tokens each in a row."""


def context(minutes: float | None = None) -> contexts.TrainingContext:
    made = learning.context()
    corpus = Corpus("films", "films", lambda: iter(TEXTS))
    limit = None if minutes is None else TimeLimit(time.monotonic() + 48 * minutes, ("lesson",), minutes, 0.0)
    return replace(made, corpus=corpus, time_limit=limit)


def count(found: contexts.TrainingContext, *, held_out: bool = False, **settings: Any) -> int:
    stage = learning.stage(data="text", head="masked_lm", max_length=16, **settings)
    return len(found.rows(stage, 0, held_out=held_out))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "LEAST_TOKENS", 100)


def test_a_small_corpus_is_encoded_whole() -> None:
    assert count(context(), steps=2, batch=4) == 392


@pytest.mark.parametrize(("steps", "batch"), [(2, 4), (10, 8)])
def test_a_stage_of_some_steps_has_a_row_for_each_place(steps: int, batch: int, few: None) -> None:
    rows = count(context(), steps=steps, batch=batch)
    assert steps * batch <= rows <= 2 * steps * batch


def test_minutes_limit_the_tokens(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contexts.TOKENS_PER_SECOND, "cpu", 10)
    monkeypatch.setitem(contexts.TOKENS_PER_SECOND, "cuda", 10)
    rows = count(context(minutes=1), steps=None, epochs=3)
    assert rows == -(-600 // 11)
    assert count(context(), steps=None, epochs=3) == 392
    assert count(context(minutes=1), steps=None, limit_tokens=200) == -(-200 // 11)
    assert count(context(minutes=1), steps=None, limit_tokens=2000) == -(-600 // 11)
    assert count(context(minutes=1), held_out=True) == 8


@pytest.mark.parametrize("family", ["bert", "albert", "electra", "ernie", "mobilebert", "deberta", "deberta-v2"])
def test_token_types_of_zeros_need_not_be_stored(family: str) -> None:
    """The gradients are equal bit for bit."""
    gradients = []
    for types in ({}, {"token_type_ids": torch.zeros(3, 7, dtype=torch.int64)}):
        model = tiny.model(family)
        model(**tiny.batch(), **types).logits.square().sum().backward()
        found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        gradients.append(found)
    assert gradients[0].keys() == gradients[1].keys()
    assert gradients[0]
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
