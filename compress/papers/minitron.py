"""Muralidharan et al. 2024, "Compact Language Models via Pruning and Knowledge
Distillation", arXiv:2407.14679.

Sec. 2.2, Eq. 1-3  activation  heads by the norm of their outputs, neurons and widths by
                               the size of their activations, over a calibration set; no
                               gradients, no labels
Sec. 2.2           activation  layers by block influence, 1 - cos(before, after) (Men et
                               al. 2024, arXiv:2403.03853), or by the loss without them,
                               the paper's perplexity

Shapes: B batch, L tokens, D hidden, U units, H heads, K head size.

Deviations
- means run over real tokens of all calibration examples; among the paper's ways to
  aggregate, this is (mean, mean) of absolute values: unlike with its best, (L2 over the
  batch, mean over tokens), no single example can decide.
- neurons are measured after their activation function, where the next product reads
  them, as in the authors' later code.
- rows of queries and keys, which the paper does not prune: the mean size of a row's
  queries times that of its keys.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from compress.models.signals import evaluating, read
from compress.pruning.hooks import (
    KEY_AXIS,
    Tap,
    over_tokens,
    passing_over,
    watching,
    watching_layers,
)
from compress.pruning.importance import Batches, Targets, answer_signal
from compress.slicing.plan import LAYERS, Group, SlicePlan
from compress.slicing.select import GroupTensors, Importance


def activation(
    student: PreTrainedModel,
    batches: Batches,
    plan: SlicePlan,
    *,
    depth: Literal["influence", "loss"] = "influence",
    targets: Targets = "labels",
) -> Importance:
    """Sum the mean absolute activation of every unit (norm for a head) over these
    batches' real tokens.

    depth: rank layers by block influence, or by the increase of the loss of `targets`
    without each, for which every batch is computed once per layer.
    """
    total = GroupTensors()
    with torch.no_grad(), evaluating(student):
        for batch in batches:
            with batches.computing():
                sums = _sum_activations(student, batch, plan)
                if depth == "loss":
                    loss = batches.loss(student, batch, targets)
                    increases = []
                    for number in range(plan.groups[LAYERS]):
                        with passing_over(student, plan, number):
                            increases.append(
                                batches.loss(student, batch, targets) - loss
                            )
                    sums[LAYERS] = torch.stack(increases)
            for group, of_unit in sums.items():
                total[group] = total.get(group, 0) + of_unit
    return total


def _sum_activations(
    student: PreTrainedModel, batch: dict[str, Tensor], plan: SlicePlan
) -> GroupTensors:
    """Sum over one batch, (U,) of each group."""
    mask_BL = batch["attention_mask"]
    sums_BU = GroupTensors()

    def add(group: Group, of_BU: Tensor) -> None:
        sums_BU[group] = sums_BU[group] + of_BU if group in sums_BU else of_BU

    def see(tap: Tap, activation: Tensor) -> None:
        for group, part in zip(
            tap.groups,
            activation.detach().float().chunk(len(tap.groups), -1),
            strict=True,
        ):
            if group is None:
                continue
            if group.axis == "heads":
                length_BLH = part.unflatten(-1, (plan.groups[group], -1)).norm(dim=-1)
                add(group, over_tokens(length_BLH, mask_BL))
                continue
            add(group, over_tokens(part.abs(), mask_BL))
            if group.axis == "value":
                length_BLH = part.unflatten(-1, (plan.sizes.heads, -1)).norm(dim=-1)
                add(plan.heads[group], over_tokens(length_BLH, mask_BL))

    def see_layer(number: int, before_BLD: Tensor, after_BLD: Tensor) -> None:
        change_BL1 = 1 - cosine_similarity(
            before_BLD.float(), after_BLD.float(), dim=-1
        ).unsqueeze(-1)
        of_BN = change_BL1.new_zeros(len(mask_BL), plan.groups[LAYERS])
        of_BN[:, number] = over_tokens(change_BL1, mask_BL)[:, 0]
        add(LAYERS, of_BN)

    with watching(student, plan, see), watching_layers(student, plan, see_layer):
        read(student, batch, answer_signal(student))
    lengths_B1 = mask_BL.sum(-1, keepdim=True)
    for group in [each for each in sums_BU if each.axis == KEY_AXIS]:
        queries = Group("query", group.block)
        sums_BU[queries] = sums_BU[queries] * sums_BU.pop(group) / lengths_B1
    return {group: of_BU.sum(0) for group, of_BU in sums_BU.items()}
