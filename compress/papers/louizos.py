"""Louizos, Welling & Kingma 2018, "Learning Sparse Neural Networks through L0
Regularization", arXiv:1712.01312.

Eq. 10, 11  drawn    a hard concrete gate: s = sigmoid((log u - log(1 - u) + log alpha)
                     / beta), u ~ U(0, 1), stretched to (gamma, zeta) and clamped to [0,
                     1]
Eq. 12      active   P(z > 0) = sigmoid(log alpha - beta log(-gamma / zeta))
Eq. 13      settled  the gate at test time: sigmoid(log alpha) stretched and clamped

Shapes: any; one log alpha for each gate.
"""

import math
from typing import Final

import torch
from torch import Tensor

BETA: Final = 2 / 3
GAMMA: Final = -0.1
ZETA: Final = 1.1
"""The values in all of the paper's experiments (Sec. 4)."""
_END = 1e-6
"""The least distance of u from 0 and 1, where the logarithms are infinite."""


def drawn(log_alpha: Tensor, uniform: Tensor | None = None) -> Tensor:
    """Draw gates in [0, 1], float32, differentiable by log alpha; `uniform`: the noise
    u, by default drawn by torch."""
    u = (
        (torch.rand_like(log_alpha) if uniform is None else uniform)
        .float()
        .clamp(_END, 1 - _END)
    )
    return _stretch(((u.log() - (-u).log1p() + log_alpha.float()) / BETA).sigmoid())


def active(log_alpha: Tensor) -> Tensor:
    """Compute the probability that the gate is not 0."""
    return (log_alpha.float() - BETA * math.log(-GAMMA / ZETA)).sigmoid()


def settled(log_alpha: Tensor) -> Tensor:
    """Compute the gate without noise."""
    return _stretch(log_alpha.float().sigmoid())


def _stretch(s: Tensor) -> Tensor:
    return (s * (ZETA - GAMMA) + GAMMA).clamp(0, 1)
