"""Hinton et al. 2015, and the official values that are its formulas up to a factor."""

import math
from collections.abc import Mapping
from typing import Any

from compress.papers import bert, hinton
from tests.papers.case import Arrays, Case, kl, prefix, random, softmax, squares

STUDENT, TEACHER, MASK = random(3, 4, seed=1), random(3, 4, seed=2), prefix(5, 2, 3)


def soft_targets(student: Any, teacher: Any, mask: Any, *, temperature: float = 1.0) -> float:
    rows = [
        kl(softmax(t, temperature), softmax(s, temperature)) * temperature**2
        for s, t in zip(student, teacher, strict=True)
    ]
    return sum(rows) / len(rows)


def soft_labels(student: Any, teacher: Any, mask: Any, *, temperature: float = 1.0) -> float:
    total = 0.0
    for s_row, t_row in zip(student, teacher, strict=True):
        for s, t in zip(s_row, t_row, strict=True):
            p, q = 1 / (1 + math.exp(-t / temperature)), 1 / (1 + math.exp(-s / temperature))
            total += temperature**2 * kl([p, 1 - p], [q, 1 - q])
    return total / len(student)


def matched_logits(student: Any, teacher: Any, mask: Any) -> float:
    return sum(0.5 * squares(s, t) for s, t in zip(student, teacher, strict=True)) / len(student)


CASES = {
    "soft_targets": Case(STUDENT, TEACHER, MASK, soft_targets),
    "soft_targets softened": Case(STUDENT, TEACHER, MASK, soft_targets, options={"temperature": 3.0}),
    "soft_labels": Case(STUDENT, TEACHER, MASK, soft_labels),
    "soft_labels softened": Case(STUDENT, TEACHER, MASK, soft_labels, options={"temperature": 3.0}),
    "matched_logits": Case(STUDENT, TEACHER, MASK, matched_logits),
}


def golden(of: Arrays) -> Mapping[str, Any]:
    student, teacher, classes = of["class_logits_student"], of["class_logits_teacher"], of["class_labels"]
    softened = hinton.soft_targets(student, teacher, None, temperature=4.0)
    V = student.shape[-1]
    return {
        # T^2 only where a hard loss is mixed in.
        "torchdistill.KDLoss alpha=0.0 T=4": softened / 4.0**2,
        "torchdistill.KDLoss alpha=0.5 T=4": 0.5 * bert.labels(student, classes, None) + 0.5 * softened,
        # No 1/2, mean over the logits, which are divided by T.
        "textbrewer.kd_mse T=4": 2 * hinton.matched_logits(student, teacher, None) / V / 4.0**2,
    }
