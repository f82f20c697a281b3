"""Jiao et al. 2020; TextBrewer's and DynaBERT's losses of the same form."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compress.papers import tinybert
from tests.papers.bert import numbers
from tests.papers.case import Arrays, Case, prefix, random, real, softmax, squares

MASK = prefix(5, 2, 3)
LOGITS, TAUGHT_LOGITS = random(3, 4, seed=1), random(3, 4, seed=2)
HIDDEN, TAUGHT = random(3, 5, 6, seed=3), random(3, 5, 6, seed=4)
SCORES, TAUGHT_SCORES = random(3, 2, 5, 5, seed=5), random(3, 2, 5, 5, seed=6)
SCORE = random(3, 1, seed=8)


def attention(student: Any, teacher: Any, mask: Any) -> float:
    values = [
        (student[b][h][i][j] - teacher[b][h][i][j]) ** 2
        for b in range(len(mask))
        for h in range(len(student[b]))
        for i in real(mask[b])
        for j in real(mask[b])
    ]
    return sum(values) / len(values)


def hidden(student: Any, teacher: Any, mask: Any) -> float:
    values = [squares(student[b][t], teacher[b][t]) for b in range(len(mask)) for t in real(mask[b])]
    return sum(values) / len(values) / len(student[0][0])


def prediction(student: Any, teacher: Any, mask: Any, *, temperature: float = 1.0) -> float:
    total = 0.0
    for s_row, t_row in zip(student, teacher, strict=True):
        for p, q in zip(softmax(t_row, temperature), softmax(s_row, temperature), strict=True):
            total -= p * math.log(q)
    return total / len(student)


def entropy(teacher: Any, temperature: float = 1.0) -> float:
    """The cross entropy of the teacher with itself."""
    return sum(-p * math.log(p) for row in teacher for p in softmax(row, temperature)) / len(teacher)


def predicted(temperature: float) -> Case:
    minimum = entropy(TAUGHT_LOGITS.tolist(), temperature)
    options = {"temperature": temperature}
    return Case(LOGITS, TAUGHT_LOGITS, MASK, prediction, minimum=minimum, options=options)


MORE_SCORES = random(3, 6, 5, 5, seed=9)


def attention_of_halves(student: Any, teacher: Any, mask: Any) -> float:
    """The first half of the heads of each is one head, their mean, and the second half another."""
    values = []
    for s, t, row in zip(student, teacher, mask, strict=True):
        for half in (0, 1):
            for i in real(row):
                for j in real(row):
                    mean_s = sum(head[i][j] for head in s[half * len(s) // 2 : (half + 1) * len(s) // 2]) / (len(s) / 2)
                    mean_t = sum(head[i][j] for head in t[half * len(t) // 2 : (half + 1) * len(t) // 2]) / (len(t) / 2)
                    values.append((mean_s - mean_t) ** 2)
    return sum(values) / len(values)


def means(scores_BHLL: Tensor, heads: int) -> Tensor:
    """Each of `heads` heads is the mean of its half of the scores'."""
    return scores_BHLL.unflatten(1, (2, -1)).mean(2).repeat_interleave(heads // 2, 1)


CASES = {
    "attention": Case(SCORES, TAUGHT_SCORES, MASK, attention),
    "attention of fewer heads": Case(SCORES, MORE_SCORES, MASK, attention_of_halves, best=means(MORE_SCORES, 2)),
    "attention of more heads": Case(MORE_SCORES, SCORES, MASK, attention_of_halves, best=means(SCORES, 6)),
    "attention of four and six heads": Case(
        random(3, 4, 5, 5, seed=10), MORE_SCORES, MASK, attention_of_halves, best=means(MORE_SCORES, 4)
    ),
    "hidden": Case(HIDDEN, TAUGHT, MASK, hidden),
    "embeddings": Case(HIDDEN, TAUGHT, MASK, hidden),
    "prediction": predicted(1.0),
    "prediction softened": predicted(3.0),
    "regression": Case(random(3, 1, seed=7), SCORE, MASK, numbers, SCORE),
}


def golden(of: Arrays) -> Mapping[str, Any]:
    student, teacher = of["class_logits_student"], of["class_logits_teacher"]
    scores_student, scores_teacher = of["scores_student"], of["scores_teacher"]
    mask, everywhere = of["mask"], torch.ones_like(of["mask"])
    V = student.shape[-1]

    def masked_keys(scores_BHLL: Tensor) -> Tensor:
        """The official code masks key columns only, then counts the zeros and the queries of pads."""
        return scores_BHLL * mask[:, None, None, :]

    def positive(scores_BHLL: Tensor) -> Tensor:
        """TextBrewer's threshold for a masked score, -1e-3, also takes every negative score."""
        return scores_BHLL.masked_fill(scores_BHLL <= -1e-3, 0)

    def one_head(scores_BHLL: Tensor) -> Tensor:
        return scores_BHLL.sum(1, keepdim=True)

    return {
        # Mean over the classes as well.
        "tinybert.soft_ce T=1 (5x3)": tinybert.prediction(student, teacher, None) / V,
        "tinybert.soft_ce T=2": tinybert.prediction(student, teacher, None, temperature=2.0) / V,
        "dynabert.soft_ce": tinybert.prediction(student, teacher, None),
        "textbrewer.kd_ce T=4": tinybert.prediction(student, teacher, None, temperature=4.0),
        "tinybert.att one layer, masked": tinybert.attention(
            masked_keys(scores_student), masked_keys(scores_teacher), everywhere
        ),
        "textbrewer.att_mse mask": tinybert.attention(scores_student, scores_teacher, mask),
        "textbrewer.att_mse nomask": tinybert.attention(positive(scores_student), positive(scores_teacher), everywhere),
        "textbrewer.att_mse_sum mask": tinybert.attention(one_head(scores_student), one_head(scores_teacher), mask),
        # Pads in the mean.
        "tinybert.hidden one layer (no mask)": tinybert.hidden(of["hidden_student"], of["hidden_teacher"], everywhere),
        "textbrewer.hid_mse mask": tinybert.hidden(of["hidden_student"], of["hidden_teacher"], mask),
    }
