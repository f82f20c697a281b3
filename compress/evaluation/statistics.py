"""Compute what a sample can tell: intervals around shares, differences and ratios, and whether two scores differ."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHARES = ("accuracy", "exact")
"""Metrics that are a share of independent rows; of the others no interval follows from the score alone."""
_Z95 = 1.959964


def wilson_interval(share: float, rows: int) -> tuple[float, float]:
    """Compute the 95 % interval of a share seen over `rows` independent rows (Wilson 1927)."""
    z = _Z95
    centre = (share + z * z / (2 * rows)) / (1 + z * z / rows)
    half = z / (1 + z * z / rows) * math.sqrt(share * (1 - share) / rows + z * z / (4 * rows * rows))
    return centre - half, centre + half


def differ_significantly(metric: str, one: float, other: float, rows: int) -> bool | None:
    """Check that two scores of the same rows differ at 95 %; None where that cannot be told from the scores.

    Both are taken as independent, and their difference as Wilson's intervals give it (Newcombe 1998, method 10). Two
    models of the same rows err together, so that in truth they are told apart a little sooner.
    """
    if one == other:
        return False
    if metric not in SHARES or rows < 1 or not (0 <= one <= 1 and 0 <= other <= 1):
        return None
    high, low = max(one, other), min(one, other)
    lower, upper = wilson_interval(high, rows)[0], wilson_interval(low, rows)[1]
    return high - low > math.hypot(high - lower, upper - low)


def paired_share_interval(only_one: int, only_other: int, rows: int) -> tuple[float, float]:
    """Compute the 95 % interval of the difference of two shares of the same rows: the score interval of Tango 1998.

    `only_one`, `only_other`: rows that one model alone has right. What it holds at a difference of 0 is McNemar's test.
    """

    def score(difference: float) -> float:
        linear = (2 * rows - only_one + only_other) * difference - only_one - only_other
        root = math.sqrt(max(0.0, linear**2 + 8 * rows * only_other * difference * (1 - difference)))
        share = (root - linear) / (4 * rows)
        variance = rows * (2 * share + difference * (1 - difference))
        return (only_one - only_other - rows * difference) / math.sqrt(max(variance, 1e-12))

    from scipy.optimize import brentq

    seen, edge = (only_one - only_other) / rows, 1 - 1e-9
    low = brentq(lambda at: score(at) - _Z95, -edge, seen) if score(-edge) > _Z95 else -1.0
    high = brentq(lambda at: score(at) + _Z95, seen, edge) if score(edge) < -_Z95 else 1.0
    return float(low), float(high)


def bootstrap_interval(
    statistic: Callable[[NDArray[Any]], float], rows: int, *, resamples: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """Compute the 95 % interval of a statistic of rows, drawn again with repeats (Efron 1979, percentiles).

    `statistic` takes the numbers of the drawn rows; of a difference of two models it takes the same rows of both.
    """
    draw = np.random.default_rng(seed)
    found = [statistic(draw.integers(0, rows, rows)) for _ in range(resamples)]
    low, high = np.percentile(found, (2.5, 97.5))
    return float(low), float(high)


def signed_rank_interval(values: NDArray[np.float64], level: float) -> tuple[float, float, float]:
    """Estimate the centre of values that scatter evenly around it, without more being known of how.

    Returns the estimate (Hodges and Lehmann 1963) and the ends of the interval that Wilcoxon's signed-rank test does
    not reject, each at `level`, by the test's exact distribution; infinite where so few values allow none.
    """
    count = len(values)
    averages = np.sort((values[:, None] + values)[np.triu_indices(count)] / 2)
    chance = np.ones(1)  # of each sum of ranks
    for rank in range(1, count + 1):
        longer = np.zeros(len(chance) + rank)
        longer[: len(chance)] += chance / 2
        longer[rank:] += chance / 2
        chance = longer
    cut = int(np.searchsorted(np.cumsum(chance), level, side="right"))  # sums 0 to cut - 1 are too rare
    if cut == 0:
        return float(np.median(averages)), -math.inf, math.inf
    return float(np.median(averages)), float(averages[cut - 1]), float(averages[len(averages) - cut])
