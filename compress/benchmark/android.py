"""Reach an Android phone over adb, and measure in its browser, by a link that needs no network.

Tested against a stand-in for `adb`, and against the real client where no phone is. No phone was measured here.
"""

import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from os import environ
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from compress.records.latency import DeviceError

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
