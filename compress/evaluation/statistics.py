"""Compute confidence intervals of shares and differences, and test whether two scores
differ."""

import math
from collections.abc import Callable

import numpy as np

from compress.arrays import Array, Doubles

_Z95 = 1.959964


def wilson_interval(share: float, rows: int) -> tuple[float, float]:
    """Compute the 95 % interval of a share of `rows` independent rows (Wilson 1927)."""
    z = _Z95
    centre = (share + z * z / (2 * rows)) / (1 + z * z / rows)
    half = (
        z
        / (1 + z * z / rows)
        * math.sqrt(share * (1 - share) / rows + z * z / (4 * rows * rows))
    )
    return centre - half, centre + half


def differ_significantly(one: float, other: float, rows: int) -> bool | None:
    """Check whether two shares of the same independent rows (`Task.shares`) differ at
    95 %; return None if they do not show it.

    The scores are assumed independent, with the interval of their difference from
    Wilson's intervals (Newcombe 1998, method 10). The errors of two models correlate,
    so this is slightly conservative.
    """
    if one == other:
        return False
    if rows < 1 or not (0 <= one <= 1 and 0 <= other <= 1):
        return None
    high = max(one, other)
    low = min(one, other)
    lower = wilson_interval(high, rows)[0]
    upper = wilson_interval(low, rows)[1]
    return high - low > math.hypot(high - lower, upper - low)


def paired_share_interval(
    only_one: int, only_other: int, rows: int
) -> tuple[float, float]:
    """Compute the 95 % interval of the difference of two shares of the same rows: the
    score interval of Tango 1998.

    `only_one`, `only_other`: rows that only one of the models has right. At a
    difference of 0 it is McNemar's test.
    """

    def score(difference: float) -> float:
        linear = (2 * rows - only_one + only_other) * difference - only_one - only_other
        root = math.sqrt(
            max(0.0, linear**2 + 8 * rows * only_other * difference * (1 - difference))
        )
        share = (root - linear) / (4 * rows)
        variance = rows * (2 * share + difference * (1 - difference))
        return (only_one - only_other - rows * difference) / math.sqrt(
            max(variance, 1e-12)
        )

    from scipy.optimize import brentq

    observed = (only_one - only_other) / rows
    edge = 1 - 1e-9
    low = (
        brentq(lambda at: score(at) - _Z95, -edge, observed)
        if score(-edge) > _Z95
        else -1.0
    )
    high = (
        brentq(lambda at: score(at) + _Z95, observed, edge)
        if score(edge) < -_Z95
        else 1.0
    )
    return float(low), float(high)


def bootstrap_interval(
    statistic: Callable[[Array], float], rows: int, *, resamples: int = 1000
) -> tuple[float, float]:
    """Compute the 95 % bootstrap interval of a statistic of rows (Efron 1979,
    percentiles).

    `statistic` takes the numbers of the rows that were drawn with replacement.
    """
    rng = np.random.default_rng(0)
    low, high = np.percentile(
        [statistic(rng.integers(0, rows, rows)) for _ in range(resamples)], (2.5, 97.5)
    )
    return float(low), float(high)


def signed_rank_interval(values: Doubles, level: float) -> tuple[float, float, float]:
    """Estimate the centre of a symmetric distribution of any shape.

    Returns the estimate (Hodges and Lehmann 1963) and the ends of the interval that
    Wilcoxon's signed-rank test does not reject, each at `level`, by the test's exact
    distribution; infinite ends for too few values.
    """
    count = len(values)
    averages = np.sort((values[:, None] + values)[np.triu_indices(count)] / 2)
    probability = np.ones(1)  # of each sum of ranks
    for rank in range(1, count + 1):
        longer = np.zeros(len(probability) + rank)
        longer[: len(probability)] += probability / 2
        longer[rank:] += probability / 2
        probability = longer
    # sums 0 to cut - 1 are too rare
    cut = int(np.searchsorted(np.cumsum(probability), level, side="right"))
    if cut == 0:
        return float(np.median(averages)), -math.inf, math.inf
    return (
        float(np.median(averages)),
        float(averages[cut - 1]),
        float(averages[len(averages) - cut]),
    )
