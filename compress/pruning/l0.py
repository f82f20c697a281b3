"""Gates on a model's units: factors on its activations, applied by hooks where the
slice plan says.

    heads, value    the input of attention's output projection: the gates of its head
                    and row
    query           the rows of the queries
    ffn             the input of the second feed-forward layer
    hidden          the outputs written to the stream, and all as wide as it; norms run
                    over the open dimensions
    layers          the path through a layer: x + z (f(x) - x), so that a closed layer
                    is skipped

A model with gates of 0 and 1 computes the same as one without the closed units; other
gates can be multiplied into the weights.

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

from compress import families
from compress.config.reference import find
from compress.errors import PruneError, did_you_mean
from compress.slicing.plan import EMBEDDING, HIDDEN, LAYERS, Group, SlicePlan
from compress.slicing.select import Kept, choose
from compress.slicing.sizes import Sizes
from compress.tensors import TensorDict, Tensors

GATED_AXES = ("layers", "hidden", "heads", "ffn")
"""The sizes that gates can prune."""
Active = Tensors


@dataclass(frozen=True)
class TargetSizes:
    """The sizes to reach in every layer, with a constraint for each mask (Sheared
    LLaMA, arXiv:2310.06694)."""

    plan: SlicePlan
    sizes: Sizes

    @staticmethod
    def from_request(
        model: PreTrainedModel, plan: SlicePlan, wanted: Mapping[str, float]
    ) -> "TargetSizes":
        """Read counts, or shares below 1. Raises PruneError if gates cannot reach
        them."""
        for name in wanted:
            if name not in GATED_AXES:
                raise PruneError(
                    "sizes: gates cannot prune "
                    f"{name!r}.{did_you_mean(name, GATED_AXES)}"
                )
        target = TargetSizes(plan, Sizes.from_request(model.config, **wanted))
        if not target.shapes:
            raise PruneError(
                f"sizes: {target.sizes} are the model's own; nothing is to be pruned"
            )
        if plan.family.rotary and "query" in target.left:
            raise PruneError(
                f"sizes: heads of {target.sizes.head_size}: gates cannot choose rows "
                f"within heads of {plan.sizes.head_size} with rotary positions; give "
                "hidden and heads that keep their size"
            )
        return target

    @property
    def left(self) -> Mapping[str, float]:
        """The share of each axis that stays; for rows, within each head."""
        of = self.plan.sizes
        to = self.sizes
        shares = {
            name: getattr(to, name) / getattr(of, name)
            for name in ("hidden", "heads", "ffn", "layers")
        }
        shares |= dict.fromkeys(("query", "value"), to.head_size / of.head_size)
        return {name: share for name, share in shares.items() if share < 1}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of the gates of each axis."""
        of = self.plan.sizes
        units = {
            "heads": of.heads,
            "ffn": of.ffn,
            "query": of.attention,
            "value": of.attention,
        }
        flat = {"hidden": (of.hidden,), "layers": (of.layers,)}
        return {
            name: flat[name] if name in flat else (of.layers, units[name])
            for name in self.left
        }

    def excess(self, active: Active, share: float) -> Tensor:
        """Compute (C,) s - t: the expected share of closed gates, less `share` of the
        target."""
        excess = []
        for name, left in self.left.items():
            each = active[name]
            if name in ("query", "value"):
                each = each.unflatten(-1, (self.plan.sizes.heads, -1))
            excess.append((1 - each.mean(-1) - share * (1 - left)).flatten())
        return torch.cat(excess)

    def kept(self, active: Active) -> Kept:
        """Choose the units that stay, exactly as many as in `sizes`."""
        importance = dict[Group, Tensor]()
        for name, of in active.items():
            if name in ("hidden", "layers"):
                importance[HIDDEN if name == "hidden" else LAYERS] = of.detach().cpu()
            else:
                importance |= {
                    Group(name, str(layer)): row
                    for layer, row in enumerate(of.detach().cpu())
                }
        return choose(self.plan, importance, self.sizes)


OPEN = 10.0
"""log alpha of a gate that is practically always open."""
_TABLES = ("words", "positions", "types", "tasks")


