"""The measures of rankings: trec_eval's values, ties, and what was not found."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import ndcg_score

from compress.evaluation.ranking import MEASURES, query_scores, rank_candidates

CASES = json.loads((Path(__file__).parents[1] / "golden" / "ranking.json").read_text())["trec_eval"]


def numbered(scores: dict[str, float]) -> dict[int, float]:
    return {int(name): value for name, value in scores.items()}


@pytest.mark.parametrize("measure", MEASURES)
def test_measures_equal_trec_eval(measure: str) -> None:
    found, judged = ([numbered(case[each]) for case in CASES] for each in ("found", "judged"))
    values = query_scores(found, judged)[measure]
    np.testing.assert_allclose(values, [case["values"][measure] for case in CASES], atol=1e-9)
    assert values.std() > 0


def test_ndcg_equals_scikit_learn() -> None:
    rng = np.random.default_rng(1)
    gains, scores = rng.integers(0, 4, (20, 15)), rng.normal(size=(20, 15))
    found, judged = ([dict(enumerate(row.tolist())) for row in rows] for rows in (scores, gains))
    assert query_scores(found, judged)["ndcg@10"].mean() == pytest.approx(ndcg_score(gains, scores, k=10))


def test_missing_candidates() -> None:
    values = query_scores([{1: 2.0, 2: 1.0}, {1: 1.0}, {}], [{1: 1.0, 3: 1.0}, {1: 0.0, 2: -1.0}, {4: 1.0}])
    assert {name: column.tolist()[1:] for name, column in values.items()} == {name: [0.0, 0.0] for name in MEASURES}
    assert [values[name][0] for name in ("mrr@10", "map", "recall@10")] == [1.0, 0.5, 0.5]


def test_mrr_cut() -> None:
    found: list[Any] = [{n: -float(n) for n in range(12)}] * 2
    assert query_scores(found, [{9: 1.0}, {10: 1.0}])["mrr@10"].tolist() == [0.1, 0.0]


def test_ties() -> None:
    forwards, backwards = dict.fromkeys(range(30), 0.5), dict.fromkeys(reversed(range(30)), 0.5)
    assert rank_candidates(forwards) == rank_candidates(backwards) != sorted(forwards)
    constant = [dict.fromkeys(range(10 * n, 10 * n + 10), 0.0) for n in range(300)]
    first = query_scores(constant, [{10 * n: 1.0} for n in range(300)])["mrr@10"]
    by_chance = sum(1 / rank for rank in range(1, 11)) / 10
    assert first.mean() == pytest.approx(by_chance, abs=0.06)
