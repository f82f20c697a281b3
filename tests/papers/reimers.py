"""Reimers & Gurevych 2020."""

from typing import Any

from tests.papers.case import Case, prefix, random, squares

STUDENT, TEACHER, MASK = random(4, 6, seed=1), random(4, 6, seed=2), prefix(5, 2, 3, 4)


def mse(student: Any, teacher: Any, mask: Any) -> float:
    return sum(squares(s, t) / len(s) for s, t in zip(student, teacher, strict=True)) / len(student)


CASES = {"mse": Case(STUDENT, TEACHER, MASK, mse)}
