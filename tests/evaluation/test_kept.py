"""How much of its teacher's score a student keeps, and how sure that is."""

from statistics import NormalDist

import numpy as np
import pytest
from datasets import Dataset

from compress.data.task import Task
from compress.evaluation.evaluator import Evaluator
from compress.evaluation.kept import judge_kept

ROWS = 400


def evaluator(rows: int = ROWS) -> Evaluator:
    split = Dataset.from_dict({"label": [number % 2 for number in range(rows)], "text": ["a"] * rows})
    return Evaluator(Task("classification", ("text",), "label", ("no", "yes"), "accuracy"), split, split)


def logits(wrong: range | list[int], rows: int = ROWS) -> np.ndarray:
    """Right answers to all rows but these."""
    answers = np.arange(rows) % 2
    answers[list(wrong)] = 1 - answers[list(wrong)]
    return np.eye(2)[answers]


def test_a_student_as_its_teacher_surely_keeps_everything() -> None:
    kept = judge_kept(evaluator(), logits(range(40)), logits(range(40)), 0.985, 0.75)
    assert (kept.score, kept.share, kept.low, kept.high) == (0.9, 1.0, 1.0, 1.0)
    assert kept.chance == pytest.approx(1.0)
    assert kept.keeps
    assert kept.resolved


def test_thresholds_that_were_chosen_on_other_rows_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[str, float | None]]()

    def scores(self: Evaluator, own: np.ndarray, *, threshold: float | None = None) -> dict[str, float]:
        asked.append(("scores", threshold))
        return {"accuracy": 0.5}

    def example_scores(self: Evaluator, own: np.ndarray, *, threshold: float | None = None) -> np.ndarray:
        asked.append(("examples", threshold))
        return np.ones(ROWS)

    monkeypatch.setattr(Evaluator, "scores", scores)
    monkeypatch.setattr(Evaluator, "example_scores", example_scores)
    judge_kept(evaluator(), logits([]), logits([]), 0.985, 0.75, thresholds=(1.0, 2.0))
    assert asked == [("scores", 1.0), ("scores", 2.0), ("examples", 1.0), ("examples", 2.0)]


def test_ten_rows_show_nothing_even_if_all_answers_are_equal() -> None:
    kept = judge_kept(evaluator(10), logits(range(1), 10), logits(range(1), 10), 0.985, 0.75)
    assert kept.chance == pytest.approx(kept.required)
    assert kept.required < 0.6
    assert kept.keeps
    assert not kept.resolved
    assert kept.needed is not None
    assert kept.needed > 500


def test_the_chance_is_that_of_the_paired_difference() -> None:
    """20 answers of 400 are lost and 12 won: against the normal approximation."""
    kept = judge_kept(evaluator(), logits(range(20, 60)), logits([*range(40, 60), *range(100, 112)]), 0.97, 0.75)
    assert kept.share == pytest.approx(0.9 / 0.92)
    margins = np.zeros(ROWS) + (1 - 0.97)
    margins[20:40] = -0.97
    margins[40:60] = 0
    margins[100:112] = 1
    error = margins.std() / ROWS**0.5
    assert kept.chance == pytest.approx(NormalDist().cdf(margins.mean() / error), abs=0.03)
    assert kept.low < kept.share < kept.high
    assert not kept.keeps


def test_rows_that_cannot_tell_ask_for_the_teachers_score() -> None:
    """Half of the errors differ: 400 rows are too few to show a loss of 1 %, and four times as many are not."""
    student, teacher = range(20, 60), range(40, 80)
    few = judge_kept(evaluator(), logits(student), logits(teacher), 0.99, 0.75)
    assert few.needed is not None
    assert few.needed > ROWS
    assert not few.resolved
    assert few.required < 0.75
    assert few.chance == pytest.approx(few.required), "it scores as its teacher does"
    assert few.keeps
    worse = judge_kept(evaluator(), logits(range(20, 61)), logits(teacher), 0.99, 0.75)
    assert not worse.keeps
    more = judge_kept(evaluator(few.needed), logits(student, few.needed), logits(teacher, few.needed), 0.99, 0.75)
    assert more.resolved, "fewer of the rows differ"


def test_all_of_the_score_cannot_be_shown() -> None:
    kept = judge_kept(evaluator(), logits(range(20, 60)), logits(range(40, 80)), 1.0, 0.75)
    assert kept.needed is None
    assert kept.required == pytest.approx(0.5)


def test_metrics_that_are_no_mean_are_resampled() -> None:
    split = Dataset.from_dict({"label": [number % 2 for number in range(ROWS)], "text": ["a"] * ROWS})
    exam = Evaluator(Task("classification", ("text",), "label", ("no", "yes"), "f1"), split, split)
    kept = judge_kept(exam, logits(range(44)), logits(range(40)), 0.9, 0.75)
    assert kept.share == pytest.approx(0.89 / 0.9)
    assert 0 < kept.low < kept.share < kept.high < 1
    assert kept.keeps
