"""InfoNCE 2018: where the teacher's vectors are orthonormal, the best student is known: the corners of a simplex."""

import math
from typing import Any

import torch

from tests.papers.case import Case, softmax
from tests.papers.reimers import MASK, STUDENT
from tests.papers.vectors import cosine

TEACHER = torch.linalg.qr(STUDENT.roll(1, 0).T).Q.T
CENTRED = TEACHER - TEACHER.mean(0)
NEAR = torch.tensor([[1.0, 0.0, 0.2, 0.1], [0.9, 0.3, 0.1, 0.0], [0.0, 1.0, 0.5, 0.3], [0.1, 0.8, 1.0, 0.7]])


def infonce(
    student: Any,
    teacher: Any,
    mask: Any,
    *,
    temperature: float = 0.05,
    hardest: int | None = None,
    same_above: float | None = None,
) -> float:
    total = 0.0
    for i, s in enumerate(student):
        negatives = [j for j in range(len(teacher)) if j != i]
        if same_above is not None:
            negatives = [j for j in negatives if cosine(teacher[i], teacher[j]) <= same_above]
        if hardest is not None:
            negatives = sorted(negatives, key=lambda j: -cosine(teacher[i], teacher[j]))[:hardest]
        total -= math.log(softmax([cosine(s, teacher[j]) for j in (i, *negatives)], temperature)[0])
    return total / len(student)


def lowest(negatives: int, apart: float, temperature: float) -> float:
    """The loss where the own text is nearer by `apart` than each of its negatives."""
    return math.log(1 + negatives * math.exp(-apart / temperature))


CASES = {
    "infonce": Case(
        STUDENT, TEACHER, MASK, infonce, best=CENTRED, minimum=lowest(3, math.sqrt(4 / 3), 0.5),
        options={"temperature": 0.5}, across=True,
    ),
}  # fmt: skip
