"""A stream of numbers in bounded memory, and the range that eight bits are spent on."""

import numpy as np
import pytest

from compress.quantization.calibration import BINS, Histogram


def of(values: np.ndarray, pieces: int = 1) -> Histogram:
    found = Histogram()
    for piece in np.array_split(values.astype(np.float32), pieces):
        found.add(piece)
    return found


def test_nothing_that_was_counted_moves_when_larger_numbers_come() -> None:
    values = np.random.default_rng(0).normal(size=4000) * np.linspace(1e-3, 300, 4000)
    found = of(values, pieces=40)
    edges = np.linspace(-found.limit, found.limit, 2 * BINS + 1)
    assert (found.counts == np.histogram(values.astype(np.float32), edges)[0]).all()
    assert found.counts.sum() == 4000
    once = of(values)
    assert (once.limit, once.low, once.high) == (found.limit, found.low, found.high)
    assert (once.counts == found.counts).all()


def test_minmax_is_all_that_was_seen_and_zero() -> None:
    assert of(np.array([3.0, -1.5, 2.0])).range("minmax") == (-1.5, 3.0)
    assert of(np.array([3.0, 1.5])).range("minmax") == (0.0, 3.0)


def test_percentile_is_the_middle_of_it() -> None:
    values = np.random.default_rng(0).normal(size=20_000).astype(np.float32)
    found = of(values, pieces=7)
    low, high = found.range("percentile", 99.0)
    bin_width = found.limit / BINS
    assert low == pytest.approx(np.quantile(values, 0.005), abs=2 * bin_width)
    assert high == pytest.approx(np.quantile(values, 0.995), abs=2 * bin_width)
    assert found.range("percentile", 100.0) == pytest.approx(found.range("minmax"), abs=bin_width)
    assert of(np.full(100, 2.0)).range("percentile", 99.0)[0] == 0.0


def test_entropy_clips_a_lone_outlier_only() -> None:
    draw = np.random.default_rng(0)
    with_outlier = np.concatenate([draw.normal(size=50_000), [400.0]])
    assert of(with_outlier).range("entropy")[1] < 100
    even = draw.uniform(-1, 1, 50_000)
    low, high = of(even).range("entropy")
    assert low == pytest.approx(-1, abs=0.05)
    assert high == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_non_finite_values_are_refused(broken: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        of(np.array([1.0, broken]))
