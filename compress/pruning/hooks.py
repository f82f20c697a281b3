"""Watch the activations in which the units of a slice plan show while a model runs.

A unit is gone when these are zero, so importance is computed from them. They are read by hooks on the modules of the
plan; no model code is changed.

    value       what attention's output product reads          (B, L, H K); heads too, where they are cut whole
    query, key  the two sides of the scores                    (B, L, H K)
    ffn         what the second feed-forward product reads     (B, L, F)
    hidden, embedding, bottleneck, shared    what their norms give, which is all that others read of them (B, L, D);
                behind a pooling layer also what the last product reads (B, D)

DeBERTa's projections of positions are no rows' own and are left out.

Shapes: B batch, L tokens, D hidden, F neurons, H heads, K head size.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from compress.slicing.plan import EMBEDDING, Cut, Group, SlicePlan

KEY = "key"
"""An axis that is in no plan: the keys that a block's `query` rows are multiplied with."""
_NORMS = (
    *("embedding_norm", "attention_norm", "ffn_norm", "final_norm", "convolution_norm", "lm_norm"),
    *("narrow_norm", "narrow_attention_norm", "widen_norm"),
)
_READ, _WRITTEN = ("attention_out", "ffn_out"), ("query", "key", "qkv", *_NORMS)


@dataclass(frozen=True)
class Tap:
    """One activation: what goes into a module, or comes out, and whose units lie along its last dimension.

    groups: one for each equal part of that dimension; None for a part that is read elsewhere. A unit takes as many
    places of its part as the others do, one after another.
    """

    name: str
    inward: bool
    groups: tuple[Group | None, ...]


Seen = Callable[[Tap, Tensor], None]
SeenLayer = Callable[[int, Tensor, Tensor], None]


def taps(model: PreTrainedModel, plan: SlicePlan) -> list[Tap]:
    """List every activation that units of `plan` show in."""
    found = [_tap(model, name, cut, inward=True) for name, cut in plan.modules(*_READ).items()]
    written = _WRITTEN if plan.heads else _NORMS  # rows of queries and keys are units but where heads are cut whole
    found += [_tap(model, name, cut, inward=False) for name, cut in plan.modules(*written).items()]
    if EMBEDDING in plan.groups:  # MobileBERT's has no norm of its own; others widen it to a stream without one
        normed = any(EMBEDDING in tap.groups for tap in found)
        found += [_tap(model, name, cut, inward=not normed) for name, cut in plan.modules("embedding_up").items()]
    if plan.modules("pooler", "detector"):
        last = plan.modules("classifier", "pair", "detector_out")
        found += [_tap(model, name, cut, inward=True) for name, cut in last.items()]
    return [tap for tap in found if any(tap.groups)]


@contextmanager
def watching(model: PreTrainedModel, plan: SlicePlan, see: Seen) -> Iterator[None]:
    """Hand every tap's activation to `see` as soon as it is computed, in each forward pass while open."""
    called: set[str] = set()

    def show(tap: Tap, tensor: Tensor) -> None:
        if plan.own_layers and tap.name in called:  # DeBERTa's projections run again, over positions
            return
        called.add(tap.name)
        see(tap, tensor)

    def reads(tap: Tap) -> Callable[..., None]:
        return lambda module, args: show(tap, args[0])

    def writes(tap: Tap) -> Callable[..., None]:
        return lambda module, args, out: show(tap, out)

    with ExitStack() as hooks:
        hooks.callback(model.base_model.register_forward_pre_hook(lambda *_: called.clear()).remove)
        for tap in taps(model, plan):
            module = model.get_submodule(tap.name)
            into, out_of = module.register_forward_pre_hook, module.register_forward_hook
            hooks.callback((into(reads(tap)) if tap.inward else out_of(writes(tap))).remove)
        yield


@contextmanager
def watching_layers(model: PreTrainedModel, plan: SlicePlan, see: SeenLayer) -> Iterator[None]:
    """Hand `see` every layer's number and the stream (B, L, D) before and after it, in each forward pass while open."""

    def react(number: int, before_BLD: Tensor, out: Any) -> None:
        see(number, before_BLD, out[0] if isinstance(out, tuple) else out)

    with _at_layers(model, plan, react):
        yield


@contextmanager
def passing_over(model: PreTrainedModel, plan: SlicePlan, number: int) -> Iterator[None]:
    """Let this layer return its input while open."""

    def react(called: int, before_BLD: Tensor, out: Any) -> Any:
        if called != number:
            return None
        return (before_BLD, *out[1:]) if isinstance(out, tuple) else before_BLD

    with _at_layers(model, plan, react):
        yield


@contextmanager
def _at_layers(model: PreTrainedModel, plan: SlicePlan, react: Callable[[int, Tensor, Any], Any]) -> Iterator[None]:
    """Call `react` with every layer's number, its input stream and its output; a result takes the output's place."""
    numbers: list[int] = []

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        numbers.append(len(numbers))
        return react(numbers[-1], args[0] if args else kwargs["hidden_states"], out)

    with ExitStack() as hooks:
        hooks.callback(model.base_model.register_forward_pre_hook(lambda *_: numbers.clear()).remove)
        for layer in layers(model, plan):
            hooks.callback(layer.register_forward_hook(after, with_kwargs=True).remove)
        yield


def layers(model: PreTrainedModel, plan: SlicePlan) -> list[nn.Module]:
    """List the layers' modules; each of ALBERT's runs several times in a forward pass."""
    if plan.own_layers:
        names = {name[: cut.span[1]] for name, cut in plan.cuts.items() if cut.layer is not None}
    else:
        names = {name[: name.index(".albert_layers.")] for name in plan.cuts if ".albert_layers." in name}
    return [model.get_submodule(name) for name in sorted(names)]


def over_tokens(values: Tensor, mask_BL: Tensor) -> Tensor:
    """Sum (B, L, D) over real tokens to (B, D); return (B, D) as it is."""
    if values.dim() == 2:
        return values
    return torch.einsum("bld,bl->bd", values, mask_BL.to(values))


def _tap(model: PreTrainedModel, name: str, cut: Cut, *, inward: bool) -> Tap:
    module = model.get_submodule(name)
    dim = 0 if cut.role.endswith("norm") else int(inward != isinstance(module, Conv1D))
    groups: tuple[Group | None, ...] = next((each.groups for each in cut.slices if each.dim == dim), ())
    if cut.role == "qkv":
        groups = (groups[0], _keys(groups[1]), None)
    elif cut.role == "key":
        groups = (_keys(groups[0]),)
    return Tap(name, inward, groups)


def _keys(group: Group | None) -> Group | None:
    return None if group is None else Group(KEY, group.block)
