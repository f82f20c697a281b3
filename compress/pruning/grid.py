"""The smaller shapes that a model allows: the grid that a budget chooses from."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from compress.errors import PruneError
from compress.slicing import Sizes, SlicePlan

STEPS = 8
"""Shares of widths, heads and neurons in the grid: eighths of the model's own."""


def smaller(config: Any, plan: SlicePlan) -> dict[str, Sizes]:
    """Every depth, and eighths of every width, of heads as large as the model's, by what they are called.

    Where attention is as wide as its stream, stream and heads go together.
    """
    whole = plan.sizes
    together = "hidden" if whole.bottleneck is None else "bottleneck"
    axes: dict[str, Sequence[int]] = {"layers": _depths(plan), "ffn": _shares(whole.ffn), "heads": _shares(whole.heads)}
    if config.model_type == "t5":
        axes["hidden"] = _shares(whole.hidden)
    found = {}
    for counts in product(*axes.values()):
        wanted: dict[str, int] = dict(zip(axes, counts, strict=True))
        if config.model_type != "t5":
            wanted[together] = wanted["heads"] * whole.head_size
        try:
            sizes = Sizes.asked(config, **wanted)
        except PruneError:  # a grid asks for more than there is
            continue
        found[str(sizes)] = sizes
    return found


def largest(shapes: Mapping[str, Sizes]) -> Iterator[str]:
    """Those that no other one is at least as large as in every size: of shapes within a budget, they fill it."""
    for name, sizes in shapes.items():
        if not any(other != sizes and sizes.within(other) for other in shapes.values()):
            yield name


def _depths(plan: SlicePlan) -> Sequence[int]:
    whole = plan.sizes.layers
    if not plan.own_layers and len(plan.blocks("ffn")) > 1:
        return [whole]
    step = max(1, whole // 12)
    return [*range(step, whole, step), whole]


def _shares(whole: int) -> list[int]:
    return sorted({max(1, round(whole * step / STEPS)) for step in range(1, STEPS + 1)})
