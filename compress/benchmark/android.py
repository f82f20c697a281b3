"""Reach an Android phone over adb, and measure there: in its browser, by a link that needs no network, or with a native
program, onnxruntime_perf_test or LiteRT's benchmark_model.

Tested against a stand-in for `adb`, and against the real client where no phone is. No phone was measured here.
"""

import re
import secrets
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from compress.benchmark.jobs import input_types, timing_job
from compress.benchmark.options import cpu_list
from compress.benchmark.race import Pass, PassTimes, race_files, sustain_file
from compress.benchmark.remote.runner import feeds
from compress.errors import did_you_mean
from compress.exporters.session import EncodedRow
from compress.records.latency import WARM_UP, DeviceError, Latency, Setting, Sustained

if TYPE_CHECKING:
    from compress.benchmark.devices import Device


CPU_SENSOR = 0
"""mType of a processor's sensor in `dumpsys thermalservice`."""


def properties(printed: str) -> dict[str, str]:
    """Parse what `getprop` prints: `[ro.product.model]: [Pixel 8]`."""
    return dict(re.findall(r"^\[([^\]]+)\]: \[(.*)\]\s*$", printed, re.MULTILINE))


def phone_facts(known: Mapping[str, str], governors: str, celsius: float | None, client: str) -> dict[str, str]:
    """Name model, processor, system and fingerprint; what the phone does not tell is left out."""
    soc = " ".join(known.get(name, "") for name in ("ro.soc.manufacturer", "ro.soc.model")).strip()
    maker, model = known.get("ro.product.manufacturer", ""), known.get("ro.product.model", "")
    release, level = known.get("ro.build.version.release", ""), known.get("ro.build.version.sdk", "")
    told = {
        "device": f"{maker} {model}".strip(),
        "cpu": soc or known.get("ro.board.platform", ""),
        "abi": known.get("ro.product.cpu.abi", ""),
        "governor": " ".join(sorted(set(governors.split()))),
        "temperature": "" if celsius is None else f"{celsius:.0f} C",
        "system": f"Android {release} (API {level})" if release else "",
        "fingerprint": known.get("ro.build.fingerprint", ""),
        "adb": client,
    }
    return {name: value for name, value in told.items() if value}


def hottest_sensor(thermal: str, battery: str) -> float | None:
    """Find the hottest of the processor's sensors in `dumpsys thermalservice`; else the battery's, of `dumpsys
    battery`."""
    sensors = re.findall(r"Temperature\{mValue=([\d.]+), mType=(-?\d+),", thermal)
    hot = [float(value) for value, kind in sensors if int(kind) == CPU_SENSOR and 0 < float(value) < 150]
    if hot:
        return max(hot)
    tenths = re.search(r"^\s*temperature: (\d+)\s*$", battery, re.MULTILINE)
    return int(tenths[1]) / 10 if tenths else None


SERVER_PORT = 5037
STATES = {
    "unauthorized": "has not allowed this machine: unlock it, and answer the question on its screen",
    "offline": "does not answer: unplug it, plug it in again",
    "no permissions": "may not be opened by this user: udev rules are missing, see `adb devices`",
    "recovery": "is in its recovery system: start Android",
    "sideload": "is in its recovery system: start Android",
    "bootloader": "is in its bootloader: start Android",
}


OpenPage = Callable[..., AbstractContextManager["Device"]]
"""`compress.benchmark.browser.device.browser` with all options but `visit`, `name` and `more` filled in."""


@dataclass(frozen=True)
class Adb:
    """The client, for one phone. `timeout`: seconds for one command that only moves or asks something."""

    serial: str
    timeout: float

    @property
    def name(self) -> str:
        return f"adb:{self.serial}"

    def run(self, *words: str, seconds: float | None = None) -> str:
        """Return what `adb -s SERIAL words` prints. Raises DeviceError with its words when it fails."""
        return _adb(["-s", self.serial, *words], self.name, self.timeout if seconds is None else seconds)

    def shell(self, *words: str, seconds: float | None = None) -> str:
        """Run a command on the phone, each word quoted for its shell."""
        return self.run("shell", shlex.join(words), seconds=seconds)

    def facts(self) -> dict[str, str]:
        governors = self.run("shell", "cat /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor 2>/dev/null || true")
        client = _adb(["version"], "adb", self.timeout).splitlines()[0]
        return phone_facts(properties(self.shell("getprop")), governors, self.temperature(), client)

    def temperature(self) -> float | None:
        thermal = self.run("shell", "dumpsys thermalservice 2>/dev/null || true")
        return hottest_sensor(thermal, self.run("shell", "dumpsys battery 2>/dev/null || true"))


