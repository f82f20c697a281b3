"""Manage the measuring processes of one machine, at the remote end of a pipe. Needs
only Python 3.8.

    python agent.py [FOLDER]

Prints one JSON line that describes the machine when ready, then answers each JSON line
of input with one line:

    {"do": "temperature"}                     {"celsius": 51.2}, null if unknown
    {"do": "versions", "of": ["numpy"]}       {"versions": {...}} or {"error": ...}, by
                                              importing them
    {"do": "put", "name": ..., "bytes": n}    {"path": ...} or {"error": ...}; n bytes
                                              follow the line
    {"do": "start", "name": ..., "runner": ..., "job": {...}}    the runner's first line
    {"do": "ask", "name": ..., "line": {...}}                    the runner's answer
    {"do": "stop", "name": ...}               {}

For a runner that has ended the answer is {"died": exit code, "words": its last line}.
When the input ends, even in the middle of a run, every runner is killed and the agent
exits: a lost connection leaves nothing running."""

from __future__ import annotations

import json
import os
import platform
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    Runners = dict[str, "Running"]
    Message = dict[str, Any]
    """A request or an answer, as JSON."""

READY = '{"agent": '
"""The beginning of our first line; anything before it was printed by a login shell."""

FAST_SETS = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "asimddp",
    "i8mm",
    "sve",
)
"""Instruction sets that decide how fast int8 and bf16 are."""

CPU_SENSORS = re.compile(
    r"cpu|pkg|package|soc|core|k10temp|zenpower|tctl", re.IGNORECASE
)
SENSORS = Path("/sys/class")
CPUS = Path("/sys/devices/system/cpu")
BYTES_PER_CHUNK = 2**20
LAST_WORDS = 600
"""Characters of a runner's last line that are reported."""


class Running(NamedTuple):
    process: subprocess.Popen[str]
    errors: IO[str]


def main(folder: str = "") -> None:
    """Serve until the input ends. `folder`: the destination of `put` files."""
    requests: queue.Queue[Message | None] = queue.Queue(1)
    runners: Runners = {}
    threading.Thread(
        target=listen, args=(folder, requests, runners), daemon=True
    ).start()
    free = shutil.disk_usage(folder).free if folder else 0
    if folder:  # onnxruntime 1.31 leaves a file in TMPDIR when it is imported
        os.environ["TMPDIR"] = tempfile.tempdir = folder
    code = 0
    try:
        say({"agent": 1, "folder": folder, "free": free, "facts": facts()})
        while True:
            request = requests.get()
            if request is None:
                break
            say(answer(request, runners))
    except BrokenPipeError:
        pass
    except Exception:  # the exit below would leave no trace of it
        traceback.print_exc()
        code = 1
    finally:
        for name in list(runners):
            stop(name, runners)
        # the listening thread may hold the lock of standard input, for which a normal
        # exit would wait
        sys.stderr.flush()
        os._exit(code)


def say(value: Message) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def listen(
    folder: str,
    requests: queue.Queue[Message | None],
    runners: Runners,
) -> None:
    """Queue the requests, after writing the files that follow them; None at the end."""
    source = sys.stdin.buffer
    for line in source:
        request = json.loads(line)
        if request["do"] == "put":
            request["put"] = receive(
                source, Path(folder) / request["name"], request["bytes"]
            )
        requests.put(request)
    for running in list(runners.values()):  # unblocks whoever waits for their answer
        running.process.kill()
    requests.put(None)


def receive(source: IO[bytes], target: Path, size: int) -> Message:
    """Write the next `size` bytes to a file; if that fails, read them nevertheless, up
    to the next request."""
    left = size
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            while left:
                chunk = source.read(min(BYTES_PER_CHUNK, left))
                if not chunk:
                    break
                left -= len(chunk)
                file.write(chunk)
    except OSError as error:
        target.unlink(missing_ok=True)
        while left and (chunk := source.read(min(BYTES_PER_CHUNK, left))):
            left -= len(chunk)
        return {"error": f"{target}: {error.strerror}"}
    return {"path": str(target)}


def answer(request: Message, runners: Runners) -> Message:
    answers = {
        "put": lambda: request["put"],
        "start": lambda: start(request, runners),
        "ask": lambda: ask(
            request["name"], json.dumps(request["line"]) + "\n", runners
        ),
        "stop": lambda: stop(request["name"], runners),
        "versions": lambda: versions(request["of"]),
        "usage": lambda: usage(request["cpus"], runners),
        "temperature": lambda: {"celsius": temperature()},
    }
    return answers[request["do"]]()


