"""A search's record: the front, the best within a budget, and JSON both ways that refuses what it is not."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compress.errors import SearchError
from compress.records.search_report import ObjectiveName, SearchReport, TrialRecord
from tests.nas.sample_search import AT, search


def found(*points: TrialRecord, **changes: Any) -> SearchReport:
    return search(points=points, **{"budgets": {}, "front": (), "winner": None, **changes})


def made(number: int, score: float | None, ms: float | None, **changes: Any) -> TrialRecord:
    scores = {} if score is None else {"subnet": score}
    return TrialRecord(
        number, {"layers": number + 1}, changes.pop("state", "complete"), scores, predicted_ms=ms, **changes
    )


def test_a_report_survives_its_json(tmp_path: Path) -> None:
    whole = search()
    (tmp_path / "search.json").write_text(whole.to_json())
    assert SearchReport.from_json(tmp_path / "search.json") == whole
    assert SearchReport.from_json(whole.to_json()) == whole
    choice: dict[str, int | float | str] = {"layers": 4, "share": 0.5, "one": 1.0, "text": "4"}
    kept = SearchReport.from_json(found(TrialRecord(0, choice, "complete")).to_json()).points[0].choice
    assert [(name, type(value)) for name, value in kept.items()] == [(n, type(v)) for n, v in choice.items()]


def test_non_finite_values_are_unknown() -> None:
    one = TrialRecord(0, {}, "complete", {"subnet": 0.8, "short": math.nan})
    assert (one.stage, one.score) == ("subnet", 0.8)
    back = SearchReport.from_json(found(one, teacher_ms=math.inf).to_json())
    assert back.teacher_ms is None and back.points[0].scores == {"subnet": 0.8, "short": None}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"points": [{"number": 1, "choice": {}, "state": "lost"}]}, "points.0.state"),
        ({"points": [{"number": "x", "choice": {}, "state": "complete"}]}, "points.0.number"),
        ({"points": [{"choice": {}, "state": "complete", "scores": {"later": 1.0}, "number": 1}]}, "points.0.scores"),
        ({"budgets": {"beauty": 1.0}}, "budgets"),
        ({"winner": 77}, "no trial 77"),
        ({"front": [-3]}, "no trial -3"),
        ({"title": None}, "title"),
    ],
)
def test_an_invalid_file_is_refused_by_field(wrong: dict[str, Any], said: str) -> None:
    text = json.dumps({**json.loads(search(3).to_json()), **wrong})
    with pytest.raises(SearchError, match=said):
        SearchReport.from_json(text)
    with pytest.raises(SearchError, match="not a search of this tool"):
        SearchReport.from_json("{")


def test_a_repeated_trial_is_refused() -> None:
    with pytest.raises(SearchError, match="listed twice"):
        found(made(1, 0.5, 1.0), made(1, 0.6, 1.0))


def test_a_point_is_looked_up_by_number() -> None:
    whole = found(made(4, 0.5, 1.0), made(9, 0.6, 1.0))
    assert whole.point(9).score == 0.6
    with pytest.raises(SearchError, match="no trial 5; it has 2, 4 to 9"):
        whole.point(5)


def test_measured_latency_overrides_predicted() -> None:
    one = replace(made(0, 0.5, 1.0), measured={AT: 1.5, "another": 9.0})
    assert found(one).ms(one) == 1.5
    assert found(one, setting="unknown").ms(one) == 1.0
    assert found(one, setting="unknown").measured_ms(one) is None


@pytest.mark.parametrize("objectives", [("score", "latency"), ("score", "latency", "parameters"), ("latency", "score")])
def test_the_front_equals_brute_force(objectives: tuple[ObjectiveName, ...]) -> None:
    rng = random.Random(0)
    points = [made(n, rng.randint(0, 9), rng.randint(1, 9), parameters=rng.randint(1, 9)) for n in range(200)]
    whole = found(*points)

    def worse_or_equal(one: TrialRecord, other: TrialRecord) -> bool:
        pairs = [(whole.value(one, name), whole.value(other, name), name) for name in objectives]
        return all((a <= b if name == "score" else a >= b) for a, b, name in pairs)  # type: ignore[operator]

    def same(one: TrialRecord, other: TrialRecord) -> bool:
        return all(whole.value(one, name) == whole.value(other, name) for name in objectives)

    expected = {
        one.number
        for one in points
        if not any(
            worse_or_equal(one, other) and (not same(one, other) or other.number < one.number)
            for other in points
            if other is not one
        )
    }
    front = whole.compute_front(objectives)
    assert set(front) == expected and len(front) == len(expected) > 1
    costs = [whole.ms(whole.point(number)) for number in front]
    assert costs == sorted(costs, key=float)  # type: ignore[arg-type]


def test_only_points_known_to_keep_the_budgets_are_on_the_front() -> None:
    slow, unknown, given_up, good = (
        made(0, 0.9, 5.0),
        made(1, 0.9, None),
        made(2, 0.9, 1.0, state="pruned"),
        made(3, 0.6, 1.0),
    )
    poor = made(4, 0.5, 0.5)
    whole = found(slow, unknown, given_up, good, poor, budgets={"latency": 4.0, "score": 0.6})
    assert whole.compute_front() == (3,)
    assert [whole.exceeded(one) for one in (slow, unknown, poor)] == [("latency",), ("latency",), ("score",)]
    assert whole.best_within() == good


def test_the_faster_of_equals_is_best() -> None:
    whole = found(made(0, 0.8, 3.0), made(1, 0.8, 2.0), made(2, 0.7, 1.0))
    best = whole.best_within()
    assert best is not None and best.number == 1


def test_the_nearest_to_an_impossible_budget() -> None:
    whole = found(made(0, 0.9, 5.0), made(1, 0.8, 3.0), made(2, 0.7, 3.0), made(3, 0.9, None), budgets={"latency": 1.0})
    assert whole.compute_front() == () and whole.best_within() is None
    nearest = whole.nearest()
    assert nearest is not None and nearest.number == 1
    assert found().nearest() is None


def test_a_front_of_five_thousand_is_quick_to_find_and_right() -> None:
    whole = search(5000)
    front = [whole.point(number) for number in whole.front]
    scores = [one.score or 0 for one in front]
    assert scores == sorted(scores) and len(set(scores)) == len(scores)
    assert sum(whole.counts().values()) == 5000
