"""Cut the weights of a smaller model out of a larger one, and build the smaller model.

The smaller model computes what the larger one would with everything else masked,
including norms over only the kept dimensions. Scores are divided by the square root of
the head size, so queries are scaled by the ratio of the sizes.
"""

import copy
import math
from itertools import product
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.errors import PruneError
from compress.slicing.plan import VOCABULARY, Cut, Group, SlicePlan, parameters_of
from compress.slicing.select import (
    Importance,
    Kept,
    best_first,
    check_layers,
    counts,
    importance_of,
)
from compress.slicing.sizes import resize_config
from compress.tensors import TensorDict, Tensors


def cut(plan: SlicePlan, tensors: Tensors, kept: Kept) -> TensorDict:
    """Cut the smaller model's weights, by name, out of the larger one's `tensors`;
    gradients flow back to these.

    Prefixes are views. New units are zero.
    """
    smaller: TensorDict = {}
    for name, tensor in tensors.items():
        if names := _new_names(name, plan.cuts[name], kept):
            smaller |= dict.fromkeys(names, _slice(tensor, plan.cuts[name], plan, kept))
    return smaller


def slice_model(model: PreTrainedModel, kept: Kept) -> PreTrainedModel:
    """Build a plain transformers model of the same class from the kept units, with its
    own weights and a matching config.

    New rows of queries and values are drawn from torch's generator, as in a new model;
    the rows they are multiplied with are zero, so that nothing changes before training.
    Raises PruneError if blocks would differ in size, and if layers share weights.
    """
    plan = SlicePlan.from_model(model)
    if getattr(model.config, "shared_layers", None):
        raise PruneError(
            f"{type(model).__name__}: its layers share weights; prune the model first, "
            "and share weights afterwards"
        )
    for group, count in {
        **counts(plan, kept.sizes),
        **dict.fromkeys(plan.heads, kept.sizes.attention),
    }.items():
        found = (
            len(kept.indices[group]) if group in kept.indices else plan.groups[group]
        )
        if found != count:
            raise PruneError(
                f"{group}: {found} units are kept, but the sizes say {count}; all "
                f"blocks of a plain {plan.family.name} have the same number"
            )
    check_layers(plan.family, kept.layers)
    config = resize_config(model.config, kept.sizes, layers=kept.layers)
    if VOCABULARY in kept.indices:
        config.vocab_size = len(kept.indices[VOCABULARY])
    with init_empty_weights(include_buffers=False):
        small = type(model)(config)
    with torch.no_grad():
        weights = cut(plan, parameters_of(model), kept)
        taken = {_memory(tensor) for tensor in parameters_of(model).values()}
        for name in parameters_of(small):
            module, _, part = name.rpartition(".")
            own = weights.pop(name).detach()
            # a view, or a layer that is kept twice
            if _memory(own) in taken or not own.is_contiguous():
                own = own.clone(memory_format=torch.contiguous_format)
            taken.add(_memory(own))
            setattr(small.get_submodule(module), part, nn.Parameter(own))
        _draw_new_rows(plan, small, kept)
    head: Any = small.get_output_embeddings()
    untied = getattr(head, "weight", None)
    small.tie_weights()
    if has_own_head(model):
        head.weight = untied
    copy_generation_config(small, model)
    return small.train(model.training)


def has_own_head(model: PreTrainedModel) -> bool:
    """Check whether a head over the vocabulary has weights of its own: those of Flan-T5
    and mT5 have, although their configs tie them to the embedding."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is not model.get_input_embeddings().weight


def copy_generation_config(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Let a student write as its teacher does, if both can: to the same end tokens,
    with the same penalties."""
    if student.can_generate() and teacher.can_generate():
        student.generation_config = copy.deepcopy(teacher.generation_config)


def reorder_units(model: PreTrainedModel, importance: Importance) -> PreTrainedModel:
    """Build an equivalent model in which the units of every group are sorted, the best
    first."""
    return slice_model(model, rank_units(SlicePlan.from_model(model), importance))


