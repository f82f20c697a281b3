"""Open the device that files are measured on: this machine, one over ssh, a browser, an Android phone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from compress.benchmark.jobs import check
from compress.benchmark.options import cpus
from compress.config.options import DeviceOptions
from compress.errors import did_you_mean
from compress.exporters.session import EncodedRow
from compress.io import sha256
from compress.provenance import command_line
from compress.records.bench_result import BenchResult
from compress.records.latency import DeviceError, Latency, Setting, Sustained

KINDS = ("local", "ssh", "browser", "adb")


class Device(Protocol):
    """An opened device. Everything raises DeviceError where the device fails, ExportError for a file that is no text
    encoder; neither leaves a process or a file behind."""

    @property
    def name(self) -> str:
        """Name the device: `local`, `ssh:pi`, `browser`, `adb:SERIAL`."""

    def facts(self) -> dict[str, str]:
        """Return what the figures are measured on: processor, cores, instructions, governor, temperature, system,
        runtime."""

    def race(self, files: Mapping[str, Path], settings: Sequence[Setting], *, rounds: int, runs: int) -> list[Latency]:
        """Measure the latency of each file at each setting: settings in the order given, files within, interleaved."""

    def sustain(self, files: Mapping[str, Path], setting: Setting, *, seconds: float) -> list[Sustained]:
        """Run each file without a pause for `seconds`, one file after another, in the order given."""

    def logits(self, file: Path, rows: Sequence[EncodedRow]) -> list[NDArray[np.float32]]:
        """Compute what the file answers there, each row by itself: (outputs,), or (tokens, outputs) of a tokenwise
        task."""


@contextmanager
def open_device(
    name: str,
    *,
    lan: bool = False,
    timeout: float = 60.0,
    say: Callable[[str], None] = print,
    affinity: tuple[int, ...] = (),
    python: str = "python3",
    native: Path | None = None,
    assets: Path | None = None,
    webgpu: bool = False,
) -> Iterator[Device]:
    """Open the device of that name, and close it at the end, whatever happens.

    name     `local`, `ssh:[user@]host[:port]`, `browser`, `adb`, `adb:SERIAL`
    lan      browser: whether other machines of the network may open the page
    timeout  seconds until a device that does not answer is given up
    say      is told what the user must do or wait for
    affinity the CPUs to run on, where the device can choose; none: wherever its system likes
    python   ssh: the interpreter there that has onnxruntime
    native   adb: the program that measures on the phone, instead of its browser
    assets   browser, adb: onnxruntime-web's tarball or folder, where npm cannot get it
    webgpu   browser, adb: whether to run on the GPU what it has kernels for
    """
    kind, colon, where = name.partition(":")
    for option, given, kinds in (
        ("affinity", affinity, ("local", "ssh", "adb")),
        ("lan", lan, ("browser",)),
        ("python", python != "python3", ("ssh",)),
        ("native", native, ("adb",)),
        ("assets", assets, ("browser", "adb")),
        ("webgpu", webgpu, ("browser", "adb")),
    ):
        if given and kind in KINDS and kind not in kinds:
            raise DeviceError(f"--{option}: means nothing to --device {kind}; it is for {', '.join(kinds)}")
    if kind == "local" and not colon:
        from compress.benchmark.local import local

        with local(affinity=affinity, say=say) as device:
            yield device
    elif kind == "ssh" and where:
        from compress.benchmark.ssh import ssh

        with ssh(where, python=python, affinity=affinity, timeout=timeout, say=say) as device:
            yield device
    elif kind == "browser" and not colon:
        from compress.benchmark.browser.device import browser

        with browser(lan=lan, timeout=timeout, say=say, assets=assets, webgpu=webgpu) as page:
            yield page
    elif kind == "adb" and bool(where) == bool(colon):
        from compress.benchmark.android import connect_phone, phone_browser

        if affinity and native is None:
            raise DeviceError("--affinity: a browser chooses its CPUs itself; with --device adb it needs --native")
        with connect_phone(where, timeout) as phone:
            if native is not None:
                from compress.benchmark.android import phone_program

                with phone_program(phone, native, affinity, say) as program:
                    yield program
            else:
                from compress.benchmark.browser.device import browser

                visiting = partial(browser, timeout=timeout, say=say, assets=assets, webgpu=webgpu)
                with phone_browser(phone, visiting, say) as there:
                    yield there
    else:
        raise DeviceError(
            f"--device {name}: no such device; expected local, ssh:[user@]host[:port], browser, adb or adb:SERIAL."
            + (did_you_mean(kind, KINDS) if kind not in KINDS else "")
        )


def open_chosen(options: DeviceOptions, *, say: Callable[[str], None] = print) -> AbstractContextManager[Device]:
    """Open the device that the options name: see `open_device`."""
    return open_device(
        options.device, lan=options.lan, timeout=options.timeout, say=say, affinity=cpus(options.affinity),
        python=options.python, native=options.native, assets=options.assets, webgpu=options.webgpu,
    )  # fmt: skip


def measure(
    device: Device,
    files: Mapping[str, Path],
    settings: Sequence[Setting],
    *,
    rounds: int,
    runs: int,
    seconds: float | None,
) -> BenchResult:
    """Race the files at every setting; then, where `seconds` is given, run each alone for so long at the first."""
    check(device.name, device.facts().get("cores", ""), files, settings)
    digests = {name: sha256(path) for name, path in files.items()}
    latencies = device.race(files, settings, rounds=rounds, runs=runs)
    sustained = device.sustain(files, settings[0], seconds=seconds) if seconds is not None else []
    return BenchResult(
        device=device.name,
        machine=device.facts(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command_line(),
        latencies=tuple(latencies),
        sustained=tuple(sustained),
        sha256=digests,
    )
