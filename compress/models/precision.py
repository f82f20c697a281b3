"""Choose the number format that is fastest on this machine, and cast frozen models to
it."""

from typing import Literal

import torch
from torch import nn

from compress.errors import CompressError

TrainingPrecision = Literal["auto", "bf16", "fp32"]


def choose(precision: TrainingPrecision) -> Literal["bf16", "fp32"]:
    """Resolve `auto` to bf16 autocast on hardware that supports it, where it makes a
    forward pass 2-4x faster."""
    if precision not in ("auto", "bf16", "fp32"):
        raise CompressError(f"--precision {precision}: expected auto, bf16 or fp32")
    if precision != "auto":
        return precision
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    return (
        "bf16"
        if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        else "fp32"
    )


def cast_linear_layers(model: nn.Module) -> None:
    """Cast the weights of a frozen model's linear layers to bfloat16 once, in place.

    Autocast would cast them in every forward pass, because it caches only casts of
    weights that require a gradient. The results are the same.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.to(torch.bfloat16)
