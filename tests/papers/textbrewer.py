"""Yang et al. 2020."""

from collections.abc import Mapping
from typing import Any

from compress.papers import textbrewer
from tests.papers.case import Arrays, Case, prefix, random, real

MASK = prefix(5, 2, 3)
HIDDEN, TAUGHT, WIDE = random(3, 5, 6, seed=1), random(3, 5, 6, seed=2), random(3, 5, 9, seed=3)


def dot(one: Any, other: Any) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def token_grams(student: Any, teacher: Any, mask: Any) -> float:
    values = [
        (dot(s[i], s[j]) / len(s[i]) - dot(t[i], t[j]) / len(t[i])) ** 2
        for s, t, row in zip(student, teacher, mask, strict=True)
        for i in real(row)
        for j in real(row)
    ]
    return sum(values) / len(values)


def feature_grams(student: Any, teacher: Any, mask: Any) -> float:
    values = [
        (sum(s[t][i] * s[t][j] - q[t][i] * q[t][j] for t in real(row)) / len(real(row))) ** 2
        for s, q, row in zip(student, teacher, mask, strict=True)
        for i in range(len(s[0]))
        for j in range(len(s[0]))
    ]
    return sum(values) / len(values)


CASES = {
    "token_grams": Case(HIDDEN, TAUGHT, MASK, token_grams),
    "token_grams of another width": Case(HIDDEN, WIDE, MASK, token_grams, best=WIDE),
    "feature_grams": Case(HIDDEN, TAUGHT, MASK, feature_grams),
}


def golden(of: Arrays) -> Mapping[str, Any]:
    """Theirs take two layers; the values are with one layer named twice."""
    hidden = of["hidden_student"], of["hidden_teacher"], of["mask"]
    return {
        "textbrewer.nst/mmd mask": textbrewer.token_grams(*hidden),
        "textbrewer.fsp mask": textbrewer.feature_grams(*hidden),
    }
