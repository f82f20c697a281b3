"""The record of a latency measurement on any device: setting, figures, noise."""

from collections.abc import Mapping
from dataclasses import dataclass

from compress.errors import CompressError

NOISE_FACTOR = 1.15
"""The largest ratio between the medians of the two passes that is not called noise."""

WARM_UP = 5
"""Untimed runs after the first one."""

BUSY = 0.2
"""How many of the CPUs that a measurement needs may be busy with other processes."""

FEWEST_SHAPES = 5
"""Minimum number of measured shapes for a latency model: with fewer, its leave-one-out
error means nothing."""

MOST_TOKENS = 2**24
"""Maximum tokens in one forward pass: with more, the inputs alone take gigabytes."""


class DeviceError(CompressError):
    """Raised when a device cannot measure a file or setting, or when the measuring
    process dies."""


@dataclass(frozen=True)
class Setting:
    """One forward of `batch` rows of `seq` tokens each, on `threads` threads."""

    threads: int = 1
    batch: int = 1
    seq: int = 128

    def __post_init__(self) -> None:
        for name in ("threads", "batch", "seq"):
            if getattr(self, name) < 1:
                raise DeviceError(
                    f"setting: {name} is {getattr(self, name)}; expected a whole "
                    "number of at least 1"
                )
        if self.batch * self.seq > MOST_TOKENS:
            raise DeviceError(
                f"setting: batch {self.batch:,} of {self.seq:,} tokens; expected at "
                f"most {MOST_TOKENS:,} tokens in one forward"
            )

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{threads}, batch {self.batch}, {self.seq} tokens"


@dataclass(frozen=True)
class Latency:
    """The latency of one file at one setting.

    runs         number of timed runs
    *_ms         milliseconds of one forward; init_ms: of opening the file; first_ms: of
                 the first forward
    peak_rss_mb  peak memory of the process with runtime and file, in 10^6 bytes; None
                 if it cannot be read
    noisy        whether the two passes disagree; the figures are then those of the
                 faster pass, and should not be quoted. noise: how far apart they are
    passes       p50 of each pass
    lows         p10 of each pass: the time of an undisturbed run, even on a busy
                 machine
    affinity     the CPUs it was pinned to, such as `0-3`; '' if it was not pinned
    celsius      the temperature at the end; None if the device has no sensor
    other_load   CPUs that other processes and other virtual machines of the host kept
                 busy; None if the device does not report it. A constant load does not
                 make the passes disagree
    busy         a description of that load, if it took CPUs that the measurement needs;
                 else ''
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
    """The latency of one file while it runs without pause.

    minutes       p50 of one forward in each minute, in milliseconds; the last minute
                  may be shorter
    temperatures  at the end of each minute, in degrees Celsius; None if the device has
                  no sensor
    started       the temperature before the first forward: a second file starts on a
                  warm device
    """

    name: str
    setting: Setting
    minutes: tuple[float, ...]
    temperatures: tuple[float | None, ...]
    started: float | None = None


def describe_load(other_load: float | None, cpus: int, threads: int) -> str:
    """Describe how many of the CPUs that `threads` threads need were busy; '' if few
    were, or if unknown.

    Half of the CPUs count: the others may be second threads of the same cores.
    """
    if other_load is None or other_load <= max(0.0, cpus / 2 - threads) + BUSY:
        return ""
    return f"other processes kept {other_load:.1f} of {cpus} CPUs busy"


def describe_device(name: str, facts: Mapping[str, str]) -> str:
    """Describe a device for evidence: its name, and processor and instruction sets if
    known."""
    return ", ".join(
        filter(None, (name, facts.get("cpu", ""), facts.get("instructions", "")))
    )
