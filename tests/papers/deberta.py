"""He et al. 2021."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from tests.papers.case import Arrays, Case, kl, prefix, random, softmax, squares

LOGITS, CLEAN, MASK = random(3, 4, seed=1), random(3, 4, seed=2), prefix(5, 2, 3)


def symmetric_kl(student: Any, target: Any, mask: Any) -> float:
    rows = [(softmax(t), softmax(s)) for s, t in zip(student, target, strict=True)]
    return sum(kl(p, q) + kl(q, p) for p, q in rows) / len(rows)


def squared(student: Any, target: Any, mask: Any) -> float:
    return sum(squares(s, t) / len(s) for s, t in zip(student, target, strict=True)) / len(student)


CASES = {
    "symmetric_kl": Case(LOGITS, CLEAN, MASK, symmetric_kl),
    "squared": Case(random(3, 1, seed=5), random(3, 1, seed=6), MASK, squared),
}


def golden(of: Arrays) -> Mapping[str, Any]:
    distances = [-511, -300, -129, -128, -127, 0, 127, 128, 129, 300, 511]
    return {
        # That of transformers' model, with which `family: deberta-v2` computes.
        "deberta.log bucket 256/512 at rel -511,-300,-129,-128,-127,0,127,128,129,300,511": make_log_bucket_position(
            torch.tensor(distances), 256, 512
        )
    }
