"""Measure on an Android phone over adb: in its browser, which needs no network, or with
a native program, onnxruntime_perf_test or LiteRT's benchmark_model.

Tested against a stand-in for `adb`, and against the real client without a phone. No
phone was measured.
"""

import re
import secrets
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from os import environ
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from onnx import numpy_helper

from compress.arrays import Floats
from compress.benchmark.arguments import format_cpus
from compress.benchmark.device import Device
from compress.benchmark.jobs import input_types, timing_job
from compress.benchmark.race import Pass, PassTimes, race_files, sustain_file
from compress.benchmark.remote.runner import feeds
from compress.errors import did_you_mean
from compress.exporters.session import EncodedRow
from compress.progress import Say
from compress.records.latency import WARM_UP, DeviceError, Latency, Setting, Sustained

CPU_SENSOR = 0
"""mType of a processor's sensor in `dumpsys thermalservice`."""


def hottest_sensor(thermal: str, battery: str) -> float | None:
    """Find the hottest sensor of the processor in `dumpsys thermalservice`, else the
    battery's in `dumpsys battery`."""
    sensors = re.findall(
        r"Temperature\{mValue=([\d.]+), mType=(-?\d+),",
        # the cached ones before may be hours old
        thermal.rpartition("Current temperatures")[2],
    )
    celsius = [
        float(value)
        for value, kind in sensors
        if int(kind) == CPU_SENSOR and 0 < float(value) < 150
    ]
    if celsius:
        return max(celsius)
    tenths = re.search(r"^\s*temperature: (\d+)\s*$", battery, re.MULTILINE)
    return int(tenths[1]) / 10 if tenths else None


SERVER_PORT = 5037
PHONE_STATES = {
    "unauthorized": "has not authorised this machine: unlock it, and answer the "
    "question on its screen",
    "offline": "does not answer: unplug it and plug it in again",
    "no permissions": "may not be opened by this user: udev rules are missing, see "
    "`adb devices`",
    "recovery": "is in recovery mode: start Android",
    "sideload": "is in recovery mode: start Android",
    "bootloader": "is in its bootloader: start Android",
}


OpenPage = Callable[..., AbstractContextManager["Device"]]
"""`compress.benchmark.browser.device.browser` with all options but `visit`, `name` and
`more` filled in."""


@dataclass(frozen=True)
class Adb:
    """The client for one phone. `timeout`: seconds for a command that only moves or
    queries something."""

    serial: str
    timeout: float

    @property
    def name(self) -> str:
        return f"adb:{self.serial}"

    def run(self, *words: str, seconds: float | None = None) -> str:
        """Return the output of `adb -s SERIAL words`. Raises DeviceError if it
        fails."""
        return _adb(
            ["-s", self.serial, *words],
            self.name,
            self.timeout if seconds is None else seconds,
        )

    def shell(self, *words: str, seconds: float | None = None) -> str:
        """Run a command on the phone, each word quoted for its shell."""
        return self.run("shell", shlex.join(words), seconds=seconds)

    def facts(self) -> dict[str, str]:
        """Describe the phone, without what it does not report."""
        governors = self.run(
            "shell",
            "cat /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor 2>/dev/null || "
            "true",
        )
        client = _adb(["version"], "adb", self.timeout).splitlines()[0]
        # lines such as `[ro.product.model]: [Pixel 8]`
        found = dict(
            re.findall(
                r"^\[([^\]]+)\]: \[(.*)\]\s*$", self.shell("getprop"), re.MULTILINE
            )
        )
        known = defaultdict(str, found)
        celsius = self.temperature()
        release = known["ro.build.version.release"]
        facts = {
            "device": (
                f"{known['ro.product.manufacturer']} {known['ro.product.model']}"
            ).strip(),
            "cpu": f"{known['ro.soc.manufacturer']} {known['ro.soc.model']}".strip()
            or known["ro.board.platform"],
            "abi": known["ro.product.cpu.abi"],
            "governor": " ".join(sorted(set(governors.split()))),
            "temperature": "" if celsius is None else f"{celsius:.0f} C",
            "system": f"Android {release} (API {known['ro.build.version.sdk']})"
            if release
            else "",
            "fingerprint": known["ro.build.fingerprint"],
            "adb": client,
        }
        return {name: value for name, value in facts.items() if value}

    def temperature(self) -> float | None:
        thermal = self.run("shell", "dumpsys thermalservice 2>/dev/null || true")
        return hottest_sensor(
            thermal, self.run("shell", "dumpsys battery 2>/dev/null || true")
        )


