"""An uneven encoder cut out of an even one: what each layer keeps is said layer by layer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.errors import PruneError
from compress.models.uneven import CLASSES, CONFIGS
from compress.slicing import Group, Kept, SlicePlan, cut, parameters_of, resized
from compress.slicing.plan import HIDDEN


def kept_layerwise(
    plan: SlicePlan, *, heads: Sequence[Tensor], ffn: Sequence[Tensor], hidden: Tensor | None = None
) -> Kept:
    """Keep these heads and neurons of each layer, by their places in the source; hidden dimensions of all, or these."""
    K = plan.sizes.head_size
    indices: dict[Group, Tensor] = {}
    for layer, (heads_H, ffn_F) in enumerate(zip(heads, ffn, strict=True)):
        rows_R = (heads_H[:, None] * K + torch.arange(K)).flatten()
        indices[Group("heads", str(layer))], indices[Group("ffn", str(layer))] = heads_H, ffn_F
        indices[Group("query", str(layer))] = indices[Group("value", str(layer))] = rows_R
    if hidden is not None:
        indices[HIDDEN] = hidden
    most = {"heads": max(map(len, heads)), "ffn": max(map(len, ffn))}
    wide = plan.sizes.hidden if hidden is None else len(hidden)
    sizes = replace(plan.sizes, hidden=wide, heads=max(1, most["heads"]), ffn=max(1, most["ffn"]))
    return Kept(sizes, tuple(range(plan.sizes.layers)), indices)


def to_uneven(model: PreTrainedModel, kept: Kept) -> PreTrainedModel:
    """A model of `models.uneven` with the kept units, its own weights, in the mode `model` is in.

    It answers as `model` does under `slicing.masked(model, kept)`. Raises PruneError for a family that has no such
    form, and where the values of a layer keep other heads than its queries.
    """
    stock = type(model)
    if stock not in CLASSES:
        raise PruneError(
            f"{stock.__name__}: layers cannot differ in size; they can in transformers' {', '.join(CONFIGS)} with the "
            "usual heads"
        )
    plan = SlicePlan.of(model)
    config = _config(model.config, plan, kept)
    with init_empty_weights(include_buffers=False):
        small: Any = CLASSES[stock](config)
    weights = cut(plan, parameters_of(model), kept)
    for name in parameters_of(small):
        module, _, part = name.rpartition(".")
        own = weights[name].detach().clone(memory_format=torch.contiguous_format)
        setattr(small.get_submodule(module), part, nn.Parameter(own))
    small.tie_weights()
    made: PreTrainedModel = small.train(model.training)
    return made


def _config(source: Any, plan: SlicePlan, kept: Kept) -> Any:
    even = resized(source, kept.sizes)
    known = {key: value for key, value in even.to_dict().items() if key not in ("model_type", "architectures")}
    heads = [_width(plan, kept, "value", layer) // kept.sizes.head_size for layer in kept.layers]
    if heads != [_width(plan, kept, "query", layer) // kept.sizes.head_size for layer in kept.layers]:
        raise PruneError(f"the values of a layer keep other numbers of heads ({heads}) than its queries")
    ffn = [_width(plan, kept, "ffn", layer) for layer in kept.layers]
    chosen: Any = CONFIGS[plan.family]
    return chosen(**known, heads=heads, ffn=ffn, head_size=kept.sizes.head_size)


def _width(plan: SlicePlan, kept: Kept, axis: str, layer: int) -> int:
    group = Group(axis, str(layer))
    return len(kept.indices[group]) if group in kept.indices else plan.groups[group]