def usage(cpus: list[int], runners: Runners) -> Message:
    """Measure how many seconds these CPUs (empty: all that we may use) have been busy,
    and our own share; on Linux.

    `busy` includes time that the host of a virtual machine took from it.
    """
    lines = (line.split() for line in _text(Path("/proc/stat")).splitlines())
    ticks = {
        line[0]: list(map(int, line[1:9]))
        for line in lines
        if re.fullmatch(r"cpu\d+", line[0])
    }
    if not ticks or not hasattr(os, "sched_getaffinity"):
        return {}
    chosen = [
        f"cpu{cpu}" for cpu in cpus or os.sched_getaffinity(0) if f"cpu{cpu}" in ticks
    ]
    tick = os.sysconf("SC_CLK_TCK")
    # without idle and iowait
    busy = sum(sum(ticks[cpu]) - ticks[cpu][3] - ticks[cpu][4] for cpu in chosen) / tick
    own = time.process_time()
    for running in runners.values():
        fields = (
            _text(Path(f"/proc/{running.process.pid}/stat")).rpartition(")")[2].split()
        )
        own += (int(fields[11]) + int(fields[12])) / tick if fields else 0.0
    return {"seconds": time.monotonic(), "busy": busy, "own": own, "cpus": len(chosen)}


def start(request: Message, runners: Runners) -> Message:
    errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # `stop` closes it
    # -P: modules in the runner's folder must not shadow installed ones
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    command = [sys.executable, *safe, request["runner"], json.dumps(request["job"])]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=errors, universal_newlines=True
    )
    runners[request["name"]] = Running(process, errors)
    return ask(request["name"], "", runners)


def ask(name: str, line: str, runners: Runners) -> Message:
    process, errors = runners[name]
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
        found = process.stdout.readline()
    except BrokenPipeError:
        found = ""
    if found:
        return json.loads(found)
    code = process.wait()
    errors.seek(0)
    words = errors.read().strip().splitlines()
    return {"died": code, "words": words[-1][-LAST_WORDS:] if words else ""}


def stop(name: str, runners: Runners) -> Message:
    process, errors = runners.pop(name)
    assert process.stdin is not None
    assert process.stdout is not None
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, errors):
        with suppress(BrokenPipeError):  # a request may be unread
            pipe.close()
    return {}


def versions(packages: list[str]) -> Message:
    """Find the versions of packages by importing them: one for another processor is
    installed, but does not load."""
    names = ", ".join(packages)
    version = (
        "(getattr(each, '__version__', None) or "
        "metadata.version(each.__name__)).split('-')[0]"
    )
    found = f"{{each.__name__: {version} for each in ({names},)}}"
    program = (
        f"import json, {names}; from importlib import metadata; "
        f"print(json.dumps({found}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        return {"error": words[-1] if words else f"ended with code {done.returncode}"}
    return {"versions": json.loads(done.stdout)}


def facts() -> dict[str, str]:
    """Describe processor, cores, instruction sets, governor, current temperature and
    load, memory, system.

    Facts that cannot be read are left out.
    """
    flags = f"{_cpuinfo('flags')} {_cpuinfo('Features')}".split()
    usable = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count()
    )
    celsius = temperature()
    governors = sorted(
        {_text(path) for path in CPUS.glob("cpu*/cpufreq/scaling_governor")}
    )
    memory = ""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = (
            f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.1f} GB"
        )
    found = {
        "cpu": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "board": _text(Path("/proc/device-tree/model")).rstrip("\0"),
        "cores": f"{usable} of {os.cpu_count()}",
        "clock": clocks(),
        "instructions": " ".join(name for name in FAST_SETS if name in flags),
        "governor": " ".join(governors),
        "temperature": "" if celsius is None else f"{celsius:.0f} C",
        "load": f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "",
        "memory": memory,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    return {name: value for name, value in found.items() if value}


def temperature(sensors: Path = SENSORS) -> float | None:
    """Read the hottest sensor of the processor in degrees Celsius; if none is known to
    be one, the hottest of all."""
    readings = []
    for pattern, label in (
        ("thermal/thermal_zone*/temp", "type"),
        ("hwmon/hwmon*/temp*_input", "name"),
    ):
        for path in sensors.glob(pattern):
            milli = _text(path)
            name = _text(path.with_name(label))
            if re.fullmatch(r"\d+", milli) and 0 < int(milli) < 150_000:
                readings.append((bool(CPU_SENSORS.search(name)), int(milli) / 1000))
    return max(readings)[1] if readings else None


def clocks(cpus: Path = CPUS) -> str:
    """Describe the clock of each CPU: `cpu 0-3 1.80 GHz, cpu 4-7 2.40 GHz`; '' if
    unknown, as that of a CPU that is switched off."""
    khz = {
        int(path.parent.parent.name[3:]): int(_text(path) or 0)
        for path in cpus.glob("cpu*/cpufreq/cpuinfo_max_freq")
    }
    groups = [
        (clock, list(group)) for clock, group in groupby(sorted(khz), khz.__getitem__)
    ]
    return ", ".join(
        f"cpu {group[0]}-{group[-1]} {clock / 1e6:.2f} GHz"
        for clock, group in groups
        if clock
    )


def _cpuinfo(field: str) -> str:
    """Return the first value of a field of Linux's /proc/cpuinfo; '' if there is
    none."""
    lines = (line.partition(":") for line in _text(Path("/proc/cpuinfo")).splitlines())
    return next(
        (value.strip() for name, _, value in lines if name.strip() == field), ""
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
