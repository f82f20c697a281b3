"""Compute what a sample of rows can tell: the interval around a share, and whether two shares differ."""

import math

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
