"""Gates on a model's units: factors on what flows through the model as it is, by hooks where the slice plan says.

    heads, value    what attention's output product reads: the gates of its head and row
    query           the rows of the queries
    ffn             what the second feed-forward product reads
    hidden          what is written to the stream, and to what is as wide as it; norms run over the open dimensions
    layers          the way through a layer: x + z (f(x) - x)

A closed layer is passed over. So a model with gates of 0 and 1 computes what is left when the closed units are cut, and
other gates can be multiplied into the weights.

Shapes: B batch, L tokens, D stream, N layers, H heads of K rows, F neurons, R = H K.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.config.reference import find
from compress.errors import PruneError, did_you_mean
from compress.slicing.plan import EMBEDDING, HIDDEN, LAYERS, Group, SlicePlan
from compress.slicing.rules import ROTARY
from compress.slicing.select import Kept, choose
from compress.slicing.sizes import Sizes

AXES = ("layers", "hidden", "heads", "ffn")
"""The sizes that gates can reach."""
Active = Mapping[str, Tensor]


@dataclass(frozen=True)
class TargetSizes:
    """The sizes to reach in every layer, by one constraint for each mask (Sheared LLaMA, arXiv:2310.06694)."""

    plan: SlicePlan
    sizes: Sizes

    @staticmethod
    def from_request(model: PreTrainedModel, plan: SlicePlan, wanted: Mapping[str, float]) -> "TargetSizes":
        """Read counts, or shares below 1. Raises PruneError where they cannot be reached."""
        for name in wanted:
            if name not in AXES:
                raise PruneError(f"sizes: gates cannot prune {name!r}.{did_you_mean(name, AXES)}")
        target = TargetSizes(plan, Sizes.from_request(model.config, **wanted))
        if not target.shapes:
            raise PruneError(f"sizes: {target.sizes} are the model's own; nothing is to be pruned")
        if plan.family in ROTARY and "query" in target.left:
            raise PruneError(
                f"sizes: heads of {target.sizes.head_size}: gates cannot choose rows within heads that turn by the "
                f"tokens' places, of {plan.sizes.head_size}; give hidden and heads that keep their size"
            )
        return target

    @property
    def left(self) -> Mapping[str, float]:
        """The share of each axis that stays; rows are counted within each head."""
        of, to = self.plan.sizes, self.sizes
        shares = {name: getattr(to, name) / getattr(of, name) for name in ("hidden", "heads", "ffn", "layers")}
        shares |= dict.fromkeys(("query", "value"), to.head_size / of.head_size)
        return {name: share for name, share in shares.items() if share < 1}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The gates there are to be, by axis."""
        of = self.plan.sizes
        units = {"heads": of.heads, "ffn": of.ffn, "query": of.attention, "value": of.attention}
        flat = {"hidden": (of.hidden,), "layers": (of.layers,)}
        return {name: flat[name] if name in flat else (of.layers, units[name]) for name in self.left}

    def excess(self, active: Active, share: float) -> Tensor:
        """Compute (C,) s - t: the share that is expected to be gone, less `share` of what is to go."""
        found = []
        for name, left in self.left.items():
            each = active[name]
            if name in ("query", "value"):
                each = each.unflatten(-1, (self.plan.sizes.heads, -1))
            found.append((1 - each.mean(-1) - share * (1 - left)).flatten())
        return torch.cat(found)

    def kept(self, active: Active) -> Kept:
        """Choose the units that stay, exactly as many as `sizes` says."""
        importance: dict[Group, Tensor] = {}
        for name, of in active.items():
            if name in ("hidden", "layers"):
                importance[HIDDEN if name == "hidden" else LAYERS] = of.detach().cpu()
            else:
                importance |= {Group(name, str(layer)): row for layer, row in enumerate(of.detach().cpu())}
        return choose(self.plan, importance, self.sizes)


FAMILIES = ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "ernie", "modernbert")
OPEN = 10.0
"""log alpha at which a gate is as good as always open."""
_TABLES = ("words", "positions", "types", "tasks")


