"""No limit is finer than the rows resolve, and none is missed by rounding."""

import numpy as np
import pytest
from datasets import Dataset

from compress.data.task import Task
from compress.evaluation.evaluator import Evaluator
from compress.quantization.certify import verdict
from compress.quantization.evaluator import ScoreDrop, compare_logits

TASK = Task("classification", ("text",), "label", ("a", "b"), "accuracy")


def changed(rows: int, wrong: int) -> ScoreDrop:
    """fp32 answers everything right, the other file `wrong` of the rows wrong."""
    labels = np.arange(rows) % 2
    exam = Evaluator(TASK, Dataset.from_dict({"label": labels}), Dataset.from_dict({"length": [1] * rows}))
    exact = np.eye(2)[labels]
    other = exact.copy()
    other[:wrong] = other[:wrong, ::-1]
    return compare_logits(exam, exact, other)


@pytest.mark.parametrize(
    ("rows", "wrong", "limit", "near"),
    [
        (500, 1, 0.002, True),  # one of 500, lost by rounding: 1 - 0.998 is more than 0.002
        (500, 2, 0.002, True),
        (500, 3, 0.002, False),
        (500, 2, 0.0, True),
        (100, 2, 0.005, True),
        (100, 3, 0.005, False),
        (10_000, 20, 0.002, True),
        (10_000, 21, 0.002, False),
    ],
)
def test_two_answers_are_allowed_on_any_number_of_rows_and_beyond_them_the_limit(
    rows: int, wrong: int, limit: float, near: bool
) -> None:
    outcome = changed(rows, wrong)
    assert outcome.changed == wrong
    assert outcome.near(limit) is outcome.keeps_score(limit) is near
    assert verdict(outcome, limit)[0] is near
    assert outcome.near(outcome.least_limit)


def test_the_verdict_says_when_it_is_the_rows_that_decide() -> None:
    good, reason = verdict(changed(100, 2), 0.005)
    assert good
    assert "1.50 more than the 0.5 allowed" in reason
    assert "2 changed answers" in reason


def test_answers_of_a_regression_all_differ_and_the_limit_is_the_limit() -> None:
    task = Task("regression", ("text",), "label", (), "pearson")
    exam = Evaluator(task, Dataset.from_dict({"label": [0.0, 1.0, 2.0]}), Dataset.from_dict({"length": [1] * 3}))
    outcome = compare_logits(exam, np.array([[0.0], [1.0], [2.0]]), np.array([[0.0], [2.0], [1.0]]))
    assert outcome.changed is None
    assert not outcome.near(0.1)


def test_answers_are_counted_by_the_example() -> None:
    task = Task("multilabel", ("text",), "label", ("a", "b"), "f1")
    exam = Evaluator(task, Dataset.from_dict({"label": [[1.0, 1.0]] * 3}), Dataset.from_dict({"length": [1] * 3}))
    assert exam.changed(np.array([[1, 1], [-1, -1], [1, 1]]), np.array([[1, 1], [1, 1], [1, -1]])) == 2