@contextmanager
def connect_phone(serial: str, timeout: float) -> Iterator[Adb]:
    """Connect to a phone, the only one if `serial` is ''. An adb server that this
    starts is stopped at the end.

    Raises DeviceError if there is no such phone, or it is not ready.
    """
    if shutil.which("adb") is None:
        raise DeviceError(
            "adb: the program `adb` is not installed; install Android's platform-tools "
            "(Debian: adb)"
        )
    port = int(environ.get("ANDROID_ADB_SERVER_PORT", SERVER_PORT))
    with socket.socket() as probe:
        server_runs = probe.connect_ex(("127.0.0.1", port)) == 0
    try:
        _adb(["start-server"], "adb", timeout)
        yield Adb(_choose_serial(serial, _adb(["devices"], "adb", timeout)), timeout)
    finally:
        if not server_runs:
            attempt(partial(_adb, ["kill-server"], "adb", timeout))


@contextmanager
def phone_browser(
    phone: Adb,
    page: OpenPage,
    say: Say,
) -> Iterator["Device"]:
    """Open the page in the phone's browser, through the cable: the phone needs no
    network."""
    with ExitStack() as stack:

        def visit(link: str) -> None:
            port = f"tcp:{urlsplit(link).port}"
            phone.run("reverse", port, port)
            stack.callback(attempt, partial(phone.run, "reverse", "--remove", port))
            say(
                f"{phone.name}: opening {link} on the phone; unlock it, and keep the "
                "page in front"
            )
            phone.shell("am", "start", "-a", "android.intent.action.VIEW", "-d", link)

        facts = phone.facts()
        with page(visit=visit, name=phone.name, more=facts) as device:
            yield device


def attempt(clean_up: Callable[[], object]) -> bool:
    """Clean up on a phone that may be gone; return whether that succeeded."""
    try:
        clean_up()
    except DeviceError:
        return False
    return True


def _choose_serial(serial: str, listing: str) -> str:
    """Return the serial of the requested phone from the output of `adb devices`. Raises
    DeviceError."""
    lines = (line for line in listing.splitlines() if "\t" in line)
    states = dict(line.strip().split("\t", 1) for line in lines)
    if not states:
        raise DeviceError(
            "adb: no phone is connected. Plug one in, allow USB debugging on it "
            "(Settings, Developer options), and check `adb devices`. Without a cable: "
            "--device browser --lan"
        )
    if not serial and len(states) > 1:
        raise DeviceError(
            f"adb: {len(states)} phones are connected; name one: "
            f"adb:{' or adb:'.join(states)}"
        )
    chosen = serial or next(iter(states))
    if chosen not in states:
        raise DeviceError(
            f"adb:{chosen}: no such phone; connected: {', '.join(states)}"
        )
    state = states[chosen]
    if state != "device":
        problem = next(
            (text for start, text in PHONE_STATES.items() if state.startswith(start)),
            "is not ready",
        )
        raise DeviceError(f"adb:{chosen}: {problem} (adb says: {state})")
    return chosen


