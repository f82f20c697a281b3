"""Hofstätter et al. 2020."""

from typing import Any

import torch

from tests.papers.case import Case, random
from tests.papers.karpukhin import ANSWERS, GROUP
from tests.papers.listnet import QUERY, RELEVANCE, STUDENT, TEACHER
from tests.papers.vectors import cosine


def margins(student: Any, teacher: Any, preferred: Any) -> float:
    found = []
    for i, row in enumerate(preferred):
        for j, prefers in enumerate(row):
            if prefers:
                mine, theirs = (each[i][0] - each[j][0] for each in (student, teacher))
                found.append((mine - theirs) ** 2)
    return sum(found) / len(found)


def vectors(student: Any, scores: Any, answers: Any, *, scale: float = 20.0) -> float:
    found = []
    for query, row in zip(student, answers, strict=True):
        own = [j for j, mark in enumerate(row) if mark == 1]
        apart = {j: scale * cosine(query, student[j]) - scores[j] for j in own}
        squares = [(apart[j] - apart[k]) ** 2 for j in own for k in own if j < k]
        found += [sum(squares) / len(squares)] if squares else []
    return sum(found) / len(found)


BEST = random(6, 5, seed=4)
SCORES = 3 + 2 * torch.stack([torch.cosine_similarity(BEST[3 * (n // 3)], BEST[n], dim=0) for n in range(6)])
PREFERRED = ((QUERY[:, None] == QUERY) & (RELEVANCE > RELEVANCE.T)).long()
CASES = {
    "margins": Case(STUDENT, TEACHER, PREFERRED, margins, query=QUERY),
    "vectors": Case(
        random(6, 5, seed=1), SCORES, ANSWERS, vectors, best=BEST, options={"scale": 2.0}, query=torch.tensor(GROUP)
    ),
}
