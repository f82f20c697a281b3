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

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.errors import PruneError
from compress.l0.aims import Aim
from compress.papers import louizos
from compress.slicing import Group, Kept, SlicePlan
from compress.slicing.masked import norms
from compress.slicing.plan import HIDDEN, LAYERS

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
        return {axis: louizos.active(each) for axis, each in self.log_alpha.items()}

    def settled(self, kept: Kept) -> dict[str, Tensor]:
        """The gates without noise, 0 for what is not kept; those of kept layers, which nothing can absorb, are 1."""
        found = {}
        for axis, each in self.log_alpha.items():
            mask = self._mask(axis, kept).to(each)
            found[axis] = mask if axis == "layers" else mask * louizos.settled(each.detach())
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
            drawn = {} if self.waiting else {axis: louizos.drawn(each) for axis, each in self.log_alpha.items()}
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