def _adb(words: Sequence[str], name: str, seconds: float) -> str:
    """Return the output of an adb command for the device `name`. Raises DeviceError if
    it fails."""
    try:
        done = subprocess.run(
            ["adb", *words],
            capture_output=True,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(
            f"{name}: `adb {' '.join(words[:4])}` did not finish within {seconds:g} s"
        ) from None
    output = done.stdout.decode(errors="replace")
    if done.returncode:
        messages = (
            done.stderr.decode(errors="replace").strip()
            or output.strip()
            or "no output"
        ).splitlines()
        raise DeviceError(
            f"{name}: adb ended with code {done.returncode}: {messages[-1]}"
        )
    return output


SUFFIX = {"onnxruntime_perf_test": ".onnx", "benchmark_model": ".tflite"}
NUMBER_PATTERN = r"(\d[\d.]*(?:[eE][+-]?\d+)?)"
TEMPORARY = "/data/local/tmp"
"""The only folder on Android from which adb's shell may run programs."""
PROGRAM_TIMEOUT = 1800.0
"""The most seconds that a native program may take."""
PHONE_SCRIPT = 'cd "$1" && rm -f times.csv && shift && LD_LIBRARY_PATH=. exec "$@"'


def parse_run(program: str, output: str, times: str = "") -> PassTimes:
    """Parse a program's output, and its file of run times, the first of which are
    warm-up.

    benchmark_model reports only quantiles of its runs: as many times are returned,
    interpolated between these.
    """
    figures = {
        name: float(value)
        for name, value in re.findall(rf"([A-Z][\w ()]*): *{NUMBER_PATTERN}\b", output)
    }
    end = (
        " / ".join(line.strip() for line in output.strip().splitlines()[-3:])
        or "no output"
    )
    if program == "onnxruntime_perf_test":
        # columns: name, seconds, [total seconds, since 2025-11,] memory, processor,
        # number
        rows = [
            line.split(",") for line in times.splitlines() if line.count(",") in (4, 5)
        ]
        ms = [float(row[len(row) - 4]) * 1e3 for row in rows][WARM_UP:]
        init = figures.get("Session creation time cost")
        first = figures.get("First inference time cost")
        if not ms or init is None or first is None:
            raise DeviceError(f"{program}: its output cannot be parsed. It ends: {end}")
        peak = figures.get("Peak working set size")
        return PassTimes(1e3 * init, first, ms, None if peak is None else peak / 1e6)
    # earlier ones: warm-up
    line = next(
        (line for line in reversed(output.splitlines()) if "count=" in line), ""
    )
    figures |= {
        name: float(value)
        for name, value in re.findall(rf"(\w+)={NUMBER_PATTERN}", line)
    }
    if "avg" not in figures and "curr" in figures:  # "curr=30(all same)"
        figures |= dict.fromkeys(("min", "max"), figures["curr"])
    needed = ("count", "min", "max", "median", "p95", "Init", "First inference")
    if missing := [name for name in needed if name not in figures]:
        raise DeviceError(
            f"{program}: did not print {', '.join(missing)}; expected a newer build. "
            f"The output ends: {end}"
        )
    ranks = (np.arange(figures["count"]) + 0.5) / figures["count"]
    ranks[0] = 0
    ranks[-1] = 1
    quantiles = [figures[name] / 1e3 for name in ("min", "median", "p95", "max")]
    ms = np.interp(ranks, (0, 0.5, 0.95, 1), quantiles).tolist()
    peak_mb = re.search(
        rf"Peak memory footprint \(MB\):.*overall={NUMBER_PATTERN}", output
    )
    return PassTimes(
        figures["Init"] / 1e3,
        figures["First inference"] / 1e3,
        ms,
        float(peak_mb[1]) if peak_mb else None,
    )


@contextmanager
def phone_program(
    phone: Adb,
    binary: Path,
    affinity: tuple[int, ...],
    say: Say,
) -> Iterator["NativeProgram"]:
    """Push the program and the libraries beside it to a folder on the phone, which is
    removed at the end."""
    program = next((name for name in SUFFIX if binary.name.startswith(name)), "")
    if not binary.is_file():
        raise DeviceError(
            f"--native {binary}: no such file; expected {' or '.join(SUFFIX)}, built "
            "for Android"
        )
    if not program:
        hint = did_you_mean(binary.name, SUFFIX)
        raise DeviceError(
            f"--native {binary}: expected a program named {' or '.join(SUFFIX)}.{hint}"
        )
    folder = f"{TEMPORARY}/compress-{secrets.token_hex(4)}"
    try:
        phone.shell("mkdir", folder)
        for part in (binary, *sorted(binary.parent.glob("*.so"))):
            phone.run(
                "push", str(part), f"{folder}/{part.name}", seconds=PROGRAM_TIMEOUT
            )
        phone.shell("chmod", "755", f"{folder}/{binary.name}")
        yield NativeProgram(
            phone, program, binary.name, folder, affinity, say, phone.facts()
        )
    finally:
        if not attempt(partial(phone.shell, "rm", "-rf", folder)):
            say(f"{phone.name}: {folder} could not be removed from the phone")


@dataclass(frozen=True)
class NativeProgram:
    """A phone with a native program, as a Device. Each call starts a process that opens
    the file again.

    pushed  file, or file and shape -> name on the phone
    """

    phone: Adb
    program: str
    binary: str
    folder: str
    affinity: tuple[int, ...]
    say: Say
    phone_facts: Mapping[str, str]
    pushed: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.phone.name

    def facts(self) -> dict[str, str]:
        facts = {**self.phone_facts, "runtime": self.program}
        if self.program == "benchmark_model":
            facts["p99"] = (
                "interpolated between p95 and the maximum, which benchmark_model "
                "reports"
            )
        return facts

    def race(
        self,
        files: Mapping[str, Path],
        settings: Sequence[Setting],
        *,
        rounds: int,
        runs: int,
    ) -> list[Latency]:
        self._check(files, settings)
        cpus = format_cpus(self.affinity)
        measure = partial(self._run_pass, files)
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
        """Run each file in turn, one call per minute: between calls the phone rests
        while the file is opened."""
        self._check(files, [setting])

        def run(path: Path, seconds: float) -> float:
            return float(np.median(self._call(path, setting, seconds=seconds).ms))

        return [
            sustain_file(
                name,
                setting,
                seconds,
                partial(run, path),
                temperature=self.phone.temperature,
                say=self._say,
            )
            for name, path in files.items()
        ]

    def logits(
        self,
        file: Path,
        rows: Sequence[EncodedRow],
    ) -> list[Floats]:
        raise DeviceError(
            f"{self.name}: {self.program} computes no logits; the phone's browser "
            "does, without --native"
        )

    def _say(self, message: str) -> None:
        self.say(f"{self.name}: {message}")

    def _check(self, files: Mapping[str, Path], settings: Sequence[Setting]) -> None:
        if wrong := [
            name for name, path in files.items() if path.suffix != SUFFIX[self.program]
        ]:
            raise DeviceError(
                f"{wrong[0]}: {self.program} runs {SUFFIX[self.program]} files"
            )
        if (
            self.program == "benchmark_model"
            and len({(setting.batch, setting.seq) for setting in settings}) > 1
        ):
            raise DeviceError(
                "a .tflite file has a fixed shape: give the --batch and --seq that it "
                "was exported for"
            )

    def _run_pass(self, files: Mapping[str, Path], this: Pass) -> dict[str, PassTimes]:
        times: dict[str, PassTimes] = {}
        for name in chain(*this.turns):
            call = self._call(files[name], this.setting, runs=this.runs)
            if name in times:
                times[name].ms += call.ms
            else:
                times[name] = call
        celsius = self.phone.temperature()
        return {
            name: replace(sample, celsius=celsius) for name, sample in times.items()
        }

    def _call(
        self,
        path: Path,
        setting: Setting,
        *,
        runs: int = 1,
        seconds: float | None = None,
    ) -> PassTimes:
        """Call the program once for `runs` timed runs, or for `seconds` of them."""
        model = self._push(path, setting)
        times = ""
        if self.program == "benchmark_model":
            words = [
                f"--graph={model}",
                f"--num_threads={setting.threads}",
                f"--warmup_runs={WARM_UP}",
                "--warmup_min_secs=0",
                f"--num_runs={runs}",
                f"--min_secs={seconds or 0:g}",
                "--max_secs=3600",
            ]
        else:
            mode = ["times", "-r", str(WARM_UP + runs)]
            if seconds is not None:
                mode = ["duration", "-t", f"{max(1, round(seconds))}"]
            entries = " ".join(
                f"{key}|{value}" for key, value in timing_job(path)["entries"].items()
            )
            words = ["-e", "cpu", "-m", *mode, "-x", str(setting.threads), "-y", "1"]
            words += [*(["-C", entries] if entries else []), model, "times.csv"]
        taskset = (
            ["taskset", f"{sum(1 << cpu for cpu in self.affinity):x}"]
            if self.affinity
            else []
        )
        words = [
            "sh",
            "-c",
            PHONE_SCRIPT,
            "sh",
            self.folder,
            *taskset,
            f"{self.folder}/{self.binary}",
            *words,
        ]
        output = self.phone.shell(*words, seconds=PROGRAM_TIMEOUT)
        if self.program == "onnxruntime_perf_test":
            times = self.phone.shell("cat", f"{self.folder}/times.csv")
        return parse_run(self.program, output, times)

    def _push(self, path: Path, setting: Setting) -> str:
        """Push the model, for onnxruntime_perf_test with inputs of the shape; return
        its name in our folder."""
        if str(path) not in self.pushed:
            model = self.pushed[str(path)] = f"{len(self.pushed)}{path.suffix}"
            self.phone.run(
                "push", str(path), f"{self.folder}/{model}", seconds=PROGRAM_TIMEOUT
            )
        model = self.pushed[str(path)]
        if self.program == "benchmark_model":
            return model
        case = f"{Path(model).stem}-{setting.batch}x{setting.seq}"
        if case not in self.pushed:
            remote = f"{self.folder}/{case}"
            self.phone.shell("mkdir", "-p", f"{remote}/test_data_set_0")
            self.phone.shell("ln", "-s", f"../{model}", f"{remote}/model.onnx")
            with tempfile.TemporaryDirectory() as scratch:
                for name, content in serialize_inputs(path, setting).items():
                    (Path(scratch) / name).write_bytes(content)
                    self.phone.run(
                        "push", f"{scratch}/{name}", f"{remote}/test_data_set_0/{name}"
                    )
            self.pushed[case] = f"{case}/model.onnx"
        return self.pushed[case]


def serialize_inputs(path: Path, setting: Setting) -> dict[str, bytes]:
    """Serialize the inputs for onnxruntime_perf_test, with the same ids as on other
    devices."""
    arrays = feeds(
        input_types(path), setting.batch, setting.seq, timing_job(path)["vocabulary"]
    )
    tensors = (numpy_helper.from_array(value, name) for name, value in arrays.items())
    return {
        f"input_{number}.pb": tensor.SerializeToString()
        for number, tensor in enumerate(tensors)
    }
