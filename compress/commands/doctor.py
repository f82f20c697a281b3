"""Look at what this machine has and lacks for each command, and what brings what is missing."""

import json
import os
import platform
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Any, Final

from compress.benchmark import probe
from compress.benchmark.remote import agent
from compress.provenance import DISTRIBUTION, install_command
from compress.records.diagnosis import Check, Diagnosis, State

LOADED: Final = ("numpy", "torch", "pyarrow", "onnx", "onnxruntime", "safetensors", "scipy", "transformers")
"""Packages that are imported, most of them with compiled code, which may be for another processor or system."""
EXTRAS: Final[Mapping[str, str]] = {
    "demo": "the embedded teacher minilm",
    "openvino": "compress export --for openvino, and measuring what it writes",
    "executorch": "compress export --for executorch; give it an environment of its own",
    "litert": "compress export --for litert; give it an environment of its own",
    "coreml": "compress export --for coreml",
    "npu": "the emulator that certifies compress export --for npu; x86-64 Linux",
    "postgresql": "a compress search whose --storage is a PostgreSQL database, for workers on many machines",
    "mlflow": "--track mlflow; TensorBoard is in the base install",
    "trackio": "--track trackio",
    "wandb": "--track wandb",
    "lan": "the QR code of compress bench --device browser --lan",
}
"""The extras of pyproject.toml that users install, each with what it is needed for."""
TOOLS: Final[Mapping[str, tuple[tuple[str, ...], str, Mapping[str, str]]]] = {
    "browser": (
        ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge", "firefox"),
        "compress bench --device browser on this machine, compress demo --serve; --lan takes a phone's instead",
        {"apt-get": "chromium", "dnf": "chromium", "pacman": "chromium", "brew": "chromium", "winget": "Google.Chrome"},
    ),
    "node": (
        ("node",),
        "npm",
        {"apt-get": "nodejs", "dnf": "nodejs", "pacman": "nodejs", "brew": "node", "winget": "OpenJS.NodeJS"},
    ),
    "npm": (
        ("npm",),
        "compress bench --device browser and compress demo, for onnxruntime-web; --assets takes a file instead",
        {"apt-get": "npm", "dnf": "npm", "pacman": "npm", "brew": "node", "winget": "OpenJS.NodeJS"},
    ),
    "adb": (
        ("adb",),
        "compress bench --device adb, a phone on a cable",
        {"apt-get": "adb", "dnf": "android-tools", "pacman": "android-tools", "brew": "android-platform-tools",
         "winget": "Google.PlatformTools"},
    ),
    "ssh": (
        ("ssh",),
        "compress bench --device ssh:HOST",
        {"apt-get": "openssh-client", "dnf": "openssh-clients", "pacman": "openssh", "brew": "openssh",
         "winget": "Microsoft.OpenSSH.Preview"},
    ),
}  # fmt: skip
"""Programs: the names they go by, what they are needed for, and the package of each package manager that has them."""
MANAGERS: Final[Mapping[str, str]] = {
    "apt-get": "sudo apt-get install", "dnf": "sudo dnf install", "pacman": "sudo pacman -S", "brew": "brew install",
    "winget": "winget install",
}  # fmt: skip
TOOL_SECONDS: Final = 5.0
"""Seconds for a program to say its version, and for the hub to answer."""
PROBE_SECONDS: Final = 180.0
"""Seconds until a package that does not finish loading is given up; all of them take 3 to 8."""
LEAST_DISK, LEAST_MEMORY = 5e9, 4e9
"""Bytes below which a run is likely to fail."""


