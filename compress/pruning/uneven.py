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
from compress.slicing.kept import most, of_heads
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
    heads = _best([of_heads(plan, rated, Group("heads", str(layer))) for layer in depth.layers], sizes.heads)
    ffn = _best([rated[Group("ffn", str(layer))] for layer in depth.layers], sizes.ffn)
    hidden = most(rated[HIDDEN], sizes.hidden) if sizes.hidden < plan.sizes.hidden else None
    small = to_uneven(shallow, kept_layerwise(SlicePlan.of(shallow), heads=heads, ffn=ffn, hidden=hidden))
    indices = {Group(axis, str(layer)): units
               for axis, each in (("heads", heads), ("ffn", ffn))
               for layer, units in zip(depth.layers, each, strict=True)}  # fmt: skip
    if hidden is not None:
        indices[HIDDEN] = hidden
    return small, replace(depth, sizes=sizes, indices=indices)


def _best(rated: Sequence[Tensor], average: int) -> list[Tensor]:
    """Of each layer those of its units that are among the best of all, in their order; `average` of each layer."""
    best = torch.zeros(sum(map(len, rated)), dtype=torch.bool)
    best[most(torch.cat([vector.float().cpu() for vector in rated]), average * len(rated))] = True
    return [part.nonzero().flatten() for part in best.split([len(vector) for vector in rated])]
