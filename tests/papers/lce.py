"""Gao, Dai & Callan 2021."""

import math
from typing import Any

import torch

from tests.papers.case import Case, softmax
from tests.papers.listnet import QUERY, SAME, STUDENT, lists

LABELS = torch.tensor([[1.0], [0.0], [0.0], [3.0], [0.0], [1.0], [0.0], [1.0]])
BEST = torch.tensor([[40.0], [-40.0], [-40.0], [math.log(3)], [-40.0], [40.0], [-80.0], [0.0]])
"""The last query wants two passages, 3 to 1."""


def relevance(student: Any, labels: Any, same: Any) -> float:
    total = 0.0
    pairs = list(zip(lists(student, same), lists(labels, same), strict=True))
    for mine, given in pairs:
        total -= sum(gain / sum(given) * math.log(q) for gain, q in zip(given, softmax(mine), strict=True) if gain)
    return total / len(pairs)


MINIMUM = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / 3
CASES = {"relevance": Case(STUDENT, LABELS, SAME, relevance, best=BEST, minimum=MINIMUM, query=QUERY)}
