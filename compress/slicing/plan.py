"""The slice plan of a model: which slices of its weights belong to one unit and are cut
together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from compress import families
from compress.errors import PruneError
from compress.families.family import Family
from compress.slicing.sizes import Sizes


class Group(NamedTuple):
    """A set of like units: an axis (see `families.family`) of one block, or, with block
    "", of the whole model."""

    axis: str
    block: str = ""

    def __str__(self) -> str:
        return f"{self.axis}.{self.block}" if self.block else self.axis


PER_BLOCK = frozenset({"query", "value", "heads", "ffn", "bottleneck", "shared"})
"""Axes along which every block has its own units; along all other axes, blocks share
units."""
QUERY_ROLES = frozenset({"query", "position_query", "qkv"})
"""Roles with rows of queries, which carry the scale of the scores; they are the first
part of their dimension."""
HIDDEN = Group("hidden")
EMBEDDING = Group("embedding")
VOCABULARY = Group("vocabulary")
LAYERS = Group("layers")
USUAL_SCALES = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
"""Settings of GPT-2 with which scores are divided by the root of the head size
alone."""


@dataclass(frozen=True)
class Slice:
    """A dimension of a weight, and the groups whose units lie along it, one group after
    another."""

    dim: int
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Cut:
    """Describe how a weight is cut. queries: the part of a slice along `query` that
    holds queries, if any."""

    role: str
    block: str
    layer: int | None
    span: tuple[int, int]
    slices: tuple[Slice, ...]
    queries: int | None


@dataclass(frozen=True)
class SlicePlan:
    """Describe how every weight of a model is cut, and the number of units of each
    group.

    `heads` maps a block's query and value groups to the group of its heads: one for
    each block, but one for all blocks in T5, whose relative biases belong to heads
    across layers. It is empty in a `grouped` family, whose heads are cut whole: each
    unit of `heads` then lies along the same number of rows.
    """

    family: Family
    sizes: Sizes
    groups: Mapping[Group, int]
    cuts: Mapping[str, Cut]
    heads: Mapping[Group, Group]

    @staticmethod
    def from_model(model: PreTrainedModel) -> "SlicePlan":
        """Plan a model with any of its usual heads. Raises PruneError for a family or a
        weight without a rule."""
        family = families.find(model.config.model_type)
        if not family.rules:
            hint = f" Did you mean {family.successor!r}?" if family.successor else ""
            raise PruneError(
                f"{type(model).__name__}: no slice plan for {family.name!r}; there is "
                f"one for {families.names('rules')}{hint}"
            )
        for name, usual in USUAL_SCALES.items():
            if getattr(model.config, name, usual) != usual:
                raise PruneError(
                    f"{type(model).__name__}: {name} is {not usual} in its config; "
                    f"expected {usual}: its attention would change in a cut model"
                )
        sizes = Sizes.from_config(model.config)
        groups: dict[Group, int] = {LAYERS: sizes.layers}
        cuts = {
            name: _cut(name, tensor, model.config, sizes, groups)
            for name, tensor in model.named_parameters(remove_duplicate=False)
        }
        heads = {
            group: Group("heads", "" if family.shared_heads else group.block)
            for group in groups
            if group.axis in ("query", "value")
        }
        for group in heads.values():
            groups[group] = sizes.heads
        return SlicePlan(family, sizes, groups, cuts, heads)

    @property
    def own_layers(self) -> bool:
        """Check whether each layer has its own weights, as in all families but
        ALBERT."""
        return any(cut.layer is not None for cut in self.cuts.values())

    @property
    def stack(self) -> str:
        """The name of the list of layers, in a model whose layers have their own
        weights."""
        name, cut = next(
            (name, cut) for name, cut in self.cuts.items() if cut.layer is not None
        )
        return name[: cut.span[0] - 1]

    def blocks(self, axis: str) -> list[Group]:
        """List the groups of an axis in model order."""
        return [group for group in self.groups if group.axis == axis]

    def along(self, group: Group) -> list[tuple[str, Cut, Slice, int]]:
        """List the places of a group's units: weight, its cut, the slice, and the part
        of the dimension."""
        return [
            (name, cut, each, part)
            for name, cut in self.cuts.items()
            for each in cut.slices
            for part, other in enumerate(each.groups)
            if other == group
        ]

    def modules(self, *roles: str) -> dict[str, Cut]:
        """Return the modules whose weight has one of these roles, by name."""
        return {
            name.removesuffix(".weight"): cut
            for name, cut in self.cuts.items()
            if cut.role in roles and name.endswith(".weight")
        }


def _cut(
    name: str, tensor: Tensor, config: Any, sizes: Sizes, groups: dict[Group, int]
) -> Cut:
    """Describe how one weight is cut, and add the number of units of its groups to
    `groups`."""
    family = families.find(config.model_type)
    found = family.place(name)
    if found is None or len(found.axes) != tensor.dim():
        raise PruneError(
            f"{name} {tuple(tensor.shape)}: the slice plan of {family.name} does not "
            "know this weight; expected a transformers model with one of its usual "
            "heads"
        )
    slices = []
    for dim, axes in enumerate(found.axes):
        if axes == (".",):
            continue
        parts = tuple(_group(axis, found.block, family, sizes) for axis in axes)
        count, rest = divmod(tensor.shape[dim], len(parts))
        if family.grouped and axes == ("heads",):
            rest = count % config.num_key_value_heads
            count = config.num_key_value_heads
        known = {groups.setdefault(group, count) for group in parts}
        if rest or known != {count}:
            raise PruneError(
                f"{name} {tuple(tensor.shape)}: has {count} units along {parts[0]}, "
                f"elsewhere {known}"
            )
        slices.append(Slice(dim, parts))
    reads = found.role in QUERY_ROLES and any("query" in axes for axes in found.axes)
    return Cut(
        found.role,
        found.block,
        found.layer,
        found.span,
        tuple(slices),
        0 if reads else None,
    )


def _group(axis: str, block: str, family: Family, sizes: Sizes) -> Group:
    if axis == "embedding" and sizes.embedding is None:
        axis = "hidden"
    if axis not in PER_BLOCK or (axis == "heads" and family.shared_heads):
        return Group(axis)
    # all FFNs of a layer write to it
    return Group(axis, block.partition(".")[0] if axis == "bottleneck" else block)


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights by name, tied ones under all their names."""
    return dict(model.named_parameters(remove_duplicate=False))
