"""Karpukhin et al. 2020: two queries are best opposite each other, each with its passage."""

import math
from typing import Any

import torch

from tests.papers.case import Case, random, softmax
from tests.papers.vectors import cosine

GROUP = [0, 0, 0, 1, 1, 1]
RELEVANCE = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0])
ANSWERS = torch.tensor(
    [[-1, 1, 1, -1, 0, 0], [-1] * 6, [-1] * 6, [-1, 0, 0, -1, 1, 1], [-1] * 6, [-1] * 6],
)
STUDENT = random(6, 5, seed=1)
AWAY = torch.tensor([[1.0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [-1, 0, 0, 0, 0]])


def in_batch(student: Any, relevance: Any, answers: Any, *, temperature: float = 0.05) -> float:
    losses = []
    for query, row in zip(student, answers, strict=True):
        passages = [j for j, mark in enumerate(row) if mark >= 0]
        shares = softmax([cosine(query, student[j]) for j in passages], temperature) if passages else []
        losses += [
            -math.log(share) for j, share in zip(passages, shares, strict=True) if row[j] == 1 and relevance[j] > 0
        ]
    return sum(losses) / len(losses)


ALONE = torch.tensor([[-1, 1, -1, 0], [-1] * 4, [-1, 0, -1, 1], [-1] * 4])
CASES = {
    "in_batch": Case(
        random(4, 5, seed=3), torch.tensor([0.0, 1.0, 0.0, 1.0]), ALONE, in_batch,
        best=torch.cat([AWAY[:2], -AWAY[:2]]), minimum=math.log(1 + math.exp(-2 / 0.5)),
        options={"temperature": 0.5}, across=True,
    ),
    "in_batch judged": Case(
        STUDENT, RELEVANCE, ANSWERS, in_batch, best=torch.cat([AWAY, AWAY]),
        minimum=math.log(2 + 2 * math.exp(-2 / 0.5)), options={"temperature": 0.5}, across=True,
    ),
}  # fmt: skip
