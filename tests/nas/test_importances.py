"""Importances: what decides comes first, what does nothing has none, too few trials are told nothing about."""

import random

import pytest

from compress.nas.record import compute_importances
from compress.records.search_report import SearchReport, TrialRecord
from tests.nas.sample_search import search


def made(count: int, **changes: object) -> SearchReport:
    """Layers decide the score, heads nothing; half of the shapes have a bottleneck."""
    rng = random.Random(0)
    points = []
    for number in range(count):
        layers, heads = rng.randint(1, 12), rng.choice([4, 8, 12])
        choice: dict[str, int | float | str] = {"layers": layers, "heads": heads, "act": rng.choice(["gelu", "relu"])}
        if number % 2:
            choice["share"] = rng.random()
        points.append(TrialRecord(number, choice, "complete", {"subnet": 0.05 * layers}, predicted_ms=1.0 + heads))
    whole: dict[str, object] = {"points": tuple(points), "budgets": {}, "front": (), "winner": None, **changes}
    return search(**whole)  # type: ignore[arg-type]


def test_the_decisive_choice_comes_first(capfd: pytest.CaptureFixture[str]) -> None:
    score, latency = compute_importances(made(200))
    assert (score.target, latency.target) == ("score", "latency")
    assert next(iter(score.shares)) == "layers" and score.shares["layers"] > 0.8
    assert next(iter(latency.shares)) == "heads" and latency.shares["heads"] > 0.8
    assert set(score.shares) == {"layers", "heads", "act", "share"}
    assert sum(score.shares.values()) == pytest.approx(1)
    assert score.trials == 200 and score.evaluator == "PED-ANOVA"
    assert capfd.readouterr() == ("", ""), "Optuna says nothing of a study the user does not know"


def test_too_few_trials_have_none() -> None:
    assert compute_importances(made(19)) == ()
    assert len(compute_importances(made(20))) == 2


def test_an_objective_without_differences_has_none() -> None:
    assert [one.target for one in compute_importances(made(50, objectives=("score", "file_mb")))] == ["score"]


def test_trained_shapes_count_by_their_first_score() -> None:
    whole = search(200)
    assert [one.trials for one in compute_importances(whole)] == [whole.counts()["complete"]] * 2
