"""A page as a Device: the protocol of `compress.bench.stationed`, done in a browser, driven from here.

Each file has a worker with a runtime and threads of its own, as each has a process elsewhere; the page is told what to
do step by step, so that rounds interleave, and passes are two, as they do and are everywhere.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.bench.browser.answers import Answer, Computed, Done, Known, Opened, Timed, read
from compress.bench.browser.assets import VERSION
from compress.bench.browser.feeding import Fed
from compress.bench.browser.server import Site
from compress.bench.browser.tables import tables
from compress.bench.protocol import WARM_UP, DeviceError, Latency, Setting, Sustained, check_turns, summarise
from compress.bench.runner import WARM_UP_PER_ROUND

BURST = 5.0
"""Seconds of one step of a sustained measurement: the page shows progress, and is missed when it is gone."""

ROWS_AT_ONCE = 32

HIDDEN = "the page was hidden meanwhile, and browsers slow hidden pages down"


@dataclass(frozen=True)
class Measured:
    """One file in one pass. hidden: whether the page was, for some of it."""

    opened: Opened
    ms: list[float]
    heap_mb: float
    hidden: bool


@dataclass(frozen=True)
class Pass:
    """One of the two passes over the files at one setting.

    start, share  of all that is measured, how much is done before, and how much this is
    """

    number: int
    setting: Setting
    rounds: int
    runs: int
    start: float
    share: float

    def __str__(self) -> str:
        return f"pass {self.number} of 2, {self.setting}"


@dataclass(frozen=True)
class Browser:
    """A page that has claimed the link.

    entry  the file of onnxruntime-web that its workers import
    say    is told how far the measuring is
    """

    site: Site
    known: Known
    entry: str
    webgpu: bool
    say: Callable[[str], None]
    name: str = "browser"

    def facts(self) -> dict[str, str]:
        """What the browser tells of what it runs on, and what is special about figures from there."""
        known = self.known
        told = {
            "device": known.model,
            "cpu": known.processor,
            "cores": str(known.cores or ""),
            "instructions": "simd" if known.simd else "",
            "threads": "" if known.isolated else "one only: the page is not isolated",
            "memory": f"{known.memory_gb:g} GB or more" if known.memory_gb else "",
            "gpu": known.gpu,
            "system": known.system,
            "browser": known.agent,
            "runtime": f"onnxruntime-web {VERSION}, {'WebGPU' if self.webgpu else 'WebAssembly'}",
            "clock": f"steps of {known.timer_ms:.2g} ms",
            "MB": "of WebAssembly memory",
        }
        return {name: value for name, value in told.items() if value}

    def race(
        self, files: Mapping[str, Path], settings: Sequence[Setting], *, rounds: int = 8, runs: int = 15
    ) -> list[Latency]:
        """As on every device; the peak memory is WebAssembly's own.

        A sample that would be shorter than 100 steps of the browser's clock is the mean of several forwards. What was
        measured while the page was hidden is flagged as noisy.
        """
        check_turns(rounds, runs)
        self._check(settings)
        fed = {name: Fed.of(path) for name, path in files.items()}
        first: dict[Setting, dict[str, Measured]] = {}
        found: list[Latency] = []
        for each in _passes(settings, rounds, runs):
            self.say(f"{self.name}: {each}")
            measured = self._pass(fed, each)
            if each.number == 1:
                first[each.setting] = measured
            else:
                found += [_latency(name, each.setting, first[each.setting][name], measured[name]) for name in files]
                self._ask({"do": "show", "tables": tables(found)}, Done)
        return found

    def sustain(self, files: Mapping[str, Path], setting: Setting, *, seconds: float) -> list[Sustained]:
        """Each file without pause for `seconds`, one after another. Raises DeviceError when the page was hidden: the
        curve would show how the browser saves power."""
        self._check([setting])
        fed = {name: Fed.of(path) for name, path in files.items()}
        return [self._sustained(name, file, setting, seconds) for name, file in fed.items()]

    def logits(self, file: Path, rows: Sequence[Mapping[str, Sequence[int]]]) -> list[NDArray[np.float32]]:
        """The file's outputs there, each row by itself: (outputs,), or (tokens, outputs) of a tokenwise task."""
        name, fed, found = file.name, Fed.of(file), list[NDArray[np.float32]]()
        self._clear(fed)
        self._open(name, fed, None)
        for start in range(0, len(rows), ROWS_AT_ONCE):
            asked = [fed.row(row) for row in rows[start : start + ROWS_AT_ONCE]]
            words = {"say": f"{name}: answering {len(rows)} rows", "done": start / len(rows)}
            answer, _ = self._ask({"do": "logits", "worker": name, "rows": asked, **words}, Computed, about=name)
            if len(answer.rows) != len(asked):
                raise DeviceError(f"browser: {name}: the page answered {len(answer.rows)} of {len(asked)} rows")
            found += answer.logits()
        return found

    def _check(self, settings: Sequence[Setting]) -> None:
        most = max((setting.threads for setting in settings), default=1)
        if most > 1 and not self.known.isolated:
            raise DeviceError(
                f"browser: {most} threads: this page may have one only, because it came over plain http from another "
                "machine. Measure with --threads 1, or from the same machine: 127.0.0.1, or --device adb."
            )

    def _pass(self, fed: Mapping[str, Fed], one: Pass) -> dict[str, Measured]:
        order = list(fed) if one.number == 1 else list(fed)[::-1]
        self._clear(*fed.values())
        opened = {name: self._open(name, fed[name], one.setting) for name in order}
        timed: dict[str, list[tuple[Timed, bool]]] = {name: [] for name in order}
        for turn in range(one.rounds):
            words = {"say": f"Measuring: {one}", "done": one.start + one.share * turn / one.rounds}
            for name in order if turn % 2 == 0 else reversed(order):
                timed[name].append(self._time(name, one.setting, {"runs": one.runs, **words}))
        return {
            name: Measured(
                opened[name],
                [ms for each, _ in timed[name] for ms in each.ms],
                timed[name][-1][0].heap_mb,
                any(hidden for _, hidden in timed[name]),
            )
            for name in fed
        }

    def _sustained(self, name: str, fed: Fed, setting: Setting, seconds: float) -> Sustained:
        self._clear(fed)
        self._open(name, fed, setting)
        minutes: dict[int, list[float]] = {}
        begin = time.monotonic()
        while (passed := time.monotonic() - begin) < seconds:
            words = {"say": f"{name}: without pause for {seconds:.0f} s, {setting}", "done": passed / seconds}
            found, hidden = self._time(name, setting, {"seconds": min(BURST, seconds - passed), **words})
            if hidden:
                raise DeviceError(f"browser: {name}: after {passed:.0f} s {HIDDEN}. Measure again with it in front.")
            minutes.setdefault(int(passed // 60), []).extend(found.ms)
        medians = tuple(float(np.median(times)) for _, times in sorted(minutes.items()))
        return Sustained(name, setting, medians, (None,) * len(medians))

    def _clear(self, *coming: Fed) -> None:
        """Ends all workers, and has the page forget the files it will not need next: a phone's memory is small."""
        self._ask({"do": "clear", "keep": [self.site.offer(fed.path) for fed in coming]}, Done)

    def _open(self, name: str, fed: Fed, setting: Setting | None) -> Opened:
        """A worker of that name opens the file and warms up at the setting; without one, for logits, it only opens."""
        command = {
            "do": "open",
            "worker": name,
            "file": self.site.offer(fed.path),
            "runtime": self.entry,
            "provider": "webgpu" if self.webgpu else "wasm",
            "threads": setting.threads if setting else 1,
            "entries": dict(fed.entries),
            "inputs": fed.drawn(setting) if setting else None,
            "warm_up": WARM_UP,
            "say": f"{name}: opening",
        }
        return self._ask(command, Opened, about=_about(name, setting))[0]

    def _time(self, name: str, setting: Setting, how: Mapping[str, Any]) -> tuple[Timed, bool]:
        command = {"do": "time", "worker": name, "warm_up": WARM_UP_PER_ROUND, **how}
        return self._ask(command, Timed, about=_about(name, setting))

    def _ask(self, command: Mapping[str, Any], kind: type[Answer], *, about: str = "") -> tuple[Answer, bool]:
        """The page's answer, and whether the page was hidden while it worked on it."""
        answer = self.site.visitor.ask(command)
        return read(answer, kind, about=about), answer.get("hidden") is True


def _passes(settings: Sequence[Setting], rounds: int, runs: int) -> list[Pass]:
    """All settings once, then all again."""
    share = 1 / (2 * max(1, len(settings)))
    planned = [(1, rounds - rounds // 2, setting) for setting in settings]
    planned += [(2, rounds // 2, setting) for setting in settings]
    return [Pass(number, setting, part, runs, at * share, share) for at, (number, part, setting) in enumerate(planned)]


def _about(name: str, setting: Setting | None) -> str:
    return f"{name} at {setting}" if setting else name


def _latency(name: str, setting: Setting, first: Measured, second: Measured) -> Latency:
    latency = summarise(
        name,
        setting,
        (first.ms, second.ms),
        init_ms=first.opened.init_ms,
        first_ms=first.opened.first_ms,
        peak_rss_mb=max(first.heap_mb, second.heap_mb),
    )
    if not (first.hidden or second.hidden):
        return latency
    return replace(latency, noisy=True, noise=f"{latency.noise}; {HIDDEN}" if latency.noise else HIDDEN)
