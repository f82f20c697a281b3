"""Race files in turns: the same two passes over all settings on every device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from compress.progress import Say
from compress.records.latency import (
    NOISE_FACTOR,
    DeviceError,
    Latency,
    Setting,
    Sustained,
    describe_load,
)

MINUTE = 60.0


@dataclass(frozen=True)
class Pass:
    """One of the two passes over the files at one setting.

    runs   timed runs in each turn of a file
    turns  the names of the files, in the order of each round; files are opened in the
           order of the first
    done   the share of the whole measurement that is done before this pass; share: that
           of this pass
    """

    number: int
    setting: Setting
    runs: int
    turns: tuple[tuple[str, ...], ...]
    done: float
    share: float

    def __str__(self) -> str:
        return f"pass {self.number} of 2, {self.setting}"


@dataclass
class PassTimes:
    """The times of one file in one pass.

    ms         every run; init_ms: opening the file; first_ms: the first forward
    celsius    the temperature at the end of the pass; None if the device reports none
    load       (CPUs that other processes kept busy, all CPUs); (0.0, 0) if unknown
    disturbed  why the times are unreliable; '' if they are not
    """

    init_ms: float
    first_ms: float
    ms: list[float] = field(default_factory=list)
    peak_rss_mb: float | None = None
    celsius: float | None = None
    load: tuple[float, int] = (0.0, 0)
    disturbed: str = ""


def race_files(
    files: Mapping[str, object],
    settings: Sequence[Setting],
    rounds: int,
    runs: int,
    measure: Callable[[Pass], Mapping[str, PassTimes]],
    *,
    say: Say,
    affinity: str = "",
    show: Callable[[Sequence[Latency]], None] = lambda _: None,
) -> list[Latency]:
    """Measure the latencies of all files, sorted by setting: half of the rounds in each
    of two passes over the settings.

    The order of the files alternates between rounds and is reversed in the second pass.
    `measure` runs one pass; `show` is called with the latencies so far, after each
    setting. Raises DeviceError for fewer than two rounds, which cannot be compared.
    """
    if rounds < 2 or runs < 1:
        raise DeviceError(
            f"race: {rounds} rounds of {runs} runs; expected at least 2 rounds, to "
            "compare them, and 1 run"
        )
    names = tuple(files)
    share = 1 / (2 * max(1, len(settings)))
    first: list[Mapping[str, PassTimes]] = []
    latencies: list[Latency] = []
    for number, order, half in (
        (1, names, rounds - rounds // 2),
        (2, names[::-1], rounds // 2),
    ):
        turns = tuple(order if turn % 2 == 0 else order[::-1] for turn in range(half))
        for at, setting in enumerate(settings):
            this = Pass(
                number,
                setting,
                runs,
                turns,
                (at + (number - 1) * len(settings)) * share,
                share,
            )
            say(str(this))
            times = measure(this)
            if number == 1:
                first.append(times)
                continue
            for name in names:
                passes = first[at][name], times[name]
                latencies.append(summarise(name, setting, *passes, affinity=affinity))
            show(latencies)
    return latencies


def summarise(
    name: str,
    setting: Setting,
    first: PassTimes,
    second: PassTimes,
    *,
    affinity: str = "",
) -> Latency:
    """Summarise the two passes of a file: if they agree, percentiles are over the runs
    of both.

    If they do not, the figures are those of the faster pass, since disturbances make a
    machine slower, and the measurement is flagged.
    """
    passes = first.ms, second.ms
    medians = tuple(float(np.median(ms)) for ms in passes)
    low, high = sorted(medians)
    halves = (first, second)
    peaks = [half.peak_rss_mb for half in halves if half.peak_rss_mb is not None]
    noise = [half.disturbed for half in halves if half.disturbed][:1]
    times = [*first.ms, *second.ms]
    if high > NOISE_FACTOR * low:
        faster = medians.index(low)
        times = passes[faster]
        both = (
            f"p50 {medians[0]:.2f} ms in the first pass, {medians[1]:.2f} ms in the "
            f"second (x{high / low:.2f})"
        )
        noise = [
            f"{both}; the figures are of the {('first', 'second')[faster]}",
            *noise,
        ]
    p50, p95, p99 = map(float, np.percentile(times, (50, 95, 99)))
    load, cpus = max(first.load, second.load)
    return Latency(
        name,
        setting,
        len(times),
        min(times),
        p50,
        p95,
        p99,
        first.init_ms,
        first.first_ms,
        peak_rss_mb=max(peaks, default=None),
        noisy=bool(noise),
        noise="; ".join(noise),
        passes=medians,
        lows=tuple(float(np.percentile(ms, 10)) for ms in passes),
        affinity=affinity,
        celsius=second.celsius,
        other_load=load if cpus else None,
        busy=describe_load(load, cpus, setting.threads) if cpus else "",
    )


def sustain_file(
    name: str,
    setting: Setting,
    seconds: float,
    run: Callable[[float], float],
    *,
    temperature: Callable[[], float | None],
    say: Say,
) -> Sustained:
    """Run one file for `seconds`: `run` takes at most a minute's worth of seconds and
    returns the median latency in milliseconds."""
    minutes: list[float] = []
    temperatures: list[float | None] = []
    started = temperature()
    left = seconds
    while left > 0:
        minutes.append(run(min(MINUTE, left)))
        temperatures.append(temperature())
        left -= MINUTE
        celsius = "" if temperatures[-1] is None else f", {temperatures[-1]:.0f} C"
        say(
            f"{name}, {setting}: minute {len(minutes)}: p50 {minutes[-1]:.2f} "
            f"ms{celsius}"
        )
    return Sustained(name, setting, tuple(minutes), tuple(temperatures), started)
