"""Sanh et al. 2019; the same divergence under other names in DistillKit and TRL."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compress.papers import bert, distilbert, hinton
from tests.papers.case import Arrays, Case, kl, prefix, random, real, softmax

STUDENT, TEACHER, MASK = random(3, 5, 4, seed=1), random(3, 5, 4, seed=2), prefix(5, 2, 3)
HIDDEN, TAUGHT = random(3, 5, 6, seed=3), random(3, 5, 6, seed=4)
MASKED = torch.tensor([[0, 1, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]])


def soft_targets(student: Any, teacher: Any, mask: Any, *, temperature: float = 2.0) -> float:
    values = [
        temperature**2 * kl(softmax(teacher[b][t], temperature), softmax(student[b][t], temperature))
        for b in range(len(mask))
        for t in real(mask[b])
    ]
    return sum(values) / len(values) if values else 0.0


def cosine(student: Any, teacher: Any, mask: Any) -> float:
    values = []
    for b in range(len(mask)):
        for t in real(mask[b]):
            s, h = student[b][t], teacher[b][t]
            dot = sum(x * y for x, y in zip(s, h, strict=True))
            values.append(1 - dot / math.sqrt(sum(x * x for x in s)) / math.sqrt(sum(y * y for y in h)))
    return sum(values) / len(values)


CASES = {
    "soft_targets": Case(STUDENT, TEACHER, MASK, soft_targets),
    "soft_targets unsoftened": Case(STUDENT, TEACHER, MASK, soft_targets, options={"temperature": 1.0}),
    "masked_soft_targets": Case(STUDENT, TEACHER, MASKED, soft_targets),
    "cosine": Case(HIDDEN, TAUGHT, MASK, cosine),
    "cosine of any length": Case(HIDDEN, TAUGHT, MASK, cosine, best=3 * TAUGHT),
}


def golden(of: Arrays) -> Mapping[str, Any]:
    student, teacher = of["token_logits_student"], of["token_logits_teacher"]
    hidden_student, hidden_teacher, mask = of["hidden_student"], of["hidden_teacher"], of["mask"]
    cos = distilbert.cosine(hidden_student, hidden_teacher, mask)

    def step(selected: Tensor, soft_targets: Any, temperature: float) -> Mapping[str, Tensor]:
        parts = {
            "_ce": soft_targets(student, teacher, selected, temperature=temperature),
            "_mlm": bert.masked_lm(student, of["mlm_labels"], mask),
            # alpha_mse, a fourth loss of the script that no recipe uses: summed over V, and no 1/2.
            "_mse": 2 * hinton.matched_logits(student, teacher, selected),
            "_cos": cos,
        }
        return parts | {"": 5 * parts["_ce"] + 2 * parts["_mlm"] + parts["_mse"] + parts["_cos"]}

    labelled = (of["mlm_labels"] != -100).long()
    return {
        "distilbert.step restrict=False T=1.0": step(mask, distilbert.soft_targets, 1.0),
        "distilbert.step restrict=False T=2.0": step(mask, distilbert.soft_targets, 2.0),
        "distilbert.step restrict=True T=1.0": step(labelled, distilbert.masked_soft_targets, 1.0),
        "distilbert.step restrict=True T=2.0": step(labelled, distilbert.masked_soft_targets, 2.0),
        "textbrewer.cos mask": cos,
        "distillkit.kl T=1.0 (x T^2 / n)": distilbert.soft_targets(student, teacher, mask, temperature=1.0),
        "distillkit.kl T=2.0 (x T^2 / n)": distilbert.soft_targets(student, teacher, mask, temperature=2.0),
        "trl.gkd beta=0 T=1": distilbert.soft_targets(student, teacher, mask, temperature=1.0),
    }
