"""Devlin et al. 2019."""

import math
from typing import Any

import torch

from compress.data.constants import IGNORE_INDEX
from tests.papers.case import Case, prefix, random, softmax, squares

TOKEN_LABELS = torch.tensor(
    [
        [3, IGNORE_INDEX, 0, 1, IGNORE_INDEX],
        [IGNORE_INDEX, 2, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX],
        [IGNORE_INDEX] * 5,
    ]
)
CLASSES = torch.tensor([1, 0, 2])
NUMBERS = random(3, 1, seed=5)
MEMBERSHIPS = torch.tensor([[1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0]])
MASK = prefix(5, 2, 3)
SURE = 40.0
"""A logit beyond which the probability is 1 in float32."""


def masked_lm(student: Any, labels: Any, mask: Any) -> float:
    found = [
        -math.log(softmax(logits)[label])
        for row, label_row in zip(student, labels, strict=True)
        for logits, label in zip(row, label_row, strict=True)
        if label != IGNORE_INDEX
    ]
    return sum(found) / len(found) if found else 0.0


def classes(student: Any, labels: Any, mask: Any) -> float:
    return sum(-math.log(softmax(row)[label]) for row, label in zip(student, labels, strict=True)) / len(labels)


def numbers(student: Any, labels: Any, mask: Any) -> float:
    """`labels` as (B,) or (B, 1)."""
    column = [label if isinstance(label, list) else [label] for label in labels]
    return sum(squares(s, y) for s, y in zip(student, column, strict=True)) / len(labels)


def memberships(student: Any, labels: Any, mask: Any) -> float:
    total = 0.0
    for logits, row in zip(student, labels, strict=True):
        for logit, member in zip(logits, row, strict=True):
            p = 1 / (1 + math.exp(-logit))
            total += -math.log(p) if member else -math.log(1 - p)
    return total / len(labels) / len(labels[0])


def sure_of(labels: torch.Tensor, V: int) -> torch.Tensor:
    return SURE * torch.nn.functional.one_hot(labels.clamp_min(0), V).float()


CASES = {
    "masked_lm": Case(random(3, 5, 4, seed=3), TOKEN_LABELS, MASK, masked_lm, sure_of(TOKEN_LABELS, 4)),
    "next_sentence": Case(random(3, 2, seed=4), CLASSES % 2, MASK, classes, sure_of(CLASSES % 2, 2)),
    "labels": Case(random(3, 4, seed=4), CLASSES, MASK, classes, sure_of(CLASSES, 4)),
    "labels numbers": Case(random(3, 1, seed=6), NUMBERS, MASK, numbers, NUMBERS),
    "labels numbers in a row": Case(random(3, 1, seed=6), NUMBERS[:, 0], MASK, numbers, NUMBERS),
    "labels memberships": Case(random(3, 4, seed=7), MEMBERSHIPS, MASK, memberships, SURE * (2 * MEMBERSHIPS - 1)),
}
