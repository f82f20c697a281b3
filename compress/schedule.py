"""Learning rates that differ between a step's groups of parameters, and steps that are told when they begin."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

Factors = Callable[[int, int], Mapping[str, float]]
"""(step, total) -> each group's multiplier of the learning rate."""


def trained_groups(step: Any, decayed: set[str], weight_decay: float) -> list[dict[str, Any]]:
    """The optimiser's groups: each of `step.groups()`, in one part that decays and one that does not.

    `decayed` are the names in `step` of the parameters that do. A parameter in no group is not trained.
    """
    decays = {id(parameter) for name, parameter in step.named_parameters() if name in decayed}
    groups = []
    for name, parameters in step.groups().items():
        trained: list[nn.Parameter] = [each for each in parameters if each.requires_grad]
        for decay in (True, False):
            part = [each for each in trained if (id(each) in decays) == decay]
            if part:
                groups.append({"params": part, "weight_decay": weight_decay if decay else 0.0, "group": name})
    return groups


def per_group(scheduler: LambdaLR, factors: Factors, total: int) -> None:
    """Multiply the learning rate of each of the optimiser's groups by its own factor, from the first step on."""

    def scaled(schedule: Callable[[int], float], group: str) -> Callable[[int], float]:
        return lambda step: schedule(step) * factors(step, total)[group]

    groups = scheduler.optimizer.param_groups
    scheduler.lr_lambdas = [
        scaled(schedule, group["group"]) for schedule, group in zip(scheduler.lr_lambdas, groups, strict=True)
    ]
    for schedule, group in zip(scheduler.lr_lambdas, groups, strict=True):
        group["lr"] = group["initial_lr"] * schedule(0)


class Started(TrainerCallback):
    """Tells a step the number of the optimiser step that begins, and how many there will be."""

    def __init__(self, begin: Callable[[int, int], None]) -> None:
        self.begin = begin

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.begin(state.global_step, state.max_steps)