class Gates(nn.Module):
    """log alpha of every gate of `target`, and the current values of the gates.

    Gates are drawn anew for each forward pass of training, and have no effect while
    `waiting`; in eval mode they are settled at the target, as after training.

    begin: the initial log alpha of gates on neurons; others start open. While attached,
    the gates are registered in the model, so that its best weights and their gates are
    saved together. Raises PruneError for a family without gates.
    """

    def __init__(self, plan: SlicePlan, target: TargetSizes, *, begin: float) -> None:
        super().__init__()
        if not plan.family.gates:
            raise PruneError(
                f"no gates for {plan.family.name!r}; there are for "
                f"{families.names('gates')}"
            )
        self.plan = plan
        self.target = target
        self.waiting = False
        self.values: Tensors = {}
        self.log_alpha = nn.ParameterDict(
            {
                axis: nn.Parameter(
                    torch.empty(shape).normal_(begin if axis == "ffn" else OPEN, 0.01)
                )
                for axis, shape in target.shapes.items()
            }
        )
        self._hooks = ExitStack()

    def active(self) -> TensorDict:
        """Compute P(z > 0) of each gate."""
        return {
            axis: find("louizos.active")(each) for axis, each in self.log_alpha.items()
        }

    def settled(self, kept: Kept) -> TensorDict:
        """Compute the gates without noise: 0 for dropped units, 1 for kept layers,
        whose gates no weight can absorb."""
        settled = {}
        for axis, each in self.log_alpha.items():
            mask = self._mask(axis, kept).to(each)
            settled[axis] = (
                mask
                if axis == "layers"
                else mask * find("louizos.settled")(each.detach())
            )
        return settled

    def train(self, mode: bool = True) -> "Gates":
        super().train(mode)
        if not mode:
            self.values = self.settled(self.target.kept(self.active()))
        return self

    def attach(self, model: PreTrainedModel) -> None:
        """Apply the gates in the model's forward passes from now on, whatever head it
        has."""
        model.gates = self.to(model.device)
        hooks = self._hooks
        plan = self.plan
        hooks.callback(delattr, model, "gates")
        hooks.callback(model.base_model.register_forward_pre_hook(self._draw).remove)
        for name, cut in plan.modules("attention_out", "ffn_out").items():
            axis = "rows" if cut.role == "attention_out" else "ffn"
            gates = partial(self._of_layer, axis, cut.layer or 0)
            hooks.callback(
                model.get_submodule(name)
                .register_forward_pre_hook(_scale_input(gates))
                .remove
            )
        if "query" in self.log_alpha:
            for name, cut in plan.modules("query").items():
                gates = partial(self._of_layer, "query", cut.layer or 0)
                hooks.callback(
                    model.get_submodule(name)
                    .register_forward_hook(_scale_output(gates))
                    .remove
                )
        if "hidden" in self.log_alpha:
            for name in writers(plan):
                hook = _scale_output(lambda: self.values.get("hidden"))
                hooks.callback(
                    model.get_submodule(name).register_forward_hook(hook).remove
                )
            for name, group in norms(plan).items():
                norm = model.get_submodule(name)
                if group == HIDDEN and isinstance(norm, nn.LayerNorm):
                    begins = plan.cuts[f"{name}.weight"].role == "embedding_norm"
                    setattr(norm, "forward", self._norm(norm, begins=begins))  # noqa: B010  mypy knows it as a method
                    hooks.callback(delattr, norm, "forward")
        if "layers" in self.log_alpha:
            stack = model.get_submodule(plan.stack)
            for number, layer in enumerate(stack.children()):
                # before those that note the layer's output
                hook = _scale_change(partial(self._of_layer, "layers", number))
                hooks.callback(layer.register_forward_hook(hook, prepend=True).remove)

    def detach(self) -> None:
        """Remove the gates from the model, without changing its weights."""
        self._hooks.close()

    def _draw(self, module: nn.Module, args: object) -> None:
        if self.training:
            self.values = (
                {}
                if self.waiting
                else {
                    axis: find("louizos.drawn")(each)
                    for axis, each in self.log_alpha.items()
                }
            )

    def _of_layer(self, axis: str, layer: int) -> Tensor | None:
        """Return a layer's gates along an axis, or along the `rows` of its values; None
        if it has none."""
        if axis == "rows":
            return rows(self.values, layer, self.plan.sizes.head_size)
        return self.values[axis][layer] if axis in self.values else None

    def _norm(self, norm: nn.LayerNorm, *, begins: bool) -> Callable[[Tensor], Tensor]:
        """Return a norm of the open dimensions, 0 elsewhere; the first norm of the
        stream applies the gate too."""

        def forward(x_BLD: Tensor) -> Tensor:
            gate_D = self.values.get("hidden")
            if gate_D is None:
                return nn.functional.layer_norm(
                    x_BLD, norm.normalized_shape, norm.weight, norm.bias, norm.eps
                )
            normed_BLD = norm_over(x_BLD, (gate_D > 0).float(), norm)
            return normed_BLD * gate_D if begins else normed_BLD

        return forward

    def _mask(self, axis: str, kept: Kept) -> Tensor:
        """Return 1 for kept units, else 0."""
        shape = self.log_alpha[axis].shape
        if axis in ("hidden", "layers"):
            places = (
                torch.tensor(kept.layers)
                if axis == "layers"
                else kept.indices.get(HIDDEN)
            )
            return _ones(shape[0], places)
        return torch.stack(
            [
                _ones(shape[1], kept.indices.get(Group(axis, str(layer))))
                for layer in range(shape[0])
            ]
        )


