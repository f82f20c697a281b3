"""Hooks that read the activations of the units of a slice plan while a model runs.

Removing a unit sets its activations to zero, so importance is computed from them. No
model code is changed.

    value       (B, L, H K): input of attention's output projection; of heads too if
                they are cut whole
    query, key  (B, L, H K): the two sides of the scores
    ffn         (B, L, F): input of the second feed-forward layer
    hidden, embedding, bottleneck, shared
                (B, L, D): outputs of their norms, through which all else reads them;
                behind a pooling layer also the input of the last layer, (B, D)

DeBERTa's projections of positions belong to no row and are left out.

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

from compress.slicing.plan import EMBEDDING, Group, SlicePlan

KEY_AXIS = "key"
"""An axis outside the plan: the keys that a block's `query` rows are multiplied
with."""
_NORMS = (
    "embedding_norm",
    "attention_norm",
    "ffn_norm",
    "final_norm",
    "convolution_norm",
    "lm_norm",
    "narrow_norm",
    "narrow_attention_norm",
    "widen_norm",
)
_READ_INPUTS = ("attention_out", "ffn_out")
_WRITTEN = ("query", "key", "qkv", *_NORMS)


@dataclass(frozen=True)
class Tap:
    """An activation: the input or output of a module, and the groups whose units lie
    along its last dimension.

    groups: one for each equal part of that dimension; None for a part that is read
    elsewhere. All units of a part take the same number of consecutive places.
    """

    name: str
    inward: bool
    groups: tuple[Group | None, ...]


def taps(model: PreTrainedModel, plan: SlicePlan) -> list[Tap]:
    """List every activation of the plan's units."""
    found = _tap_modules(model, plan, *_READ_INPUTS, inward=True)
    # rows of queries and keys are units unless heads are cut whole
    written = _WRITTEN if plan.heads else _NORMS
    found += _tap_modules(model, plan, *written, inward=False)
    # MobileBERT's has no norm of its own; others widen it to a stream without one
    if EMBEDDING in plan.groups:
        normed = any(EMBEDDING in tap.groups for tap in found)
        found += _tap_modules(model, plan, "embedding_up", inward=not normed)
    if plan.modules("pooler", "detector"):
        last = ("classifier", "pair", "detector_out")
        found += _tap_modules(model, plan, *last, inward=True)
    return [tap for tap in found if any(tap.groups)]


@contextmanager
def watching(
    model: PreTrainedModel, plan: SlicePlan, see: Callable[[Tap, Tensor], None]
) -> Iterator[None]:
    """Call `see` with every tap and its activation as soon as it is computed, in each
    forward pass while open."""
    called = set[str]()

    def show(tap: Tap, tensor: Tensor) -> None:
        # DeBERTa's projections run again, over positions
        if plan.own_layers and tap.name in called:
            return
        called.add(tap.name)
        see(tap, tensor)

    with ExitStack() as hooks:
        hooks.callback(
            model.base_model.register_forward_pre_hook(lambda *_: called.clear()).remove
        )
        for tap in taps(model, plan):
            module = model.get_submodule(tap.name)
            if tap.inward:
                hook = module.register_forward_pre_hook(
                    lambda _, args, tap=tap: show(tap, args[0])
                )
            else:
                hook = module.register_forward_hook(
                    lambda _, args, out, tap=tap: show(tap, out)
                )
            hooks.callback(hook.remove)
        yield


@contextmanager
def watching_layers(
    model: PreTrainedModel, plan: SlicePlan, see: Callable[[int, Tensor, Tensor], None]
) -> Iterator[None]:
    """Call `see` with every layer's number, and the stream (B, L, D) before and after
    it, while open."""

    def react(number: int, before_BLD: Tensor, out: Any) -> None:
        see(number, before_BLD, out[0] if isinstance(out, tuple) else out)

    with _after_layers(model, plan, react):
        yield


@contextmanager
def passing_over(
    model: PreTrainedModel, plan: SlicePlan, number: int
) -> Iterator[None]:
    """Let this layer return its input while open."""

    def react(called: int, before_BLD: Tensor, out: Any) -> Any:
        if called != number:
            return None
        return (before_BLD, *out[1:]) if isinstance(out, tuple) else before_BLD

    with _after_layers(model, plan, react):
        yield


@contextmanager
def _after_layers(
    model: PreTrainedModel, plan: SlicePlan, react: Callable[[int, Tensor, Any], Any]
) -> Iterator[None]:
    """Call `react` with every layer's number, its input and its output; what it returns
    replaces the output."""
    numbers = list[int]()

    def after(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Any:
        numbers.append(len(numbers))
        return react(numbers[-1], args[0] if args else kwargs["hidden_states"], out)

    if plan.own_layers:
        names = {
            name[: cut.span[1]]
            for name, cut in plan.cuts.items()
            if cut.layer is not None
        }
    else:  # ALBERT's, which run several times in a forward pass
        names = {
            name[: name.index(".albert_layers.")]
            for name in plan.cuts
            if ".albert_layers." in name
        }
    with ExitStack() as hooks:
        hooks.callback(
            model.base_model.register_forward_pre_hook(
                lambda *_: numbers.clear()
            ).remove
        )
        for name in sorted(names):
            hooks.callback(
                model.get_submodule(name)
                .register_forward_hook(after, with_kwargs=True)
                .remove
            )
        yield


def over_tokens(values: Tensor, mask_BL: Tensor) -> Tensor:
    """Sum (B, L, D) over real tokens to (B, D); return (B, D) as it is."""
    if values.dim() == 2:
        return values
    return torch.einsum("bld,bl->bd", values, mask_BL.to(values))


def _tap_modules(
    model: PreTrainedModel, plan: SlicePlan, *roles: str, inward: bool
) -> list[Tap]:
    """Tap the inputs, or the outputs, of the modules with these roles."""
    found = []
    for name, cut in plan.modules(*roles).items():
        conv1d = isinstance(model.get_submodule(name), Conv1D)
        dim = 0 if cut.role.endswith("norm") else int(inward != conv1d)
        groups: tuple[Group | None, ...] = next(
            (each.groups for each in cut.slices if each.dim == dim), ()
        )
        keys = Group(KEY_AXIS, cut.block)
        if cut.role == "qkv":
            groups = (groups[0], keys, None)
        elif cut.role == "key":
            groups = (keys,)
        found.append(Tap(name, inward, groups))
    return found
