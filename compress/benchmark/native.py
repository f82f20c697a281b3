"""Measure on an Android phone with a native program: onnxruntime_perf_test, or LiteRT's benchmark_model."""

import re
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from compress.benchmark.android import Adb, attempt
from compress.benchmark.jobs import input_types, timing_job
from compress.benchmark.options import cpu_list
from compress.benchmark.race import Pass, PassTimes, race_files, sustain_file
from compress.benchmark.remote.runner import feeds
from compress.errors import did_you_mean
from compress.exporters.session import EncodedRow
from compress.records.latency import WARM_UP, DeviceError, Latency, Setting, Sustained

SUFFIX = {"onnxruntime_perf_test": ".onnx", "benchmark_model": ".tflite"}
NUMBER = r"(\d[\d.]*(?:[eE][+-]?\d+)?)"
PLACE = "/data/local/tmp"
"""The one folder of Android from which the shell's user may run programs."""
LONGEST = 1800.0
"""Seconds after which a native program that has not ended is given up."""
SCRIPT = 'cd "$1" && rm -f times.csv && shift && LD_LIBRARY_PATH=. exec "$@"'


def read_run(program: str, printed: str, times: str = "") -> PassTimes:
    """Read what a program printed, and the file of its runs, of which the first few are warming up.

    benchmark_model tells how its runs are distributed: as many times are returned, interpolated between its quantiles.
    """
    found = {name: float(value) for name, value in re.findall(rf"([A-Z][\w ()]*): *{NUMBER}\b", printed)}
    end = " / ".join(line.strip() for line in printed.strip().splitlines()[-3:]) or "it said nothing"
    if program == "onnxruntime_perf_test":
        # columns: name, seconds, [seconds in all, since 2025-11,] memory, processor, number
        rows = [line.split(",") for line in times.splitlines() if line.count(",") in (4, 5)]
        ms = [float(row[len(row) - 4]) * 1e3 for row in rows][WARM_UP:]
        init, first = found.get("Session creation time cost"), found.get("First inference time cost")
        if not ms or init is None or first is None:
            raise DeviceError(f"{program}: its output is not what we can read. It ended: {end}")
        peak = found.get("Peak working set size")
        return PassTimes(1e3 * init, first, ms, None if peak is None else peak / 1e6)
    line = next((line for line in reversed(printed.splitlines()) if "count=" in line), "")  # those before: warming up
    found |= {name: float(value) for name, value in re.findall(rf"(\w+)={NUMBER}", line)}
    if "avg" not in found and "curr" in found:  # "curr=30(all same)"
        found |= dict.fromkeys(("min", "max"), found["curr"])
    needed = ("count", "min", "max", "median", "p95", "Init", "First inference")
    if missing := [name for name in needed if name not in found]:
        raise DeviceError(f"{program}: prints no {', '.join(missing)}; expected a newer build. It ended: {end}")
    places = (np.arange(found["count"]) + 0.5) / found["count"]
    places[0], places[-1] = 0, 1
    ms = np.interp(places, (0, 0.5, 0.95, 1), [found[name] / 1e3 for name in ("min", "median", "p95", "max")]).tolist()
    peak_mb = re.search(rf"Peak memory footprint \(MB\):.*overall={NUMBER}", printed)
    return PassTimes(found["Init"] / 1e3, found["First inference"] / 1e3, ms, float(peak_mb[1]) if peak_mb else None)


@contextmanager
def phone_program(
    phone: Adb, binary: Path, affinity: tuple[int, ...], say: Callable[[str], None]
) -> Iterator["NativeProgram"]:
    """Push the program, and the libraries beside it, into a folder on the phone that is removed at the end."""
    program = next((name for name in SUFFIX if binary.name.startswith(name)), "")
    if not binary.is_file():
        raise DeviceError(f"--native {binary}: no such file; expected {' or '.join(SUFFIX)}, built for Android")
    if not program:
        hint = did_you_mean(binary.name, SUFFIX)
        raise DeviceError(f"--native {binary}: expected a program named {' or '.join(SUFFIX)}.{hint}")
    folder = f"{PLACE}/compress-{secrets.token_hex(4)}"
    try:
        phone.shell("mkdir", folder)
        for part in (binary, *sorted(binary.parent.glob("*.so"))):
            phone.run("push", str(part), f"{folder}/{part.name}", seconds=LONGEST)
        phone.shell("chmod", "755", f"{folder}/{binary.name}")
        yield NativeProgram(phone, program, binary.name, folder, affinity, say, phone.facts())
    finally:
        if not attempt(partial(phone.shell, "rm", "-rf", folder)):
            say(f"{phone.name}: {folder} could not be removed from the phone")


