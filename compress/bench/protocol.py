"""What a latency measurement is, whatever the device: the setting, the figures, the verdict on noise."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compress.errors import CompressError

NOISE_FACTOR = 1.15
"""How much the medians of the first and of the last half of the rounds may differ before a measurement is flagged."""


class DeviceError(CompressError):
    """A device that cannot measure what was asked, or a measuring process that died."""


@dataclass(frozen=True)
class Setting:
    """One forward of `batch` rows of `seq` tokens each, on `threads` threads."""

    threads: int = 1
    batch: int = 1
    seq: int = 128

    def __post_init__(self) -> None:
        for name in ("threads", "batch", "seq"):
            if getattr(self, name) < 1:
                raise DeviceError(f"setting: {name} is {getattr(self, name)}; expected a whole number of at least 1")


@dataclass(frozen=True)
class Latency:
    """What one file took at one setting.

    runs         how many timed runs the percentiles are of
    *_ms         of one forward, in milliseconds; init_ms opens the file, first_ms is the first forward
    peak_rss_mb  the most memory its process held, runtime and file included, 10^6 bytes; None where it cannot be read
    noisy        the machine changed speed during the measurement: do not quote the figures; `noise` says how much
    """

    name: str
    setting: Setting
    runs: int
    min_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    init_ms: float
    first_ms: float
    peak_rss_mb: float | None
    noisy: bool
    noise: str


@dataclass(frozen=True)
class Sustained:
    """What one file took while it ran without pause.

    minutes       p50 of one forward in each minute, in milliseconds; the last minute may be cut short
    temperatures  at the end of each minute, degrees Celsius; None where the device shows none
    started       the temperature before the first forward: a file measured after another starts on a warm device
    """

    name: str
    setting: Setting
    minutes: tuple[float, ...]
    temperatures: tuple[float | None, ...]
    started: float | None = None


def summarise(
    name: str,
    setting: Setting,
    rounds: Sequence[Sequence[float]],
    *,
    init_ms: float,
    first_ms: float,
    peak_rss_mb: float | None,
) -> Latency:
    """Percentiles over the runs of all rounds (at least two), and whether the halves of the rounds agree."""
    times = np.concatenate([np.asarray(times) for times in rounds])
    half = len(rounds) // 2
    early, late = (float(np.median(np.concatenate(part))) for part in (rounds[:half], rounds[half:]))
    factor = max(early, late) / min(early, late)
    noisy = factor > NOISE_FACTOR
    p50, p95, p99 = np.percentile(times, (50, 95, 99))
    return Latency(
        name=name,
        setting=setting,
        runs=len(times),
        min_ms=float(times.min()),
        p50_ms=float(p50),
        p95_ms=float(p95),
        p99_ms=float(p99),
        init_ms=init_ms,
        first_ms=first_ms,
        peak_rss_mb=peak_rss_mb,
        noisy=noisy,
        noise=f"p50 {early:.2f} ms in the first rounds, {late:.2f} ms in the last (x{factor:.2f})" if noisy else "",
    )
