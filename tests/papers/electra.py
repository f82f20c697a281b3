"""Clark et al. 2020."""

import math
from typing import Any

import torch

from tests.papers.case import Case, kl, prefix, random, real

MASK = prefix(5, 2, 3)
LOGITS, TAUGHT = random(3, 5, seed=1, scale=2), random(3, 5, seed=2, scale=2)
REPLACED = torch.tensor([[0, 1, 0, 0, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
SURE = 40.0
"""A logit beyond which the probability is 1 in float32."""


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def replaced_tokens(student: Any, replaced: Any, mask: Any) -> float:
    terms = [
        -math.log(sigmoid(student[b][t]) if replaced[b][t] else 1 - sigmoid(student[b][t]))
        for b in range(len(mask))
        for t in real(mask[b])
    ]
    return sum(terms) / len(terms)


def soft_replaced_tokens(student: Any, teacher: Any, mask: Any, *, temperature: float = 1.0) -> float:
    terms = []
    for b in range(len(mask)):
        for t in real(mask[b]):
            p, q = sigmoid(teacher[b][t] / temperature), sigmoid(student[b][t] / temperature)
            terms.append(temperature**2 * kl([p, 1 - p], [q, 1 - q]))
    return sum(terms) / len(terms)


CASES = {
    "replaced_tokens": Case(LOGITS, REPLACED, MASK, replaced_tokens, SURE * (2.0 * REPLACED - 1)),
    "soft_replaced_tokens": Case(LOGITS, TAUGHT, MASK, soft_replaced_tokens),
    "soft_replaced_tokens softened": Case(LOGITS, TAUGHT, MASK, soft_replaced_tokens, options={"temperature": 3.0}),
}
