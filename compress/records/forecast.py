"""The record of what a command is expected to take: minutes, memory and disk, phase by
phase."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class PhaseEstimate:
    """The forecast of one phase of a command.

    steps, seconds   optimiser steps and seconds, at least and at most
    likely           its likely position between them, from 0 (at least) to 1 (at most)
    disk_mb          the maximum that it holds on disk, in 10^6 bytes
    cached           whether it takes no time because an earlier command has done it
    note             anything unusual
    """

    name: str
    steps: tuple[int, int] = (0, 0)
    seconds: tuple[float, float] = (0.0, 0.0)
    samples_per_second: float | None = None
    note: str = ""
    disk_mb: float = 0.0
    cached: bool = False
    likely: float = 0.5


@dataclass(frozen=True)
class Forecast:
    """The forecast of a command.

    peak_rss_mb    peak memory of the trial steps, in 10^6 bytes
    limit          `--minutes`
    out_of_reach   one sentence for each budget that cannot be met
    """

    title: str
    phases: tuple[PhaseEstimate, ...]
    peak_rss_mb: float
    limit: float | None = None
    out_of_reach: tuple[str, ...] = ()

    @property
    def minutes(self) -> tuple[float, float]:
        """Sum the minutes of all phases, at least and at most. Only training is cut to
        keep the limit."""
        return self._sum_minutes(0), self._sum_minutes(1)

    @property
    def keeps_limit(self) -> bool:
        """Return True unless what cannot be cut takes longer than the limit."""
        return self.limit is None or self.minutes[0] <= self.limit

    def _sum_minutes(self, bound: int) -> float:
        """Sum the minimum (0) or the maximum (1) minutes of all phases."""
        training = sum(each.seconds[bound] for each in self.phases if each.steps[1])
        others = sum(each.seconds[bound] for each in self.phases if not each.steps[1])
        if self.limit is not None:
            training = min(training, max(0.0, 60 * self.limit - others))
        return (training + others) / 60

    @property
    def likely_minutes(self) -> float:
        """Sum the minutes that the phases probably take."""
        spans = (
            (least, most - least, phase.likely)
            for phase in self.phases
            for least, most in [phase.seconds]
        )
        return min(
            self.minutes[1],
            sum(least + likely * span for least, span, likely in spans) / 60,
        )

    @property
    def disk_mb(self) -> float:
        """Sum the 10^6 bytes of all phases."""
        return sum(phase.disk_mb for phase in self.phases)

    def to_json(self) -> str:
        """Return the phases and the totals as JSON."""
        totals = {
            "minutes": self.minutes,
            "likely_minutes": self.likely_minutes,
            "disk_mb": self.disk_mb,
        }
        return json.dumps({**asdict(self), **totals}, indent=1) + "\n"


def size_mb(*paths: Path) -> float:
    """Sum the 10^6 bytes of these files, and of the files in these folders."""
    files = [
        file for path in paths for file in (path, *path.rglob("*")) if file.is_file()
    ]
    return sum(file.stat().st_size for file in files) / 1e6


def time_call(run: Callable[[], object]) -> float:
    """Call a function and return the seconds it took."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
