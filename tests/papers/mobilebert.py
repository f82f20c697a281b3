"""Sun et al. 2020."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compress.papers import mobilebert
from tests.papers.case import Arrays, Case, prefix, random, real, softmax

MASK = prefix(5, 2, 3)
HIDDEN, TAUGHT = random(3, 5, 6, seed=3), random(3, 5, 6, seed=4)
SCORES, TAUGHT_SCORES = random(3, 2, 5, 5, seed=5), random(3, 2, 5, 5, seed=6)
WORDS, TAUGHT_WORDS = random(3, 5, 7, seed=7), random(3, 5, 7, seed=8)
MASKED = torch.tensor([[0, 1, 0, 1, 0], [0, 1, 0, 0, 0], [1, 0, 1, 0, 0]])


def average(row: Sequence[float]) -> float:
    return sum(row) / len(row)


def moment(row: Sequence[float]) -> float:
    return average([(value - average(row)) ** 2 for value in row])


def normalised(row: Sequence[float]) -> list[float]:
    return [(value - average(row)) / math.sqrt(moment(row)) for value in row]


def cross_entropy(teacher: Sequence[float], student: Sequence[float]) -> float:
    pairs = zip(softmax(teacher), softmax(student), strict=True)
    return -sum(p * math.log(q) for p, q in pairs)


def over_tokens(per_token: Any) -> Any:
    """The mean of a function of the student's and the teacher's state over real tokens."""

    def formula(student: Any, teacher: Any, mask: Any) -> float:
        return average([per_token(student[b][t], teacher[b][t]) for b in range(len(mask)) for t in real(mask[b])])

    return formula


def feature_map(student: Sequence[float], teacher: Sequence[float]) -> float:
    return average([(s - t) ** 2 for s, t in zip(normalised(student), normalised(teacher), strict=True)])


def attention(student: Any, teacher: Any, mask: Any) -> float:
    values = []
    for b, row in enumerate(mask):
        keys = real(row)
        for t in keys:
            for h in range(len(student[b])):
                taught, learned = ([scores[b][h][t][k] for k in keys] for scores in (teacher, student))
                values.append(cross_entropy(taught, learned))
    # the mean over heads and queries of the whole batch
    return average(values)


masked_lm = over_tokens(lambda student, teacher: cross_entropy(teacher, student))

CASES = {
    "feature_maps": Case(HIDDEN, TAUGHT, MASK, over_tokens(feature_map)),
    "attention": Case(
        SCORES,
        TAUGHT_SCORES,
        MASK,
        attention,
        minimum=attention(TAUGHT_SCORES.tolist(), TAUGHT_SCORES.tolist(), MASK.tolist()),
    ),
    "mean": Case(HIDDEN, TAUGHT, MASK, over_tokens(lambda s, t: (average(s) - average(t)) ** 2)),
    "variance": Case(HIDDEN, TAUGHT, MASK, over_tokens(lambda s, t: abs(moment(s) - moment(t)))),
    "masked_lm": Case(
        WORDS,
        TAUGHT_WORDS,
        MASKED,
        masked_lm,
        minimum=masked_lm(TAUGHT_WORDS.tolist(), TAUGHT_WORDS.tolist(), MASKED.tolist()),
    ),
}


def golden(of: Arrays) -> Mapping[str, Any]:
    mask, everywhere = of["mask"], torch.ones_like(of["mask"])
    student, teacher = of["hidden_student"], of["hidden_teacher"]

    def masked_keys(scores_BHLL: Tensor) -> Tensor:
        """The authors mask keys only, and average over the queries of pads too."""
        return scores_BHLL - 1e4 * (1 - mask[:, None, None, :])

    return {
        "mobilebert.attention CE one layer": mobilebert.attention(
            masked_keys(of["scores_student"]), masked_keys(of["scores_teacher"]), everywhere
        ),
        # Pads in the mean.
        "mobilebert.feature-map one layer": mobilebert.feature_maps(student, teacher, everywhere),
        "mobilebert.beta(mean) one layer, as in the paper": mobilebert.mean(student, teacher, everywhere),
        "mobilebert.gamma(var) one layer, abs": mobilebert.variance(student, teacher, everywhere),
    }
