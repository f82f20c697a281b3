"""The distribution of a stream of numbers in bounded memory, and the range that stands for it.

Every bin is a multiple of a power of two wide, and 0 is always an edge: when a larger number comes, neighbouring bins
are merged and nothing that was counted moves.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Method = Literal["minmax", "percentile", "entropy"]
Array = NDArray[np.float64]

BINS = 4096
"""On each side of 0."""
LEVELS = 256
"""What eight bits tell apart."""
CANDIDATES = 128
"""Thresholds that `entropy` compares."""


@dataclass
class Histogram:
    """Counts of the numbers seen so far, between -limit and limit."""

    low: float = 0.0
    high: float = 0.0
    limit: float = 2.0**-20
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(2 * BINS, np.int64))

    def add(self, values: NDArray[np.float32]) -> None:
        """Raises ValueError for numbers that are not finite."""
        low, high = float(values.min()), float(values.max())
        if not np.isfinite([low, high]).all():
            raise ValueError("not finite")
        self.low, self.high = min(self.low, low), max(self.high, high)
        while max(-low, high) >= self.limit:
            pairs = self.counts.reshape(-1, 2).sum(1)
            self.counts = np.concatenate([np.zeros(BINS // 2, np.int64), pairs, np.zeros(BINS // 2, np.int64)])
            self.limit *= 2
        places = np.floor(values.ravel() * np.float32(BINS / self.limit)).astype(np.int64) + BINS
        self.counts += np.bincount(np.clip(places, 0, 2 * BINS - 1), minlength=2 * BINS)

    def range(self, method: Method, percentile: float = 99.99) -> tuple[float, float]:
        """Lowest and highest number that int8 need tell apart; what lies outside is clipped. 0 is always inside.

        minmax      all that was seen
        percentile  the middle `percentile` % of it
        entropy     cut at the |x| which leaves the distribution after quantisation nearest to what it was, by
                    Kullback-Leibler divergence
        """
        if method == "percentile":
            return self._middle(percentile)
        if method == "entropy":
            return self._nearest()
        return self.low, self.high

    @property
    def _edges(self) -> Array:
        return np.linspace(-self.limit, self.limit, 2 * BINS + 1)

    def _middle(self, percentile: float) -> tuple[float, float]:
        share = np.cumsum(self.counts) / self.counts.sum()
        outside = (1 - percentile / 100) / 2
        first = int(np.searchsorted(share, outside, side="right"))
        last = int(np.searchsorted(share, 1 - outside, side="left"))
        edges = self._edges
        return (
            float(min(0.0, max(self.low, edges[min(first, 2 * BINS - 1)]))),
            float(max(0.0, min(self.high, edges[min(last, 2 * BINS - 1) + 1]))),
        )

    def _nearest(self) -> tuple[float, float]:
        seen = max(-self.low, self.high)
        width = self.limit / BINS
        widest = max(1, int(np.ceil(seen / width)))
        narrowest = min(widest, LEVELS // 2)
        best, cut = np.inf, seen
        for half in np.unique(np.linspace(narrowest, widest, CANDIDATES).astype(int)):
            first = BINS + max(-half, int(np.floor(self.low / width)))
            last = BINS + min(half, int(np.ceil(self.high / width)))
            if last > first and (far := _divergence(self.counts, first, last)) < best:
                best, cut = far, half * width
        return max(self.low, -float(cut)), min(self.high, float(cut))


def _divergence(counts: NDArray[np.int64], first: int, last: int) -> float:
    """KL(P || Q): P the counts with what is outside [first, last) moved into the outermost bins, Q what is left of the
    inside when its bins are told apart by LEVELS only."""
    inside = counts[first:last].astype(np.float64)
    clipped = inside.copy()
    clipped[0] += counts[:first].sum()
    clipped[-1] += counts[last:].sum()
    group = np.arange(len(inside)) * LEVELS // len(inside) if len(inside) > LEVELS else np.arange(len(inside))
    filled = inside > 0
    sums, sizes = np.bincount(group, inside), np.bincount(group, filled)
    spread = np.where(filled, sums[group] / np.maximum(sizes[group], 1), 0.0)
    here = clipped > 0
    p = clipped[here] / clipped.sum()
    q = np.maximum(spread[here] / max(spread.sum(), 1.0), 1e-12)
    return float((p * np.log(p / q)).sum())
