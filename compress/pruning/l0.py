"""Gates on a model's units: factors on what flows through the model as it is, by hooks where the slice plan says.

    value       what attention's output product reads: the gates of its block, head and row
    query       the rows of the queries
    ffn         what the second feed-forward product reads: the gates of its block and neuron
    hidden      what is written to the stream, and to what is as wide as it; norms run over the open dimensions
    layers      the way through a layer: x + z (f(x) - x)

A block whose gate is closed still adds its bias to the stream and norms it, as one without units does; a closed layer
is passed over. So a model with gates of 0 and 1 computes what is left when the closed units are cut, and other gates
can be multiplied into the weights.

Shapes: B batch, L tokens, D stream, N layers, H heads of K rows, F neurons, R = H K.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.config.reference import find
from compress.errors import PruneError, did_you_mean
from compress.models.uneven import kept_layerwise
from compress.slicing.masking import norms
from compress.slicing.plan import HIDDEN, LAYERS, Cut, Group, SlicePlan
from compress.slicing.select import Kept, choose
from compress.slicing.sizes import Sizes

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


FAMILIES = ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "ernie")
COARSE = ("hidden", "layers", "attention", "network")
"""Gates that close much at once."""
OPEN = 10.0
"""log alpha at which a gate is as good as always open."""
_TABLES = ("words", "positions", "types", "tasks")


class Gates(nn.Module):
    """log alpha of every gate that `aim` asks for, and what multiplies the model now: drawn anew for each forward pass
    of training, nothing there while `waiting`; settled at the aim in eval mode, as if training ended.

    begin: the first log alpha of gates on heads, neurons and rows; the coarse ones begin open. Registered in the
    model while attached, so that its best weights and their gates are kept together. Raises PruneError for a family
    whose blocks are not known here.
    """

    def __init__(self, plan: SlicePlan, aim: Aim, *, begin: float) -> None:
        super().__init__()
        if plan.family not in FAMILIES:
            raise PruneError(f"no gates for {plan.family!r}; there are for {', '.join(FAMILIES)}")
        self.plan, self.aim, self.waiting = plan, aim, False
        self.values: Mapping[str, Tensor] = {}
        self.log_alpha = nn.ParameterDict(
            {
                axis: nn.Parameter(torch.empty(shape).normal_(OPEN if axis in COARSE else begin, 0.01))
                for axis, shape in aim.shapes.items()
            }
        )
        self._hooks = ExitStack()

    def active(self) -> dict[str, Tensor]:
        """P(z > 0) of each gate."""
        return {axis: find("louizos.active")(each) for axis, each in self.log_alpha.items()}

    def settled(self, kept: Kept) -> dict[str, Tensor]:
        """The gates without noise, 0 for what is not kept; those of kept layers, which nothing can absorb, are 1."""
        found = {}
        for axis, each in self.log_alpha.items():
            mask = self._mask(axis, kept).to(each)
            found[axis] = mask if axis == "layers" else mask * find("louizos.settled")(each.detach())
        return found

    def train(self, mode: bool = True) -> "Gates":
        super().train(mode)
        if not mode:
            self.values = self.settled(self.aim.kept(self.active()))
        return self

    def attach(self, model: PreTrainedModel) -> None:
        """From here on the model's passes go through the gates, whatever head they end in."""
        model.gates = self.to(model.device)
        hooks, plan = self._hooks, self.plan
        hooks.callback(delattr, model, "gates")
        hooks.callback(model.base_model.register_forward_pre_hook(self._begin).remove)
        for name, cut in plan.modules("attention_out", "ffn_out").items():
            of = self._rows if cut.role == "attention_out" else self._neurons
            hooks.callback(model.get_submodule(name).register_forward_pre_hook(_reading(of, cut.layer or 0)).remove)
        if "query" in self.log_alpha:
            for name, cut in plan.modules("query").items():
                hooks.callback(
                    model.get_submodule(name).register_forward_hook(_giving(self._queries, cut.layer or 0)).remove
                )
        if "hidden" in self.log_alpha:
            self._attach_hidden(model)
        if "layers" in self.log_alpha:
            stack = model.get_submodule(plan.stack)
            for number, layer in enumerate(stack.children()):
                hook = _passing(self._of_layer, number)  # before those that note the layer's output
                hooks.callback(layer.register_forward_hook(hook, prepend=True).remove)

    def detach(self) -> None:
        """The model is as it was before, its weights apart."""
        self._hooks.close()

    def _attach_hidden(self, model: PreTrainedModel) -> None:
        for name in writers(self.plan):
            self._hooks.callback(model.get_submodule(name).register_forward_hook(_giving(self._stream, 0)).remove)
        for name, group in norms(self.plan).items():
            norm = model.get_submodule(name)
            if group == HIDDEN and isinstance(norm, nn.LayerNorm):
                begins = self.plan.cuts[f"{name}.weight"].role == "embedding_norm"
                setattr(norm, "forward", self._norm(norm, begins=begins))  # noqa: B010  mypy knows it as a method
                self._hooks.callback(delattr, norm, "forward")

    def _begin(self, module: nn.Module, args: object) -> None:
        if self.training:
            drawn = {} if self.waiting else {axis: find("louizos.drawn")(each) for axis, each in self.log_alpha.items()}
            self.values = drawn

    def _rows(self, layer: int) -> Tensor | None:
        return rows(self.values, layer, self.plan.sizes.head_size)

    def _neurons(self, layer: int) -> Tensor | None:
        return neurons(self.values, layer)

    def _queries(self, layer: int) -> Tensor | None:
        return self.values["query"][layer] if "query" in self.values else None

    def _stream(self, layer: int) -> Tensor | None:
        return self.values.get("hidden")

    def _of_layer(self, layer: int) -> Tensor | None:
        return self.values["layers"][layer] if "layers" in self.values else None

    def _norm(self, norm: nn.LayerNorm, *, begins: bool) -> Callable[[Tensor], Tensor]:
        """Over the open dimensions, 0 elsewhere; the one that the stream begins with writes to it, gate included."""

        def forward(x_BLD: Tensor) -> Tensor:
            gate_D = self.values.get("hidden")
            if gate_D is None:
                return nn.functional.layer_norm(x_BLD, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
            normed_BLD = norm_over(x_BLD, (gate_D > 0).float(), norm)
            return normed_BLD * gate_D if begins else normed_BLD

        return forward

    def _mask(self, axis: str, kept: Kept) -> Tensor:
        """1 for what is kept; a block is, where one of its units is."""
        of = self.log_alpha[axis]
        if axis in ("hidden", "layers"):
            group = HIDDEN if axis == "hidden" else LAYERS
            places = torch.tensor(kept.layers) if axis == "layers" else kept.indices.get(group)
            return _ones(of.shape[0], places)
        if axis in ("attention", "network"):
            units = self._mask("heads" if axis == "attention" else "ffn", kept)
            return units.any(1).float()
        found = [_ones(of.shape[1], kept.indices.get(Group(axis, str(layer)))) for layer in range(of.shape[0])]
        return torch.stack(found)


def norm_over(x_BLD: Tensor, open_D: Tensor, norm: nn.LayerNorm) -> Tensor:
    """The layer norm of the open dimensions (1), 0 in the others (0); float32."""
    x, count = x_BLD.float(), open_D.sum().clamp(min=1)
    mean = (x * open_D).sum(-1, keepdim=True) / count
    centred = (x - mean) * open_D
    scale = (centred.square().sum(-1, keepdim=True) / count + norm.eps).rsqrt()
    return (centred * scale * norm.weight.float() + norm.bias.float()) * open_D


def rows(values: Mapping[str, Tensor], layer: int, size: int) -> Tensor | None:
    """(R,) of one layer: z_MHA z_head z_value; None where nothing of it is gated."""
    found = [values["attention"][layer]] if "attention" in values else []
    found += [values["heads"][layer].repeat_interleave(size)] if "heads" in values else []
    found += [values["value"][layer]] if "value" in values else []
    return _product(found)


def neurons(values: Mapping[str, Tensor], layer: int) -> Tensor | None:
    """(F,) of one layer: z_FFN z_int."""
    return _product([values[axis][layer] for axis in ("network", "ffn") if axis in values])


def writers(plan: SlicePlan) -> list[str]:
    """Modules whose outputs lie along the stream's width and are no norm's: linear layers."""
    return [
        name
        for role in {
            cut.role for cut in plan.cuts.values() if not cut.role.endswith("norm") and cut.role not in _TABLES
        }
        for name, cut in plan.modules(role).items()
        if any(each.dim == 0 and each.groups == (HIDDEN,) for each in cut.slices)
    ]


@torch.no_grad()
def fold(model: PreTrainedModel, plan: SlicePlan, values: Mapping[str, Tensor]) -> None:
    """Multiply settled gates into the weights of a model that they are no longer attached to."""
    writing, hidden_D = set(writers(plan)), values.get("hidden")
    for name, weight in model.named_parameters():
        cut, (module, _, part) = plan.cuts[name], name.rpartition(".")
        if cut.role in ("attention_out", "ffn_out") and part == "weight" and cut.layer is not None:
            size = plan.sizes.head_size
            inward = rows(values, cut.layer, size) if cut.role == "attention_out" else neurons(values, cut.layer)
            weight.mul_(1 if inward is None else inward)
        if cut.role == "query" and "query" in values and cut.layer is not None:
            _outward(weight, values["query"][cut.layer])
        if hidden_D is not None and module in writing:
            _outward(weight, hidden_D)
        if hidden_D is not None and cut.role == "embedding_norm" and cut.slices[0].groups == (HIDDEN,):
            weight.mul_(hidden_D)


def _outward(weight: Tensor, gate: Tensor) -> None:
    weight.mul_(gate.view(-1, *[1] * (weight.dim() - 1)))


def _product(factors: list[Tensor]) -> Tensor | None:
    if not factors:
        return None
    found = factors[0]
    for each in factors[1:]:
        found = found * each
    return found


def _ones(count: int, places: Tensor | None) -> Tensor:
    if places is None:
        return torch.ones(count)
    return torch.zeros(count).index_fill_(0, places[places >= 0].cpu(), 1.0)


Of = Callable[[int], Tensor | None]


def _reading(of: Of, layer: int) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> Any:
        gate = of(layer)
        return None if gate is None else (args[0] * gate, *args[1:])

    return hook


def _giving(of: Of, layer: int) -> Callable[..., Any]:
    def hook(module: nn.Module, args: object, out: Tensor) -> Any:
        gate = of(layer)
        return None if gate is None else out * gate

    return hook


def _passing(of: Of, layer: int) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Any:
        gate = of(layer)
        return None if gate is None else args[0] + gate * (out - args[0])

    return hook
