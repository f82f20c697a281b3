"""Measure on this machine, or on any other that runs the agent: a request through its pipe, an answer."""

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
from numpy.typing import NDArray

from compress.benchmark import jobs
from compress.benchmark.options import cpu_list
from compress.benchmark.race import Pass, PassTimes, race_files, sustain_file
from compress.benchmark.remote import agent, runner
from compress.benchmark.remote.runner import REFUSED
from compress.progress import Progress, show_progress
from compress.records.latency import DeviceError, Latency, Setting, Sustained

PATIENCE = 15.0
"""Seconds an agent has to end after its input did: it kills its runners, and removes its folder where it has one."""

Loss = Callable[[int | None, str], DeviceError]
"""The error for a lost agent, of its process's exit code (None: given up) and its words on standard error."""


@dataclass
class Link:
    """A running agent. `hello` is its first line."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    loss: Loss
    hello: Mapping[str, Any] = field(default_factory=dict)

    def ask(self, body: Path | None = None, **request: Any) -> dict[str, Any]:
        """Return the agent's answer; the content of `body` follows the request. Raises what `loss` makes of its end."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            if body is not None:
                with body.open("rb") as file:
                    shutil.copyfileobj(file, self.process.stdin, agent.CHUNK)
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.lost() from None
        found: dict[str, Any] = json.loads(self.read_line())
        return found

    def read_line(self) -> str:
        """Read a whole line of its output. Raises what `loss` makes of its end."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self.lost()
        return line.decode(errors="replace")

    def lost(self, *, gave_up: bool = False) -> DeviceError:
        """Say what its end means, with its last words."""
        code = self.process.wait()
        self.errors.seek(0)
        return self.loss(None if gave_up else code, self.errors.read().decode(errors="replace").strip())


@contextmanager
def connect(command: Sequence[str], *, loss: Loss, timeout: float, preamble: bytes = b"") -> Iterator[Link]:
    """Start the agent by `command`; `preamble` is written before the first request.

    In a session of its own: Ctrl-C is for us alone, and the agent ends when its input does, which is here, whatever
    happens. Raises DeviceError when it says nothing for `timeout` seconds.
    """
    pipe, silent = subprocess.PIPE, threading.Event()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True)
        assert process.stdin is not None and process.stdout is not None
        link = Link(process, errors, loss)

        def give_up() -> None:
            silent.set()
            process.kill()

        alarm = threading.Timer(timeout, give_up)
        try:
            alarm.start()
            try:
                process.stdin.write(preamble)
                process.stdin.flush()
                while not (line := link.read_line()).startswith(agent.READY):
                    pass  # what a login shell says
            except (BrokenPipeError, DeviceError):
                raise link.lost(gave_up=silent.is_set()) from None
            finally:
                alarm.cancel()
            link.hello = json.loads(line)
            yield link
        finally:
            try:
                with suppress(BrokenPipeError):  # of what is still in the buffer
                    process.stdin.close()
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                pass
            finally:
                process.kill()
                process.wait()
                process.stdout.close()


Ask = Callable[[dict[str, Any]], dict[str, Any]]
ROWS_AT_ONCE = 64
"""Rows sent in one line."""


@dataclass(frozen=True)
class AgentDevice:
    """A machine with an agent, as a Device.

    place     brings a file to the machine, and says where it is there
    runner    the path of runner.py there
    affinity  the CPUs that runners are kept on; none: wherever the system likes
    say       is told how far the measuring is
    missing   what to do about a runtime that does not load there: the runtime, why -> the error
    loaded    runtime -> version, of those known to load there
    """

    name: str
    link: Link
    place: Callable[[Path], str]
    runner: str
    affinity: tuple[int, ...]
    say: Callable[[str], None]
    missing: Callable[[str, str], DeviceError]
    loaded: dict[str, str] = field(default_factory=dict)

    def facts(self) -> dict[str, str]:
        """Describe the machine; load and temperature are from before anything was measured."""
        if not self.loaded:
            self._needs("onnxruntime")
        runtimes = ", ".join(f"{name} {version}" for name, version in self.loaded.items())
        return {**self.link.hello["facts"], "runtime": runtimes}

    def race(
        self, files: Mapping[str, Path], settings: Sequence[Setting], *, rounds: int = 8, runs: int = 15
    ) -> list[Latency]:
        """Race the files, see `race_files`; inputs are random ids of each file's own vocabulary with nothing masked."""
        jobs_of = {name: self._send(jobs.timing_job(path), path) for name, path in files.items()}
        done = race_files(
            files, settings, rounds, runs, partial(self._pass, jobs_of),
            say=self._say, affinity=cpu_list(self.affinity),
        )  # fmt: skip
        return [latency for of_setting in done for latency in of_setting]

    def sustain(self, files: Mapping[str, Path], setting: Setting, *, seconds: float) -> list[Sustained]:
        curves = []
        for name, path in files.items():
            with self._runner(name, self._send(jobs.timing_job(path), path), setting) as (ask, _):

                def run(span: float, ask: Ask = ask) -> float:
                    return float(ask({"seconds": span})["p50_ms"])

                curves.append(sustain_file(name, setting, seconds, run, temperature=self._temperature, say=self._say))
        return curves

    def logits(self, file: Path, rows: Sequence[Mapping[str, Sequence[int]]]) -> list[NDArray[np.float32]]:
        found: list[NDArray[np.float32]] = []
        with (
            self._runner(str(file), self._send(jobs.logits_job(file), file), None) as (ask, _),
            Progress("scoring", len(rows), "rows") as bar,
        ):
            for at in range(0, len(rows), ROWS_AT_ONCE):
                lines = [{key: list(map(int, ids)) for key, ids in row.items()} for row in rows[at : at + ROWS_AT_ONCE]]
                for shape, data in ask({"rows": lines})["logits"]:
                    found.append(np.frombuffer(base64.b64decode(data), np.float32).reshape(shape))
                bar.advance(len(lines))
        return found

    def _needs(self, runtime: str) -> None:
        if runtime in self.loaded:
            return
        found = self.link.ask(do="versions", of=["numpy", runtime])
        if "error" in found:
            raise self.missing(runtime, found["error"])
        self.loaded[runtime] = found["versions"][runtime]

    def _send(self, job: dict[str, Any], path: Path) -> dict[str, Any]:
        self._needs(job["runtime"])
        return {**job, "path": self.place(path), "affinity": list(self.affinity)}

    def _pass(self, jobs_of: Mapping[str, dict[str, Any]], one: Pass) -> dict[str, PassTimes]:
        before = self._usage()
        found: dict[str, PassTimes] = {}
        with ExitStack() as stack:
            asks = {}
            for name in one.turns[0]:
                asks[name], ready = stack.enter_context(self._runner(name, jobs_of[name], one.setting))
                found[name] = PassTimes(
                    ready["init_ms"], ready["first_ms"]
                )  # before the next starts: loading is timed too
            turns = list(chain(*one.turns))
            for name in show_progress(turns, f"timing at {one.setting}", len(turns), "turns"):
                said = asks[name]({"runs": one.runs})
                found[name].ms += said["ms"]
                found[name].peak_rss_mb = said["peak_rss_mb"]
            celsius, load = self._temperature(), _other_load(before, self._usage())
        return {name: replace(sample, celsius=celsius, load=load) for name, sample in found.items()}

    def _say(self, words: str) -> None:
        self.say(f"{self.name}: {words}")

    def _usage(self) -> dict[str, Any]:
        return self.link.ask(do="usage", cpus=list(self.affinity))

    def _temperature(self) -> float | None:
        celsius: float | None = self.link.ask(do="temperature")["celsius"]
        return celsius

    @contextmanager
    def _runner(self, name: str, job: dict[str, Any], setting: Setting | None) -> Iterator[tuple[Ask, dict[str, Any]]]:
        """Start a runner; return what asks it, and the line it starts with."""

        def alive(answer: dict[str, Any]) -> dict[str, Any]:
            if "died" not in answer:
                return answer
            code, words, at = answer["died"], answer["words"], f" at {setting}" if setting else ""
            if code == REFUSED:
                raise DeviceError(f"{name}{at}: {words}")
            raise DeviceError(
                f"{name}: the measuring process ended with code {code}{at}: {words or 'it said nothing'}. Usual "
                "reasons: more tokens than the model has positions, or too little memory."
            )

        full = {**job, **(asdict(setting) if setting else {})}
        ready = self.link.ask(do="start", name=name, runner=self.runner, job=full)
        try:
            yield lambda line: alive(self.link.ask(do="ask", name=name, line=line)), alive(ready)
        except Exception:  # of whatever kind, it came between two answers: the next request finds the agent listening
            with suppress(DeviceError):  # where the agent itself is lost, that has been said
                self.link.ask(do="stop", name=name)
            raise
        # not when interrupted: an answer may be due, and the end of the link stops all
        self.link.ask(do="stop", name=name)


