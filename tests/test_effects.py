"""The statistics behind the verdicts on recipes, and the results that they are given on."""

import itertools
import math
import re
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks import effects
from compress.config import loader

RESULTS = Path(__file__).parents[1] / "benchmarks/results/recipes"


def random_errors(seeds: int = 4, rows: int = 30) -> tuple[list[Any], list[Any]]:
    rng = np.random.default_rng(0)
    return [rng.random(rows) for _ in range(seeds)], [rng.random(rows) + 0.2 for _ in range(seeds)]


def test_the_formula_as_loops() -> None:
    ours, theirs = random_errors()
    d = [[theirs[s][r] - ours[s][r] for r in range(30)] for s in range(4)]
    mean = fmean(d[s][r] for s, r in itertools.product(range(4), range(30)))
    a = variance(fmean(d[s]) for s in range(4)) / 4
    b = variance(fmean(d[s][r] for s in range(4)) for r in range(30)) / 30
    freedom = (a + b) ** 2 / (a**2 / 3 + b**2 / 29)
    half = stats.t.ppf(0.975, freedom) * math.sqrt(a + b)
    found = effects.measure(ours, theirs)
    assert [found.mean, found.low, found.high] == pytest.approx([mean, mean - half, mean + half])
    assert found.freedom == pytest.approx(freedom)
    assert found.seeds == pytest.approx([fmean(d[s]) for s in range(4)])
    assert found.rows == 30


def test_with_equal_rows_it_is_the_t_test_over_seeds() -> None:
    leads = [0.1, 0.3, 0.2]
    found = effects.measure([np.zeros(50)] * 3, [np.full(50, lead) for lead in leads])
    expected = stats.ttest_1samp(leads, 0.0)
    interval = expected.confidence_interval()
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_with_equal_seeds_it_is_the_t_test_over_rows() -> None:
    rows = np.random.default_rng(1).normal(0.1, 1.0, 40)
    assert effects.measure([np.zeros(40)] * 3, [rows] * 3).p == pytest.approx(stats.ttest_1samp(rows, 0.0).pvalue)


def test_p_is_multiplied_by_the_looks() -> None:
    effect = {"effects": {"control": {"mean": 0.1, "p": 0.03}}}
    assert effects.judge({"leaf": effect}) == {"leaf": ("works", 0.03)}
    assert effects.judge({"leaf": {**effect, "looks": 2}}) == {"leaf": ("no better", 0.06)}


def test_more_rows_do_not_hide_seeds_that_disagree() -> None:
    rng = np.random.default_rng(2)
    leads = (-0.05, 0.02, 0.12)
    few, many = (
        effects.measure([np.zeros(rows)] * 3, [rng.normal(lead, 0.1, rows) for lead in leads]) for rows in (100, 20_000)
    )
    assert min(few.p, many.p) > 0.4


def test_it_is_seldom_wrong_where_there_is_no_effect() -> None:
    """Of 400 draws of 3 seeds with an effect of their own each, and rows too, about 5 % or fewer are significant."""
    rng = np.random.default_rng(3)

    def p() -> float:
        of_seed, of_row = rng.normal(0, 0.02, 3), rng.normal(0, 0.3, 200)
        return effects.measure([np.zeros(200)] * 3, [of_row + each + rng.normal(0, 0.3, 200) for each in of_seed]).p

    assert np.mean([p() < effects.LEVEL for _ in range(400)]) < 0.07


def test_no_difference_at_all() -> None:
    same = [np.ones(5)] * 3
    found = effects.measure(same, same)
    assert (found.mean, found.low, found.high, found.p) == (0, 0, 0, 1)


def test_two_seeds_are_too_few() -> None:
    with pytest.raises(ValueError, match="expected 3 or more"):
        effects.measure(*random_errors(seeds=2))


def test_holms_correction() -> None:
    ps = {"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}
    assert effects.correct(ps) == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert effects.correct({"a": 0.7, "b": 0.6}) == {"a": 1.0, "b": 1.0}


def test_verdicts() -> None:
    lead = {"good": (0.02, 0.001), "bad": (-0.02, 0.002), "lucky": (0.02, 0.04), "none": (0.0, 1.0)}
    results = {name: {"effects": {"control": {"mean": mean, "p": p}}} for name, (mean, p) in lead.items()}
    verdicts = {name: verdict for name, (verdict, _) in effects.judge(results).items()}
    assert verdicts == {"good": "works", "bad": "harmful", "lucky": "no better", "none": "no better"}


def flaws(result: dict[str, Any]) -> list[str]:
    """Say what keeps a result out of the table."""
    found = [source for source in effects.SOURCES if not result.get(source)]
    if not re.fullmatch("[0-9a-f]{40}", str(result.get("commit"))):
        found.append("commit")
    if "benchmarks.recipes_for_real" not in str(result.get("command")):
        found.append("command")
    if len(result.get("seeds", ())) < effects.LEAST_SEEDS:
        found.append("seeds")
    return found


def test_results_of_recipes_say_where_they_come_from() -> None:
    results = effects.load(RESULTS)
    assert results.keys() <= set(loader.names())
    for name, result in results.items():
        assert result["recipe"] == name
        assert flaws(result) == [], f"{name}: run it again: benchmarks/recipes_for_real.py"
        for effect in result["effects"].values():
            assert len(effect["seeds"]) == len(result["seeds"])
            assert fmean(effect["seeds"]) == pytest.approx(effect["mean"])
            assert effect["low"] <= effect["mean"] <= effect["high"]


@pytest.mark.parametrize("source", effects.SOURCES)
def test_a_result_without_its_source_is_refused(source: str) -> None:
    whole: dict[str, Any] = {
        "command": "python -m benchmarks.recipes_for_real",
        "date": "2026-11-29",
        "machine": {"cpu": "x"},
        "versions": {"torch": "2"},
        "commit": "0" * 40,
        "clean": True,
        "seeds": [0, 1, 2],
    }
    assert flaws(whole) == []
    assert source in flaws(whole | {source: None})
    assert flaws(whole | {"seeds": [0]}) == ["seeds"]


def test_reasons_are_of_recipes() -> None:
    assert effects.NOT_RUN.keys() <= set(loader.names())
