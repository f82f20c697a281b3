"""Observe on real rows which numbers the products of a graph read: the ranges that static int8 needs.

The fp32 graph is run with those tensors as further outputs, and what they hold is counted as it comes: memory is
bounded by TOKENS tokens of one batch, whatever the number of rows.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from compress.errors import ExportError
from compress.exporters.rewrite.graph import products
from compress.exporters.session import UNOPENED, read_model, session_options
from compress.progress import Progress

if TYPE_CHECKING:
    from compress.exporters.session import EncodedRow

Method = Literal["minmax", "percentile", "entropy"]

BINS = 4096
"""Bins on each side of 0."""
LEVELS = 256
"""The numbers that eight bits tell apart."""
CANDIDATES = 128
"""Thresholds that `entropy` compares."""


@dataclass
class Histogram:
    """Counts the numbers seen so far, between -limit and limit."""

    low: float = 0.0
    high: float = 0.0
    limit: float = 2.0**-20
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(2 * BINS, np.int64))

    def add(self, values: NDArray[np.float32]) -> None:
        """Count these numbers. Raises ValueError for numbers that are not finite."""
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
        """Choose the lowest and highest number that int8 represents, 0 among them; what lies outside is clipped.

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

    def _middle(self, percentile: float) -> tuple[float, float]:
        share = np.cumsum(self.counts) / self.counts.sum()
        outside = (1 - percentile / 100) / 2
        first = int(np.searchsorted(share, outside, side="right"))
        last = int(np.searchsorted(share, 1 - outside, side="left"))
        edges = np.linspace(-self.limit, self.limit, 2 * BINS + 1)
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
    """Compute KL(P || Q): P the counts with what is outside [first, last) moved into the outermost bins, Q what is left
    of the inside when its bins are told apart by LEVELS only."""
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


TOKENS = 512
"""The most tokens in a batch."""
WINDOW = 1024
"""Rows that are held at a time, to make batches of equal lengths: padding would be counted as activations."""


def ranges(
    source: Path,
    rows: "Iterable[EncodedRow]",
    *,
    method: Method = "percentile",
    percentile: float = 99.99,
    threads: int = 1,
) -> dict[str, tuple[float, float]]:
    """Find the lowest and highest value of each tensor that a product of the fp32 file `source` reads, by name: see
    `Histogram.range`. Zero is always inside.

    Raises ExportError for a file without products, no rows, or activations that are not finite.
    """
    return choose_ranges(observe(source, rows, threads=threads), method, percentile)


def choose_ranges(
    seen: Mapping[str, Histogram], method: Method = "percentile", percentile: float = 99.99
) -> dict[str, tuple[float, float]]:
    """Choose the ranges from what was observed: all methods can be computed from one pass over the rows."""
    return {name: histogram.range(method, percentile) for name, histogram in seen.items()}


def observe(source: Path, rows: "Iterable[EncodedRow]", *, threads: int = 1) -> dict[str, Histogram]:
    """Count the numbers that each product reads on the rows; each row counts as if run alone."""
    model = read_model(source)
    names = list(dict.fromkeys(product.reads for product in products(model.graph)))
    if not names:
        raise ExportError(f"{source}: no matrix product with constant weights; expected the fp32 file of a bundle")
    seen = {name: Histogram() for name in names}
    for values in watch(model, names, rows, threads=threads, source=source):
        for name, value in values.items():
            try:
                seen[name].add(value)
            except ValueError:
                raise ExportError(f"{source}: {name} is not finite on these rows; its weights are broken") from None
    if not any(histogram.counts.any() for histogram in seen.values()):
        raise ExportError(f"{source}: calibration needs at least one row")
    return seen


def watch(
    model: onnx.ModelProto, names: Sequence[str], rows: "Iterable[EncodedRow]", *, threads: int = 1, source: Path
) -> Iterator[dict[str, Any]]:
    """Yield the values of these tensors, batch after batch of rows of one length; `source` is named in errors."""
    shown = copy.deepcopy(model)
    have = {value.name for value in shown.graph.output}
    types = {name: onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names}
    shown.graph.output.extend(value for name, value in types.items() if name not in have)
    try:
        session = onnxruntime.InferenceSession(
            shown.SerializeToString(), session_options(threads, {}), providers=["CPUExecutionProvider"]
        )
    except UNOPENED as error:
        raise ExportError(f"{source}: onnxruntime {onnxruntime.__version__} cannot open it: {error}") from None
    inputs = [node.name for node in session.get_inputs()]
    with Progress("calibration", len(rows) if isinstance(rows, Sized) else None, "rows") as bar:
        for batch in _batches(rows, inputs, source):
            yield dict(zip(names, session.run(list(names), batch), strict=True))
            bar.advance(len(batch[inputs[0]]))


def _batches(rows: "Iterable[EncodedRow]", inputs: Sequence[str], source: Path) -> Iterator[dict[str, Any]]:
    """Yield batches of rows of one length."""
    rows = iter(rows)
    while held := list(islice(rows, WINDOW)):
        by_length: dict[int, list[EncodedRow]] = {}
        for row in held:
            if missing := [name for name in inputs if name not in row]:
                raise ExportError(f"{source}: a row has {', '.join(row)}; expected {', '.join(missing)} too")
            by_length.setdefault(len(row[inputs[0]]), []).append(row)
        for length, alike in sorted(by_length.items()):
            size = max(1, TOKENS // max(1, length))
            for at in range(0, len(alike), size):
                yield {name: np.array([row[name] for row in alike[at : at + size]], np.int64) for name in inputs}
