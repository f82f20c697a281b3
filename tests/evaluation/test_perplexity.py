"""Held-out likelihood: exact over labelled positions, the same masks each time, nothing left changed."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForMaskedLM

from compress.config.term import Term
from compress.data.collate import Collate
from compress.errors import DataError
from compress.evaluation.perplexity import logits_at, measure_perplexity, score_rows
from compress.papers import gpt2
from compress.records.language_scores import LanguageScore, LanguageScores
from compress.training.step import Distillation
from tests import generative, tiny

TEXTS = ("a good film", "bad", "the story was too slow", "fun", "cold and sad", "so so")


def rows(tokenizer: Any, texts: tuple[str, ...] = TEXTS) -> Dataset:
    ids = tokenizer(list(texts))["input_ids"]
    return Dataset.from_dict({"input_ids": ids, "length": [len(each) for each in ids]})


def causal(**options: Any) -> dict[str, float]:
    tokenizer = generative.gpt2_tokenizer()
    words = generative.words(tokenizer)
    given = {"model": generative.gpt2(), "rows": rows(tokenizer), "collate": Collate(tokenizer)}
    return measure_perplexity(**{**given, "prepare": lambda batch: gpt2.next_tokens(batch, words), **options})


def by_hand(texts: tuple[str, ...]) -> float:
    """Each text alone, by transformers' own loss."""
    model, total, count = generative.gpt2(), 0.0, 0
    for text in texts:
        ids = generative.rows(text)["input_ids"]
        if len(text) > 1:
            total += model(input_ids=ids, labels=ids).loss.item() * (len(text) - 1)
            count += len(text) - 1
    return total / count


def test_perplexity() -> None:
    found = causal(batch=4)
    assert found["nll"] == pytest.approx(by_hand(TEXTS), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["nll"]))


def test_batch_size_does_not_matter() -> None:
    assert causal(batch=1)["nll"] == pytest.approx(causal(batch=6)["nll"], rel=1e-5)


@pytest.mark.parametrize("batch", [1, 4])
def test_rows_are_scored_each_by_itself(batch: int) -> None:
    tokenizer = generative.gpt2_tokenizer()
    words = generative.words(tokenizer)
    chosen = np.array([2, 0, 4, 3, 5])
    sums, counts = score_rows(
        generative.gpt2(),
        rows(tokenizer),
        chosen,
        Collate(tokenizer),
        lambda batch: gpt2.next_tokens(batch, words),
        batch=batch,
    )
    assert sums / counts == pytest.approx([by_hand((TEXTS[row],)) for row in chosen], rel=1e-5)
    assert counts.tolist() == [len(TEXTS[row]) - 1 for row in chosen]


def test_the_error_is_that_of_documents() -> None:
    """Of documents that are alike, none; of two, half of their difference; in a pair, what they have in common goes."""
    easy, hard = LanguageScore("easy", 1, (10.0, 60.0)), LanguageScore("hard", 1, (20.0, 70.0))
    scores = LanguageScores((10, 10), (easy, hard))
    assert scores.mean((20.0, 20.0)) == (2.0, 0.0)
    assert scores.mean(easy.nats) == pytest.approx((3.5, 2.5))
    assert scores.compare(hard, easy) == pytest.approx((1.0, 0.0))
    assert math.isnan(LanguageScores((10,), (easy,)).mean((10.0,))[1])
    assert scores.summarise()[0]["perplexity"] == pytest.approx(math.exp(3.5))


def test_long_documents_weigh_more() -> None:
    """A hundred copies of the documents have a tenth of the error."""
    nats, tokens = (5.0, 90.0, 40.0), (10, 30, 20)
    few, many = LanguageScores(tokens, ()), LanguageScores(tokens * 100, ())
    assert few.mean(nats)[0] == many.mean(nats * 100)[0] == 2.25
    assert many.mean(nats * 100)[1] == pytest.approx(few.mean(nats)[1] / 10 * math.sqrt(2 / 3 * 300 / 299), rel=1e-6)


def test_limit() -> None:
    assert causal(limit=3)["nll"] == pytest.approx(by_hand((TEXTS[0], TEXTS[2], TEXTS[5])), rel=1e-5)
    assert causal(limit=100) == causal()


def masked(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    chosen = (torch.rand(batch["input_ids"].shape) < 0.4) & batch["attention_mask"].bool()
    return {
        **batch,
        "input_ids": batch["input_ids"].masked_fill(chosen, 4),
        "labels": batch["input_ids"].masked_fill(~chosen, -100),
    }


def of_masks(model: Any = None) -> dict[str, float]:
    tokenizer = tiny.tokenizer()
    model = model or tiny.model("bert", head=AutoModelForMaskedLM)
    return measure_perplexity(model, rows(tokenizer), Collate(tokenizer), masked, batch=3)


def test_masks_are_reproducible() -> None:
    model = tiny.model("bert", head=AutoModelForMaskedLM)
    torch.manual_seed(1)
    first = of_masks(model)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), after), "the generator is where it was"
    assert of_masks() == first
    assert of_masks(tiny.model("bert", head=AutoModelForMaskedLM, seed=5)) != first


def test_eval_mode() -> None:
    model = tiny.model("bert", head=AutoModelForMaskedLM).train()
    model.bert.pooler = None
    model.bert.encoder.layer[0].eval()
    assert of_masks(model) == of_masks()
    assert model.training
    assert not model.bert.encoder.layer[0].training


def test_student_of_a_step() -> None:
    step = Distillation(generative.gpt2(), None, [Term("bert.masked_lm")])
    assert causal(model=step) == causal()


def test_nothing_to_predict() -> None:
    with pytest.raises(DataError, match="no position to predict"):
        causal(rows=rows(generative.gpt2_tokenizer(), ("a", "b")))


def test_infinite_perplexity() -> None:
    model = generative.gpt2()
    with torch.no_grad():
        model.transformer.ln_f.weight.mul_(1e4)
    found = causal(model=model)
    assert found["nll"] > 700
    assert found["perplexity"] == math.inf


@pytest.mark.parametrize("family", ["gpt2", "t5", "bert"])
def test_logits_at(family: str) -> None:
    if family == "bert":
        model, batch = tiny.model("bert", head=AutoModelForMaskedLM), tiny.batch()
    else:
        model, batch = getattr(generative, family)(), generative.rows(*TEXTS)
    inputs = batch | ({"decoder_input_ids": batch["input_ids"]} if family == "t5" else {})
    at = torch.rand(batch["input_ids"].shape) < 0.3
    torch.testing.assert_close(logits_at(model, inputs, at), model(**inputs).logits[at])
