"""Let the larger model compute what a smaller one would: everything that is not kept is masked, nothing is cut.

This is the oracle of `cut`, by another way: weights of dropped units are zero, norms run over the kept dimensions,
dropped layers are passed over.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.slicing.plan import SlicePlan, parameters_of
from compress.slicing.select import Kept


@contextmanager
def masked(model: PreTrainedModel, kept: Kept) -> Iterator[None]:
    """Let `model` answer as `slice_model(model, kept)` does while open: the same logits at full size, for inference."""
    plan = SlicePlan.from_model(model)
    with ExitStack() as restored:
        for name, parameter in parameters_of(model).items():
            _mask_weight(parameter, plan, name, kept, restored)
        for name in [name for name, cut in plan.cuts.items() if cut.role.endswith("norm")]:
            (group,) = plan.cuts[name].slices[0].groups
            if name.endswith(".weight") and group in kept.indices:
                module: Any = model.get_submodule(name.removesuffix(".weight"))
                restored.callback(setattr, module, "forward", module.forward)
                module.forward = _norm_over(module, kept.indices[group])
        restored.enter_context(_only_layers(model, plan, kept))
        yield


def _mask_weight(parameter: Tensor, plan: SlicePlan, name: str, kept: Kept, restored: ExitStack) -> None:
    original = parameter.data
    smaller = original
    for each in plan.cuts[name].slices:
        parts = [_mask(plan.groups[group], kept.indices.get(group)).to(original.device) for group in each.groups]
        shape = [1] * original.dim()
        shape[each.dim] = -1
        mask = torch.cat(parts).to(original)
        smaller = smaller * mask.repeat_interleave(original.shape[each.dim] // len(mask)).view(shape)
    restored.callback(setattr, parameter, "data", original)
    parameter.data = smaller


def _mask(count: int, indices: Tensor | None) -> Tensor:
    if indices is None:
        return torch.ones(count)
    return torch.zeros(count).index_fill_(0, indices[indices >= 0], 1.0)


def _norm_over(module: Any, indices: Tensor) -> Callable[[Tensor], Tensor]:
    """Make a norm over the kept dimensions, zero elsewhere: layer norm, T5's, or MobileBERT's scale and shift."""
    weight, bias = module.weight, getattr(module, "bias", None)

    def forward(x: Tensor) -> Tensor:
        at = indices.to(x.device)
        kept, out = x[..., at], torch.zeros_like(x)
        if isinstance(module, nn.LayerNorm):
            shift = None if bias is None else bias[at]  # ModernBERT's have none
            out[..., at] = nn.functional.layer_norm(kept, at.shape, weight[at], shift, module.eps)
        elif hasattr(module, "variance_epsilon"):
            out[..., at] = nn.functional.rms_norm(kept, at.shape, weight[at], module.variance_epsilon)
        else:
            out[..., at] = kept * weight[at] + bias[at]  # type: ignore[index]  # MobileBERT's has one
        return out

    return forward


@contextmanager
def _only_layers(model: PreTrainedModel, plan: SlicePlan, kept: Kept) -> Iterator[None]:
    """Leave the model only the kept layers while open, in their order."""
    config: Any = model.config
    if not plan.own_layers:
        with _set(config, "num_hidden_layers", kept.sizes.layers):
            yield
        return
    if kept.layers == tuple(range(plan.sizes.layers)):
        yield
        return
    stack = model.get_submodule(plan.stack)
    assert isinstance(stack, nn.ModuleList), "a family's layers are a list"
    layers = nn.ModuleList(stack[n] for n in kept.layers)
    parent, _, name = plan.stack.rpartition(".")
    with ExitStack() as restored:
        restored.enter_context(_set(model.get_submodule(parent), name, layers))
        restored.enter_context(_set(config, "num_hidden_layers", len(layers)))
        if kinds := getattr(config, "layer_types", None):
            restored.enter_context(_set(config, "layer_types", [kinds[n] for n in kept.layers]))
        yield


@contextmanager
def _set(place: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)
