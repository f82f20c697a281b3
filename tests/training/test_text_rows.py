"""No more of a corpus is encoded than a stage reads, and small corpora are encoded whole."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from compress.config.stages import Prune
from compress.data.corpus import Corpus
from compress.pruning.stage import sample_rows
from compress.training import context as contexts
from compress.training.schedule import TimeLimit
from compress.training.scoring import encode_held_out
from tests import generative, learning, tiny

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


CODE = "def f(x):\n    if x:\n        return 1.\n\n    return 2.\n"
FLAT = "def f(x): if x: return 1. return 2."


@pytest.mark.parametrize(("head", "expected"), [("causal_lm", CODE), ("encoder", FLAT)])
def test_a_causal_language_model_reads_line_ends_and_indentation(head: str, expected: str) -> None:
    """In the rows that it learns from, those that score it, and those that decide what is cut."""
    tokenizer = generative.gpt2_tokenizer()
    tokenizer.add_tokens(["\n", "(", ")"])
    corpus = Corpus("code", "code", lambda: iter([CODE] * 100))
    made = replace(learning.context(), corpus=corpus, tokenizer=tokenizer)
    stage = learning.stage(
        data="text", head=head, max_length=64, rows={"by": "gpt2.blocks"}, corrupt={"by": "gpt2.next_tokens"}
    )
    whole = tokenizer.decode(made.rows(stage, 0)[0]["input_ids"])
    assert whole.startswith(f"{expected}<|endoftext|>")
    scored = encode_held_out(stage, made, 0)
    assert tokenizer.decode(scored[0]["input_ids"]) == f"{expected}<|endoftext|>"
    prune = Prune(
        kind="prune",
        name="once",
        data="text",
        head=head,
        importance={"by": "minitron.activation"},
        rows=2,
        max_length=64,
    )
    assert tokenizer.decode(sample_rows(prune, made, 0)[0]["input_ids"]) == expected


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
