"""Choose the units that a smaller model keeps.

Shapes: H heads of K rows each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.errors import PruneError
from compress.families.family import Family
from compress.slicing.plan import LAYERS, Group, SlicePlan, parameters_of
from compress.slicing.sizes import Sizes, select_layers

Importance = Mapping[Group, Tensor]
"""A number for each unit of a group; higher is more important. For `query` and `value`,
a number for each row."""
GroupTensors = dict[Group, Tensor]


@dataclass(frozen=True)
class Kept:
    """The source layer that becomes each layer, and the kept units of each group, in
    the order of the result.

    A group that is not in `indices` keeps all its units. -1 is a new unit that starts
    at zero, in a head that is larger than the source's.
    """

    sizes: Sizes
    layers: tuple[int, ...]
    indices: Mapping[Group, Tensor]


def choose(
    plan: SlicePlan,
    importance: Importance | None,
    sizes: Sizes,
    *,
    layers: str | Sequence[int] | None = None,
) -> Kept:
    """Keep the most important units of every group, in the source's order.

    importance: None: units are sorted already (`reorder_units`), so keep the first.
    layers: the rule or list that `sizes.select_layers` takes; None: the most important,
    or evenly spread if `importance` has none for layers. A head is as important as its
    rows of values together if `importance` has none for heads. Raises PruneError if
    `sizes` are not within the plan's.
    """
    _check_sizes(plan, sizes)
    if (
        layers is None
        and importance is not None
        and LAYERS in importance
        and plan.own_layers
    ):
        of_layers = importance[LAYERS].float().clone()
        if plan.family.own_first_layer:
            of_layers[0] = torch.inf
        chosen = top_units(of_layers, sizes.layers).tolist()
    else:
        chosen = select_layers(layers or "even", sizes.layers, plan.sizes.layers)
    check_layers(plan.family, chosen)
    wanted = counts(plan, sizes) | dict.fromkeys(plan.heads.values(), sizes.heads)
    indices = GroupTensors()
    for group, count in wanted.items():
        if count < plan.groups[group]:
            indices[group] = (
                torch.arange(count)
                if importance is None
                else top_units(importance_of(plan, importance, group), count)
            )
    return Kept(
        sizes, tuple(chosen), indices | _choose_rows(plan, sizes, indices, importance)
    )


def counts(plan: SlicePlan, sizes: Sizes) -> dict[Group, int]:
    """Count the units of each group in a model of these sizes, except tokens, and
    except heads and their rows unless heads are cut whole."""
    widths = {
        "hidden": sizes.hidden,
        "embedding": sizes.embedding,
        "ffn": sizes.ffn,
        "bottleneck": sizes.bottleneck,
        "shared": sizes.bottleneck,
    }
    found = {
        group: count
        for group in plan.groups
        if (count := widths.get(group.axis)) is not None
    }
    if not plan.heads:
        found |= {
            each: plan.groups[each] * sizes.heads // plan.sizes.heads
            for each in plan.blocks("heads")
        }
    return found


def _check_sizes(plan: SlicePlan, sizes: Sizes) -> None:
    if not sizes.within(plan.sizes):
        raise PruneError(
            f"{sizes}: not within the model's {plan.sizes}; pruning can only take away"
        )
    size = sizes.head_size
    source_size = plan.sizes.head_size
    if plan.family.rotary and size % source_size and source_size % size:
        raise PruneError(
            f"heads of {size}: the model's heads of {source_size} have rotary "
            "positions, so their size can only change by a whole factor"
        )
    if (
        sizes.layers < plan.sizes.layers
        and not plan.own_layers
        and len(plan.blocks("ffn")) > 1
    ):
        raise PruneError(
            "layers: the groups of layers of this model share weights; its depth "
            "cannot be cut"
        )


def check_layers(family: Family, layers: Sequence[int]) -> None:
    """Raise PruneError if a layer would move to a position where its family has other
    weights."""
    if family.own_first_layer and (layers[0] != 0 or 0 in layers[1:]):
        raise PruneError(
            f"layers {list(layers)}: the first layer of {family.name}, and no other, "
            "has no norm before its attention, so it stays the first; choose layers by "
            "even, first or importance, or list them from 0 on"
        )


def top_units(importance: Tensor, count: int) -> Tensor:
    """Return the indices of the most important units, ascending; of equal ones, the
    first."""
    return best_first(importance)[:count].sort().values


def best_first(importance: Tensor) -> Tensor:
    """Return the order along the last dimension, the most important first; of equal
    ones, the first."""
    return importance.float().cpu().argsort(descending=True, stable=True)


def importance_of(plan: SlicePlan, importance: Importance, group: Group) -> Tensor:
    """Return the importance of a group; that of heads, if not given, is the sum over
    their rows of values in all blocks."""
    if group in importance:
        return importance[group]
    rows = [
        importance[each]
        for each, heads in plan.heads.items()
        if heads == group and each.axis == "value"
    ]
    return torch.stack(
        [each.float().view(plan.sizes.heads, -1).sum(1) for each in rows]
    ).sum(0)


def _choose_rows(
    plan: SlicePlan,
    sizes: Sizes,
    indices: Mapping[Group, Tensor],
    importance: Importance | None,
) -> GroupTensors:
    """Choose rows of queries and values: the rows of the kept heads, and the best (or
    first) of them if heads get smaller."""
    if (sizes.heads, sizes.head_size) == (plan.sizes.heads, plan.sizes.head_size):
        return {}
    K = plan.sizes.head_size
    size = sizes.head_size
    chosen = {}
    for group, heads in plan.heads.items():
        kept_H = indices.get(heads, torch.arange(plan.sizes.heads))
        if group.axis == "query" and plan.family.rotary:
            inside_K = rotary_rows(K, size)
            chosen[group] = torch.where(
                inside_K < 0, -1, kept_H[:, None] * K + inside_K
            ).flatten()
            continue
        inside_HK = torch.arange(min(K, size)).expand(len(kept_H), -1)
        if size < K and importance is not None:
            of_HK = importance[group].view(-1, K)
            inside_HK = best_first(of_HK)[kept_H, :size].sort(dim=1).values
        rows_HK = kept_H[:, None] * K + inside_HK
        if size > K:
            rows_HK = torch.cat(
                [rows_HK, rows_HK.new_full((len(kept_H), size - K), -1)], 1
            )
        chosen[group] = rows_HK.flatten()
    return chosen


def rotary_rows(size: int, wanted: int) -> Tensor:
    """Choose rows of a head of `size` for one of `wanted` rows, by the speed of their
    rotation; -1: a new row."""
    if wanted <= size:
        half = torch.arange(0, size // 2, size // wanted)
        return torch.cat([half, half + size // 2])
    rows = torch.full((2, wanted // 2), -1)
    rows[:, :: wanted // size] = torch.arange(size).view(2, -1)
    return rows.flatten()


_WRITE = {
    "hidden": ("ffn_out", "widen"),
    "embedding": ("words",),
    "ffn": ("ffn_in",),
    "query": ("query", "position_query", "qkv"),
    "value": ("value", "qkv"),
    "heads": ("value",),
    "bottleneck": ("narrow", "attention_out", "ffn_out"),
    "shared": ("narrow_attention",),
}
_READ = {
    "hidden": ("ffn_in", "narrow"),
    "embedding": (),
    "ffn": ("ffn_out",),
    "query": ("key", "position_key", "qkv"),
    "value": ("attention_out",),
    "heads": ("attention_out",),
    "bottleneck": ("ffn_in", "widen"),
    "shared": ("query", "key"),
}


@torch.no_grad()
def magnitude(model: PreTrainedModel, plan: SlicePlan | None = None) -> Importance:
    """Compute each unit's importance: the norm of the weights that write it times the
    norm of the weights that read it.

    For the width of an embedding, it is the norm of the table's columns. Layers get no
    importance.
    """
    plan = plan or SlicePlan.from_model(model)
    weights = parameters_of(model)
    found = GroupTensors()
    for group in plan.groups:
        if group.axis in _WRITE and group not in plan.heads.values():
            writes = _WRITE[group.axis]
            reads = _READ[group.axis]
            squares = _sum_squares(plan, weights, group, writes, first=True)
            if reads:
                squares *= _sum_squares(plan, weights, group, reads, first=False)
            found[group] = squares.sqrt()
    return found


def _sum_squares(
    plan: SlicePlan,
    weights: dict[str, Tensor],
    group: Group,
    roles: tuple[str, ...],
    *,
    first: bool,
) -> Tensor:
    """Sum the squares of weights of these roles along each unit; of queries and keys in
    one matrix, count one."""
    total = torch.zeros(plan.groups[group])
    for name, cut, each, part in plan.along(group):
        if cut.role not in roles or not name.endswith("weight"):
            continue
        if (
            cut.role == "qkv"
            and group.axis == "query"
            and (part == cut.queries) != first
        ):
            continue
        matrix = weights[name].detach().float().chunk(len(each.groups), each.dim)[part]
        squares = (
            matrix.pow(2)
            .sum([dim for dim in range(matrix.dim()) if dim != each.dim])
            .cpu()
        )
        total += squares.view(len(total), -1).sum(1)
    return total
