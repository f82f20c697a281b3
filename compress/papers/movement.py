"""Sanh, Wolf & Rush 2020, "Movement Pruning: Adaptive Sparsity by Fine-Tuning",
arXiv:2005.07683. Lagunas, Charlaix, Sanh & Rush 2021, "Block Pruning For Faster
Transformers", arXiv:2109.04838.

Sanh, Sec. 4, Eq. 5   movement  S = -sum over steps of W * dL/dW, while W is fine-tuned:
                                weights that grow matter
Lagunas, Sec. 3       movement  one score for each structure, the sum over its weights

Shapes: U units of a group.

Deviations
- scores are collected first, then all units are cut at once; the papers prune during
  training, by scores that learn through a straight-through estimator. The score of a
  step is the same.
- the fine-tuning has no dropout, a constant rate and AdamW without decay, on a copy
  that is discarded: only the direction in which weights move matters.
- all weights that write or read a unit count; Lagunas et al. use blocks of weights.
"""

import copy

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from pydantic import PositiveInt
from torch import Tensor
from transformers import PreTrainedModel

from compress.errors import PruneError
from compress.pruning.importance import Batches, Targets
from compress.slicing.plan import LAYERS, Group, SlicePlan
from compress.slicing.select import GroupTensors, Importance
from compress.tensors import Tensors


def movement(
    student: PreTrainedModel,
    batches: Batches,
    plan: SlicePlan,
    *,
    targets: Targets = "labels",
    steps: PositiveInt = 100,
    lr: float = 3e-5,
) -> Importance:
    """Sum -W * dL/dW over each unit's weights and over `steps` of fine-tuning; L is the
    mean over a batch.

    Processes train together, and each returns an equal share of the sum. Raises
    PruneError if the loss is not finite.
    """
    moved = copy.deepcopy(student).eval().requires_grad_(True)
    optimizer = torch.optim.AdamW(moved.parameters(), lr=lr, weight_decay=0.0)
    found = GroupTensors()
    for batch in batches.turns(steps):
        with batches.computing():
            loss = batches.loss(moved, batch, targets) / batches.size
        optimizer.zero_grad()
        loss.backward()
        # every process needs the gradients of the whole batch
        if PartialState().num_processes > 1:
            for parameter in moved.parameters():
                own = (
                    torch.zeros_like(parameter)
                    if parameter.grad is None
                    else parameter.grad
                )
                parameter.grad = reduce(own, "sum")
        for group, of_unit in _scores(dict(moved.named_parameters()), plan).items():
            found[group] = found.get(group, 0) + of_unit
        optimizer.step()
    if not all(bool(scores.isfinite().all()) for scores in found.values()):
        raise PruneError(
            f"movement: the loss is not finite after {steps} steps at lr {lr}; lower lr"
        )
    return {
        group: of_unit / PartialState().num_processes
        for group, of_unit in found.items()
    }


def _scores(weights: Tensors, plan: SlicePlan) -> GroupTensors:
    """Compute -W * dL/dW of one step, (U,) for each group; tied weights count once."""
    found = GroupTensors()

    def add(group: Group, of_U: Tensor) -> None:
        found[group] = found[group] + of_U if group in found else of_U

    for name, weight in weights.items():
        if weight.grad is None:
            continue
        score = -(weight.detach() * weight.grad).float()
        cut = plan.cuts[name]
        for each in cut.slices:
            along = score.movedim(each.dim, 0).reshape(score.shape[each.dim], -1).sum(1)
            for group, part in zip(
                each.groups, along.chunk(len(each.groups)), strict=True
            ):
                add(group, part.view(plan.groups[group], -1).sum(1))
        if cut.layer is not None:
            of_N = score.new_zeros(plan.groups[LAYERS])
            of_N[cut.layer] = score.sum()
            add(LAYERS, of_N)
    for rows, heads in plan.heads.items():
        add(heads, found[rows].view(plan.sizes.heads, -1).sum(1))
    return found
