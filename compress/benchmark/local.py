"""Measure on this machine, or on any other that runs the agent, by requests and answers
through a pipe."""

import base64
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnxruntime

from compress.arrays import Floats
from compress.benchmark import jobs
from compress.benchmark.arguments import format_cpus
from compress.benchmark.race import Pass, PassTimes, race_files, sustain_file
from compress.benchmark.remote import agent, runner
from compress.benchmark.remote.runner import REFUSED
from compress.exporters.session import EncodedRow
from compress.io import JsonObject
from compress.progress import Progress, Say, show_progress
from compress.records.latency import DeviceError, Latency, Setting, Sustained

EXIT_TIMEOUT = 15.0
"""Seconds that an agent may take to exit after its input ends, to kill its runners and
remove its folder."""

MakeError = Callable[[int | None, str], DeviceError]
"""Build the error for a lost agent from its exit code (None: timed out) and its output
on standard error."""


@dataclass
class Link:
    """A running agent. `hello` is its first line."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    make_error: MakeError
    hello: Mapping[str, Any] = field(default_factory=dict)

    def ask(self, body: Path | None = None, **request: Any) -> JsonObject:
        """Send a request, followed by the content of `body`, and return the answer.
        Raises DeviceError at the end of the agent's output."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            if body is not None:
                with body.open("rb") as file:
                    shutil.copyfileobj(file, self.process.stdin, agent.BYTES_PER_CHUNK)
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.lost_error() from None
        answer: JsonObject = json.loads(self.read_line())
        return answer

    def read_line(self) -> str:
        """Read a whole line of output. Raises DeviceError at its end."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self.lost_error()
        return line.decode(errors="replace")

    def lost_error(self, *, timed_out: bool = False) -> DeviceError:
        """Wait for the process to end, and build the error for it."""
        code = self.process.wait()
        self.errors.seek(0)
        return self.make_error(
            None if timed_out else code,
            self.errors.read().decode(errors="replace").strip(),
        )


@contextmanager
def connect(
    command: Sequence[str],
    *,
    make_error: MakeError,
    timeout: float,
    preamble: bytes = b"",
) -> Iterator[Link]:
    """Start the agent with `command`, after writing `preamble`; always end it by
    closing its input.

    The agent runs in its own session, so that Ctrl-C interrupts only us. Raises
    DeviceError if it is silent for `timeout` seconds.
    """
    pipe = subprocess.PIPE
    timed_out = threading.Event()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True
        )
        assert process.stdin is not None and process.stdout is not None
        link = Link(process, errors, make_error)

        def give_up() -> None:
            timed_out.set()
            process.kill()

        alarm = threading.Timer(timeout, give_up)
        try:
            alarm.start()
            try:
                process.stdin.write(preamble)
                process.stdin.flush()
                while not (line := link.read_line()).startswith(agent.READY):
                    pass  # printed by a login shell
            except (BrokenPipeError, DeviceError):
                raise link.lost_error(timed_out=timed_out.is_set()) from None
            finally:
                alarm.cancel()
            link.hello = json.loads(line)
            yield link
        finally:
            try:
                with suppress(BrokenPipeError):  # if the buffer is not empty
                    process.stdin.close()
                process.wait(EXIT_TIMEOUT)
            except subprocess.TimeoutExpired:
                pass
            finally:
                process.kill()
                process.wait()
                process.stdout.close()


Ask = Callable[[JsonObject], JsonObject]
ROWS_PER_JOB = 64
"""Rows sent in one line."""


@dataclass(frozen=True)
class AgentDevice:
    """A machine with an agent, as a Device.

    place     copies a file to the machine and returns its path there
    runner    the path of runner.py there
    affinity  the CPUs that runners may use; empty: the system decides
    say       receives messages about progress
    missing   builds the error for a runtime that does not load there, from its name and
              the reason
    loaded    runtime -> version, for those known to load there
    """

    name: str
    link: Link
    place: Callable[[Path], str]
    runner: str
    affinity: tuple[int, ...]
    say: Say
    missing: Callable[[str, str], DeviceError]
    loaded: dict[str, str] = field(default_factory=dict)

    def facts(self) -> dict[str, str]:
        """Describe the machine; load and temperature are from before the
        measurement."""
        if not self.loaded:
            self._check_runtime("onnxruntime")
        runtimes = ", ".join(
            f"{name} {version}" for name, version in self.loaded.items()
        )
        return {**self.link.hello["facts"], "runtime": runtimes}

    def race(
        self,
        files: Mapping[str, Path],
        settings: Sequence[Setting],
        *,
        rounds: int = 8,
        runs: int = 15,
    ) -> list[Latency]:
        """Race the files, see `race_files`; the inputs are random ids of each file's
        vocabulary with nothing masked."""
        timing_jobs = {
            name: self._place(jobs.timing_job(path), path)
            for name, path in files.items()
        }
        cpus = format_cpus(self.affinity)
        measure = partial(self._run_pass, timing_jobs)
        return race_files(
            files, settings, rounds, runs, measure, say=self._say, affinity=cpus
        )

    def sustain(
        self,
        files: Mapping[str, Path],
        setting: Setting,
        *,
        seconds: float,
    ) -> list[Sustained]:
        curves = []
        for name, path in files.items():
            with self._start_runner(
                name, self._place(jobs.timing_job(path), path), setting
            ) as (ask, _):

                def run(span: float, ask: Ask = ask) -> float:
                    return float(ask({"seconds": span})["p50_ms"])

                curves.append(
                    sustain_file(
                        name,
                        setting,
                        seconds,
                        run,
                        temperature=self._temperature,
                        say=self._say,
                    )
                )
        return curves

    def logits(
        self,
        file: Path,
        rows: Sequence[EncodedRow],
    ) -> list[Floats]:
        logits: list[Floats] = []
        with (
            self._start_runner(
                str(file), self._place(jobs.logits_job(file), file), None
            ) as (ask, _),
            Progress("scoring", len(rows), "rows") as bar,
        ):
            for at in range(0, len(rows), ROWS_PER_JOB):
                batch = [_as_json(row) for row in rows[at : at + ROWS_PER_JOB]]
                for shape, data in ask({"rows": batch})["logits"]:
                    logits.append(
                        np.frombuffer(base64.b64decode(data), np.float32).reshape(shape)
                    )
                bar.advance(len(batch))
        return logits

    def _check_runtime(self, runtime: str) -> None:
        if runtime not in self.loaded:
            answer = self.link.ask(do="versions", of=["numpy", runtime])
            if "error" in answer:
                raise self.missing(runtime, answer["error"])
            self.loaded[runtime] = answer["versions"][runtime]

    def _place(self, job: JsonObject, path: Path) -> JsonObject:
        self._check_runtime(job["runtime"])
        return {**job, "path": self.place(path), "affinity": list(self.affinity)}

    def _run_pass(
        self,
        timing_jobs: Mapping[str, JsonObject],
        this: Pass,
    ) -> dict[str, PassTimes]:
        cpus = list(self.affinity)
        before = self.link.ask(do="usage", cpus=cpus)
        times: dict[str, PassTimes] = {}
        with ExitStack() as stack:
            asks = {}
            for name in this.turns[0]:  # one after the other: opening is timed too
                asks[name], ready = stack.enter_context(
                    self._start_runner(name, timing_jobs[name], this.setting)
                )
                times[name] = PassTimes(ready["init_ms"], ready["first_ms"])
            turns = list(chain(*this.turns))
            for name in show_progress(
                turns, f"timing at {this.setting}", len(turns), "turns"
            ):
                answer = asks[name]({"runs": this.runs})
                times[name].ms += answer["ms"]
                times[name].peak_rss_mb = answer["peak_rss_mb"]
            celsius = self._temperature()
            load = _other_load(before, self.link.ask(do="usage", cpus=cpus))
        return {
            name: replace(sample, celsius=celsius, load=load)
            for name, sample in times.items()
        }

    def _say(self, message: str) -> None:
        self.say(f"{self.name}: {message}")

    def _temperature(self) -> float | None:
        celsius: float | None = self.link.ask(do="temperature")["celsius"]
        return celsius

    @contextmanager
    def _start_runner(
        self,
        name: str,
        job: JsonObject,
        setting: Setting | None,
    ) -> Iterator[tuple[Ask, JsonObject]]:
        """Start a runner; yield a function that sends it a request, and its first
        line."""

        def check(answer: JsonObject) -> JsonObject:
            if "died" not in answer:
                return answer
            code = answer["died"]
            message = answer["words"]
            at = f" at {setting}" if setting else ""
            if code == REFUSED:
                raise DeviceError(f"{name}{at}: {message}")
            raise DeviceError(
                f"{name}: the measuring process ended with code {code}{at}: "
                f"{message or 'no output'}. Usual reasons: more tokens than the model "
                "has positions, or too little memory."
            )

        full = {**job, **(asdict(setting) if setting else {})}
        ready = self.link.ask(do="start", name=name, runner=self.runner, job=full)
        try:
            yield (
                lambda line: check(self.link.ask(do="ask", name=name, line=line)),
                check(ready),
            )
        except Exception:
            # raised between two answers, so the agent is ready for the next request
            with suppress(DeviceError):  # a lost agent has been reported already
                self.link.ask(do="stop", name=name)
            raise
        # not after an interrupt: an answer may be due, and closing the link stops every
        # runner
        self.link.ask(do="stop", name=name)


def _as_json(row: EncodedRow) -> JsonObject:
    """Write a row's columns as Python numbers: lists, and single ones."""
    return {
        name: value if isinstance(value, int) else list(map(int, value))
        for name, value in row.items()
    }


