"""Which of several shapes to prune a model to: each is cut at once, by importance, and asked before any training.

How far a cut model's answers are from the whole model's costs a forward pass, not a training. What is nearer before
training need not be nearer after it (Muralidharan et al. 2024, arXiv:2407.14679, train candidates briefly for that), so
a narrow lead means little.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from compress.data.batches import Batching
from compress.data.task import Kind
from compress.errors import PruneError
from compress.objective import Objective, find_loss
from compress.recipe import Recipe
from compress.shape import Shape
from compress.signals import Signals, read
from compress.slicing import Importance, Sizes, SlicePlan, choose, parameters_of, sliced
from compress.slicing.kept import counts
from compress.term import Term

BATCH = 32


def last_words(recipe: Recipe, kind: Kind | None) -> list[Term]:
    """The part of the recipe's last objective that reads logits: what its students are to answer in the end."""
    for stage in reversed(recipe.training):
        terms = [term for term in stage.objective if term.serves(kind) and find_loss(term).reading.signal == "logits"]
        if terms:
            return terms
    raise PruneError(f"{recipe.name}: no objective reads logits, by which a budget could choose a shape; give sizes")


@torch.inference_mode()
def losses(
    model: PreTrainedModel,
    shapes: Mapping[str, Sizes],
    rated: Importance,
    rows: Dataset,
    collate: Batching,
    *,
    layers: str | None,
    terms: Sequence[Term],
    kind: Kind | None,
) -> dict[str, float]:
    """The mean loss of each shape on `rows`, with `model` as the teacher.

    layers: the rule by which they stay; None: the most important.
    """
    plan, shape = SlicePlan.of(model), Shape.of(model.config)
    objective = Objective(terms, shape, shape, kind=kind)
    batches = _batches(rows, collate, model.device)
    shown = [read(model, batch, frozenset({"logits"})) for batch in batches]
    found = {}
    for name, sizes in shapes.items():
        small = sliced(model, choose(plan, rated, sizes, layers=layers)).eval()
        found[name] = _mean(small, objective, batches, shown)
    return found


def parameters(model: PreTrainedModel, plan: SlicePlan, sizes: Sizes) -> int:
    """How many parameters the slice of this model would have, without cutting it."""
    left: dict[Any, int] = {**counts(plan, sizes), **dict.fromkeys(plan.heads, sizes.attention)}
    left |= dict.fromkeys(plan.heads.values(), sizes.heads)
    each = {id(tensor): (name, tensor) for name, tensor in parameters_of(model).items()}  # tied ones once
    total = 0.0
    for name, tensor in each.values():
        dims = list(tensor.shape)
        for part in plan.cuts[name].slices:
            dims[part.dim] = sum(left.get(group, plan.groups[group]) for group in part.groups)
        share = sizes.layers / plan.sizes.layers if plan.cuts[name].layer is not None else 1
        total += math.prod(dims) * share
    return round(total)


def _batches(rows: Dataset, collate: Batching, device: Any) -> list[dict[str, Tensor]]:
    """Rows of like lengths together."""
    order = np.argsort(np.asarray(rows["length"][:]), kind="stable")
    parts = (order[at : at + BATCH] for at in range(0, len(order), BATCH))
    return [{k: v.to(device) for k, v in collate([rows[int(i)] for i in part]).items()} for part in parts]


def _mean(
    model: PreTrainedModel, objective: Objective, batches: Sequence[dict[str, Tensor]], shown: Sequence[Signals]
) -> float:
    total, seen = 0.0, 0
    for batch, teacher in zip(batches, shown, strict=True):
        size = len(batch["input_ids"])
        parts = objective(read(model, batch, objective.student_wants), teacher, batch)
        total, seen = total + size * float(parts["total"]), seen + size
    return total / seen
