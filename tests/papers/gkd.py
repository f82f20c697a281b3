"""Agarwal et al. 2024; the values of TRL's trainer."""

import math
from collections.abc import Mapping
from typing import Any

from compress.papers import gkd
from tests.papers.case import Arrays, Case, kl, random, real, softmax
from tests.papers.distilbert import MASKED

STUDENT, TEACHER = random(3, 5, 4, seed=1), random(3, 5, 4, seed=2)


def divergence(student: Any, teacher: Any, mask: Any, *, beta: float = 0.5, temperature: float = 1.0) -> float:
    values = []
    for b in range(len(mask)):
        for t in real(mask[b]):
            q, p = softmax(student[b][t], temperature), softmax(teacher[b][t], temperature)
            if beta in (0, 1):
                values.append(kl(q, p) if beta else kl(p, q))
                continue
            m = [beta * pv + (1 - beta) * qv for pv, qv in zip(p, q, strict=True)]
            assert math.isclose(sum(m), 1)
            values.append(beta * kl(p, m) + (1 - beta) * kl(q, m))
    return sum(values) / len(values)


CASES = {
    f"divergence beta {beta} T {temperature}": Case(
        STUDENT, TEACHER, MASKED, divergence, options={"beta": beta, "temperature": temperature}
    )
    for beta, temperature in ((0.5, 1.0), (0.1, 1.0), (0.0, 2.0), (1.0, 2.0), (0.5, 0.9))
}


def golden(of: Arrays) -> Mapping[str, Any]:
    student, teacher, mask = of["token_logits_student"], of["token_logits_teacher"], of["mask"]
    return {
        f"trl.gkd beta={beta} T={temperature}": gkd.divergence(
            student, teacher, mask, beta=beta, temperature=temperature
        )
        for beta, temperature in ((0.1, 1), (0.5, 1), (0.9, 1), (1, 1), (0.5, 2))
    }
