"""LEAF 2025."""

import math
from typing import Any

from tests.papers.case import Case, squares
from tests.papers.reimers import MASK, STUDENT, TEACHER
from tests.papers.vectors import unit


def l2(student: Any, teacher: Any, mask: Any, *, squared: bool = True, normalize: bool = True) -> float:
    total = 0.0
    for s, t in zip(student, teacher, strict=True):
        error = squares(unit(s), unit(t)) if normalize else squares(s, t)
        total += error if squared else math.sqrt(error)
    return total / len(student)


CASES = {
    "l2": Case(STUDENT, TEACHER, MASK, l2),
    "l2 lengths": Case(STUDENT, TEACHER, MASK, l2, options={"normalize": False}),
    "l2 distance": Case(STUDENT, TEACHER, MASK, l2, options={"squared": False}),
}
