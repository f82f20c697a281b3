"""Sun et al. 2019."""

import math
from collections.abc import Mapping
from typing import Any

from compress.papers import pkd
from tests.papers.case import Arrays, Case, kl, prefix, random, softmax, squares

MASK = prefix(5, 2, 3)
TAUGHT = random(3, 5, 6, seed=2)
LOGITS = random(3, 4, seed=1), random(3, 4, seed=2)


def soft_targets(student: Any, teacher: Any, mask: Any, *, temperature: float) -> float:
    rows = [kl(softmax(t, temperature), softmax(s, temperature)) for s, t in zip(student, teacher, strict=True)]
    return temperature**2 * sum(rows) / (len(rows) * len(student[0]))


def patience(student: Any, teacher: Any, mask: Any) -> float:
    def normalised(row: list[float]) -> list[float]:
        return [value / math.sqrt(sum(x * x for x in row)) for value in row]

    apart = [squares(normalised(s[0]), normalised(t[0])) for s, t in zip(student, teacher, strict=True)]
    return sum(apart) / (len(apart) * len(student[0][0]))


CASES = {
    "soft_targets": Case(*LOGITS, MASK, soft_targets, options={"temperature": 3.0}),
    "patience": Case(random(3, 5, 6, seed=1), TAUGHT, MASK, patience),
    "patience of any length": Case(random(3, 5, 6, seed=1), TAUGHT, MASK, patience, best=3 * TAUGHT),
}


def golden(of: Arrays) -> Mapping[str, Any]:
    student, teacher = of["hidden_student"], of["hidden_teacher"]
    return {"textbrewer.pkd": student.shape[-1] * pkd.patience(student, teacher, of["mask"])}  # theirs sums over D
