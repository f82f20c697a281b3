"""Parse the arguments of `compress bench`: settings, CPUs, durations, files."""

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from compress.errors import did_you_mean
from compress.exporters import formats
from compress.records.latency import DeviceError, Setting

DEFAULT_SEQ = 128
"""Default number of tokens in a text, if the model takes that many."""
SECONDS_OF_UNIT = {"s": 1.0, "m": 60.0, "h": 3600.0}
RUNTIME_CHOICES = {
    suffix: each.runtime
    for each in formats.known()
    for suffix in each.suffixes
    if each.runtime
}
"""Suffixes of model files that can be raced without a bundle, and the Python package
that runs each."""


def parse_settings(threads: str, batch: str, seq: str) -> list[Setting]:
    """Combine three comma-separated lists into settings. Raises DeviceError."""
    lists = [
        parse_numbers(name, text)
        for name, text in (("threads", threads), ("batch", batch), ("seq", seq))
    ]
    return [Setting(*values) for values in product(*lists)]


def parse_duration(text: str) -> float:
    """Parse `90s`, `5m` or `1h` into seconds. Raises DeviceError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if not match or float(match[1]) == 0:
        raise DeviceError(
            f"--sustain {text}: expected a duration such as 90s, 5m or 1h"
        )
    return float(match[1]) * SECONDS_OF_UNIT[match[2]]


def parse_cpus(text: str) -> tuple[int, ...]:
    """Parse a list of CPUs such as `0-3,6`; '' is empty. Raises DeviceError."""
    cpus: set[int] = set()
    for part in text.split(",") if text else ():
        ends = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not ends or int(ends[2] or ends[1]) < int(ends[1]):
            raise DeviceError(
                f"--affinity {text}: expected CPUs such as 0-3 or 0,2,4-7"
            )
        cpus.update(range(int(ends[1]), int(ends[2] or ends[1]) + 1))
    return tuple(sorted(cpus))


def format_cpus(cpus: Sequence[int]) -> str:
    """Write (0, 1, 2, 3, 6) as `0-3,6`."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]) for run in runs)


def list_files(paths: Sequence[Path], precision: str = "") -> dict[str, Path]:
    """List the files to race by name: those of a bundle as `runs/sst2/bundle:int8`, a
    lone file by its path.

    `precision`: the bundle files to include, comma-separated; '' includes all. Raises
    BundleError if a folder is not a bundle, DeviceError for a precision that no bundle
    has, or a path given twice.
    """
    from compress.exporters.artifact import Bundle

    wanted = [part.strip() for part in precision.split(",")] if precision else []
    files: dict[str, Path] = {}
    available: set[str] = set()
    without = ""
    for path in paths:
        if path.suffix in RUNTIME_CHOICES:
            named = {str(path): path}
        elif path.is_file():
            raise DeviceError(
                f"{path}: expected the folder of a bundle, or a file ending in "
                f"{', '.join(RUNTIME_CHOICES)}"
            )
        else:
            bundle = Bundle.load(path)
            if bundle.manifest.kind == "generative":
                raise DeviceError(
                    f"{path}: generates text token by token; expected a text encoder"
                )
            in_bundle = bundle.files()
            available |= in_bundle.keys()
            named = {
                f"{path}:{name}": file
                for name, file in in_bundle.items()
                if not wanted or name in wanted
            }
            if not named:
                without = f"{path}: has {', '.join(in_bundle)}"
        if repeated := sorted(named.keys() & files.keys()):
            raise DeviceError(
                f"{repeated[0]}: given twice; to see how noisy the device is, race a "
                "copy of the file"
            )
        files |= named
    if unknown := [name for name in wanted if name not in available]:
        hint = did_you_mean(unknown[0], available)
        raise DeviceError(
            f"--precision {precision}: no bundle has {unknown[0]!r}.{hint}"
        )
    if without:
        raise DeviceError(f"--precision {precision}: none in {without}")
    return files


def parse_percentage(option: str, text: str) -> float:
    """Parse `5%` into 0.05. Raises DeviceError, naming the option."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if not match:
        raise DeviceError(f"--{option} {text}: expected a percentage such as 5%")
    return float(match[1]) / 100


def parse_numbers(name: str, text: str) -> list[int]:
    """Parse a comma-separated list of whole numbers such as `1,2,4`. Raises
    DeviceError, naming the option."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise DeviceError(
            f"--{name} {text}: expected whole numbers separated by commas, such as "
            "1,2,4"
        )
    return [int(part) for part in parts]
