"""Observe the activations of a graph on real rows, for the ranges that static int8
needs.

The fp32 graph is run with those tensors as additional outputs, and their values are
added to histograms: memory is bounded by one batch of TOKENS_PER_RUN tokens, whatever
the number of rows.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from compress.arrays import Floats, Longs
from compress.errors import ExportError
from compress.exporters.rewrite.graph import products
from compress.exporters.session import (
    create_session,
    expose,
    read_model,
    session_options,
)
from compress.progress import Progress

if TYPE_CHECKING:
    from compress.exporters.session import EncodedRow

Method = Literal["minmax", "percentile", "entropy"]

BINS = 4096
"""Bins on each side of 0."""
HISTOGRAM_LEVELS = 256
"""The number of values that eight bits can represent."""
CANDIDATES = 128
"""The number of thresholds that `entropy` compares."""


@dataclass
class Histogram:
    """The counts of all numbers so far, between -limit and limit."""

    low: float = 0.0
    high: float = 0.0
    limit: float = 2.0**-20
    counts: Longs = field(default_factory=lambda: np.zeros(2 * BINS, np.int64))

    def add(self, values: Floats) -> None:
        """Count these numbers. Raises ValueError unless all are finite."""
        low = float(values.min())
        high = float(values.max())
        if not np.isfinite([low, high]).all():
            raise ValueError("not finite")
        self.low = min(self.low, low)
        self.high = max(self.high, high)
        while max(-low, high) >= self.limit:
            pairs = self.counts.reshape(-1, 2).sum(1)
            self.counts = np.concatenate(
                [np.zeros(BINS // 2, np.int64), pairs, np.zeros(BINS // 2, np.int64)]
            )
            self.limit *= 2
        places = (
            np.floor(values.ravel() * np.float32(BINS / self.limit)).astype(np.int64)
            + BINS
        )
        self.counts += np.bincount(np.clip(places, 0, 2 * BINS - 1), minlength=2 * BINS)

    def range(self, method: Method, percentile: float = 99.99) -> tuple[float, float]:
        """Return the lowest and highest number that int8 represents, with 0 between
        them; the rest is clipped.

        minmax      all numbers
        percentile  the middle `percentile` % of them
        entropy     |x| up to the threshold that minimises the Kullback-Leibler
                    divergence after quantisation
        """
        if method == "minmax":
            return self.low, self.high
        if method == "percentile":
            share = np.cumsum(self.counts) / self.counts.sum()
            outside = (1 - percentile / 100) / 2
            first = int(np.searchsorted(share, outside, side="right"))
            last = int(np.searchsorted(share, 1 - outside, side="left"))
            edges = np.linspace(-self.limit, self.limit, 2 * BINS + 1)
            return (
                float(min(0.0, max(self.low, edges[min(first, 2 * BINS - 1)]))),
                float(max(0.0, min(self.high, edges[min(last, 2 * BINS - 1) + 1]))),
            )
        largest = max(-self.low, self.high)
        width = self.limit / BINS
        widest = max(1, int(np.ceil(largest / width)))
        narrowest = min(widest, HISTOGRAM_LEVELS // 2)
        best = np.inf
        threshold = largest
        for half in np.unique(np.linspace(narrowest, widest, CANDIDATES).astype(int)):
            first = BINS + max(-half, int(np.floor(self.low / width)))
            last = BINS + min(half, int(np.ceil(self.high / width)))
            if (
                last > first
                and (divergence := _divergence(self.counts, first, last)) < best
            ):
                best = divergence
                threshold = half * width
        return max(self.low, -float(threshold)), min(self.high, float(threshold))


def _divergence(counts: Longs, first: int, last: int) -> float:
    """Compute KL(P || Q): P are the counts with those outside [first, last) moved into
    the outermost bins, Q those inside after quantisation to HISTOGRAM_LEVELS bins."""
    inside = counts[first:last].astype(np.float64)
    clipped = inside.copy()
    clipped[0] += counts[:first].sum()
    clipped[-1] += counts[last:].sum()
    bins = max(len(inside), HISTOGRAM_LEVELS)
    group = np.arange(len(inside)) * HISTOGRAM_LEVELS // bins
    filled = inside > 0
    sums = np.bincount(group, inside)
    sizes = np.bincount(group, filled)
    spread = np.where(filled, sums[group] / np.maximum(sizes[group], 1), 0.0)
    positive = clipped > 0
    p = clipped[positive] / clipped.sum()
    q = np.maximum(spread[positive] / max(spread.sum(), 1.0), 1e-12)
    return float((p * np.log(p / q)).sum())


TOKENS_PER_RUN = 512
"""The most tokens in one batch."""
CALIBRATION_WINDOW = 1024
"""Rows held in memory to form batches of equal length: padding would count as
activations."""


def compute_ranges(
    source: Path,
    rows: "Iterable[EncodedRow]",
    *,
    method: Method = "percentile",
    percentile: float = 99.99,
    threads: int = 1,
) -> dict[str, tuple[float, float]]:
    """Compute the range of each tensor that a product of the fp32 file `source` reads,
    by name: see `Histogram.range`.

    Raises ExportError for a file without products, no rows, or activations that are not
    finite.
    """
    return choose_ranges(observe(source, rows, threads=threads), method, percentile)


def choose_ranges(
    seen: Mapping[str, Histogram],
    method: Method = "percentile",
    percentile: float = 99.99,
) -> dict[str, tuple[float, float]]:
    """Choose the ranges from histograms: one pass over the rows serves every method."""
    return {
        name: histogram.range(method, percentile) for name, histogram in seen.items()
    }


def observe(
    source: Path,
    rows: "Iterable[EncodedRow]",
    *,
    names: Sequence[str] | None = None,
    threads: int = 1,
) -> dict[str, Histogram]:
    """Count the numbers in each tensor of `names`, by default those that products read;
    rows are not padded."""
    if names is None:
        names = list_read(source)
    if not names:
        raise ExportError(
            f"{source}: no matrix product with constant weights; expected the fp32 "
            "file of a bundle"
        )
    histograms = {name: Histogram() for name in names}
    for values in iterate_activations(source, names, rows, threads=threads):
        for name, value in values.items():
            try:
                histograms[name].add(value)
            except ValueError:
                raise ExportError(
                    f"{source}: {name} is not finite on these rows; its weights are "
                    "broken"
                ) from None
    if not any(histogram.counts.any() for histogram in histograms.values()):
        raise ExportError(f"{source}: calibration needs at least one row")
    return histograms


def list_read(source: Path) -> list[str]:
    """List the tensors that the products of a file read."""
    found = products(read_model(source).graph)
    return list(dict.fromkeys(product.reads for product in found))


def iterate_activations(
    source: Path,
    names: Sequence[str],
    rows: "Iterable[EncodedRow]",
    *,
    threads: int = 1,
) -> Iterator[dict[str, Any]]:
    """Yield the values of these tensors of a file, one batch of rows of equal length
    after another."""
    exposed = expose(read_model(source), names).SerializeToString()
    session = create_session(exposed, session_options(threads, {}), source)
    inputs = [node.name for node in session.get_inputs()]
    with Progress(
        "calibration", len(rows) if isinstance(rows, Sized) else None, "rows"
    ) as bar:
        for batch in _batches(rows, inputs, source):
            yield dict(zip(names, session.run(list(names), batch), strict=True))
            bar.advance(len(batch[inputs[0]]))


def _batches(
    rows: "Iterable[EncodedRow]", inputs: Sequence[str], source: Path
) -> Iterator[dict[str, Any]]:
    """Yield batches of rows of equal length."""
    rows = iter(rows)
    while window := list(islice(rows, CALIBRATION_WINDOW)):
        by_length: dict[int, list[EncodedRow]] = {}
        for row in window:
            if missing := [name for name in inputs if name not in row]:
                raise ExportError(
                    f"{source}: a row has {', '.join(row)}; expected "
                    f"{', '.join(missing)} too"
                )
            by_length.setdefault(len(row[inputs[0]]), []).append(row)
        for length, group in sorted(by_length.items()):
            size = max(1, TOKENS_PER_RUN // max(1, length))
            for at in range(0, len(group), size):
                yield {
                    name: np.array(
                        [row[name] for row in group[at : at + size]], np.int64
                    )
                    for name in inputs
                }
