"""A phone as a Device: by its browser's page, or by a native program that is pushed to it."""

import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from compress.bench import native
from compress.bench.adb import Adb, attempt
from compress.bench.asked import cpu_list
from compress.bench.device import Device, Row
from compress.bench.jobs import logits_job
from compress.bench.protocol import DeviceError, Latency, Setting, Sustained, check_turns, summarise

MINUTE = 60.0
PLACE = "/data/local/tmp"
"""The one folder of Android from which the shell's user may run programs."""

LONGEST = 1800.0
"""Seconds after which a native program that has not ended is given up."""


@dataclass(frozen=True)
class Page:
    """The page in the phone's browser, with what adb knows of the phone."""

    name: str
    page: Device
    phone: Mapping[str, str]

    def facts(self) -> dict[str, str]:
        return {**self.page.facts(), **self.phone}

    def race(self, files: Mapping[str, Path], settings: Sequence[Setting], *, rounds: int, runs: int) -> list[Latency]:
        return self.page.race(files, settings, rounds=rounds, runs=runs)

    def sustain(self, files: Mapping[str, Path], setting: Setting, *, seconds: float) -> list[Sustained]:
        return self.page.sustain(files, setting, seconds=seconds)

    def logits(self, file: Path, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        return self.page.logits(file, rows)


@contextmanager
def phone_program(
    phone: Adb, binary: Path, affinity: tuple[int, ...], say: Callable[[str], None]
) -> Iterator["Native"]:
    """The phone with the program, and the libraries beside it, in a folder that is removed at the end."""
    program = native.program_of(binary)
    folder = f"{PLACE}/compress-{secrets.token_hex(4)}"
    try:
        phone.shell("mkdir", folder)
        for part in (binary, *sorted(binary.parent.glob("*.so"))):
            phone.run("push", str(part), f"{folder}/{part.name}", seconds=LONGEST)
        phone.shell("chmod", "755", f"{folder}/{binary.name}")
        yield Native(phone, program, binary.name, folder, affinity, say, phone.facts())
    finally:
        if not attempt(lambda: phone.shell("rm", "-rf", folder)):
            say(f"{phone.name}: {folder} could not be removed from the phone")


@dataclass(frozen=True)
class Native:
    """A phone with a program. Each call of it is a process that opens the file anew: rounds interleave as elsewhere.

    pushed  file -> its name there
    """

    phone: Adb
    program: native.Program
    binary: str
    folder: str
    affinity: tuple[int, ...]
    say: Callable[[str], None]
    known: Mapping[str, str]
    pushed: dict[Path, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.phone.name

    def facts(self) -> dict[str, str]:
        limits = {"p99": "the largest run: benchmark_model tells no more"} if self.program == "benchmark_model" else {}
        return {**self.known, "runtime": self.program, **limits}

    def race(self, files: Mapping[str, Path], settings: Sequence[Setting], *, rounds: int, runs: int) -> list[Latency]:
        """Half of the rounds make the first pass over all settings, the rest the second, in the opposite order."""
        check_turns(rounds, runs)
        native.check(self.program, files, settings)
        found: dict[tuple[str, Setting], list[native.Said]] = {(name, at): [] for at in settings for name in files}
        for turn in range(rounds):
            for setting in settings:
                self.say(f"{self.name}: round {turn + 1} of {rounds}, {setting}")
                for name in files if turn % 2 == 0 else reversed(list(files)):
                    found[name, setting].append(self._call(files[name], setting, runs=runs))
        warm = self.phone.temperature()
        return [self._latency(name, setting, said, warm) for (name, setting), said in found.items()]

    def sustain(self, files: Mapping[str, Path], setting: Setting, *, seconds: float) -> list[Sustained]:
        """Each minute is a call of its own: the phone rests for as long as the file takes to open."""
        native.check(self.program, files, [setting])
        return [self._sustained(name, path, setting, seconds) for name, path in files.items()]

    def logits(self, file: Path, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        raise DeviceError(f"{self.name}: {self.program} answers no rows; without --native the phone's browser does")

    def _latency(self, name: str, setting: Setting, said: Sequence[native.Said], warm: float | None) -> Latency:
        peaks = [each.peak_rss_mb for each in said if each.peak_rss_mb is not None]
        latency = summarise(
            name,
            setting,
            [each.ms for each in said],
            init_ms=said[0].init_ms,
            first_ms=said[0].first_ms,
            peak_rss_mb=max(peaks, default=None),
            affinity=cpu_list(self.affinity),
            celsius=warm,
        )
        if self.program == "onnxruntime_perf_test":
            return latency
        half = len(said) // 2
        faster = said[:half] if latency.passes[0] <= latency.passes[1] else said[half:]
        kept = faster if latency.noisy else said
        return replace(
            latency,
            runs=sum(each.runs for each in kept),
            min_ms=min(each.min_ms for each in kept),
            p95_ms=float(np.median([each.p95_ms for each in kept])),
            p99_ms=max(each.max_ms for each in kept),
        )

    def _sustained(self, name: str, path: Path, setting: Setting, seconds: float) -> Sustained:
        minutes: list[float] = []
        temperatures: list[float | None] = []
        started = self.phone.temperature()
        left = seconds
        while left > 0:
            minutes.append(self._call(path, setting, seconds=min(MINUTE, left)).p50_ms)
            temperatures.append(self.phone.temperature())
            left -= MINUTE
            self.say(f"{self.name}: {name}, {setting}: minute {len(minutes)}: p50 {minutes[-1]:.2f} ms")
        return Sustained(name, setting, tuple(minutes), tuple(temperatures), started)

    def _call(self, path: Path, setting: Setting, *, runs: int = 1, seconds: float | None = None) -> native.Said:
        model = self._placed(path, setting)
        entries = logits_job(path)["entries"] if self.program == "onnxruntime_perf_test" else {}
        binary = f"{self.folder}/{self.binary}"
        words = native.command(self.program, binary, model, setting, runs=runs, seconds=seconds, entries=entries)
        if self.affinity:
            words = ["taskset", f"{sum(1 << cpu for cpu in self.affinity):x}", *words]
        script = ["sh", "-c", 'cd "$1" && rm -f times.csv && shift && LD_LIBRARY_PATH=. exec "$@"', "sh", self.folder]
        printed = self.phone.shell(*script, *words, seconds=LONGEST)
        if self.program == "benchmark_model":
            return native.read_benchmark_model(printed)
        return native.read_perf_test(printed, self.phone.shell("cat", f"{self.folder}/{native.RESULT}"))

    def _placed(self, path: Path, setting: Setting) -> str:
        """The model on the phone, relative to our folder; for onnxruntime_perf_test with inputs of the shape beside."""
        if path not in self.pushed:
            self.pushed[path] = f"{len(self.pushed)}{path.suffix}"
            self.phone.run("push", str(path), f"{self.folder}/{self.pushed[path]}", seconds=LONGEST)
        model = self.pushed[path]
        if self.program == "benchmark_model":
            return model
        case = f"{PurePosixPath(model).stem}-{setting.batch}x{setting.seq}"
        if Path(case) not in self.pushed:
            self._push_case(path, setting, model, case)
            self.pushed[Path(case)] = f"{case}/model.onnx"
        return self.pushed[Path(case)]

    def _push_case(self, path: Path, setting: Setting, model: str, case: str) -> None:
        there = f"{self.folder}/{case}"
        self.phone.shell("mkdir", "-p", f"{there}/test_data_set_0")
        self.phone.shell("ln", "-s", f"../{model}", f"{there}/model.onnx")
        with tempfile.TemporaryDirectory() as here:
            for name, content in native.inputs(path, setting).items():
                (Path(here) / name).write_bytes(content)
                self.phone.run("push", f"{here}/{name}", f"{there}/test_data_set_0/{name}")
