"""Compute in float32 where autocast would compute in less."""

import torch
from torch import Tensor


def multiply(one: Tensor, other: Tensor) -> Tensor:
    """Multiply matrices in float32 also under autocast: what nearly equal models differ
    in would be rounded away."""
    with torch.autocast(one.device.type, enabled=False):
        return one.float() @ other.float()
