"""Latency on this machine: files race each other, each in a process of its own, in interleaved rounds.

Interleaving keeps the ratio of two files honest on a machine whose speed drifts; separate processes keep one
session's spinning threads away from another's, and make the peak memory the file's own.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnxruntime
import psutil
from numpy.typing import NDArray

from compress.bench import runner
from compress.bench.protocol import DeviceError, Latency, Setting, Sustained, summarise
from compress.export.session import open_session, read_model, session_entries, vocabulary_size

WARM_UP = 5
LAST_WORDS = 600
"""How many characters of the last line of a dead worker's stderr its error repeats."""

FAST_SETS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimddp", "i8mm", "sve")
"""Instruction sets that decide how fast int8 and bf16 are."""


def race(files: Mapping[str, Path], settings: Sequence[Setting], *, rounds: int = 8, runs: int = 15) -> list[Latency]:
    """The latency of each ONNX file at each setting: settings in the order given, files within.

    Per setting every file is timed for `rounds` x `runs` forwards, the files taking turns round by round. Inputs are
    random ids of the file's own vocabulary with nothing masked. Raises DeviceError when a measuring process dies,
    with its last words; ExportError for a file that is no text encoder. Leaves no process behind.
    """
    if rounds < 2 or runs < 1:
        raise DeviceError(f"race: {rounds} rounds of {runs} runs; expected at least 2 rounds, to compare, of 1 run")
    jobs = {name: _job(path) for name, path in files.items()}
    return [latency for setting in settings for latency in _race(jobs, setting, rounds, runs)]


def machine() -> dict[str, str]:
    """What figures are measured on: processor, cores, instruction sets, governor, load now, memory, system."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count()
    flags = f"{_cpuinfo('flags')} {_cpuinfo('Features')}".split()
    known = {
        "cpu": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "cores": f"{cores} of {psutil.cpu_count()}",
        "instructions": " ".join(name for name in FAST_SETS if name in flags),
        "governor": _text(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        "load": f"{psutil.getloadavg()[0]:.2f}",
        "memory": f"{psutil.virtual_memory().total / 1e9:.1f} GB",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    return {name: value for name, value in known.items() if value}


@dataclass(frozen=True)
class Local:
    """This machine, as a Device."""

    name: str = "local"

    def facts(self) -> dict[str, str]:
        return {**machine(), "runtime": f"onnxruntime {onnxruntime.__version__}"}

    def race(
        self, files: Mapping[str, Path], settings: Sequence[Setting], *, rounds: int = 8, runs: int = 15
    ) -> list[Latency]:
        return race(files, settings, rounds=rounds, runs=runs)

    def sustain(self, files: Mapping[str, Path], setting: Setting, *, seconds: float) -> list[Sustained]:
        return [_sustained(name, _job(path), setting, seconds) for name, path in files.items()]

    def logits(self, file: Path, rows: Sequence[Mapping[str, Sequence[int]]]) -> list[NDArray[np.float32]]:
        session = open_session(file, threads=1)
        names = [node.name for node in session.get_inputs()]

        def run(row: Mapping[str, Sequence[int]]) -> NDArray[np.float32]:
            found = [each[0] for each in session.run(None, {name: np.asarray([row[name]], np.int64) for name in names})]
            return found[0] if len(found) == 1 else np.stack(found, axis=-1)

        return [run(row) for row in rows]


def _sustained(name: str, job: Mapping[str, Any], setting: Setting, seconds: float) -> Sustained:
    minutes = []
    with _worker(name, setting, job) as worker:
        worker.answer()
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            times: list[float] = []
            until = time.monotonic() + min(60.0, left)
            while time.monotonic() < until:
                times += worker.ask(10)["ms"]
            minutes.append(float(np.median(times)))
    return Sustained(name, setting, tuple(minutes), (None,) * len(minutes))


@dataclass(frozen=True)
class _Worker:
    """A running measuring process, and the file that takes its stderr."""

    name: str
    setting: Setting
    process: subprocess.Popen[str]
    errors: IO[str]

    def ask(self, runs: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the missing answer tells, with the reason
            self.process.stdin.write(f"{runs}\n")
            self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self._death()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _death(self) -> DeviceError:
        code, at = self.process.wait(), self.setting
        self.errors.seek(0)
        words = self.errors.read().strip().splitlines()
        return DeviceError(
            f"{self.name}: the measuring process ended with code {code} at {at.threads} threads, batch {at.batch}, "
            f"{at.seq} tokens: {words[-1][-LAST_WORDS:] if words else 'it said nothing'}. Usual reasons: more tokens "
            "than the model has positions, or too little memory."
        )


def _job(path: Path) -> dict[str, Any]:
    model = read_model(path)
    entries, vocabulary = session_entries(model), vocabulary_size(model, path)
    return {"path": str(path), "entries": entries, "vocabulary": vocabulary, "warm_up": WARM_UP}


def _race(jobs: Mapping[str, dict[str, Any]], setting: Setting, rounds: int, runs: int) -> list[Latency]:
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
    with ExitStack() as stack:
        workers, starts = [], {}
        for name, job in jobs.items():
            workers.append(stack.enter_context(_worker(name, setting, job)))
            starts[name] = workers[-1].answer()  # before the next one starts: loading is timed too
        for turn in range(rounds):
            for worker in workers if turn % 2 == 0 else reversed(workers):
                answers[worker.name].append(worker.ask(runs))
    return [
        summarise(
            name,
            setting,
            [answer["ms"] for answer in answers[name]],
            **starts[name],
            peak_rss_mb=answers[name][-1]["peak_rss_mb"],
        )
        for name in jobs
    ]


@contextmanager
def _worker(name: str, setting: Setting, job: Mapping[str, Any]) -> Iterator[_Worker]:
    # -P: the runner's neighbours in its folder must not pass for installed modules
    command = [sys.executable, "-P", str(runner.__file__), json.dumps({**job, **asdict(setting)})]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            yield _Worker(name, setting, process, errors)
        finally:
            process.kill()


def _cpuinfo(field: str) -> str:
    """The first value of a field of Linux's /proc/cpuinfo, '' where there is none."""
    lines = (line.partition(":") for line in _text(Path("/proc/cpuinfo")).splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == field), "")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
