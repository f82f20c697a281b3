"""Check what this machine has for each command, and name the command that installs what
is missing."""

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
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from compress.arguments import check_arguments
from compress.benchmark import probe
from compress.benchmark.remote import agent
from compress.exporters import formats
from compress.machine import count_cores, measure_memory
from compress.provenance import (
    DISTRIBUTION,
    find_problem,
    install_command,
    list_requirements,
)
from compress.records.diagnosis import Check, CheckState, Diagnosis

if TYPE_CHECKING:
    from packaging.requirements import Requirement

LOADED: Final = (
    "numpy",
    "torch",
    "pyarrow",
    "onnx",
    "onnxruntime",
    "safetensors",
    "scipy",
    "transformers",
)
"""Packages to import: their compiled code may be for another processor or system."""
EXTRAS: Final[Mapping[str, str]] = {
    "demo": "the embedded teacher minilm",
    **{
        each.extra.name: each.extra.purpose
        for each in formats.known()
        if each.extra is not None
    },
    "postgresql": "a compress search whose --storage is a PostgreSQL database, for "
    "workers on many machines",
    "mlflow": "--track mlflow; TensorBoard is in the base install",
    "trackio": "--track trackio",
    "wandb": "--track wandb",
    "lan": "the QR code of compress bench --device browser --lan",
    "fast": "much faster tokenization; without it, tokenizers yields the same tokens",
    "gguf": "--teacher model.gguf, a model in the format of llama.cpp",
    "ray": "bundles in Ray Data (docs/engines.md)",
    "spark": "bundles in Spark (docs/engines.md), which needs Java too",
}
"""The extras of pyproject.toml for users, and what each is needed for."""


@dataclass(frozen=True)
class Tool:
    """A program that some commands need.

    programs  its possible names
    purpose   what it is needed for
    package   its package in most package managers; others: manager -> another name
    """

    programs: tuple[str, ...]
    purpose: str
    package: str
    others: Mapping[str, str]


TOOLS: Final[Mapping[str, Tool]] = {
    "browser": Tool(
        (
            "chromium",
            "chromium-browser",
            "google-chrome",
            "google-chrome-stable",
            "chrome",
            "msedge",
            "firefox",
        ),
        "compress bench --device browser on this machine, compress demo --serve; --lan "
        "uses a phone's instead",
        "chromium",
        {"winget": "Google.Chrome"},
    ),
    "node": Tool(
        ("node",),
        "npm",
        "nodejs",
        {"brew": "node", "winget": "OpenJS.NodeJS"},
    ),
    "npm": Tool(
        ("npm",),
        "compress bench --device browser and compress demo, for onnxruntime-web; "
        "--assets takes a file instead",
        "npm",
        {"brew": "node", "winget": "OpenJS.NodeJS"},
    ),
    "adb": Tool(
        ("adb",),
        "compress bench --device adb, a phone on a cable",
        "android-tools",
        {
            "apt-get": "adb",
            "brew": "android-platform-tools",
            "winget": "Google.PlatformTools",
        },
    ),
    "ssh": Tool(
        ("ssh",),
        "compress bench --device ssh:HOST",
        "openssh",
        {
            "apt-get": "openssh-client",
            "dnf": "openssh-clients",
            "winget": "Microsoft.OpenSSH.Preview",
        },
    ),
}
"""Programs that some commands need."""
MANAGERS: Final[Mapping[str, str]] = {
    "apt-get": "sudo apt-get install",
    "dnf": "sudo dnf install",
    "pacman": "sudo pacman -S",
    "brew": "brew install",
    "winget": "winget install",
}
TOOL_SECONDS: Final = 5.0
"""Seconds that a program may take to print its version, and the hub to answer."""
DOCTOR_SECONDS: Final = 180.0
"""Seconds after which a package that does not finish loading counts as broken; all of
them take 3 to 8."""
LEAST_DISK = 5e9
LEAST_MEMORY = 4e9
"""Bytes below which a run is likely to fail."""


@check_arguments
def doctor(*, say: Callable[[Check], object] = lambda _: None) -> Diagnosis:
    """Check machine, packages, extras, programs, hub and caches, and name the command
    that installs what is missing.

    say     called with each check as soon as it is done, the quick ones first

    Nothing is installed, fetched or changed. The packages in LOADED are imported, and
    matrix products are timed for half a second, in a separate process, so that a broken
    package is reported. Every check has a time limit.
    """
    checks: list[Check] = []

    def add(check: Check) -> None:
        checks.append(check)
        say(check)

    with ThreadPoolExecutor(1) as pool:
        tools = {
            name: _run_in_thread(check_tool, name, tool) for name, tool in TOOLS.items()
        }
        hub = _run_in_thread(check_hub)
        probed = pool.submit(probe_packages)
        try:
            wanted = str(metadata(DISTRIBUTION)["Requires-Python"])
            requirements = list_requirements()
        except PackageNotFoundError:
            wanted = ">=3.11"
            requirements = []
        for check in (*check_machine(wanted), *check_extras(), *check_caches()):
            add(check)
        for name, future in tools.items():
            purpose = TOOLS[name].purpose
            silent = Check("tools", name, "broken", "does not answer", purpose)
            add(_wait(future, TOOL_SECONDS, silent))
        add(
            _wait(
                hub,
                TOOL_SECONDS,
                Check("tools", "hub", "missing", _UNREACHABLE, _HUB),
            )
        )
        if not requirements:
            found = (
                "not installed: it runs from a folder, and its requirements are unknown"
            )
            remedy = "pip install ."
            package = partial(
                Check,
                "packages",
                DISTRIBUTION,
                "broken",
                required=True,
            )
            add(package(found, needed_for="everything", remedy=remedy))
        for check in check_packages(requirements, probed.result()):
            add(check)
    return Diagnosis(tuple(checks))


