"""Judge which share of its teacher's score a student keeps, and how sure that is.

Both models answer the same rows, so that their errors correlate: the rows are drawn
again and again with replacement, and both are scored on each draw (the paired
bootstrap: Efron & Tibshirani 1993, chapter 16).
"""

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np

from compress.arrays import Array
from compress.data.task import Thresholds
from compress.evaluation.evaluator import Evaluator
from compress.records.path import KeptScore

CONFIDENCE = 0.9
"""The probability with which the share is above `low`, and below `high`."""
RESAMPLES = 1000
"""Number of draws of rows; 200 for metrics that are not a mean over examples, where
each draw takes milliseconds."""
SLOW_RESAMPLES = 200


def judge_kept(
    evaluator: Evaluator,
    student: Array,
    teacher: Array,
    keep: float,
    confidence: float,
    *,
    taught: Evaluator | None = None,
    thresholds: Thresholds = (None, None),
) -> KeptScore:
    """Judge the logits of a student against its teacher's on the evaluator's rows.

    keep, confidence    the share of the teacher's score that is asked for, and how
                        sure it must be
    taught              the same rows in the teacher's tokens, if they differ
    thresholds          of the student and of the teacher; None: the best on these rows
    """
    taught = taught or evaluator
    metric = evaluator.task.metric
    of_student, of_teacher = thresholds
    score = evaluator.scores(student, threshold=of_student)[metric]
    whole = taught.scores(teacher, threshold=of_teacher)[metric]
    student_on, examples, resamples = _score_of_drawn(evaluator, student, of_student)
    teacher_on, _, _ = _score_of_drawn(taught, teacher, of_teacher)
    rng = np.random.default_rng(0)
    draws = [rng.integers(0, examples, examples) for _ in range(resamples)]
    scores_R = np.array([student_on(drawn) for drawn in draws])
    wholes_R = np.array([teacher_on(drawn) for drawn in draws])
    low, high = np.quantile(
        scores_R / np.maximum(wholes_R, 1e-9), (1 - CONFIDENCE, CONFIDENCE)
    )
    # few examples on which both are right do not show that they never differ
    error = max(float((scores_R - keep * wholes_R).std()), 1 / examples)
    allowed = (1 - keep) * whole
    return KeptScore(
        score,
        score / max(whole, 1e-9),
        float(low),
        float(high),
        _chance(score - keep * whole, error),
        min(confidence, _chance(allowed, error)),
        examples,
        _count_needed(allowed, error, examples),
    )


def foresee(look: KeptScore, gain: float, keep: float) -> float:
    """Return the chance that a student keeps a share, if further training adds `gain`
    to the share that it keeps now."""
    wide = look.high - look.low
    error = wide / (2 * NormalDist().inv_cdf(CONFIDENCE))
    return _chance(look.share + gain - keep, max(error, 1 / look.examples))


def _score_of_drawn(
    evaluator: Evaluator,
    logits: Array,
    threshold: float | None,
) -> tuple[Callable[[Array], float], int, int]:
    """Return a function from the numbers of examples to the metric over them, the count
    of examples, and how many draws to take."""
    values = evaluator.example_scores(logits, threshold=threshold)
    if values is None:
        return *evaluator.metric_of_examples(logits), SLOW_RESAMPLES
    return lambda drawn: float(values[drawn].mean()), len(values), RESAMPLES


def _chance(margin: float, error: float) -> float:
    """Return the chance that a margin with this standard error is above 0."""
    return NormalDist().cdf(margin / error)


def _count_needed(allowed: float, error: float, examples: int) -> int | None:
    """Return how many examples show with CONFIDENCE that a difference of 0 is above
    -`allowed`, or None if no number does."""
    if allowed <= 0:
        return None
    ratio = NormalDist().inv_cdf(CONFIDENCE) * error / allowed
    return max(1, math.ceil(examples * ratio**2))