class Gates(nn.Module):
    """Hold log alpha of every gate that `target` asks for, and what multiplies the model now.

    Gates are drawn anew for each forward pass of training, and nothing is gated while `waiting`; in eval mode they are
    settled at the target, as if training ended.

    begin: the first log alpha of gates on neurons; the others begin open. Registered in the model while attached, so
    that its best weights and their gates are kept together. Raises PruneError for a family whose blocks are not known
    here.
    """

    def __init__(self, plan: SlicePlan, target: TargetSizes, *, begin: float) -> None:
        super().__init__()
        if plan.family not in FAMILIES:
            raise PruneError(f"no gates for {plan.family!r}; there are for {', '.join(FAMILIES)}")
        self.plan, self.target, self.waiting = plan, target, False
        self.values: Mapping[str, Tensor] = {}
        self.log_alpha = nn.ParameterDict(
            {
                axis: nn.Parameter(torch.empty(shape).normal_(begin if axis == "ffn" else OPEN, 0.01))
                for axis, shape in target.shapes.items()
            }
        )
        self._hooks = ExitStack()

    def active(self) -> dict[str, Tensor]:
        """Compute P(z > 0) of each gate."""
        return {axis: find("louizos.active")(each) for axis, each in self.log_alpha.items()}

    def settled(self, kept: Kept) -> dict[str, Tensor]:
        """Compute the gates without noise: 0 for what is not kept, 1 for kept layers, which nothing can absorb."""
        found = {}
        for axis, each in self.log_alpha.items():
            mask = self._mask(axis, kept).to(each)
            found[axis] = mask if axis == "layers" else mask * find("louizos.settled")(each.detach())
        return found

    def train(self, mode: bool = True) -> "Gates":
        super().train(mode)
        if not mode:
            self.values = self.settled(self.target.kept(self.active()))
        return self

    def attach(self, model: PreTrainedModel) -> None:
        """Let the model's passes go through the gates from here on, whatever head they end in."""
        model.gates = self.to(model.device)
        hooks, plan = self._hooks, self.plan
        hooks.callback(delattr, model, "gates")
        hooks.callback(model.base_model.register_forward_pre_hook(self._begin).remove)
        for name, cut in plan.modules("attention_out", "ffn_out").items():
            axis = "rows" if cut.role == "attention_out" else "ffn"
            gates = partial(self._of_layer, axis, cut.layer or 0)
            hooks.callback(model.get_submodule(name).register_forward_pre_hook(_reading(gates)).remove)
        if "query" in self.log_alpha:
            for name, cut in plan.modules("query").items():
                gates = partial(self._of_layer, "query", cut.layer or 0)
                hooks.callback(model.get_submodule(name).register_forward_hook(_giving(gates)).remove)
        if "hidden" in self.log_alpha:
            self._attach_hidden(model)
        if "layers" in self.log_alpha:
            stack = model.get_submodule(plan.stack)
            for number, layer in enumerate(stack.children()):
                hook = _passing(partial(self._of_layer, "layers", number))  # before those that note the layer's output
                hooks.callback(layer.register_forward_hook(hook, prepend=True).remove)

    def detach(self) -> None:
        """Take the gates off the model; its weights stay as they are."""
        self._hooks.close()

    def _attach_hidden(self, model: PreTrainedModel) -> None:
        for name in writers(self.plan):
            writer = model.get_submodule(name)
            self._hooks.callback(writer.register_forward_hook(_giving(lambda: self.values.get("hidden"))).remove)
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

    def _of_layer(self, axis: str, layer: int) -> Tensor | None:
        """Return the gates of one layer along an axis, or along the `rows` of its values; None where it has none."""
        if axis == "rows":
            return rows(self.values, layer, self.plan.sizes.head_size)
        return self.values[axis][layer] if axis in self.values else None

    def _norm(self, norm: nn.LayerNorm, *, begins: bool) -> Callable[[Tensor], Tensor]:
        """Norm the open dimensions, 0 elsewhere; the norm that the stream begins with applies the gate too."""

        def forward(x_BLD: Tensor) -> Tensor:
            gate_D = self.values.get("hidden")
            if gate_D is None:
                return nn.functional.layer_norm(x_BLD, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
            normed_BLD = norm_over(x_BLD, (gate_D > 0).float(), norm)
            return normed_BLD * gate_D if begins else normed_BLD

        return forward

    def _mask(self, axis: str, kept: Kept) -> Tensor:
        """Return 1 for what is kept, else 0."""
        of = self.log_alpha[axis]
        if axis in ("hidden", "layers"):
            group = HIDDEN if axis == "hidden" else LAYERS
            places = torch.tensor(kept.layers) if axis == "layers" else kept.indices.get(group)
            return _ones(of.shape[0], places)
        found = [_ones(of.shape[1], kept.indices.get(Group(axis, str(layer)))) for layer in range(of.shape[0])]
        return torch.stack(found)


def normed_group(plan: SlicePlan, module: str) -> Group | None:
    """Return the group whose units a norm runs over; None for any other module."""
    cut = plan.cuts.get(f"{module}.weight")
    return cut.slices[0].groups[0] if cut is not None and cut.role.endswith("norm") else None


def norms(plan: SlicePlan) -> Mapping[str, Group]:
    """Return the modules that norm over the residual stream or the embedding, with their groups."""
    names = plan.modules(*{cut.role for cut in plan.cuts.values() if cut.role.endswith("norm")})
    found = {name: normed_group(plan, name) for name in names}
    return {name: group for name, group in found.items() if group in (HIDDEN, EMBEDDING)}


def norm_over(x_BLD: Tensor, open_D: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Compute the layer norm of the open dimensions (1), 0 in the others (0); float32."""
    x, count = x_BLD.float(), open_D.sum().clamp(min=1)
    mean = (x * open_D).sum(-1, keepdim=True) / count
    centred = (x - mean) * open_D
    scale = (centred.square().sum(-1, keepdim=True) / count + norm.eps).rsqrt()
    bias: Any = norm.bias  # ModernBERT's norms have none
    normed = centred * scale * norm.weight.float()
    return (normed if bias is None else normed + bias.float()) * open_D


def rows(values: Mapping[str, Tensor], layer: int, size: int) -> Tensor | None:
    """Return (R,) of one layer: z_head z_value; None where nothing of it is gated."""
    of_heads_R = values["heads"][layer].repeat_interleave(size) if "heads" in values else None
    if "value" not in values:
        return of_heads_R
    return values["value"][layer] if of_heads_R is None else of_heads_R * values["value"][layer]


def writers(plan: SlicePlan) -> list[str]:
    """List the modules whose outputs lie along the stream's width and are no norm's: linear layers."""
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
            if cut.role == "attention_out":
                inward = rows(values, cut.layer, plan.sizes.head_size)
            else:
                inward = values["ffn"][cut.layer] if "ffn" in values else None
            weight.mul_(1 if inward is None else inward)
        if cut.role == "query" and "query" in values and cut.layer is not None:
            _outward(weight, values["query"][cut.layer])
        if hidden_D is not None and module in writing:
            _outward(weight, hidden_D)
        if hidden_D is not None and cut.role == "embedding_norm" and cut.slices[0].groups == (HIDDEN,):
            weight.mul_(hidden_D)


def _outward(weight: Tensor, gate: Tensor) -> None:
    weight.mul_(gate.view(-1, *[1] * (weight.dim() - 1)))


def _ones(count: int, places: Tensor | None) -> Tensor:
    if places is None:
        return torch.ones(count)
    return torch.zeros(count).index_fill_(0, places[places >= 0].cpu(), 1.0)


Gate = Callable[[], Tensor | None]


def _reading(gate: Gate) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> Any:
        return None if (now := gate()) is None else (args[0] * now, *args[1:])

    return hook


def _giving(gate: Gate) -> Callable[..., Any]:
    def hook(module: nn.Module, args: object, out: Tensor) -> Any:
        return None if (now := gate()) is None else out * now

    return hook


def _passing(gate: Gate) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Any:
        return None if (now := gate()) is None else args[0] + now * (out - args[0])

    return hook
