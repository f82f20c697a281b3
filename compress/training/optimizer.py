"""Build the optimiser of a stage, its parameter groups and their learning rates.

adamw       torch's fused AdamW, which the library builds from its own arguments
adafactor   transformers' Adafactor with the settings of T5's authors
            (mesh_tensorflow/optimize.py): the rate is relative to the root mean square
            of each tensor, no momentum, factored second moments. Their code does not
            factor the second moments of tensors with fewer than 32 rows or columns; the
            library factors every matrix.
lamb        `Lamb`, below
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers.optimization import Adafactor

from compress.config.stages import Stage
from compress.training.step import Step


def choose_optimizer(stage: Stage) -> tuple[type[Optimizer], dict[str, Any]] | None:
    """Return the class and settings of the stage's optimiser; None: the library's
    AdamW."""
    rate = {"lr": stage.lr}
    if stage.optimizer == "adafactor":
        return Adafactor, rate | {"scale_parameter": True, "relative_step": False}
    return (
        (Lamb, rate | {"betas": stage.betas, "eps": stage.eps})
        if stage.optimizer == "lamb"
        else None
    )


class Lamb(Optimizer):
    """Move each tensor x in Adam's direction, by `lr` times its own norm.

    You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76
    minutes", arXiv:1904.00962, Algorithm 2 with phi(z) = z: m = b1 m + (1 - b1) g; v =
    b2 v + (1 - b2) g^2; u = m / (sqrt(v) + eps) + decay x; x = x - lr |x| / |u| u. The
    ratio |x| / |u| is 1 if one of them is 0, and for the tensors of groups with `adapt:
    False`: in ALBERT's and MobileBERT's code biases and norms, which do not decay
    either. As in these two, m and v are not corrected for their bias, unlike in
    Algorithm 2.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "adapt": True,
            },
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every tensor that has a gradient; return the loss of the closure, if
        given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for x in group["params"]:
                if x.grad is None:
                    continue
                state = self.state[x]
                if not state:
                    state["m"] = torch.zeros_like(x)
                    state["v"] = torch.zeros_like(x)
                m = state["m"].mul_(b1).add_(x.grad, alpha=1 - b1)
                v = state["v"].mul_(b2).addcmul_(x.grad, x.grad, value=1 - b2)
                u = (m / (v.sqrt() + group["eps"])).add_(x, alpha=group["weight_decay"])
                if group["adapt"]:
                    norm_x = x.norm()
                    norm_u = u.norm()
                    u.mul_(
                        torch.where((norm_x > 0) & (norm_u > 0), norm_x / norm_u, 1.0)
                    )
                x.add_(u, alpha=-group["lr"])
        return loss


def group_parameters(
    step: Step, decayed: set[str], weight_decay: float
) -> list[dict[str, Any]]:
    """Split each group of `step.groups()` into an optimiser group with and one without
    weight decay.

    `decayed` names the parameters of `step` with weight decay, which `Lamb` also
    adapts. A parameter in no group is not trained.
    """
    decays = {
        id(parameter) for name, parameter in step.named_parameters() if name in decayed
    }
    groups = []
    for name, parameters in step.groups().items():
        trained: list[nn.Parameter] = [
            parameter for parameter in parameters if parameter.requires_grad
        ]
        for decay in (True, False):
            if part := [
                parameter for parameter in trained if (id(parameter) in decays) == decay
            ]:
                settings = {
                    "weight_decay": weight_decay if decay else 0.0,
                    "adapt": decay,
                }
                groups.append({"params": part, "group": name} | settings)
    return groups


def scale_rate(
    groups: list[dict[str, Any]], layer: nn.Module, *, lr: float, eps: float, by: float
) -> list[dict[str, Any]]:
    """Multiply the learning rate of a layer's parameters by `by`, in separate groups.

    AdamW's steps do not grow with the gradient: without this, a head would take `by`
    times as many steps to predict numbers that are `by` times larger. Its gradients are
    smaller by the same factor, and so is `eps`; weight decay is unchanged.
    """
    own = {id(parameter) for parameter in layer.parameters()}
    scaled = []
    for group in groups:
        if part := [parameter for parameter in group["params"] if id(parameter) in own]:
            group["params"] = [
                parameter for parameter in group["params"] if id(parameter) not in own
            ]
            decay = group["weight_decay"] / by
            scaled.append(
                group
                | {
                    "params": part,
                    "lr": by * lr,
                    "eps": eps / by,
                    "weight_decay": decay,
                }
            )
    return [group for group in (*groups, *scaled) if group["params"]]


def set_group_rates(scheduler: LambdaLR, step: Step, total: int) -> None:
    """Give each optimiser group its own learning rate from the first step on: see
    `factors` and `rates` of `Step`.

    A group without either follows the stage's schedule.
    """

    def schedule_group(
        schedule: Callable[[int], float], group: Mapping[str, Any]
    ) -> Callable[[int], float]:
        def factor(at: int) -> float:
            """Compute the rate as a share of the stage's peak."""
            rates = step.rates(at, total)
            if group["group"] in rates:
                return float(rates[group["group"]] / group["initial_lr"])
            factors = step.factors(at, total)
            return float(schedule(at) * factors.get(group["group"], 1.0))

        return factor

    groups = scheduler.optimizer.param_groups
    scheduler.lr_lambdas = [
        schedule_group(schedule, group)
        for schedule, group in zip(scheduler.lr_lambdas, groups, strict=True)
    ]
    for schedule, group in zip(scheduler.lr_lambdas, groups, strict=True):
        group["lr"] = group["initial_lr"] * schedule(0)
