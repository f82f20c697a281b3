"""The two programs that measure on a phone without a browser: how they are called, and what they print.

    onnxruntime_perf_test   .onnx; made by onnxruntime's build for Android, beside libonnxruntime.so
    benchmark_model         .tflite; of LiteRT: older ones, of TensorFlow Lite, print no percentiles

What they print was taken from their sources and from outputs that others published; the parsing is tested against
such text. Neither was run on a phone by us.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from compress.bench.jobs import input_types, timing_job
from compress.bench.protocol import WARM_UP, DeviceError, Setting
from compress.errors import did_you_mean

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

    from compress.bench.runner import feeds

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
