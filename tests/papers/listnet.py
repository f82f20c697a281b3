"""Cao et al. 2007."""

import math
from typing import Any

import torch

from tests.papers.case import Case, kl, random, softmax

QUERY = torch.tensor([0, 1, 0, 2, 0, 1, 2, 2])
SAME = (QUERY[:, None] == QUERY).long()
RELEVANCE = torch.tensor([[1.0], [0.0], [0.0], [3.0], [0.0], [1.0], [0.0], [1.0]])
STUDENT, TEACHER = random(8, 1, seed=1), random(8, 1, seed=2)


def lists(values: Any, same: Any) -> list[list[float]]:
    """The values of each query's rows."""
    rows = {tuple(row) for row in same}
    return [[value for (value,), one in zip(values, row, strict=True) if one] for row in sorted(rows)]


def top_one(student: Any, teacher: Any, same: Any, *, temperature: float = 1.0) -> float:
    pairs = list(zip(lists(student, same), lists(teacher, same), strict=True))
    values = [temperature**2 * kl(softmax(t, temperature), softmax(s, temperature)) for s, t in pairs]
    return sum(values) / len(values)


def relevance(student: Any, labels: Any, same: Any) -> float:
    total = 0.0
    pairs = list(zip(lists(student, same), lists(labels, same), strict=True))
    for mine, given in pairs:
        total -= sum(p * math.log(q) for p, q in zip(softmax(given), softmax(mine), strict=True))
    return total / len(pairs)


CASES = {
    "top_one": Case(STUDENT, TEACHER, SAME, top_one, query=QUERY),
    "top_one softened": Case(STUDENT, TEACHER, SAME, top_one, options={"temperature": 3.0}, query=QUERY),
    "relevance": Case(
        STUDENT,
        RELEVANCE,
        SAME,
        relevance,
        best=RELEVANCE,
        minimum=relevance(RELEVANCE.tolist(), RELEVANCE.tolist(), SAME.tolist()),
        query=QUERY,
    ),
}
