"""The record of what a command will take: minutes, memory and disk, phase by phase, before it is begun."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Phase:
    """Forecast a part of a command.

    steps, seconds   optimiser steps and seconds, at least and at most
    disk_mb          10^6 bytes that it holds on disk at most
    cached           an earlier command has left it, and it takes no time
    note             what is not as usual
    """

    name: str
    steps: tuple[int, int] = (0, 0)
    seconds: tuple[float, float] = (0.0, 0.0)
    samples_per_second: float | None = None
    note: str = ""
    disk_mb: float = 0.0
    cached: bool = False


@dataclass(frozen=True)
class Forecast:
    """Forecast a command.

    peak_rss_mb    the most memory that the trials held, in 10^6 bytes
    limit          `--minutes`
    out_of_reach   each budget that nothing can keep, in a sentence
    """

    title: str
    phases: tuple[Phase, ...]
    peak_rss_mb: float
    limit: float | None = None
    out_of_reach: tuple[str, ...] = ()

    @property
    def minutes(self) -> tuple[float, float]:
        """Return the minutes of everything, at least and at most."""
        least, most = (sum(phase.seconds[at] for phase in self.phases) / 60 for at in (0, 1))
        return (least, most) if self.limit is None else (min(least, self.limit), min(most, self.limit))

    @property
    def disk_mb(self) -> float:
        """Return the 10^6 bytes of all phases."""
        return sum(phase.disk_mb for phase in self.phases)

    def to_json(self) -> str:
        """Return the phases and the totals as JSON."""
        return json.dumps({**asdict(self), "minutes": self.minutes, "disk_mb": self.disk_mb}, indent=1) + "\n"


def size_mb(*paths: Path) -> float:
    """Return the 10^6 bytes of these files, and of those in these folders."""
    files = [file for path in paths for file in (path, *path.rglob("*")) if file.is_file()]
    return sum(file.stat().st_size for file in files) / 1e6


def time_call(run: Callable[[], object]) -> float:
    """Return the seconds that this takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
