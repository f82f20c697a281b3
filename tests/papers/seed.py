"""SEED 2021 and CompRess 2020, over the texts of a batch instead of a queue."""

from typing import Any

from tests.papers.case import Case, kl, random, softmax
from tests.papers.reimers import MASK, STUDENT, TEACHER
from tests.papers.vectors import cosine


def similarities(
    student: Any, teacher: Any, mask: Any, *, temperature: float = 0.05, teacher_temperature: float | None = None
) -> float:
    total = 0.0
    for s, t in zip(student, teacher, strict=True):
        p = softmax([cosine(t, other) for other in teacher], teacher_temperature or temperature)
        q = softmax([cosine(s, other) for other in teacher], temperature)
        total += kl(p, q)
    return total / len(student)


def own_similarities(
    student: Any, teacher: Any, mask: Any, *, temperature: float = 0.05, teacher_temperature: float | None = None
) -> float:
    total = 0.0
    for i in range(len(student)):
        others = [j for j in range(len(student)) if j != i]
        p = softmax([cosine(teacher[i], teacher[j]) for j in others], teacher_temperature or temperature)
        q = softmax([cosine(student[i], student[j]) for j in others], temperature)
        total += kl(p, q)
    return total / len(student)


CASES = {
    "similarities": Case(STUDENT, TEACHER, MASK, similarities, options={"temperature": 0.3}, across=True),
    "own_similarities": Case(STUDENT, TEACHER, MASK, own_similarities, options={"temperature": 0.3}, across=True),
    "own_similarities wider": Case(
        STUDENT,
        random(4, 9, seed=3),
        MASK,
        own_similarities,
        options={"temperature": 0.3},
        across=True,
        best=random(4, 9, seed=3),
    ),
}
