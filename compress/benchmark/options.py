"""Parse the words of `compress bench`: settings, CPUs, spans of time, files."""

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from compress.errors import did_you_mean
from compress.records.latency import DeviceError, Setting

SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
LONE = (".onnx", ".xml", ".tflite")
"""Files that are raced without a bundle around them."""


def settings(threads: str, batch: str, seq: str) -> list[Setting]:
    """Combine three comma-separated lists into settings. Raises DeviceError."""
    lists = [numbers(name, text) for name, text in (("threads", threads), ("batch", batch), ("seq", seq))]
    return [Setting(*values) for values in product(*lists)]


def span(text: str) -> float:
    """Parse `90s`, `5m` or `1h` into seconds. Raises DeviceError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if not found or float(found[1]) == 0:
        raise DeviceError(f"--sustain {text}: expected a span of time, as in 90s, 5m or 1h")
    return float(found[1]) * SECONDS[found[2]]


def cpus(text: str) -> tuple[int, ...]:
    """Parse the CPUs in `0-3,6`; none in ''. Raises DeviceError."""
    found: set[int] = set()
    for part in text.split(",") if text else ():
        ends = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not ends or int(ends[2] or ends[1]) < int(ends[1]):
            raise DeviceError(f"--affinity {text}: expected CPUs, as in 0-3 or 0,2,4-7")
        found.update(range(int(ends[1]), int(ends[2] or ends[1]) + 1))
    return tuple(sorted(found))


def cpu_list(chosen: Sequence[int]) -> str:
    """Write (0, 1, 2, 3, 6) as `0-3,6`."""
    runs: list[list[int]] = []
    for cpu in chosen:
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]) for run in runs)


def files(paths: Sequence[Path], precision: str = "") -> dict[str, Path]:
    """Name the files to race: every bundle's files, as `runs/sst2/bundle:int8`, and lone ones, by their path.

    `precision`: those to keep, comma-separated; '' keeps all. Raises BundleError for what is no bundle, DeviceError for
    a precision that none has, or a path given twice.
    """
    from compress.exporters.artifact import Bundle

    wanted = [part.strip() for part in precision.split(",")] if precision else []
    found: dict[str, Path] = {}
    known: set[str] = set()
    for path in paths:
        if path.suffix in LONE:
            named = {str(path): path}
        elif path.is_file():
            raise DeviceError(f"{path}: expected a bundle's folder, or a file that ends in {', '.join(LONE)}")
        else:
            bundle = Bundle.load(path)
            if bundle.manifest.kind == "generative":
                raise DeviceError(f"{path}: writes text token by token; expected a model that reads a text as a whole")
            held = bundle.files()
            known |= held.keys()
            named = {f"{path}:{which}": file for which, file in held.items() if not wanted or which in wanted}
        if twice := sorted(named.keys() & found.keys()):
            raise DeviceError(f"{twice[0]}: given twice; to see how noisy the device is, race a copy of the file")
        found |= named
    if unknown := [each for each in wanted if each not in known]:
        raise DeviceError(f"--precision {precision}: no bundle has {unknown[0]!r}.{did_you_mean(unknown[0], known)}")
    return found


def place(out: Path | None, option: str = "out", example: str = "latency.json") -> None:
    """Raise DeviceError where the file of an option could not be written, before anything is measured."""
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        what = "is a folder" if out.is_dir() else f"there is no folder {out.parent}"
        raise DeviceError(f"--{option} {out}: {what}; expected a file to write, as in {example}")


def percentage(option: str, text: str) -> float:
    """Parse `5%` into 0.05. Raises DeviceError, naming the option."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if not found:
        raise DeviceError(f"--{option} {text}: expected a percentage, as in 5%")
    return float(found[1]) / 100


def numbers(name: str, text: str) -> list[int]:
    """Parse a comma-separated list of whole numbers, such as `1,2,4`. Raises DeviceError, naming the option."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise DeviceError(f"--{name} {text}: expected whole numbers separated by commas, as in 1,2,4")
    return [int(part) for part in parts]
