"""Floating-point operations of a forward pass, counted by torch on the real graph rather than by a formula."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from compress.slicing.shape import positions


def flops_per_token(model: nn.Module, length: int = 128) -> float:
    """FLOPs (a multiply-add is two) of one forward pass over `length` tokens, divided by `length` (less where the
    model has fewer positions).

    Counts matrix products, attention included; embedding look-ups, norms and activations count nothing. On the meta
    device it works without weights, but for XLM, XLNet and the first DeBERTa, whose code looks at values.
    """
    device = next(model.parameters()).device
    length = min(length, positions(model) or length)
    training = model.training
    model.eval()
    with torch.no_grad(), _frozen(model), FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter:
        ids_BL = torch.ones(1, length, dtype=torch.long, device=device)
        config: Any = model.config
        if config.is_encoder_decoder:  # T5 classifies at the end of the text
            ids_BL[:, -1] = config.eos_token_id
        model(input_ids=ids_BL, **({"attention_mask": torch.ones_like(ids_BL)} if _takes_a_mask(model) else {}))
    model.train(training)
    return counter.get_total_flops() / length


def parameters(model: nn.Module) -> int:
    """Number of parameters, each tied one once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _attention(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


_ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}
"""What the CPU computes attention by, and torch's own table of counted operations leaves out."""


def _takes_a_mask(model: Any) -> bool:
    """Not whether a mask is all ones, which on the meta device nobody knows: most families leave such a one out."""
    return str(model.device.type) != "meta" or model.config.model_type.startswith("deberta")


@contextmanager
def _frozen(model: Any) -> Iterator[None]:
    """Keep the counter from hooking the gradient of whatever parameter is passed to a module, as DeBERTa's positions
    are, and GPT-2 on the meta device from looking for padding among tokens that have no values."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    padding = model.config.pad_token_id
    if model.device.type == "meta":
        model.config.pad_token_id = None
    try:
        yield
    finally:
        model.config.pad_token_id = padding
        for parameter in trained:
            parameter.requires_grad_(True)
