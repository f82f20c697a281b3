"""Gu et al. 2024."""

from collections.abc import Mapping
from typing import Any

from compress.papers import minillm
from tests.papers.case import Arrays, Case, kl, random, real, softmax
from tests.papers.distilbert import MASKED


def reverse_kl(student: Any, teacher: Any, mask: Any) -> float:
    values = [kl(softmax(student[b][t]), softmax(teacher[b][t])) for b in range(len(mask)) for t in real(mask[b])]
    return sum(values) / len(values)


CASES = {"reverse_kl": Case(random(3, 5, 4, seed=1), random(3, 5, 4, seed=2), MASKED, reverse_kl)}


def golden(of: Arrays) -> Mapping[str, Any]:
    value = minillm.reverse_kl(of["token_logits_student"], of["token_logits_teacher"], of["mask"])
    return {"minillm.single-step reverse KL": value}
