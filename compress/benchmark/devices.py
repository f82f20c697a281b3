"""Open the device that files are measured on: this machine, one over ssh, a browser, an
Android phone."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

from compress.benchmark.arguments import parse_cpus
from compress.benchmark.device import Device
from compress.benchmark.jobs import check_settings
from compress.config.options import DeviceOptions
from compress.errors import did_you_mean
from compress.io import sha256
from compress.progress import Say
from compress.provenance import command_line, timestamp
from compress.records.bench_result import BenchResult
from compress.records.latency import DeviceError, Setting

DEVICE_KINDS = ("local", "ssh", "browser", "adb")


def check_device(options: DeviceOptions) -> tuple[str, str]:
    """Return the kind of device, and which one. Raises DeviceError if there is no such
    device, or for an option that does not apply to it."""
    name = options.device
    kind, colon, where = name.partition(":")
    for option, kinds in (
        ("affinity", ("local", "ssh", "adb")),
        ("timeout", ("ssh", "browser", "adb")),
        ("lan", ("browser",)),
        ("python", ("ssh",)),
        ("native", ("adb",)),
        ("assets", ("browser", "adb")),
        ("webgpu", ("browser", "adb")),
    ):
        is_set = getattr(options, option) != getattr(DeviceOptions, option)
        if is_set and kind in DEVICE_KINDS and kind not in kinds:
            raise DeviceError(
                f"--{option}: does not apply to --device {kind}; it is for "
                f"{', '.join(kinds)}"
            )
    exists = {
        "local": not colon,
        "ssh": bool(where),
        "browser": not colon,
        "adb": bool(where) == bool(colon),
    }
    if not exists.get(kind, False):
        meant = did_you_mean(kind, DEVICE_KINDS) if kind not in DEVICE_KINDS else ""
        raise DeviceError(
            f"--device {name}: no such device; expected local, "
            f"ssh:[user@]host[:port], browser or adb[:SERIAL].{meant}"
        )
    return kind, where


@contextmanager
def open_device(
    name: str,
    *,
    lan: bool = False,
    timeout: float = 60.0,
    say: Say = print,
    affinity: tuple[int, ...] = (),
    python: str = "python3",
    native: Path | None = None,
    assets: Path | None = None,
    webgpu: bool = False,
) -> Iterator[Device]:
    """Open the device of that name, and always close it at the end.

    name      `local`, `ssh:[user@]host[:port]`, `browser`, `adb`, `adb:SERIAL`
    lan       browser: allow other machines on the network to open the page
    timeout   seconds to wait for a device that does not answer
    say       receives messages about progress and about what the user must do
    affinity  the CPUs to run on, where the device allows the choice; empty: the system
              decides
    python    ssh: the remote interpreter that has onnxruntime
    native    adb: the program that measures on the phone, instead of its browser
    assets    browser, adb: the tarball or folder of onnxruntime-web, if npm cannot
              fetch it
    webgpu    browser, adb: run every operator that WebGPU supports on the GPU
    """
    options = DeviceOptions(
        device=name,
        lan=lan,
        timeout=timeout,
        affinity=",".join(map(str, affinity)),
        python=python,
        native=native,
        assets=assets,
        webgpu=webgpu,
    )
    kind, where = check_device(options)
    device: Device
    with ExitStack() as stack:
        if kind == "local":
            from compress.benchmark.local import open_local

            device = stack.enter_context(open_local(affinity=affinity, say=say))
        elif kind == "ssh":
            from compress.benchmark.ssh import open_ssh

            device = stack.enter_context(
                open_ssh(
                    where, python=python, affinity=affinity, timeout=timeout, say=say
                )
            )
        elif kind == "browser":
            from compress.benchmark.browser.device import browser

            device = stack.enter_context(
                browser(lan=lan, timeout=timeout, say=say, assets=assets, webgpu=webgpu)
            )
        else:
            from compress.benchmark.android import (
                connect_phone,
                phone_browser,
                phone_program,
            )

            if affinity and native is None:
                raise DeviceError(
                    "--affinity: a browser chooses its CPUs itself; with --device adb "
                    "it needs --native"
                )
            phone = stack.enter_context(connect_phone(where, timeout))
            if native is not None:
                device = stack.enter_context(
                    phone_program(phone, native, affinity, say)
                )
            else:
                from compress.benchmark.browser.device import browser

                page = partial(
                    browser, timeout=timeout, say=say, assets=assets, webgpu=webgpu
                )
                device = stack.enter_context(phone_browser(phone, page, say))
        yield device


def open_chosen(
    options: DeviceOptions,
    *,
    say: Say = print,
) -> AbstractContextManager[Device]:
    """Open the device that the options describe; see `open_device`."""
    return open_device(
        options.device,
        lan=options.lan,
        timeout=options.timeout,
        say=say,
        affinity=parse_cpus(options.affinity),
        python=options.python,
        native=options.native,
        assets=options.assets,
        webgpu=options.webgpu,
    )


def measure(
    device: Device,
    files: Mapping[str, Path],
    settings: Sequence[Setting],
    *,
    rounds: int,
    runs: int,
    seconds: float | None,
) -> BenchResult:
    """Race the files at every setting; then, if `seconds` is given, run each alone for
    that long at the first."""
    check_settings(device.name, device.facts().get("cores", ""), files, settings)
    digests = {name: sha256(path) for name, path in files.items()}
    latencies = device.race(files, settings, rounds=rounds, runs=runs)
    sustained = (
        device.sustain(files, settings[0], seconds=seconds)
        if seconds is not None
        else []
    )
    return BenchResult(
        device=device.name,
        machine=device.facts(),
        date=timestamp(),
        command=command_line(),
        latencies=tuple(latencies),
        sustained=tuple(sustained),
        sha256=digests,
    )
