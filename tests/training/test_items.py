"""Means that stay exact when a batch is split over processes or accumulated in parts."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForTokenClassification,
)

from compress.config.reference import Call
from compress.config.term import Term
from compress.data.masking import Words
from compress.kinds import Kind, find
from compress.papers import deberta, deberta_v3, electra, gkd, gpt2, minillm
from compress.papers.cofi import Matched, MatchOptions
from compress.slicing.shape import Shape
from compress.training.objective import Objective, count_items, find_loss
from compress.training.reads import CountedItem
from compress.training.step import Distillation
from tests import tiny

WORDS = Words.from_tokenizer(tiny.tokenizer())
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

EVERY_ITEM: dict[CountedItem, list[Term]] = {
    "example": [Term("pkd.patience"), Term("minilm.value_relation", layers="last")],
    "token": [Term("tinybert.hidden"), Term("distilbert.soft_targets")],
    "pair": [Term("tinybert.attention")],
    "label": [Term("bert.masked_lm"), Term("distilbert.masked_soft_targets")],
}

EVERY_ITEM_OF_A_RANKING: dict[CountedItem, list[Term]] = {
    "query": [Term("listnet.top_one", temperature=2.0), Term("listnet.relevance"), Term("lce.relevance")],
    "preference": [Term("margin_mse.margins")],
}


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    loss.backward()
    return {name: each.grad for name, each in module.named_parameters() if each.grad is not None}


def counted(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return count_items(batch["attention_mask"], batch.get("labels"))


def means(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    counts = [counted(part) for part in parts]
    return {per: torch.stack([count[per] for count in counts]).mean() for per in counts[0]}


def masked_batch(labels: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    batch = tiny.batch((7, 3, 5, 2))
    return batch | {"labels": labels(batch["input_ids"])}


def some(ids: Tensor) -> Tensor:
    chosen = torch.zeros_like(ids, dtype=torch.bool)
    chosen[0, 1] = chosen[0, 4] = chosen[1, 0] = chosen[3, 1] = True
    return ids.masked_fill(~chosen, -100)


def only_one(ids: Tensor) -> Tensor:
    """Fewer labels than parts: a part holds 1/3 of a label on average."""
    chosen = torch.zeros_like(ids, dtype=torch.bool)
    chosen[0, 1] = True
    return ids.masked_fill(~chosen, -100)


def test_every_kind_of_item_is_tested_and_counted() -> None:
    assert {*EVERY_ITEM, *EVERY_ITEM_OF_A_RANKING} == set(get_args(CountedItem))
    assert all(find_loss(term).reading.per == per for per, terms in EVERY_ITEM.items() for term in terms)
    counts = {per: count.item() for per, count in counted(masked_batch(some)).items()}
    assert counts == {"example": 4, "row": 4, "token": 17, "pair": 49 + 9 + 25 + 4, "label": 4}


def test_without_a_mask_all_tokens_count() -> None:
    step = Distillation(tiny.model("bert", head=AutoModelForMaskedLM), None, [Term("bert.masked_lm")])
    ids = tiny.batch((6, 6, 6, 6))["input_ids"]
    batch = {"input_ids": ids, "labels": some(ids)}
    found = step.items(batch)
    assert found == step.items(batch | {"attention_mask": torch.ones_like(ids)})
    assert step(**batch, items=found)["loss"].item() == step(**batch)["loss"].item()


@pytest.mark.parametrize("labels", [some, only_one])
@pytest.mark.parametrize("cut", [(3, 1), (2, 1, 1)])
@pytest.mark.parametrize("per", EVERY_ITEM)
def test_split_equals_whole(per: CountedItem, cut: tuple[int, ...], labels: Callable[[Tensor], Tensor]) -> None:
    """Losses and gradients of unequal parts, each told the mean count, average to those of the whole batch."""
    student = tiny.model("bert", head=AutoModelForMaskedLM, layers=2)
    teacher = tiny.model("bert", head=AutoModelForMaskedLM, layers=4, seed=1)
    step = Distillation(student, teacher, EVERY_ITEM[per])
    batch = masked_batch(labels)
    check_split(step, batch, cut, means)


@pytest.mark.parametrize("cut", [(3, 5), (5, 1, 2), (6, 2)])
@pytest.mark.parametrize("per", EVERY_ITEM_OF_A_RANKING)
def test_whole_queries_may_be_split(per: CountedItem, cut: tuple[int, ...]) -> None:
    """The parts hold 1 to 3 queries, of 1 to 3 passages, and 0 to 3 preferences."""
    student, teacher = tiny.bert(1), tiny.bert(1, layers=3, seed=1)
    shapes = (Shape.from_config(model.config) for model in (student, teacher))
    step = Distillation(student, teacher, Objective(EVERY_ITEM_OF_A_RANKING[per], *shapes, kind="ranking"))
    batch = tiny.batch((7, 3, 5, 2, 4, 6, 5, 2)) | {
        "query": torch.tensor([4, 4, 4, 1, 1, 0, 2, 2]),
        "labels": torch.tensor([[1.0], [0.0], [0.5], [0.0], [1.0], [1.0], [0.0], [0.0]]),
    }

    assert {name: step.items(batch)[name].item() for name in ("query", "preference")} == {"query": 4, "preference": 4}
    check_split(step, batch, cut, partial(means_of, step))


# The steps of papers


def objective(student: Any, teacher: Any, *terms: Term, kind: Kind | None = None) -> Objective:
    return Objective(terms, Shape.from_config(student.config), Shape.from_config(teacher.config), kind=kind)


def masked(labels: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Make a batch of which only labelled tokens are [MASK]."""
    batch = masked_batch(labels)
    batch["input_ids"] = batch["input_ids"].where(batch["labels"] == -100, WORDS.need_mask("the test"))
    return batch


