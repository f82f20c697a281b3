"""Spans, exact match, F1 and the threshold of no answer, worked out by hand."""

import itertools

import numpy as np
import pytest

from compress.evaluation import qa
from compress.evaluation.qa import Spans, Windows


@pytest.mark.parametrize(
    ("answer", "gold", "exact", "f1"),
    [
        ("The Eiffel Tower", "eiffel tower", 1.0, 1.0),  # case, articles
        ("an apple.", "Apple", 1.0, 1.0),
        ("U.S.", "US", 1.0, 1.0),  # punctuation goes without leaving a space
        ("rock-n-roll", "rock n roll", 0.0, 0.0),
        ("  10th  and 11th\tcenturies", "10th and 11th centuries", 1.0, 1.0),
        ("theatre", "atre", 0.0, 0.0),  # an article inside a word is none
        ("in the 10th century", "10th century", 0.0, 2 * 2 / (3 + 2)),
        ("to be or not to be", "to be", 0.0, 2 * 2 / (6 + 2)),  # words count as often as both have them
        ("the", "the", 1.0, 1.0),
        ("", "something", 0.0, 0.0),
        ("« oui »", "oui", 0.0, 2 / 4),  # only ASCII punctuation goes, as in the official script
    ],
)
def test_exact_match_and_f1(answer: str, gold: str, exact: float, f1: float) -> None:
    right = qa.right_answers([gold])
    assert qa.exact(answer, right) == exact
    assert qa.f1(answer, right) == pytest.approx(f1)


def test_best_gold_answer() -> None:
    assert qa.f1("10th century", ["11th century", "the 10th century"]) == 1.0


def test_answers_that_normalise_to_nothing() -> None:
    assert qa.right_answers([]) == qa.right_answers(["the", "."]) == [""]
    assert qa.right_answers(["the", "one"]) == ["one"]
    assert qa.exact("The", [""]) == 1.0


def test_scores_by_answerability() -> None:
    found = qa.answer_scores(["yes", "", "no"], [["yes"], [], []])
    assert found["f1"] == found["exact"] == pytest.approx(2 / 3)
    assert (found["f1_answerable"], found["no_answer"]) == (1.0, 0.5)
    assert set(qa.answer_scores(["yes"], [["yes"]])) == {"f1", "exact"}


def windows(lengths: list[int], questions: list[int], heads: int = 2) -> Windows:
    """Rows of a null token, `heads - 1` of a question, context of one character a token, and a last special one."""
    starts = [np.array([-1] * heads + list(range(n - heads - 1)) + [-1]) for n in lengths]
    begins = np.concatenate(starts)
    return Windows(
        begins,
        np.where(begins < 0, -1, begins + 1),
        np.array(lengths),
        np.zeros(len(lengths), int),
        np.array(questions),
    )


def brute(logits: np.ndarray, where: Windows, question: int) -> tuple[float, int, int]:
    begins = np.concatenate([[0], np.cumsum(where.lengths_R)])
    best = (-np.inf, 0, 0)
    for row in np.flatnonzero(where.question_R == question):
        inside = [t for t in range(begins[row], begins[row + 1]) if where.starts_T[t] >= 0]
        for i, j in itertools.product(inside, inside):
            if i <= j < i + qa.LONGEST:
                best = max(best, (logits[i, 0] + logits[j, 1], i, j))
    return best


def test_best_span_equals_brute_force() -> None:
    where = windows([7, 45, 9, 6], [0, 1, 1, 2])
    for seed in range(20):
        logits = np.random.default_rng(seed).normal(size=(67, 2))
        found = qa.best_spans(logits, where)
        for question in range(3):
            score, first, last = brute(logits, where, question)
            assert (found.first_Q[question], found.last_Q[question]) == (first, last)
            assert found.starts_Q[question] == where.starts_T[first]
            assert found.ends_Q[question] == where.ends_T[last]
            rows = np.flatnonzero(where.question_R == question)
            nulls = [logits[where.lengths_R[:row].sum()].sum() for row in rows]
            assert found.margin_Q[question] == pytest.approx(min(nulls) - score)


def test_invalid_spans() -> None:
    where = windows([60, 10], [0, 0])
    logits = np.zeros((70, 2))
    logits[10, 0] = logits[50, 1] = 9.0  # too far apart
    logits[40, 0] = logits[20, 1] = 8.0  # the wrong way round
    logits[58, 0] = logits[63, 1] = 7.0  # in two rows
    logits[30, 0], logits[33, 1] = 3.0, 3.5
    found = qa.best_spans(logits, where)
    # 9 and nothing: 10 .. any end within 30 with logit 8 at 20
    assert (found.first_Q[0], found.last_Q[0]) == (10, 20)


def test_context_without_tokens() -> None:
    found = qa.best_spans(np.ones((7, 2)), windows([3, 4], [0, 1]))
    assert np.isposinf(found.margin_Q[0])
    assert found.texts(["", "x"], 1e9) == ["", "x"]


def spans(margins: list[float]) -> Spans:
    n = np.arange(len(margins))
    return Spans(0 * n, 0 * n + 3, n, n, np.array(margins))


@pytest.mark.parametrize(
    ("margins", "golds", "expected", "score"),
    [
        ([-2.0, -1.0, 1.0, 2.0], [["yes"], ["yes"], [], []], 0.0, 1.0),
        ([-2.0, -1.0, 1.0, 2.0], [["yes"], ["yes"], ["yes"], ["yes"]], 3.0, 1.0),  # always answer
        ([-2.0, -1.0, 1.0, 2.0], [[], [], [], []], -3.0, 1.0),  # never
        ([-2.0, 1.0, 1.0, 2.0], [["yes"], ["yes"], [], []], -0.5, 0.75),  # equal margins cannot be parted
    ],
)
def test_best_threshold(margins: list[float], golds: list[list[str]], expected: float, score: float) -> None:
    contexts = ["yes"] * len(margins)
    threshold = qa.best_threshold(spans(margins), contexts, golds, metric="f1")
    assert threshold == pytest.approx(expected)
    assert qa.answer_scores(spans(margins).texts(contexts, threshold), golds)["f1"] == pytest.approx(score)


def test_best_threshold_equals_search() -> None:
    draw = np.random.default_rng(1)
    for _ in range(20):
        found, contexts = spans(draw.integers(-5, 5, 12).tolist()), ["yes"] * 12
        golds = [[["yes"], ["yes", "no"], ["yes sir"], []][k] for k in draw.integers(0, 4, 12)]
        chosen = qa.best_threshold(found, contexts, golds, metric="f1")
        best, *others = (
            qa.answer_scores(found.texts(contexts, threshold), golds)["f1"]
            for threshold in (chosen, *np.arange(-7, 7, 0.5))
        )
        assert best >= max(others) - 1e-12
