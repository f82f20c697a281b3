"""Measure the latency of bundles and model files on a device."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from compress.benchmark import arguments
from compress.benchmark.devices import measure, open_chosen
from compress.config.options import DeviceOptions
from compress.records.bench_result import BenchResult
from compress.records.latency import DeviceError, Setting


def bench(
    files: Sequence[str | Path],
    *,
    device: DeviceOptions = DeviceOptions(),
    precision: str = "",
    threads: Sequence[int] = (1,),
    batch: Sequence[int] = (1,),
    seq: Sequence[int] = (128,),
    rounds: int = 8,
    runs: int = 15,
    sustain: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Measure the latency of files on a device: interleaved, warmed up, in two passes, with a verdict on noise.

    files      folders of bundles, or .onnx, .xml or .tflite files; they are raced together
    device     where to measure, and how to connect: see `DeviceOptions`
    precision  which files of the bundles to measure, such as "int8,fp32"; default: all of them
    threads, batch, seq    the settings: every combination of threads, texts per batch, and tokens per text
    rounds, runs           interleaved rounds per setting, half of them in each pass; timed runs per round
    sustain    seconds for which each file then runs without a pause, at the first setting; None: skip this

    Raises BundleError for a folder that is no bundle, DeviceError for a device that fails or cannot be reached.
    """
    chosen = arguments.list_files([Path(file) for file in files], precision)
    settings = [Setting(*values) for values in product(threads, batch, seq)]
    with open_chosen(device, say=say) as opened:
        return measure(opened, chosen, settings, rounds=rounds, runs=runs, seconds=sustain)


def bench_visitors(
    files: Sequence[str | Path],
    visitors: int,
    *,
    device: DeviceOptions,
    say: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> Iterator[BenchResult]:
    """Measure in several browsers, one after the other; yield the result of each.

    Each browser gets its own link, and a name such as `browser 1`: two phones cannot be told apart by what a page over
    plain http reports. Raises the errors of `bench`, and DeviceError if the device is no browser.
    """
    if device.device != "browser":
        raise DeviceError(f"--visitors {visitors}: only applies to --device browser, not {device.device}")
    for name in (f"browser {number}" for number in range(1, visitors + 1)):
        say(f"{name} of {visitors}")
        yield replace(bench(files, device=device, say=say, **options), device=name)