@contextmanager
def connect_phone(serial: str, timeout: float) -> Iterator[Adb]:
    """Find the phone; `serial` '': the only one there is. An adb server that this started is stopped at the end.

    Raises DeviceError when there is no such phone, or it is not ready.
    """
    if shutil.which("adb") is None:
        raise DeviceError("adb: there is no program `adb` here; install Android's platform-tools (Debian: adb)")
    with _server(timeout):
        yield Adb(_choose(serial, _adb(["devices"], "adb", timeout)), timeout)


@contextmanager
def phone_browser(phone: Adb, page: OpenPage, say: Callable[[str], None]) -> Iterator["Device"]:
    """Open the page in the phone's browser, through the cable: the phone needs no network."""
    with ExitStack() as stack:

        def visit(link: str) -> None:
            port = f"tcp:{urlsplit(link).port}"
            phone.run("reverse", port, port)
            stack.callback(attempt, partial(phone.run, "reverse", "--remove", port))
            say(f"{phone.name}: opening {link} on the phone; unlock it, and keep the page in front")
            phone.shell("am", "start", "-a", "android.intent.action.VIEW", "-d", link)

        facts = phone.facts()
        with page(visit=visit, name=phone.name, more=facts) as device:
            yield device


def attempt(clean: Callable[[], object]) -> bool:
    """Clean up on a phone that may be gone; return whether it did."""
    try:
        clean()
    except DeviceError:
        return False
    return True


def _choose(serial: str, printed: str) -> str:
    """Choose the serial of the phone meant, of what `adb devices` lists. Raises DeviceError."""
    lines = [line.split("\t", 1) for line in printed.splitlines() if "\t" in line]
    states = {line[0]: line[1].strip() for line in lines}
    if not states:
        raise DeviceError(
            "adb: no phone is connected. Plug one in, allow USB debugging on it (Settings, Developer options), and see "
            "`adb devices`. Without a cable: --device browser --lan"
        )
    if not serial and len(states) > 1:
        raise DeviceError(f"adb: {len(states)} phones are connected; name one: adb:{' or adb:'.join(states)}")
    chosen = serial or next(iter(states))
    if chosen not in states:
        raise DeviceError(f"adb:{chosen}: no such phone; connected: {', '.join(states)}")
    state = states[chosen]
    if state != "device":
        known = next((words for start, words in STATES.items() if state.startswith(start)), "is not ready")
        raise DeviceError(f"adb:{chosen}: {known} (adb says: {state})")
    return chosen


def _adb(words: Sequence[str], name: str, seconds: float) -> str:
    try:
        done = subprocess.run(
            ["adb", *words], capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(f"{name}: `adb {' '.join(words[:4])}` did not end within {seconds:g} s") from None
    printed = done.stdout.decode(errors="replace")
    if done.returncode:
        said = (done.stderr.decode(errors="replace").strip() or printed.strip()).splitlines()
        raise DeviceError(f"{name}: adb ended with code {done.returncode}: {said[-1] if said else 'it said nothing'}")
    return printed


@contextmanager
def _server(timeout: float) -> Iterator[None]:
    """Keep the server that every adb command starts; stop it at the end if it was not there before."""
    port = int(environ.get("ANDROID_ADB_SERVER_PORT", SERVER_PORT))
    with socket.socket() as probe:
        there = probe.connect_ex(("127.0.0.1", port)) == 0
    try:
        _adb(["start-server"], "adb", timeout)
        yield
    finally:
        if not there:
            attempt(lambda: _adb(["kill-server"], "adb", timeout))


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