def doctor(*, say: Callable[[Check], object] = lambda _: None) -> Diagnosis:
    """Look at machine, packages, extras, programs, hub and caches, and name the command that brings what is missing.

    say     is told each check as soon as it is known, the quick ones first

    Nothing is installed, fetched or changed. LOADED are imported, and matrix products timed for half a second, in a
    process of its own, so that a broken one is an answer. Everything has a limit of time: it never hangs.
    """
    found: list[Check] = []

    def add(check: Check) -> None:
        found.append(check)
        say(check)

    with ThreadPoolExecutor(1) as pool:
        tools = {name: _started(_tool, name, *about) for name, about in TOOLS.items()}
        hub = _started(_hub)
        listed, unlisted = _listed()
        probed = pool.submit(_probe)
        for check in (*_machine(), *unlisted, *_extras(listed), *_caches()):
            add(check)
        for name, each in tools.items():
            add(_within(each, TOOL_SECONDS, Check("tools", name, "broken", "does not answer", TOOLS[name][1])))
        add(_within(hub, TOOL_SECONDS, Check("tools", "hub", "missing", _UNREACHED, _HUB)))
        for check in _packages(listed, probed.result()):
            add(check)
    return Diagnosis(tuple(found))


def _started(work: Callable[..., Check], *arguments: Any) -> "Future[Check]":
    """Do it in a thread that nobody waits for at the end: a name server may be silent for longer than any limit."""
    future: Future[Check] = Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _within(future: "Future[Check]", seconds: float, otherwise: Check) -> Check:
    try:
        return future.result(seconds)
    except TimeoutError:
        return otherwise


def _machine() -> Iterator[Check]:
    """Look at Python, processor, memory and disk."""
    wanted = _wanted_python()
    yield Check(
        "machine", "python", "ok" if _allows(wanted, platform.python_version()) else "broken",
        f"{platform.python_version()} at {sys.executable}; {wanted} is needed", "everything", required=True,
    )  # fmt: skip
    facts = agent.facts()
    cores = _cores()
    yield Check(
        "machine", "processor", "ok",
        f"{facts['cpu']}, {facts['cores']} cores, load {facts.get('load', 'unknown')}", values={"cores": cores},
    )  # fmt: skip
    sets = facts.get("instructions", "")
    fast = [what for what, names in _FAST.items() if any(name in sets.split() for name in names)]
    yield Check("machine", "instructions", "ok", f"{sets or 'none known'}: fast {' and '.join(fast) or 'fp32 alone'}")
    total, free = _memory()
    if total:
        few: State = "ok" if total >= LEAST_MEMORY else "missing"
        yield Check(
            "machine", "memory", few, f"{total / 1e9:.1f} GB, {free / 1e9:.1f} GB of it free",
            f"training: {LEAST_MEMORY / 1e9:.0f} GB at least", values={"total_bytes": total, "free_bytes": free},
        )  # fmt: skip
    free = shutil.disk_usage(Path.cwd()).free
    yield Check(
        "machine", "disk", "ok" if free >= LEAST_DISK else "missing", f"{free / 1e9:.1f} GB free in {Path.cwd()}",
        f"a run: {LEAST_DISK / 1e9:.0f} GB at least", values={"free_bytes": free},
    )  # fmt: skip


