"""Pruning where every layer keeps as many heads and neurons as matter in it: the best of all layers together."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.errors import PruneError
from compress.models.uneven import CLASSES, CONFIGS
from compress.models.uneven_slices import kept_layerwise, to_uneven
from compress.slicing import Group, Importance, Kept, Sizes, SlicePlan, choose, sliced
from compress.slicing.plan import HIDDEN


def check_form(model: PreTrainedModel) -> None:
    """Raises PruneError for a model that has no form in which its layers differ."""
    if type(model) not in CLASSES:
        raise PruneError(
            f"{type(model).__name__}: layers cannot differ in size; they can in {', '.join(CONFIGS)}. Leave out "
            "--heterogeneous"
        )


def cut_unevenly(
    model: PreTrainedModel, rated: Importance, sizes: Sizes, *, layers: str | None
) -> tuple[PreTrainedModel, Kept]:
    """The model with this many layers and widths; heads and neurons are `sizes.heads` and `sizes.ffn` on average over
    the layers, the most important of all of them. Heads keep their size.

    layers: the rule by which layers stay; None: the most important. What is kept is by the places in `model`. Raises
    PruneError for families whose layers cannot differ (`models.uneven`).
    """
    plan = SlicePlan.of(model)
    depth = choose(plan, rated, replace(plan.sizes, layers=sizes.layers), layers=layers)
    shallow = sliced(model, depth) if sizes.layers < plan.sizes.layers else model
    heads = _best([_heads(plan, rated, str(layer)) for layer in depth.layers], sizes.heads)
    ffn = _best([rated[Group("ffn", str(layer))] for layer in depth.layers], sizes.ffn)
    hidden = rated[HIDDEN].topk(sizes.hidden).indices.sort().values if sizes.hidden < plan.sizes.hidden else None
    small = to_uneven(shallow, kept_layerwise(SlicePlan.of(shallow), heads=heads, ffn=ffn, hidden=hidden))
    indices = {Group(axis, str(layer)): units
               for axis, each in (("heads", heads), ("ffn", ffn))
               for layer, units in zip(depth.layers, each, strict=True)}  # fmt: skip
    if hidden is not None:
        indices[HIDDEN] = hidden
    return small, replace(depth, sizes=sizes, indices=indices)


def _heads(plan: SlicePlan, rated: Importance, block: str) -> Tensor:
    """Of a function that rates no heads: their rows of values together."""
    whole = rated.get(Group("heads", block))
    return rated[Group("value", block)].view(plan.sizes.heads, -1).sum(-1) if whole is None else whole


def _best(rated: Sequence[Tensor], average: int) -> list[Tensor]:
    """Of each layer those of its units that are among the best of all, in their order; `average` of each layer."""
    every = torch.cat([vector.float().cpu() for vector in rated])
    best = torch.zeros(len(every), dtype=torch.bool)
    best[every.topk(average * len(rated)).indices] = True
    return [part.nonzero().flatten() for part in best.split([len(vector) for vector in rated])]
