"""A phone as a Device: by its browser's page, or by a native program that is pushed to it."""

import re
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from compress.benchmark.android import Adb, attempt
from compress.benchmark.devices import Device, Row
from compress.benchmark.jobs import input_types, logits_job, timing_job
from compress.benchmark.options import cpu_list
from compress.errors import did_you_mean
from compress.records.latency import WARM_UP, DeviceError, Latency, Setting, Sustained, check_turns, summarise

Program = Literal["onnxruntime_perf_test", "benchmark_model"]
SUFFIX: Mapping[Program, str] = {"onnxruntime_perf_test": ".onnx", "benchmark_model": ".tflite"}
RESULT = "times.csv"
"""Where onnxruntime_perf_test writes the seconds of every run."""

FLOAT = r"([\d.eE+-]+)"


@dataclass(frozen=True)
class Said:
    """What one call of a program measured; times in milliseconds.

    ms  of every run where the program tells, else of the median run alone; min_ms ... runs are of all runs
    """

    ms: tuple[float, ...]
    runs: int
    min_ms: float
    p50_ms: float
    p95_ms: float
    max_ms: float
    init_ms: float
    first_ms: float
    peak_rss_mb: float | None


def program_of(native: Path) -> Program:
    """Which of the two it is, by its name. Raises DeviceError."""
    if not native.is_file():
        raise DeviceError(f"--native {native}: no such file; expected {' or '.join(SUFFIX)}, built for Android")
    for program in SUFFIX:
        if native.name.startswith(program):
            return program
    raise DeviceError(
        f"--native {native}: expected a program named {' or '.join(SUFFIX)}.{did_you_mean(native.name, SUFFIX)}"
    )


def check(program: Program, files: Mapping[str, Path], settings: Sequence[Setting]) -> None:
    """Raises DeviceError for files this program does not run, and shapes it cannot give them."""
    wrong = [name for name, path in files.items() if path.suffix != SUFFIX[program]]
    if wrong:
        raise DeviceError(f"{wrong[0]}: {program} runs {SUFFIX[program]} files")
    if program == "benchmark_model" and len({(setting.batch, setting.seq) for setting in settings}) > 1:
        raise DeviceError("a .tflite file has its shape inside: give the one --batch and --seq that it was made for")


def inputs(path: Path, setting: Setting) -> dict[str, bytes]:
    """What onnxruntime_perf_test reads: input_N.pb -> content. The ids are those of the runner of other devices."""
    from onnx import numpy_helper

    from compress.benchmark.remote.runner import feeds

    made = feeds(input_types(path), setting.batch, setting.seq, timing_job(path)["vocabulary"])
    tensors = (numpy_helper.from_array(value, name) for name, value in made.items())
    return {f"input_{at}.pb": tensor.SerializeToString() for at, tensor in enumerate(tensors)}


def command(
    program: Program,
    binary: str,
    model: str,
    setting: Setting,
    *,
    runs: int,
    seconds: float | None,
    entries: Mapping[str, str],
) -> list[str]:
    """The words of one call: `runs` timed runs, or `seconds` of them."""
    threads = str(setting.threads)
    if program == "benchmark_model":
        span = (runs, 0.0) if seconds is None else (1, seconds)
        warm = [f"--warmup_runs={WARM_UP}", "--warmup_min_secs=0"]
        timed = [f"--num_runs={span[0]}", f"--min_secs={span[1]:g}", "--max_secs=3600"]
        return [binary, f"--graph={model}", f"--num_threads={threads}", *warm, *timed]
    mode = ["times", "-r", str(WARM_UP + runs)] if seconds is None else ["duration", "-t", f"{max(1, round(seconds))}"]
    wanted = ["-C", " ".join(f"{key}|{value}" for key, value in entries.items())] if entries else []
    return [binary, "-e", "cpu", "-m", *mode, "-x", threads, "-y", "1", *wanted, model, RESULT]


def read_perf_test(printed: str, times: str) -> Said:
    """`printed` on standard output; `times`: the file of runs, of which the first few are warming up."""
    # columns: name, seconds, [seconds in all, since 2025-11,] memory, processor, number
    rows = [line.split(",") for line in times.splitlines() if line.count(",") in (4, 5)]
    ms = [float(row[len(row) - 4]) * 1e3 for row in rows][WARM_UP:]
    if not ms:
        raise _unread("onnxruntime_perf_test", printed)
    peak = _found(rf"Peak working set size:\s*{FLOAT}", printed)
    return Said(
        ms=tuple(ms),
        runs=len(ms),
        min_ms=min(ms),
        p50_ms=float(np.median(ms)),
        p95_ms=float(np.percentile(ms, 95)),
        max_ms=max(ms),
        init_ms=1e3 * _needed(rf"Session creation time cost:\s*{FLOAT} s", printed, "onnxruntime_perf_test"),
        first_ms=_needed(rf"First inference time cost:\s*{FLOAT} ms", printed, "onnxruntime_perf_test"),
        peak_rss_mb=None if peak is None else peak / 1e6,
    )


