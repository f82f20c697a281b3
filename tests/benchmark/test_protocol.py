"""Percentiles are of all runs; rounds whose halves disagree are flagged."""

import pytest

from compress.benchmark.race import PassTimes, summarise
from compress.records.latency import Latency, Setting, describe_load


def summary(*passes: list[float]) -> Latency:
    first, second = (PassTimes(30.0, 9.0, ms, 80.0) for ms in passes)
    return summarise("x", Setting(2, 4, 8), first, second)


def test_percentiles_cover_both_passes() -> None:
    latency = summary(*([float(value) for value in range(100 - at, 0, -2)] for at in range(2)))
    assert (latency.runs, latency.min_ms, latency.p50_ms) == (100, 1.0, 50.5)
    assert (latency.p95_ms, latency.p99_ms) == (pytest.approx(95.05), pytest.approx(99.01))
    assert (latency.init_ms, latency.first_ms, latency.peak_rss_mb) == (30.0, 9.0, 80.0)
    assert (latency.noisy, latency.noise) == (False, "")


def test_passes_that_disagree_are_flagged_not_averaged_and_single_outliers_are_not() -> None:
    noisy = summary([1.0] * 4, [1.2] * 4)
    assert noisy.noisy
    assert noisy.noise == ("p50 1.00 ms in the first pass, 1.20 ms in the second (x1.20); the figures are of the first")
    assert (noisy.runs, noisy.min_ms, noisy.p50_ms, noisy.p99_ms) == (4, 1.0, 1.0, 1.0)
    assert noisy.passes == (1.0, 1.2)
    assert not summary([1.0, 1.0, 1.0, 9.0], [1.1] * 4).noisy
    later = summary([1.2, 1.2], [1.0, 1.0])
    assert later.noisy
    assert later.p50_ms == 1.0
    assert later.noise.endswith("of the second")


@pytest.mark.parametrize(
    ("other", "cpus", "threads", "expected"),
    [
        (0.1, 2, 1, False),
        (0.5, 2, 1, True),
        (1.0, 64, 1, False),
        (40.0, 64, 1, True),
        (1.0, 8, 4, True),
        (None, 2, 1, False),
    ],
)
def test_load_is_described_if_it_disturbs(other: float | None, cpus: int, threads: int, expected: bool) -> None:
    assert bool(describe_load(other, cpus, threads)) is expected
