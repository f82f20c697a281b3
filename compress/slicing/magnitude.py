"""Importance by the size of the weights alone: no data, no gradients.

A unit matters as much as the weights that write it and those that read it: the product of their norms, so that a unit
that is large on one side and unread on the other does not count.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.slicing.kept import Importance
from compress.slicing.plan import Group, SlicePlan, parameters_of

_WRITE = {
    "hidden": ("ffn_out", "widen"),
    "embedding": ("words",),
    "ffn": ("ffn_in",),
    "query": ("query", "position_query", "qkv"),
    "value": ("value", "qkv"),
    "bottleneck": ("narrow", "attention_out", "ffn_out"),
    "shared": ("narrow_attention",),
}
_READ = {
    "hidden": ("ffn_in", "narrow"),
    "embedding": (),
    "ffn": ("ffn_out",),
    "query": ("key", "position_key", "qkv"),
    "value": ("attention_out",),
    "bottleneck": ("ffn_in", "widen"),
    "shared": ("query", "key"),
}


@torch.no_grad()
def magnitude(model: PreTrainedModel, plan: SlicePlan | None = None) -> Importance:
    """Of each unit, the norm of the weights that write it times that of those that read it, over all its layers.

    Of an embedding's widths, the norm of the table's columns. Layers have none.
    """
    plan = plan or SlicePlan.of(model)
    weights = parameters_of(model)
    found: dict[Group, Tensor] = {}
    for group in plan.groups:
        if group.axis in _WRITE:
            written = _squares(plan, weights, group, _WRITE[group.axis], first=True)
            read = _squares(plan, weights, group, _READ[group.axis], first=False)
            found[group] = (written * read).sqrt() if _READ[group.axis] else written.sqrt()
    return found


def _squares(
    plan: SlicePlan, weights: dict[str, Tensor], group: Group, roles: tuple[str, ...], *, first: bool
) -> Tensor:
    """The sum of squares of weights of these roles along each unit; of queries and keys in one matrix, one of both."""
    total = torch.zeros(plan.groups[group])
    for name, cut, each, part in plan.along(group):
        if cut.role not in roles or not name.endswith("weight"):
            continue
        if cut.role == "qkv" and group.axis == "query" and (part == cut.queries) != first:
            continue
        matrix = weights[name].detach().float()
        piece = matrix.chunk(len(each.groups), each.dim)[part]
        total += piece.pow(2).sum([dim for dim in range(piece.dim()) if dim != each.dim]).cpu()
    return total