def _other_load(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[float, int]:
    """Subtract our own use of the CPUs from that of all: (CPUs that others kept busy, CPUs); (0.0, 0): not known."""
    if not before or not after:
        return 0.0, 0
    seconds, busy, own = (after[key] - before[key] for key in ("seconds", "busy", "own"))
    return max(0.0, busy - own) / max(seconds, 1e-3), after["cpus"]


START = 60.0
"""Seconds an agent on this machine has to start: it takes a tenth of one."""


def race(
    files: Mapping[str, Path],
    settings: Sequence[Setting],
    *,
    rounds: int = 8,
    runs: int = 15,
    say: Callable[[str], None] = lambda _: None,
) -> list[Latency]:
    """Race ONNX files on this machine: their latency, settings in the order given, files within.

    Raises DeviceError when a measuring process dies, with its last words; ExportError for a file that is no text
    encoder. Leaves no process behind.
    """
    with local(say=say) as device:
        return device.race(files, settings, rounds=rounds, runs=runs)


def machine() -> dict[str, str]:
    """Describe what figures are measured on: processor, cores, instruction sets, governor, load now, memory, system."""
    return agent.facts()


@contextmanager
def local(*, affinity: tuple[int, ...] = (), say: Callable[[str], None] = lambda _: None) -> Iterator[AgentDevice]:
    # -P: the agent's neighbours in its folder must not pass for installed modules
    command = [sys.executable, "-P", str(agent.__file__)]
    loaded = {"onnxruntime": onnxruntime.__version__}
    with connect(command, loss=_lost, timeout=START) as link:
        yield AgentDevice(
            "local", link, lambda path: str(path.resolve()), str(runner.__file__), affinity, say, _missing, loaded
        )


def _lost(code: int | None, words: str) -> DeviceError:
    return DeviceError(f"local: the process that keeps the measuring ones ended with code {code}: {words or 'silent'}")


def _missing(runtime: str, why: str) -> DeviceError:
    return DeviceError(f"local: {runtime} does not load here ({why}). Install it: pip install {runtime}")
