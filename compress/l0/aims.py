"""What gates are to leave: a number of weights, wherever they are, or exact sizes, the same in every layer.

`active` maps each gated axis to P(z > 0) of its gates:

    hidden (D,)   heads (N, H)   ffn (N, F)      of the stream, of each layer's heads and neurons
    attention, network (N,)                      of each layer's whole blocks
    layers (N,)   query, value (N, H K)          of whole layers, and of the rows within heads

Shapes: N layers, H heads of K rows, F neurons, D stream, C constraints.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.errors import PruneError, did_you_mean
from compress.l0.size import Size
from compress.models.uneven_slices import kept_layerwise
from compress.slicing import Group, Kept, Sizes, SlicePlan, choose
from compress.slicing.plan import HIDDEN, LAYERS

AXES = ("layers", "hidden", "heads", "ffn")
"""The sizes that gates can reach."""
Active = Mapping[str, Tensor]


class Aim(Protocol):
    """shapes: the gates there are to be, by axis."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def excess(self, active: Active, share: float) -> Tensor:
        """(C,) s - t: the share of the model that is expected to be gone, less `share` of what is to be."""
        ...

    def kept(self, active: Active) -> Kept:
        """The units that stay, at the aim itself."""
        ...


@dataclass(frozen=True)
class Budget:
    """At most `limit` weights of the `whole`, the likeliest open, anywhere: layers may differ.

    size counts a model's weights. What `kept` leaves is the largest model of the most active units that fits.
    """

    plan: SlicePlan
    size: Size
    whole: float
    limit: float

    @staticmethod
    def of(model: PreTrainedModel, plan: SlicePlan, *, sparsity: float | None, max_params: int | None) -> "Budget":
        """sparsity: the share of the blocks' matrices that goes (CoFi, Eq. 2); max_params: all weights that stay.

        Raises PruneError where no model is so small, or this one is already.
        """
        size, sizes = Size.of(model, plan, blocks=max_params is None), plan.sizes
        of_N = torch.ones(sizes.layers)
        whole = float(size(torch.tensor(sizes.hidden), sizes.heads * of_N, sizes.ffn * of_N))
        least = float(size(torch.tensor(1), 0 * of_N, 0 * of_N))
        limit = (1 - sparsity) * whole if sparsity is not None else float(max_params or 0)
        if not least <= limit < whole or not limit:
            asked = f"sparsity {sparsity}" if sparsity is not None else f"max_params {max_params}"
            most = "a sparsity above 0 and below 1" if sparsity is not None else f"{least:,.0f} to {whole - 1:,.0f}"
            raise PruneError(f"{asked}: cannot be; expected {most}")
        return Budget(plan, size, whole, limit)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        of = self.plan.sizes
        layered = {"heads": (of.layers, of.heads), "ffn": (of.layers, of.ffn)}
        return layered | {"hidden": (of.hidden,), "attention": (of.layers,), "network": (of.layers,)}

    def excess(self, active: Active, share: float) -> Tensor:
        heads_NH, ffn_NF = _coarse_and_fine(active)
        gone = 1 - self.size(active["hidden"].sum(), heads_NH.sum(1), ffn_NF.sum(1)) / self.whole
        return (gone - share * (1 - self.limit / self.whole)).float()[None]

    def kept(self, active: Active) -> Kept:
        """The threshold on P(z > 0), of both gates of a unit together, at which the model just fits."""
        shown = [active["hidden"], *_coarse_and_fine(active)]
        scores = torch.cat([each.detach().float().cpu().flatten() for each in shown])
        order = scores.argsort(descending=True, stable=True)
        low, high = 0, len(order)  # the first `low` units fit, the first `high` may not
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(self._first(order, middle)) else (low, middle - 1)
        hidden_D, heads_NH, ffn_NF = self._first(order, low)
        if not hidden_D.any():
            hidden_D[int(active["hidden"].argmax())] = True
        places = ([row.nonzero().flatten() for row in rows] for rows in (heads_NH, ffn_NF))
        heads, ffn = places
        return kept_layerwise(self.plan, heads=heads, ffn=ffn, hidden=hidden_D.nonzero().flatten())

    def _first(self, order: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        of, chosen = self.plan.sizes, torch.zeros(len(order), dtype=torch.bool)
        chosen[order[:count]] = True
        hidden_D, heads, ffn = chosen.split([of.hidden, of.layers * of.heads, of.layers * of.ffn])
        return hidden_D.clone(), heads.view(of.layers, -1), ffn.view(of.layers, -1)

    def _fits(self, chosen: tuple[Tensor, Tensor, Tensor]) -> bool:
        hidden_D, heads_NH, ffn_NF = chosen
        return float(self.size(hidden_D.sum().clamp(min=1), heads_NH.sum(1), ffn_NF.sum(1))) <= self.limit


@dataclass(frozen=True)
class Exact:
    """These sizes, the same in every layer, by one constraint for each mask (Sheared LLaMA, arXiv:2310.06694)."""

    plan: SlicePlan
    sizes: Sizes

    @staticmethod
    def of(model: PreTrainedModel, plan: SlicePlan, wanted: Mapping[str, float]) -> "Exact":
        """Counts, or shares below 1, as `Sizes.asked` reads them. Raises PruneError where they cannot be."""
        for name in wanted:
            if name not in AXES:
                raise PruneError(f"sizes: gates cannot prune {name!r}.{did_you_mean(name, AXES)}")
        found = Exact(plan, Sizes.asked(model.config, **wanted))
        if not found.shapes:
            raise PruneError(f"sizes: {found.sizes} are the model's own; nothing is to be pruned")
        return found

    @property
    def left(self) -> Mapping[str, float]:
        """The share of each axis that stays; rows are counted within each head."""
        of, to = self.plan.sizes, self.sizes
        shares = {name: getattr(to, name) / getattr(of, name) for name in ("hidden", "heads", "ffn", "layers")}
        shares |= dict.fromkeys(("query", "value"), to.head_size / of.head_size)
        return {name: share for name, share in shares.items() if share < 1}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        of = self.plan.sizes
        layered = {"heads": of.heads, "ffn": of.ffn, "query": of.attention, "value": of.attention}
        known = {name: (of.layers, count) for name, count in layered.items()}
        return {name: {**known, "hidden": (of.hidden,), "layers": (of.layers,)}[name] for name in self.left}

    def excess(self, active: Active, share: float) -> Tensor:
        found = []
        for name, left in self.left.items():
            each = (
                active[name].unflatten(-1, (self.plan.sizes.heads, -1)) if name in ("query", "value") else active[name]
            )
            found.append((1 - each.mean(-1) - share * (1 - left)).flatten())
        return torch.cat(found)

    def kept(self, active: Active) -> Kept:
        return choose(self.plan, self._importance(active), self.sizes)

    def _importance(self, active: Active) -> dict[Group, Tensor]:
        found: dict[Group, Tensor] = {}
        for name, of in active.items():
            if name in ("hidden", "layers"):
                found[HIDDEN if name == "hidden" else LAYERS] = of.detach().cpu()
            else:
                found |= {Group(name, str(layer)): row for layer, row in enumerate(of.detach().cpu())}
        return found


def _coarse_and_fine(active: Active) -> tuple[Tensor, Tensor]:
    """P that a head, and a neuron, is open and its block is."""
    return active["attention"][:, None] * active["heads"], active["network"][:, None] * active["ffn"]
