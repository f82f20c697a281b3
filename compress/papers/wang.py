"""Wang, Wohlwend & Lei 2020, "Structured Pruning of Large Language Models",
arXiv:1910.04732.

Sec. 4.1  lagrangian   g = lambda_1 (s - t) + lambda_2 (s - t)^2, minimised over the
                       model, maximised over the lambdas
          Multipliers  the lambdas, by gradient ascent
          wanted       t, which grows linearly from 0

Shapes: C constraints.

Deviation: s is the share of the model that is pruned, as in CoFi; theirs is the share
that remains."""

import torch
from torch import Tensor, nn


def lagrangian(excess_C: Tensor, lambda_2C: Tensor) -> Tensor:
    """lambda_1 (s - t) + lambda_2 (s - t)^2, summed over the constraints."""
    return (lambda_2C[0] * excess_C + lambda_2C[1] * excess_C.square()).sum()


def wanted(step: float, begin: float, steps: float) -> float:
    """Compute the share of the target at a step: 0 until `begin`, then linearly to 1 in
    `steps`."""
    return (
        min(1.0, max(0.0, (step - begin) / steps))
        if steps > 0
        else float(step >= begin)
    )


class Multipliers(nn.Module):
    """lambda_1 and lambda_2 of C constraints, 0 at first.

    Their gradient is negated, so that an optimiser that minimises the loss maximises it
    over them.
    """

    def __init__(self, constraints: int) -> None:
        super().__init__()
        self.lambda_2C = nn.Parameter(torch.zeros(2, constraints))
        self.lambda_2C.register_hook(torch.neg)

    def forward(self, excess_C: Tensor) -> Tensor:
        return lagrangian(excess_C, self.lambda_2C)
