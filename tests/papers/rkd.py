"""Park et al. 2019; the official values are in tests/golden/embeddings.json."""

from typing import Any

from tests.papers.case import Case, random
from tests.papers.reimers import MASK, STUDENT, TEACHER
from tests.papers.vectors import cosine, huber, length, minus


def distances(student: Any, teacher: Any, mask: Any) -> float:
    B = len(student)

    def relative(vectors: Any) -> list[list[float]]:
        apart = [[length(minus(one, other)) for other in vectors] for one in vectors]
        mean = sum(map(sum, apart)) / (B * (B - 1))
        return [[value / mean for value in row] for row in apart]

    mine, theirs = relative(student), relative(teacher)
    return sum(huber(mine[i][j] - theirs[i][j]) for i in range(B) for j in range(B)) / B**2


def angles(student: Any, teacher: Any, mask: Any) -> float:
    B, total = len(student), 0.0
    for i in range(B):
        for j in range(B):
            for k in range(B):
                if i in (j, k):
                    continue
                mine, theirs = (
                    cosine(minus(of[j], of[i]), minus(of[k], of[i])) if j != k else 1.0 for of in (student, teacher)
                )
                total += huber(mine - theirs)
    return total / B**3


WIDER = random(4, 9, seed=3)
CASES = {
    "distances": Case(STUDENT, TEACHER, MASK, distances, across=True),
    "distances wider": Case(STUDENT, WIDER, MASK, distances, across=True, best=WIDER),
    "distances far": Case(STUDENT * random(4, 1, seed=4, scale=9), TEACHER, MASK, distances, across=True),
    "angles": Case(STUDENT, TEACHER, MASK, angles, across=True),
    "angles wider": Case(STUDENT, WIDER, MASK, angles, across=True, best=WIDER),
}