def _run_in_thread(work: Callable[..., Check], *arguments: Any) -> "Future[Check]":
    """Run it in a daemon thread, so that a name server that does not answer cannot
    delay the exit."""
    future: Future[Check] = Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _wait(future: "Future[Check]", seconds: float, otherwise: Check) -> Check:
    try:
        return future.result(seconds)
    except TimeoutError:
        return otherwise


def check_machine(python: str) -> Iterator[Check]:
    """Check Python (which must be in the versions `python`), processor, memory and
    disk."""
    from packaging.specifiers import SpecifierSet

    accepted = SpecifierSet(python).contains(
        platform.python_version(), prereleases=True
    )
    yield Check(
        "machine",
        "python",
        "ok" if accepted else "broken",
        f"{platform.python_version()} at {sys.executable}; {python} is needed",
        "everything",
        required=True,
    )
    facts = agent.facts()
    yield Check(
        "machine",
        "processor",
        "ok",
        f"{facts['cpu']}, {facts['cores']} cores, load {facts.get('load', 'unknown')}",
        values={"cores": count_cores()},
    )
    sets = facts.get("instructions", "")
    fast = [
        what
        for what, names in _FAST.items()
        if any(name in sets.split() for name in names)
    ]
    yield Check(
        "machine",
        "instructions",
        "ok",
        f"{sets or 'none known'}: fast {' and '.join(fast) or 'fp32 only'}",
    )
    total, free = measure_memory()
    if total:
        yield Check(
            "machine",
            "memory",
            "ok" if total >= LEAST_MEMORY else "missing",
            f"{total / 1e9:.1f} GB, {free / 1e9:.1f} GB of it free",
            f"training: at least {LEAST_MEMORY / 1e9:.0f} GB",
            values={"total_bytes": total, "free_bytes": free},
        )
    free = shutil.disk_usage(Path.cwd()).free
    yield Check(
        "machine",
        "disk",
        "ok" if free >= LEAST_DISK else "missing",
        f"{free / 1e9:.1f} GB free in {Path.cwd()}",
        f"a run: at least {LEAST_DISK / 1e9:.0f} GB",
        values={"free_bytes": free},
    )


_FAST: Final = {
    "int8": ("avx_vnni", "avx512_vnni", "amx_int8", "i8mm"),
    "bf16": ("avx512_bf16", "amx_int8"),
}
"""Instruction sets that make a format fast; every processor with AMX has it for
both."""


def check_extras() -> Iterator[Check]:
    """Check the versions of what the extras install, without importing it."""
    for extra, purpose in EXTRAS.items():
        try:
            installed = [
                (each.name, *find_problem(each)) for each in list_requirements(extra)
            ]
        except PackageNotFoundError:
            return
        faults = [f"{name}: {why}" for name, _, why in installed if why]
        found = "; ".join(faults) or ", ".join(
            f"{name} {found}" for name, found, _ in installed
        )
        remedy = install_command(extra) if faults else ""
        yield Check(
            "extras",
            extra,
            "missing" if faults else "ok",
            found,
            purpose,
            remedy,
        )