def of_task(kind: Kind) -> dict[str, Tensor]:
    batch = tiny.batch((7, 3, 5, 2))
    some_tags = some(batch["input_ids"] % 3).where(batch["attention_mask"] == 1, -100)
    labels = {
        "classification": torch.tensor([0, 2, 1, 1]),
        "multilabel": torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]),
        "regression": torch.tensor([0.5, 2.0, -1.0, 0.0]),
        "tagging": some_tags,
        "qa": torch.tensor([[1, 2], [0, 0], [3, 4], [1, 1]]),
    }
    return batch | {"labels": labels[kind]}


def sift(kind: Kind) -> Any:
    outputs = {"regression": 1, "qa": 2}.get(kind, 3)
    student = find(kind).auto_class().from_config(tiny.config("bert", labels=outputs, **NO_DROPOUT))
    student.eval().double()  # the differences of two answers are small
    terms = objective(student, student, Term("bert.labels"), kind=kind)
    return deberta.ScaleInvariantFineTuning(student, None, terms, start=0.1, step_size=0.1)


@pytest.mark.parametrize("cut", [(3, 1), (2, 1, 1)])
@pytest.mark.parametrize("kind", ["classification", "multilabel", "regression", "tagging", "qa"])
def test_sift_is_the_same_in_unequal_parts(kind: Kind, cut: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise is the same at every token, so that it does not depend on the part."""
    noise_E = torch.randn(32, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(torch, "randn_like", lambda like, **_: noise_E.expand_as(like).clone())
    step = sift(kind)
    assert float(step(**of_task(kind))["deberta.sift"]) > 1e-3
    check_split(step, of_task(kind), cut, partial(means_of, step))


def language_models(family: str = "bert", **changes: Any) -> tuple[Any, Any]:
    student, teacher = (
        tiny.model(family, head=AutoModelForMaskedLM, layers=layers, seed=layers, **changes) for layers in (2, 4)
    )
    return student, teacher


def enhanced() -> nn.Module:
    return deberta.EnhancedMaskDecoder(language_models("deberta-v2")[0], None, None)


def replaced_tokens() -> nn.Module:
    student = tiny.model("electra", head=AutoModelForPreTraining)
    return electra.ReplacedTokens(student, None, None, width=0.5, weight=1.0)


def replaced_tokens_of_deberta() -> nn.Module:
    return deberta_v3.ReplacedTokenDetection(tiny.model("deberta-v2", head=AutoModel), None, None)


def matched_layers() -> nn.Module:
    student, teacher = language_models()
    terms = objective(student, teacher, Term("distilbert.masked_soft_targets"))
    return Matched(student, teacher, terms, match=MatchOptions(matched_layers=[3], ordered=True))


def wrapped(step: str, *terms: Term, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        student, teacher = language_models()
        made: nn.Module = Call(step, options)(student, teacher, objective(student, teacher, *terms))
        return made

    return make


UNEVEN: Mapping[str, Callable[[], nn.Module]] = {
    "deberta.EnhancedMaskDecoder": enhanced,
    "deberta_v3.ReplacedTokenDetection": replaced_tokens_of_deberta,
    "electra.ReplacedTokens": replaced_tokens,
    "electra.FineTuning": wrapped("electra.FineTuning", Term("bert.masked_lm"), Term("tinybert.hidden")),
    "cofi.Matched": matched_layers,
    "mobilebert.Progressive": wrapped("mobilebert.Progressive", Term("mobilebert.feature_maps")),
    "mobilebert.WithoutDropout": wrapped("mobilebert.WithoutDropout", Term("mobilebert.masked_lm")),
    "q8bert.QuantizationAware": wrapped("q8bert.QuantizationAware", Term("bert.masked_lm")),
    "dynabert.Sandwich": wrapped(
        "dynabert.Sandwich", Term("bert.masked_lm"), Term("tinybert.hidden", project=True), widths=[0.5]
    ),
}
"""Steps of the papers; those that sample continuations are below."""


@pytest.mark.parametrize("labels", [some, only_one])
@pytest.mark.parametrize("name", UNEVEN)
def test_steps_are_the_same_in_unequal_parts(
    name: str, labels: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples of a generator are its likeliest tokens, so that they do not depend on the part."""
    monkeypatch.setattr(torch, "multinomial", lambda weights, *_: weights.argmax(-1, keepdim=True))
    step = UNEVEN[name]()
    if name == "q8bert.QuantizationAware":
        step(**masked(labels))  # in eval mode the ranges of its inputs stay as they are
    step.eval()
    for cut in ((3, 1), (2, 1, 1)):
        check_split(step, masked(labels), cut, partial(means_of, step))


@pytest.mark.parametrize("cut", [(3, 1), (2, 1, 1)])
def test_texts_that_are_not_sampled_are_the_same_in_unequal_parts(cut: tuple[int, ...]) -> None:
    student, teacher = (tiny.model("llama", head=AutoModelForCausalLM, seed=seed) for seed in (1, 2))
    step = gkd.OnPolicy(student, teacher, objective(student, teacher, Term("gkd.divergence")), words=WORDS, share=0.0)
    check_split(step, masked_batch(some), cut, partial(means_of, step))


def test_the_corpus_of_minillm_is_the_same_in_unequal_parts() -> None:
    student, teacher = (tiny.model("llama", head=AutoModelForCausalLM, seed=seed) for seed in (1, 2))
    terms = objective(student, teacher, Term("bert.masked_lm"))
    step = minillm.PolicyGradient(student, teacher, terms, words=WORDS, prompt=2, new_tokens=3)
    batch = gpt2.next_tokens(masked_batch(some), WORDS)
    whole = step(**batch)["bert.masked_lm"]
    parts = divide(batch, (3, 1))
    items = means_of(step, parts)
    found = [step(**part, items=items)["bert.masked_lm"] for part in parts]
    torch.testing.assert_close(torch.stack(found).mean(), whole)


@pytest.mark.parametrize("cut", [(3, 1), (2, 1, 1)])
@pytest.mark.parametrize(
    "name",
    ["hinton.soft_targets", "tinybert.prediction", "pkd.patience", "minilm.attention", "textbrewer.feature_grams"],
)
def test_tagging_without_labels_is_the_same_in_unequal_parts(name: str, cut: tuple[int, ...]) -> None:
    """Every real token is an example of logits: their mean is over 17 tokens, not over none; of states a row is one."""
    student, teacher = (tiny.model("bert", head=AutoModelForTokenClassification, seed=seed) for seed in (1, 2))
    step = Distillation(student, teacher, objective(student, teacher, Term(name), kind="tagging"))
    batch = tiny.batch((7, 3, 5, 2))
    assert step.items(batch)["example"].item() == 17
    assert float(step(**batch)["loss"].detach()) > 0.01
    check_split(step, batch, cut, partial(means_of, step))


def means_of(step: Any, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    counts = [step.items(part) for part in parts]
    return {per: torch.stack([count[per] for count in counts]).mean() for per in counts[0]}


def divide(batch: Mapping[str, Tensor], cut: tuple[int, ...]) -> list[dict[str, Tensor]]:
    rows = [tensor.split(cut) for tensor in batch.values()]
    return [dict(zip(batch, row, strict=True)) for row in zip(*rows, strict=True)]


def check_split(
    step: Any,
    batch: Mapping[str, Tensor],
    cut: tuple[int, ...],
    mean: Callable[[Sequence[Mapping[str, Tensor]]], dict[str, Tensor]],
) -> None:
    whole = step(**batch)
    expected = gradients(step, whole["loss"])
    parts = divide(batch, cut)
    items = mean(parts)
    outs = [step(**part, items=items) for part in parts]
    split = gradients(step, torch.stack([out["loss"] for out in outs]).mean())

    for name in whole:
        torch.testing.assert_close(torch.stack([out[name] for out in outs]).mean(), whole[name])
    assert split.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(split[name], gradient, rtol=1e-4, atol=1e-6)
