"""A latency measurement, whatever the device: the setting, the figures, the verdict on noise."""

from collections.abc import Mapping
from dataclasses import dataclass

from compress.errors import CompressError

NOISE_FACTOR = 1.15
"""The largest ratio of the medians of the two passes that is not flagged."""

WARM_UP = 5
"""Untimed runs after the first one."""

BUSY = 0.2
"""CPUs that other processes may keep busy, of those that a measurement needs."""

FEWEST_SHAPES = 5
"""Measured shapes that a latency model needs: with fewer, its leave-one-out error means nothing."""

MOST_TOKENS = 2**24
"""The most tokens in one forward: the inputs alone would be gigabytes."""


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
        if self.batch * self.seq > MOST_TOKENS:
            raise DeviceError(
                f"setting: batch {self.batch:,} of {self.seq:,} tokens; expected at most {MOST_TOKENS:,} tokens in one "
                "forward"
            )

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{threads}, batch {self.batch}, {self.seq} tokens"


@dataclass(frozen=True)
class Latency:
    """The latency of one file at one setting.

    runs         how many timed runs the percentiles are of
    *_ms         of one forward, in milliseconds; init_ms opens the file, first_ms is the first forward
    peak_rss_mb  the most memory its process held, runtime and file included, 10^6 bytes; None where it cannot be read
    noisy        the two passes disagree: the figures are of the faster one alone, and not to be quoted; `noise` says
                 how far apart they are
    passes       p50 of each pass
    lows         p10 of each pass: what a run takes that nothing disturbs, even on a busy machine
    affinity     the CPUs it was kept on, as `0-3`; '' for wherever the system liked
    celsius      the temperature at the end; None where the device shows none
    other_load   how many CPUs other processes and other machines of the same host kept busy meanwhile; None where the
                 device does not tell. The two passes agree under a load that stays
    busy         what that was, in words, where it was of the CPUs that the measurement needs; ''
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
    passes: tuple[float, ...] = ()
    lows: tuple[float, ...] = ()
    affinity: str = ""
    celsius: float | None = None
    other_load: float | None = None
    busy: str = ""


@dataclass(frozen=True)
class Sustained:
    """The latency of one file while it ran without pause.

    minutes       p50 of one forward in each minute, in milliseconds; the last minute may be cut short
    temperatures  at the end of each minute, degrees Celsius; None where the device shows none
    started       the temperature before the first forward: a file measured after another starts on a warm device
    """

    name: str
    setting: Setting
    minutes: tuple[float, ...]
    temperatures: tuple[float | None, ...]
    started: float | None = None


def describe_load(other_load: float | None, cpus: int, threads: int) -> str:
    """Say what other processes took of the CPUs that `threads` threads need; '' for little, or where it is unknown.

    Half of the CPUs count: the others may be second threads of the same cores.
    """
    if other_load is None or other_load <= max(0.0, cpus / 2 - threads) + BUSY:
        return ""
    return f"other processes kept {other_load:.1f} of {cpus} CPUs busy"


def describe_device(name: str, facts: Mapping[str, str]) -> str:
    """Describe a device as evidence names it: name, processor and instruction sets, as far as it tells them."""
    return ", ".join(filter(None, (name, facts.get("cpu", ""), facts.get("instructions", ""))))