def _other_load(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> tuple[float, int]:
    """Return (CPUs that other processes kept busy, all CPUs); (0.0, 0) if unknown."""
    if not before or not after:
        return 0.0, 0
    seconds = after["seconds"] - before["seconds"]
    busy = after["busy"] - before["busy"]
    own = after["own"] - before["own"]
    return max(0.0, busy - own) / max(seconds, 1e-3), after["cpus"]


START = 60.0
"""Seconds that an agent on this machine may take to start; it usually takes 0.1."""


def race(
    files: Mapping[str, Path],
    settings: Sequence[Setting],
    *,
    rounds: int = 8,
    runs: int = 15,
    say: Say = lambda _: None,
) -> list[Latency]:
    """Race ONNX files on this machine; return their latencies, sorted by setting, then
    by file, as given.

    Raises DeviceError if a measuring process dies, ExportError for a file that is not a
    text encoder. Leaves no process behind.
    """
    with open_local(say=say) as device:
        return device.race(files, settings, rounds=rounds, runs=runs)


def machine() -> dict[str, str]:
    """Describe this machine: processor, cores, instruction sets, governor, current
    load, memory, system."""
    return agent.facts()


@contextmanager
def open_local(
    *,
    affinity: tuple[int, ...] = (),
    say: Say = lambda _: None,
) -> Iterator[AgentDevice]:
    """Open this machine as a Device."""

    def lost(code: int | None, output: str) -> DeviceError:
        return DeviceError(
            f"local: the measuring agent ended with code {code}: "
            f"{output or 'no output'}"
        )

    def missing(runtime: str, reason: str) -> DeviceError:
        return DeviceError(
            f"local: {runtime} does not load here ({reason}). Install it: pip install "
            f"{runtime}"
        )

    # -P: modules in the agent's folder must not shadow installed ones
    command = [sys.executable, "-P", str(agent.__file__)]
    loaded = {"onnxruntime": onnxruntime.__version__}
    with connect(command, make_error=lost, timeout=START) as link:
        yield AgentDevice(
            "local",
            link,
            lambda path: str(path.resolve()),
            str(runner.__file__),
            affinity,
            say,
            missing,
            loaded,
        )