def norms(plan: SlicePlan) -> Mapping[str, Group]:
    """Return the norms over the residual stream or the embedding, with their groups."""
    roles = {cut.role for cut in plan.cuts.values() if cut.role.endswith("norm")}
    groups = {
        name: cut.slices[0].groups[0] for name, cut in plan.modules(*roles).items()
    }
    return {
        name: group for name, group in groups.items() if group in (HIDDEN, EMBEDDING)
    }


def norm_over(x_BLD: Tensor, open_D: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Compute the layer norm over the open dimensions (1), and 0 in the others (0);
    float32."""
    x = x_BLD.float()
    count = open_D.sum().clamp(min=1)
    mean = (x * open_D).sum(-1, keepdim=True) / count
    centred = (x - mean) * open_D
    scale = (centred.square().sum(-1, keepdim=True) / count + norm.eps).rsqrt()
    bias: Any = norm.bias  # ModernBERT's norms have none
    normed = centred * scale * norm.weight.float()
    return (normed if bias is None else normed + bias.float()) * open_D


def rows(values: Tensors, layer: int, size: int) -> Tensor | None:
    """Return (R,) z_head z_value of a layer; None if neither is gated."""
    of_heads_R = (
        values["heads"][layer].repeat_interleave(size) if "heads" in values else None
    )
    if "value" not in values:
        return of_heads_R
    return (
        values["value"][layer]
        if of_heads_R is None
        else of_heads_R * values["value"][layer]
    )


def writers(plan: SlicePlan) -> list[str]:
    """List the linear layers whose outputs lie along the stream."""
    return [
        name
        for role in {
            cut.role
            for cut in plan.cuts.values()
            if not cut.role.endswith("norm") and cut.role not in _TABLES
        }
        for name, cut in plan.modules(role).items()
        if any(each.dim == 0 and each.groups == (HIDDEN,) for each in cut.slices)
    ]


@torch.no_grad()
def fold(model: PreTrainedModel, plan: SlicePlan, values: Tensors) -> None:
    """Multiply settled gates into the weights of a model that they are detached
    from."""
    writing = set(writers(plan))
    hidden_D = values.get("hidden")
    for name, weight in model.named_parameters():
        cut = plan.cuts[name]
        (module, _, part) = name.rpartition(".")
        if (
            cut.role in ("attention_out", "ffn_out")
            and part == "weight"
            and cut.layer is not None
        ):
            if cut.role == "attention_out":
                inward = rows(values, cut.layer, plan.sizes.head_size)
            else:
                inward = values["ffn"][cut.layer] if "ffn" in values else None
            weight.mul_(1 if inward is None else inward)
        if cut.role == "query" and "query" in values and cut.layer is not None:
            _scale_rows(weight, values["query"][cut.layer])
        if hidden_D is not None and module in writing:
            _scale_rows(weight, hidden_D)
        if (
            hidden_D is not None
            and cut.role == "embedding_norm"
            and cut.slices[0].groups == (HIDDEN,)
        ):
            weight.mul_(hidden_D)


def _scale_rows(weight: Tensor, gate: Tensor) -> None:
    weight.mul_(gate.view(-1, *[1] * (weight.dim() - 1)))


def _ones(count: int, places: Tensor | None) -> Tensor:
    if places is None:
        return torch.ones(count)
    return torch.zeros(count).index_fill_(0, places[places >= 0].cpu(), 1.0)


Gate = Callable[[], Tensor | None]


def _scale_input(gate: Gate) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> Any:
        return None if (now := gate()) is None else (args[0] * now, *args[1:])

    return hook


def _scale_output(gate: Gate) -> Callable[..., Any]:
    def hook(module: nn.Module, args: object, out: Tensor) -> Any:
        return None if (now := gate()) is None else out * now

    return hook


def _scale_change(gate: Gate) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Any:
        return None if (now := gate()) is None else args[0] + now * (out - args[0])

    return hook
