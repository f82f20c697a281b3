"""Nogueira & Cho 2019."""

import math
from typing import Any

import torch

from tests.papers.case import Case, prefix, random

LABELS = torch.tensor([[2.0], [0.0], [1.0]])


def relevance(student: Any, labels: Any, mask: Any) -> float:
    total = 0.0
    for (z,), (label,) in zip(student, labels, strict=True):
        p = 1 / (1 + math.exp(-z))
        total -= math.log(p if label > 0 else 1 - p)
    return total / len(student)


CASES = {
    "relevance": Case(random(3, 1, seed=1), LABELS, prefix(5, 2, 3), relevance, best=80 * (LABELS > 0).float() - 40)
}