def read_benchmark_model(printed: str) -> Said:
    """Microseconds in, milliseconds out. The last line of counts is of the timed runs, those before of warming up."""
    line = next((line for line in reversed(printed.splitlines()) if "count=" in line), "")
    known = {name: float(value) for name, value in re.findall(rf"(\w+)={FLOAT}", line)}
    if "avg" not in known and "curr" in known:  # "curr=30(all same)"
        known |= dict.fromkeys(("min", "max"), known["curr"])
    if missing := [name for name in ("count", "min", "max", "median", "p95") if name not in known]:
        raise DeviceError(
            f"benchmark_model: prints no {', '.join(missing)}; expected a newer build. It ended: {_end(printed)}"
        )
    peak = _found(rf"Peak memory footprint \(MB\):.*overall={FLOAT}", printed)
    return Said(
        ms=(known["median"] / 1e3,),
        runs=int(known["count"]),
        min_ms=known["min"] / 1e3,
        p50_ms=known["median"] / 1e3,
        p95_ms=known["p95"] / 1e3,
        max_ms=known["max"] / 1e3,
        init_ms=_needed(rf"Init: {FLOAT}", printed, "benchmark_model") / 1e3,
        first_ms=_needed(rf"First inference: {FLOAT}", printed, "benchmark_model") / 1e3,
        peak_rss_mb=peak,
    )


def _found(pattern: str, text: str) -> float | None:
    match = re.search(pattern, text)
    return float(match[1].rstrip(",")) if match else None


def _needed(pattern: str, text: str, program: str) -> float:
    found = _found(pattern, text)
    if found is None:
        raise _unread(program, text)
    return found


def _unread(program: str, printed: str) -> DeviceError:
    return DeviceError(f"{program}: its output is not what we can read. It ended: {_end(printed)}")


def _end(printed: str) -> str:
    return " / ".join(line.strip() for line in printed.strip().splitlines()[-3:]) or "it said nothing"


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
    program = program_of(binary)
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
    program: Program
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
        check(self.program, files, settings)
        found: dict[tuple[str, Setting], list[Said]] = {(name, at): [] for at in settings for name in files}
        for turn in range(rounds):
            for setting in settings:
                self.say(f"{self.name}: round {turn + 1} of {rounds}, {setting}")
                for name in files if turn % 2 == 0 else reversed(list(files)):
                    found[name, setting].append(self._call(files[name], setting, runs=runs))
        warm = self.phone.temperature()
        return [self._latency(name, setting, said, warm) for (name, setting), said in found.items()]

    def sustain(self, files: Mapping[str, Path], setting: Setting, *, seconds: float) -> list[Sustained]:
        """Each minute is a call of its own: the phone rests for as long as the file takes to open."""
        check(self.program, files, [setting])
        return [self._sustained(name, path, setting, seconds) for name, path in files.items()]

    def logits(self, file: Path, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        raise DeviceError(f"{self.name}: {self.program} answers no rows; without --native the phone's browser does")

    def _latency(self, name: str, setting: Setting, said: Sequence[Said], warm: float | None) -> Latency:
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

    def _call(self, path: Path, setting: Setting, *, runs: int = 1, seconds: float | None = None) -> Said:
        model = self._placed(path, setting)
        entries = logits_job(path)["entries"] if self.program == "onnxruntime_perf_test" else {}
        binary = f"{self.folder}/{self.binary}"
        words = command(self.program, binary, model, setting, runs=runs, seconds=seconds, entries=entries)
        if self.affinity:
            words = ["taskset", f"{sum(1 << cpu for cpu in self.affinity):x}", *words]
        script = ["sh", "-c", 'cd "$1" && rm -f times.csv && shift && LD_LIBRARY_PATH=. exec "$@"', "sh", self.folder]
        printed = self.phone.shell(*script, *words, seconds=LONGEST)
        if self.program == "benchmark_model":
            return read_benchmark_model(printed)
        return read_perf_test(printed, self.phone.shell("cat", f"{self.folder}/{RESULT}"))

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
            for name, content in inputs(path, setting).items():
                (Path(here) / name).write_bytes(content)
                self.phone.run("push", f"{here}/{name}", f"{there}/test_data_set_0/{name}")
