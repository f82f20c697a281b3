"""Which dimensions, heads and neurons of a teacher a narrower student keeps: those with the largest weights.

Importance is the magnitude of the weights that write a unit times that of the weights that read it, so a unit that is
large on one side and unread on the other does not count. Kept indices stay in the teacher's order.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.errors import StudentError
from compress.shape import Shape
from compress.students.naming import Weight


@dataclass(frozen=True)
class Kept:
    """Teacher indices a student keeps along each axis; for heads and ffn, per teacher layer."""

    hidden: Tensor
    embedding: Tensor
    query_heads: Mapping[int, Tensor]
    value_heads: Mapping[int, Tensor]
    ffn: Mapping[int, Tensor]

    def along(self, axis: str, layer: int | None) -> Tensor:
        kept = getattr(self, axis)
        return kept if isinstance(kept, Tensor) else kept[layer]


def choose(weights: Mapping[Weight, Tensor], teacher: Shape, student: Shape) -> Kept:
    """Raises StudentError when the student is wider than its teacher."""
    for size in ("hidden", "embedding", "heads", "head_size", "ffn"):
        mine, theirs = getattr(student, size), getattr(teacher, size)
        if mine > theirs:
            raise StudentError(
                f"student: init: teacher can only narrow, but {size} {mine} is more than the teacher's {theirs}; "
                "make it smaller (hidden = heads x head size) or use init: scratch"
            )
    hidden = _hidden(weights, student.hidden)
    factorised = teacher.embedding != teacher.hidden
    embedding = (
        _largest(_norm(weights[Weight("words", None, "weight")], 0), student.embedding) if factorised else hidden
    )
    query: dict[int, Tensor] = {}
    value: dict[int, Tensor] = {}
    ffn: dict[int, Tensor] = {}
    for layer in range(teacher.layers):
        query[layer], value[layer] = _heads(weights, layer, teacher, student)
        neurons = _norm(weights[Weight("ffn_in", layer, "weight")], 1) * _norm(
            weights[Weight("ffn_out", layer, "weight")], 0
        )
        ffn[layer] = _largest(neurons, student.ffn)
    return Kept(hidden, embedding, query, value, ffn)


def _norm(weight: Tensor, over: int) -> Tensor:
    return weight.float().norm(dim=over)


def _largest(importance: Tensor, count: int) -> Tensor:
    return importance.topk(count).indices.sort().values


def _hidden(weights: Mapping[Weight, Tensor], count: int) -> Tensor:
    """A residual dimension matters as much as the layers write to it and read from it, summed over layers."""
    written = [
        _norm(w, 1).pow(2) for key, w in weights.items() if key.part == "weight" and key.axes == ("hidden", "ffn")
    ]
    read = [_norm(w, 0).pow(2) for key, w in weights.items() if key.part == "weight" and key.axes == ("ffn", "hidden")]
    return _largest(torch.stack(written).sum(0) * torch.stack(read).sum(0), count)


def _heads(weights: Mapping[Weight, Tensor], layer: int, teacher: Shape, student: Shape) -> tuple[Tensor, Tensor]:
    """Rows of (query and key), rows of (value and attention output): whole heads first, then dimensions within."""
    of = {role: weights[Weight(role, layer, "weight")] for role in ("query", "key", "value", "attention_out")}
    match_HK = (_norm(of["query"], 1) * _norm(of["key"], 1)).view(teacher.heads, teacher.head_size)
    carry_HK = (_norm(of["value"], 1) * _norm(of["attention_out"], 0)).view(teacher.heads, teacher.head_size)
    heads = _largest(carry_HK.sum(1), student.heads)
    return _rows(match_HK, heads, student.head_size), _rows(carry_HK, heads, student.head_size)


def _rows(importance_HK: Tensor, heads: Tensor, size: int) -> Tensor:
    inside_HK = importance_HK[heads].topk(size, dim=1).indices.sort(dim=1).values
    return (heads[:, None] * importance_HK.shape[1] + inside_HK).flatten()
