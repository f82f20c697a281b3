"""How many weights a model has, as a function of its width and of the heads and neurons of each layer.

A weight lies along the stream, along the units of one block, and along what is never cut: counted all at once, a model
has sum over a of D^a (fixed_a + heads_a . h + ffn_a . f) weights, a = 0, 1, 2. The same function counts a model that
is cut, and, of expected numbers of open gates, the model that is expected.

Shapes: N layers; 3 powers of the width D.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.slicing import SlicePlan
from compress.slicing.plan import HIDDEN, Cut

BLOCKS = ("query", "key", "value", "attention_out", "ffn_in", "ffn_out")
"""The matrices whose share is the sparsity of CoFi, Eq. 2."""


@dataclass(frozen=True)
class Size:
    """fixed (3,), heads and ffn (3, N): weights for each power of D, for one head and one neuron of each layer."""

    fixed_3: Tensor
    heads_3N: Tensor
    ffn_3N: Tensor

    @staticmethod
    def of(model: PreTrainedModel, plan: SlicePlan, *, blocks: bool) -> "Size":
        """Of the matrices in the blocks alone, or of every weight; a tied one counts once."""
        N, K = plan.sizes.layers, plan.sizes.head_size
        fixed_3, heads_3N, ffn_3N = torch.zeros(3), torch.zeros(3, N), torch.zeros(3, N)
        for name, weight in _counted(model, plan, blocks=blocks):
            cut = plan.cuts[name]
            power, axis, rest = _along(cut, weight.shape)
            if axis in ("query", "value") and cut.layer is not None:
                heads_3N[power, cut.layer] += rest * K
            elif axis == "ffn" and cut.layer is not None:
                ffn_3N[power, cut.layer] += rest
            else:
                fixed_3[power] += rest
        return Size(fixed_3.double(), heads_3N.double(), ffn_3N.double())

    def __call__(self, hidden: Tensor, heads_N: Tensor, ffn_N: Tensor) -> Tensor:
        """The number of weights, float64."""
        at = {name: getattr(self, name).to(hidden.device) for name in ("fixed_3", "heads_3N", "ffn_3N")}
        of_3 = at["fixed_3"] + at["heads_3N"] @ heads_N.double() + at["ffn_3N"] @ ffn_N.double()
        powers_3 = torch.stack([torch.ones_like(hidden), hidden, hidden.square()]).double()
        return of_3 @ powers_3


def _counted(model: PreTrainedModel, plan: SlicePlan, *, blocks: bool) -> Iterable[tuple[str, Tensor]]:
    for name, weight in model.named_parameters():
        if not blocks or (plan.cuts[name].role in BLOCKS and name.endswith("weight")):
            yield name, weight


def _along(cut: Cut, shape: torch.Size) -> tuple[int, str, int]:
    """The power of D, the axis of the block (empty for none), and the number of weights for one unit of each."""
    power, axis, rest = 0, "", shape.numel()
    for each in cut.slices:
        (group,) = each.groups
        if group == HIDDEN:
            power, rest = power + 1, rest // shape[each.dim]
        elif group.axis in ("query", "value", "ffn"):
            axis, rest = group.axis, rest // shape[each.dim]
    return power, axis, rest