def check_caches() -> Iterator[Check]:
    """Check size and place of our cache and of the hub's."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE

        from compress.data.cache import home  # imports pyarrow, which may be broken
    except ImportError as error:
        yield Check(
            "machine",
            "cache",
            "broken",
            f"cannot be checked: {error}",
            "cached results",
        )
        return
    existing = next(
        path for path in (home(), *home().absolute().parents) if path.exists()
    )
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    yield _check_cache(
        "cache",
        home(),
        writable,
        "cached results; set COMPRESS_HOME for another place",
    )
    yield _check_cache(
        "hub cache",
        Path(HF_HUB_CACHE),
        True,
        "models and data sets of the hub; set HF_HOME for another place",
    )


def _check_cache(name: str, folder: Path, writable: bool, purpose: str) -> Check:
    size = sum(
        os.lstat(Path(above, each)).st_size
        for above, _, names in os.walk(folder)
        for each in names
        if not Path(above, each).is_symlink()
    )
    found = f"{size / 1e6:,.1f} MB in {folder}" + (
        "" if writable else ", which cannot be written"
    )
    return Check(
        "machine",
        name,
        "ok" if writable else "broken",
        found,
        purpose,
        required=name == "cache",
        values={"bytes": size},
    )


def check_tool(name: str, tool: Tool) -> Check:
    """Look for a program by its possible names, and run it to get its version."""
    check = partial(Check, "tools", name, needed_for=tool.purpose)
    found = next(filter(None, map(shutil.which, tool.programs)), None)
    if found is None:
        manager = next(filter(shutil.which, MANAGERS), None)
        package = tool.others.get(manager or "", tool.package)
        return check(
            "missing",
            f"no {' or '.join(tool.programs[:2])} on the PATH",
            remedy=f"{MANAGERS[manager]} {package}" if manager else "",
        )
    command = [found, {"ssh": "-V", "adb": "version"}.get(name, "--version")]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TOOL_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return check("broken", f"{found} does not run: {type(error).__name__}")
    line = ((done.stdout or done.stderr).strip().splitlines() or [""])[0]
    if done.returncode:
        return check("broken", f"{found} exits with code {done.returncode}: {line}")
    return check("ok", f"{line or 'unknown version'}, {found}")


_HUB: Final = (
    "models and data sets from the hub; files, caches and embedded ones work without it"
)
_UNREACHABLE: Final = "cannot be reached: offline, or blocked by a proxy"


def check_hub() -> Check:
    """Check that the hub, or the mirror in HF_ENDPOINT, can be reached, unless
    HF_HUB_OFFLINE is set."""
    from compress.data.sources import is_reachable

    check = partial(Check, "tools", "hub", needed_for=_HUB)
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        found = "not checked: HF_HUB_OFFLINE is set"
        return check("missing", found, remedy="unset HF_HUB_OFFLINE")
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if is_reachable(endpoint):
        return check("ok", f"{endpoint} answers")
    return check("missing", f"{endpoint} {_UNREACHABLE}")


def probe_packages() -> dict[str, dict[str, Any]]:
    """Import LOADED in a separate process; return its reports by package, and for
    `gpu`, `fp32` and `bf16`.

    A package that ends the process or takes too long is reported with an error;
    packages after it are not reported.
    """
    command = [
        sys.executable,
        "-P",
        str(probe.__file__),
        json.dumps(LOADED),
        str(count_cores()),
    ]
    lines: queue.Queue[str] = queue.Queue()
    found: dict[str, dict[str, Any]] = {}
    with subprocess.Popen(
        command,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as child:

        def read() -> None:
            assert child.stdout is not None
            for line in child.stdout:
                lines.put(line)
            lines.put("")

        threading.Thread(target=read, daemon=True).start()
        end = time.monotonic() + DOCTOR_SECONDS
        why = ""
        try:
            while line := lines.get(timeout=max(0.0, end - time.monotonic())):
                report = json.loads(line)
                found[report.get("package", report.get("product", "gpu"))] = report
            if child.wait():
                why = f"exits with code {child.returncode}"
        except queue.Empty:
            why = f"does not load within {DOCTOR_SECONDS:.0f} s"
        finally:
            child.kill()
    if why:
        culprit = next((name for name in LOADED if name not in found), "torch")
        found[culprit] = {"error": why}
    return found


def check_packages(
    requirements: "Sequence[Requirement]", probed: Mapping[str, Mapping[str, Any]]
) -> Iterator[Check]:
    """Check the packages of the base install, by version and by importing them; then
    GPU and speed."""
    for requirement in requirements:
        name = requirement.name
        found, why = find_problem(requirement)
        if not why and "error" in probed.get(name, {}):
            why = f"{found} does not load: {probed[name]['error']}"
        check = partial(Check, "packages", name, required=True)
        if not why:
            yield check("ok", found)
            continue
        remedy = f"pip install '{name}{requirement.specifier}'"
        state: CheckState = "broken" if found else "missing"
        yield check(state, why, "everything", remedy)
    if "gpu" in probed:
        yield _check_gpu(probed["gpu"])
    for precision in ("fp32", "bf16"):
        if speeds := probed.get(precision, {}).get("gflops", {}):
            words = ", ".join(
                f"{speed:,.0f} with {count} thread{'s' * (count != '1')}"
                for count, speed in speeds.items()
            )
            values = {
                f"gflops_{count}_threads": speed for count, speed in speeds.items()
            }
            yield Check(
                "compute",
                f"{precision} products",
                "ok",
                f"10^9 operations/s: {words}",
                values=values,
            )


def _check_gpu(report: Mapping[str, Any]) -> Check:
    check = partial(Check, "compute", "gpu")
    if report["gpu"]:
        size = {"bytes": report.get("bytes", 0)}
        return check("ok", report["gpu"], "faster training", values=size)
    purpose = "faster training; everything works without a GPU"
    if not shutil.which("nvidia-smi"):
        return check("missing", "none", purpose)
    why = (
        "torch does not see the GPU that nvidia-smi reports: it is a CPU-only "
        "build, or the driver is too old"
    )
    remedy = "pip uninstall -y torch && pip install torch"
    return check("missing", why, purpose, remedy)