@dataclass(frozen=True)
class NativeProgram:
    """A phone with a program, as a Device. Each call of it is a process that opens the file anew.

    pushed  file, or file and shape -> its name there
    """

    phone: Adb
    program: str
    binary: str
    folder: str
    affinity: tuple[int, ...]
    say: Callable[[str], None]
    known: Mapping[str, str]
    pushed: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.phone.name

    def facts(self) -> dict[str, str]:
        few = {"p99": "interpolated: benchmark_model tells p95 and the largest run"}
        return {**self.known, "runtime": self.program, **(few if self.program == "benchmark_model" else {})}

    def race(self, files: Mapping[str, Path], settings: Sequence[Setting], *, rounds: int, runs: int) -> list[Latency]:
        self._check(files, settings)
        cpus, measure = cpu_list(self.affinity), partial(self._pass, files)
        return list(chain(*race_files(files, settings, rounds, runs, measure, say=self._say, affinity=cpus)))

    def sustain(self, files: Mapping[str, Path], setting: Setting, *, seconds: float) -> list[Sustained]:
        """Run each file alone, a call for each minute: the phone rests for as long as the file takes to open."""
        self._check(files, [setting])

        def run(path: Path, span: float) -> float:
            return float(np.median(self._call(path, setting, seconds=span).ms))

        return [
            sustain_file(name, setting, seconds, partial(run, path), temperature=self.phone.temperature, say=self._say)
            for name, path in files.items()
        ]

    def logits(self, file: Path, rows: Sequence[EncodedRow]) -> list[NDArray[np.float32]]:
        raise DeviceError(f"{self.name}: {self.program} answers no rows; without --native the phone's browser does")

    def _say(self, words: str) -> None:
        self.say(f"{self.name}: {words}")

    def _check(self, files: Mapping[str, Path], settings: Sequence[Setting]) -> None:
        if wrong := [name for name, path in files.items() if path.suffix != SUFFIX[self.program]]:
            raise DeviceError(f"{wrong[0]}: {self.program} runs {SUFFIX[self.program]} files")
        if self.program == "benchmark_model" and len({(setting.batch, setting.seq) for setting in settings}) > 1:
            raise DeviceError("a .tflite file has its shape inside: give the --batch and --seq that it was made for")

    def _pass(self, files: Mapping[str, Path], one: Pass) -> dict[str, PassTimes]:
        found: dict[str, PassTimes] = {}
        for name in chain(*one.turns):
            call = self._call(files[name], one.setting, runs=one.runs)
            found.setdefault(name, PassTimes(call.init_ms, call.first_ms, peak_rss_mb=call.peak_rss_mb)).ms.extend(
                call.ms
            )
        celsius = self.phone.temperature()
        for sample in found.values():
            sample.celsius = celsius
        return found

    def _call(self, path: Path, setting: Setting, *, runs: int = 1, seconds: float | None = None) -> PassTimes:
        """Call the program once for `runs` timed runs, or for `seconds` of them."""
        model, times = self._push(path, setting), ""
        if self.program == "benchmark_model":
            least = f"--num_runs={runs}", f"--min_secs={seconds or 0:g}"
            words = [f"--graph={model}", f"--num_threads={setting.threads}", f"--warmup_runs={WARM_UP}"]
            words += ["--warmup_min_secs=0", *least, "--max_secs=3600"]
        else:
            few = ["times", "-r", str(WARM_UP + runs)]
            entries = " ".join(f"{key}|{value}" for key, value in timing_job(path)["entries"].items())
            words = ["-e", "cpu", "-m", *(few if seconds is None else ["duration", "-t", f"{max(1, round(seconds))}"])]
            words += ["-x", str(setting.threads), "-y", "1", *(["-C", entries] if entries else []), model, "times.csv"]
        pinned = ["taskset", f"{sum(1 << cpu for cpu in self.affinity):x}"] if self.affinity else []
        words = ["sh", "-c", SCRIPT, "sh", self.folder, *pinned, f"{self.folder}/{self.binary}", *words]
        printed = self.phone.shell(*words, seconds=LONGEST)
        if self.program == "onnxruntime_perf_test":
            times = self.phone.shell("cat", f"{self.folder}/times.csv")
        return read_run(self.program, printed, times)

    def _push(self, path: Path, setting: Setting) -> str:
        """Push the model, and for onnxruntime_perf_test inputs of the shape; return its name in our folder."""
        if str(path) not in self.pushed:
            model = self.pushed[str(path)] = f"{len(self.pushed)}{path.suffix}"
            self.phone.run("push", str(path), f"{self.folder}/{model}", seconds=LONGEST)
        model = self.pushed[str(path)]
        case = f"{Path(model).stem}-{setting.batch}x{setting.seq}"
        if self.program == "benchmark_model":
            return model
        if case not in self.pushed:
            there = f"{self.folder}/{case}"
            self.phone.shell("mkdir", "-p", f"{there}/test_data_set_0")
            self.phone.shell("ln", "-s", f"../{model}", f"{there}/model.onnx")
            with tempfile.TemporaryDirectory() as here:
                for name, content in inputs(path, setting).items():
                    (Path(here) / name).write_bytes(content)
                    self.phone.run("push", f"{here}/{name}", f"{there}/test_data_set_0/{name}")
            self.pushed[case] = f"{case}/model.onnx"
        return self.pushed[case]


def inputs(path: Path, setting: Setting) -> dict[str, bytes]:
    """Make the files that onnxruntime_perf_test reads: the ids are those of the runner of other devices."""
    from onnx import numpy_helper

    made = feeds(input_types(path), setting.batch, setting.seq, timing_job(path)["vocabulary"])
    tensors = (numpy_helper.from_array(value, name) for name, value in made.items())
    return {f"input_{at}.pb": tensor.SerializeToString() for at, tensor in enumerate(tensors)}
