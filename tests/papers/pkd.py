"""Sun et al. 2019."""

import math
from collections.abc import Mapping
from typing import Any

from compress.papers import pkd
from tests.papers.case import Arrays, Case, prefix, random, squares

MASK = prefix(5, 2, 3)
TAUGHT = random(3, 5, 6, seed=2)


def patience(student: Any, teacher: Any, mask: Any) -> float:
    def normalised(row: list[float]) -> list[float]:
        return [value / math.sqrt(sum(x * x for x in row)) for value in row]

    return sum(squares(normalised(s[0]), normalised(t[0])) for s, t in zip(student, teacher, strict=True)) / len(mask)


CASES = {
    "patience": Case(random(3, 5, 6, seed=1), TAUGHT, MASK, patience),
    "patience of any length": Case(random(3, 5, 6, seed=1), TAUGHT, MASK, patience, best=3 * TAUGHT),
}


def golden(of: Arrays) -> Mapping[str, Any]:
    return {"textbrewer.pkd": pkd.patience(of["hidden_student"], of["hidden_teacher"], of["mask"])}