def rank_units(plan: SlicePlan, importance: Importance) -> Kept:
    """Sort all units, the most important of every group first.

    Heads move as a whole, and rows within their head, except queries with rotary
    positions. Layers stay in place.
    """
    indices: dict[Group, Tensor] = {
        group: best_first(importance[group])
        for group in counts(plan, plan.sizes)
        if group in importance
    }
    H = plan.sizes.heads
    K = plan.sizes.head_size
    for rows, heads in plan.heads.items():
        order_H = best_first(importance_of(plan, importance, heads))
        inside_HK = best_first(importance[rows].view(H, K))[order_H]
        if rows.axis == "query" and plan.family.rotary:
            inside_HK = torch.arange(K).expand(H, -1)
        indices[heads] = order_H
        indices[rows] = (order_H[:, None] * K + inside_HK).flatten()
    return Kept(plan.sizes, tuple(range(plan.sizes.layers)), indices)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _new_names(name: str, how: Cut, kept: Kept) -> list[str]:
    """Return the names in the smaller model of the weights that come from this
    weight."""
    if how.layer is None:
        return [name]
    begin, end = how.span
    return [
        f"{name[:begin]}{n}{name[end:]}"
        for n, source in enumerate(kept.layers)
        if source == how.layer
    ]


def _slice(tensor: Tensor, how: Cut, plan: SlicePlan, kept: Kept) -> Tensor:
    for each in how.slices:
        if not any(group in kept.indices for group in each.groups):
            continue
        parts = tensor.chunk(len(each.groups), each.dim)
        taken = [
            _take(part, each.dim, plan.groups[group], kept.indices.get(group))
            for part, group in zip(parts, each.groups, strict=True)
        ]
        factor = math.sqrt(kept.sizes.head_size / plan.sizes.head_size)
        if (
            how.queries is not None
            and each.groups[how.queries].axis == "query"
            and factor != 1
        ):
            taken[how.queries] = taken[how.queries] * factor
        tensor = taken[0] if len(taken) == 1 else torch.cat(taken, each.dim)
    return tensor


def _take(tensor: Tensor, dim: int, count: int, indices: Tensor | None) -> Tensor:
    """Take the units at these indices, of `count` that lie along the dimension."""
    if indices is None:
        return tensor
    if (width := tensor.shape[dim] // count) > 1:
        indices = (indices[:, None] * width + torch.arange(width)).flatten()
    if bool((indices == torch.arange(len(indices))).all()):
        return tensor.narrow(dim, 0, len(indices))
    taken = tensor.index_select(dim, indices.clamp(min=0).to(tensor.device))
    if bool((indices < 0).any()):
        shape = [1] * tensor.dim()
        shape[dim] = -1
        taken = taken * (indices >= 0).to(tensor).view(shape)
    return taken


def _draw_new_rows(plan: SlicePlan, small: PreTrainedModel, kept: Kept) -> None:
    """Draw the new rows of queries and values; the keys and output columns they are
    multiplied with stay zero."""
    if kept.sizes.head_size <= plan.sizes.head_size:
        return
    spread = float(getattr(small.config, "initializer_range", 0.02))
    weights = parameters_of(small)
    for source, how in plan.cuts.items():
        if how.role not in ("query", "value", "qkv") or not source.endswith("weight"):
            continue
        for name, each in product(_new_names(source, how, kept), how.slices):
            for part, group in enumerate(each.groups):
                if group not in plan.heads or (
                    group.axis == "query" and part != how.queries
                ):
                    continue
                place = (
                    weights[name]
                    .data.chunk(len(each.groups), each.dim)[part]
                    .movedim(each.dim, 0)
                )
                new = kept.indices[group].to(place.device) < 0
                place[new] = torch.randn_like(place[new]) * spread
