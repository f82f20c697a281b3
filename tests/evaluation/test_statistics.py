"""Intervals hold what they promise."""

import numpy as np
import pytest
from scipy.stats import binom, multinomial, wilcoxon

from compress.evaluation.statistics import bootstrap_interval, paired_share_interval, signed_rank_interval


def test_paired_interval_without_differences() -> None:
    z2 = 1.959964**2
    assert paired_share_interval(0, 0, 100) == pytest.approx((-z2 / (100 + z2), z2 / (100 + z2)))


def test_paired_interval_agrees_with_mcnemar() -> None:
    low, high = paired_share_interval(30, 10, 500)
    assert paired_share_interval(10, 30, 500) == pytest.approx((-high, -low))
    for lost in range(10, 40):
        differs = abs(lost - 10) / np.sqrt(lost + 10) > 1.959964
        low, high = paired_share_interval(lost, 10, 500)
        assert (low > 0 or high < 0) == differs


@pytest.mark.parametrize(("lost", "won"), [(0.04, 0.02), (0.1, 0.1), (0.02, 0.005)])
def test_paired_interval_coverage(lost: float, won: float) -> None:
    rows = 200
    held = 0.0
    for b in range(60):
        for c in range(60):
            low, high = paired_share_interval(b, c, rows)
            if low <= lost - won <= high:
                held += multinomial.pmf([b, c, rows - b - c], rows, [lost, won, 1 - lost - won])
    assert 0.93 < held < 0.98


def test_signed_rank_interval_agrees_with_wilcoxon() -> None:
    values = np.random.default_rng(0).normal(0.3, 1, 15)
    centre, low, high = signed_rank_interval(values, 0.025)
    assert low < centre < high
    for end, alternative in ((low, "greater"), (high, "less")):
        inside, outside = (end + sign * 1e-9 * (1 if end == low else -1) for sign in (1, -1))
        assert wilcoxon(values - inside, alternative=alternative).pvalue > 0.025
        assert wilcoxon(values - outside, alternative=alternative).pvalue <= 0.025


def test_signed_rank_interval_of_few_values() -> None:
    assert signed_rank_interval(np.arange(5.0), 0.025) == (2.0, -np.inf, np.inf)
    assert np.isfinite(signed_rank_interval(np.arange(6.0), 0.025)[1])


def test_bootstrap_interval() -> None:
    values = (np.arange(400) < 300).astype(float)
    low, high = bootstrap_interval(lambda drawn: float(values[drawn].mean()), 400)
    assert (400 * low, 400 * high) == pytest.approx(binom(400, 0.75).interval(0.95), abs=3)