_FAST: Final = {"int8": ("avx_vnni", "avx512_vnni", "amx_int8", "i8mm"), "bf16": ("avx512_bf16", "amx_int8")}
"""Instruction sets that make a format fast. A processor with AMX has it for both."""


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> tuple[int, int]:
    """Return the bytes of memory and those free, a container's limit included; (0, 0) where they are not known."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return 0, 0
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    lines = (line.split() for line in _text(Path("/proc/meminfo")).splitlines())
    free = next((int(line[1]) * 1024 for line in lines if line[0] == "MemAvailable:"), total)
    limit, used = (_text(Path("/sys/fs/cgroup", name)).strip() for name in ("memory.max", "memory.current"))
    if limit.isdecimal() and used.isdecimal() and int(limit) < total:
        total, free = int(limit), min(free, int(limit) - int(used))
    return total, free


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _wanted_python() -> str:
    try:
        return str(metadata(DISTRIBUTION)["Requires-Python"])
    except PackageNotFoundError:
        return ">=3.11"


def _allows(specifier: str, found: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(found, prereleases=True)


Listed = Sequence[tuple[str, str, str]]
"""Packages that we list: name, the extra that brings it ('': the base install), versions that are accepted."""


def _listed() -> tuple[Listed, list[Check]]:
    """Read what our own metadata lists; a check that says so where there is none."""
    from packaging.requirements import Requirement

    try:
        lines = [Requirement(line) for line in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:
        told = "not installed: it is run from a folder, and what it needs is not known"
        return [], [Check("packages", DISTRIBUTION, "broken", told, "everything", "pip install .", required=True)]
    return [
        (each.name, str(each.marker or "").partition("extra ==")[2].strip(" \"'"), str(each.specifier))
        for each in lines
    ], []


def _installed(name: str, accepted: str) -> tuple[str, str]:
    """Return the version of a package, '' where it is absent, and why it will not do, '' where it does."""
    try:
        found = version(name)
    except PackageNotFoundError:
        return "", "not installed"
    return found, "" if _allows(accepted, found) else f"{found} is installed; {accepted} is needed"


def _extras(listed: Listed) -> Iterator[Check]:
    """Look for what the extras bring, by its version alone."""
    for extra, purpose in EXTRAS.items():
        wanted = [(name, *_installed(name, accepted)) for name, of, accepted in listed if of == extra]
        if not wanted:
            continue
        faults = [f"{name}: {why}" for name, _, why in wanted if why]
        found = "; ".join(faults) or ", ".join(f"{name} {found}" for name, found, _ in wanted)
        remedy = install_command(extra) if faults else ""
        yield Check("extras", extra, "missing" if faults else "ok", found, purpose, remedy)


def _caches() -> Iterator[Check]:
    """Look at the size and place of our cache and of the hub's."""
    hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    try:
        from compress.data.cache import home  # pyarrow, which may be what is broken
    except ImportError as error:
        yield Check("machine", "cache", "broken", f"cannot be looked at: {error}", "work that is kept")
    else:
        above = next(each for each in (home(), *home().absolute().parents) if each.exists())
        writable = above.is_dir() and os.access(above, os.W_OK | os.X_OK)
        yield _cache("cache", home(), writable, "what is computed once; COMPRESS_HOME names another place")
    yield _cache("hub cache", hub, True, "models and data sets of the hub; HF_HOME names another place")


def _cache(name: str, folder: Path, writable: bool, purpose: str) -> Check:
    size = sum(
        os.lstat(Path(above, each)).st_size for above, _, names in os.walk(folder) for each in names
        if not Path(above, each).is_symlink()
    )  # fmt: skip
    found = f"{size / 1e6:,.1f} MB in {folder}" + ("" if writable else ", which cannot be written")
    state: State = "ok" if writable else "broken"
    return Check("machine", name, state, found, purpose, required=name == "cache", values={"bytes": size})


