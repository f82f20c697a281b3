"""Means that stay exact when a batch is split over processes or accumulated in parts."""

from collections.abc import Callable, Mapping, Sequence
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM

from compress.config.term import Term
from compress.slicing.shape import Shape
from compress.training.objective import Objective, count_items, find_loss
from compress.training.reads import Item
from compress.training.step import Distillation
from tests import tiny

EVERY_ITEM: dict[Item, list[Term]] = {
    "example": [Term("pkd.patience"), Term("minilm.value_relation", layers="last")],
    "token": [Term("tinybert.hidden"), Term("distilbert.soft_targets")],
    "pair": [Term("tinybert.attention")],
    "label": [Term("bert.masked_lm"), Term("distilbert.masked_soft_targets")],
}

EVERY_ITEM_OF_A_RANKING: dict[Item, list[Term]] = {
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
    assert {*EVERY_ITEM, *EVERY_ITEM_OF_A_RANKING} == set(get_args(Item))
    assert all(find_loss(term).reading.per == per for per, terms in EVERY_ITEM.items() for term in terms)
    counts = {per: count.item() for per, count in counted(masked_batch(some)).items()}
    assert counts == {"example": 4, "token": 17, "pair": 49 + 9 + 25 + 4, "label": 4}


@pytest.mark.parametrize("labels", [some, only_one])
@pytest.mark.parametrize("cut", [(3, 1), (1, 3), (2, 1, 1)])
@pytest.mark.parametrize("per", EVERY_ITEM)
def test_split_equals_whole(per: Item, cut: tuple[int, ...], labels: Callable[[Tensor], Tensor]) -> None:
    """Losses and gradients of unequal parts, each told the mean count, average to those of the whole batch."""
    student = tiny.model("bert", head=AutoModelForMaskedLM, layers=2)
    teacher = tiny.model("bert", head=AutoModelForMaskedLM, layers=4, seed=1)
    step = Distillation(student, teacher, EVERY_ITEM[per])
    batch = masked_batch(labels)
    check_split(step, batch, cut, means)


@pytest.mark.parametrize("cut", [(3, 5), (5, 1, 2), (6, 2)])
@pytest.mark.parametrize("per", EVERY_ITEM_OF_A_RANKING)
def test_whole_queries_may_be_split(per: Item, cut: tuple[int, ...]) -> None:
    """The parts hold 1 to 3 queries, of 1 to 3 passages, and 0 to 3 preferences."""
    student, teacher = tiny.bert(1), tiny.bert(1, layers=3, seed=1)
    shapes = (Shape.from_config(model.config) for model in (student, teacher))
    step = Distillation(student, teacher, Objective(EVERY_ITEM_OF_A_RANKING[per], *shapes, kind="ranking"))
    batch = tiny.batch((7, 3, 5, 2, 4, 6, 5, 2)) | {
        "query": torch.tensor([4, 4, 4, 1, 1, 0, 2, 2]),
        "labels": torch.tensor([[1.0], [0.0], [0.5], [0.0], [1.0], [1.0], [0.0], [0.0]]),
    }

    def of_parts(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        counts = [step.items(part) for part in parts]
        return {per: torch.stack([count[per] for count in counts]).mean() for per in counts[0]}

    assert {name: step.items(batch)[name].item() for name in ("query", "preference")} == {"query": 4, "preference": 4}
    check_split(step, batch, cut, of_parts)


def check_split(
    step: Distillation,
    batch: Mapping[str, Tensor],
    cut: tuple[int, ...],
    mean: Callable[[Sequence[Mapping[str, Tensor]]], dict[str, Tensor]],
) -> None:
    whole = step(**batch)
    expected = gradients(step, whole["loss"])
    rows = [tensor.split(cut) for tensor in batch.values()]
    parts = [dict(zip(batch, row, strict=True)) for row in zip(*rows, strict=True)]
    items = mean(parts)
    outs = [step(**part, items=items) for part in parts]
    split = gradients(step, torch.stack([out["loss"] for out in outs]).mean())

    for name in whole:
        torch.testing.assert_close(torch.stack([out[name] for out in outs]).mean(), whole[name])
    assert split.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(split[name], gradient, rtol=1e-4, atol=1e-6)