def _tool(name: str, programs: Sequence[str], purpose: str, packages: Mapping[str, str]) -> Check:
    """Look for a program by its names, and ask it for its version."""
    found = next(filter(None, map(shutil.which, programs)), None)
    if found is None:
        manager = next((each for each in MANAGERS if each in packages and shutil.which(each)), None)
        remedy = f"{MANAGERS[manager]} {packages[manager]}" if manager else ""
        return Check("tools", name, "missing", f"no {' or '.join(programs[:2])} on the PATH", purpose, remedy)
    asked = [found, "-V" if name == "ssh" else "version" if name == "adb" else "--version"]
    try:
        done = subprocess.run(
            asked, capture_output=True, text=True, timeout=TOOL_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("tools", name, "broken", f"{found} does not run: {type(error).__name__}", purpose)
    words = ((done.stdout or done.stderr).strip().splitlines() or [""])[0]
    if done.returncode:
        return Check("tools", name, "broken", f"{found} ends with code {done.returncode}: {words}", purpose)
    return Check("tools", name, "ok", f"{words or 'of no version that it tells'}, {found}", purpose)


_HUB: Final = "models and data sets by their names on the hub; files, caches and embedded ones work without it"
_UNREACHED: Final = "cannot be reached: offline, or behind a proxy that refuses"


def _hub() -> Check:
    """Ask the hub, or the mirror that HF_ENDPOINT names, for an answer, unless HF_HUB_OFFLINE says not to."""
    from compress.data.sources import reaches

    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return Check("tools", "hub", "missing", "not asked: HF_HUB_OFFLINE is set", _HUB, "unset HF_HUB_OFFLINE")
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if reaches(endpoint):
        return Check("tools", "hub", "ok", f"{endpoint} answers", _HUB)
    return Check("tools", "hub", "missing", f"{endpoint} {_UNREACHED}", _HUB)


def _probe() -> dict[str, dict[str, Any]]:
    """Import LOADED in a process of its own; return its lines by what they are of: a package, `gpu`, fp32, bf16.

    A package that ends the process, or takes too long, gets that for an error, and those after it get no line.
    """
    command = [sys.executable, "-P", str(probe.__file__), json.dumps(LOADED), str(_cores())]
    lines: queue.Queue[str] = queue.Queue()
    found: dict[str, dict[str, Any]] = {}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as child:  # type: ignore[call-overload]  # in a dict

        def read() -> None:
            for line in child.stdout:
                lines.put(line)
            lines.put("")

        threading.Thread(target=read, daemon=True).start()
        end = time.monotonic() + PROBE_SECONDS
        why = ""
        try:
            while line := lines.get(timeout=max(0.0, end - time.monotonic())):
                told = json.loads(line)
                found[told.get("package", told.get("product", "gpu"))] = told
            if child.wait():
                why = f"ends the process with code {child.returncode}"
        except queue.Empty:
            why = f"does not load within {PROBE_SECONDS:.0f} s"
        finally:
            child.kill()
    if why:
        at = next((name for name in LOADED if name not in found), "torch")
        found[at] = {"error": why}
    return found


def _packages(listed: Listed, probed: Mapping[str, Mapping[str, Any]]) -> Iterator[Check]:
    """Judge the packages of the base install, by version and by what became of importing them; then what they show."""
    for name, extra, accepted in listed:
        if extra:
            continue
        found, why = _installed(name, accepted)
        if not why and "error" in probed.get(name, {}):
            why = f"{found} does not load: {probed[name]['error']}"
        state: State = "ok" if not why else "broken" if found else "missing"
        remedy = f"pip install '{name}{accepted}'" if why else ""
        yield Check("packages", name, state, why or found, "everything" if why else "", remedy, required=True)
    if "gpu" in probed:
        yield _gpu(probed["gpu"])
    for precision in ("fp32", "bf16"):
        if speeds := probed.get(precision, {}).get("gflops", {}):
            words = ", ".join(
                f"{speed:,.0f} by {count} thread{'s' * (count != '1')}" for count, speed in speeds.items()
            )
            values = {f"gflops_{count}_threads": speed for count, speed in speeds.items()}
            yield Check("compute", f"{precision} products", "ok", f"10^9 operations/s: {words}", values=values)


def _gpu(told: Mapping[str, Any]) -> Check:
    if told["gpu"]:
        return Check("compute", "gpu", "ok", told["gpu"], "faster training", values={"bytes": told.get("bytes", 0)})
    purpose = "faster training; everything works without one"
    if shutil.which("nvidia-smi"):
        why = (
            "torch does not see the GPU that nvidia-smi is for: it is built for processors alone, or the driver is old"
        )
        return Check("compute", "gpu", "missing", why, purpose, "pip uninstall -y torch && pip install torch")
    return Check("compute", "gpu", "missing", "none", purpose)
