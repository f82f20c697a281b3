"""Measure the latency of shapes with random weights, exported and quantised like a
shipped model.

Latency does not depend on the weights, so nothing is trained: a shape is built,
exported as by `Bundle.write`, and timed in turns with others. Other processes only make
runs slower, so the fastest tenth of the runs counts, once another race confirms it;
docs/latency-prediction.md describes its accuracy on a busy machine.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from compress.benchmark.device import Device
from compress.errors import SearchError, StudentError, did_you_mean
from compress.exporters.fp16 import to_float16
from compress.exporters.int8 import quantize_dynamic
from compress.exporters.manifest import BUNDLE_FILES, Precision
from compress.exporters.onnx import to_onnx
from compress.exporters.session import rows_for
from compress.exporters.weight_only import quantize_weights
from compress.kinds import Kind
from compress.latency.features import Terms
from compress.models import heads
from compress.models.sharing import share_again
from compress.progress import Say, show_progress
from compress.records.latency import Latency, Setting
from compress.slicing.shape import positions

Configs = Mapping[str, Any]
"""The config of each shape, by its name."""

AGREE = 1.05
"""The largest ratio between a file's p10 in its best two races for both to count as
undisturbed."""

RACED_TOGETHER = 8
"""Files open on the device at once; a phone cannot hold more."""

SWEEPS = 3
MORE = 5
"""Races of every file, and further races of disturbed files: two in a row can be
disturbed alike."""


@dataclass(frozen=True)
class Sample:
    """A measured shape. ms: see `race`; noisy: no second race confirms it."""

    name: str
    terms: Terms
    ms: float
    noisy: bool = False
    noise: str = ""
    file_mb: float | None = None


def sample(
    configs: Configs,
    device: Device,
    setting: Setting,
    *,
    precision: Precision | Mapping[str, Precision] = "int8",
    kind: Kind | None = "classification",
    segments: bool = True,
    files: Mapping[str, Path] = MappingProxyType({}),
    rounds: int = 4,
    runs: int = 10,
    say: Say = lambda _: None,
) -> tuple[Sample, ...]:
    """Measure shapes for a LatencyModel to fit to, and other `files` in the same race:
    see `exported` and `race`.

    Raises SearchError for a shape that cannot be built or has too few positions,
    ExportError from the export, DeviceError from the device. Leaves no file behind.
    """
    with exported(
        configs, setting, precision=precision, kind=kind, segments=segments, say=say
    ) as exports:
        files = {**exports, **files}
        terms = {
            name: Terms.from_config(config, setting, kind)
            for name, config in configs.items()
        }
        latencies = race(files, device, setting, rounds=rounds, runs=runs, say=say)
        return tuple(
            Sample(
                name=name,
                terms=terms.get(name, Terms({}, 0.0)),
                ms=each.p50_ms,
                noisy=each.noisy,
                noise=each.noise,
                file_mb=files[name].stat().st_size / 1e6,
            )
            for name, each in latencies.items()
        )


@contextmanager
def exported(
    configs: Configs,
    setting: Setting,
    *,
    precision: Precision | Mapping[str, Precision] = "int8",
    kind: Kind | None = "classification",
    segments: bool = True,
    say: Say = lambda _: None,
) -> Iterator[dict[str, Path]]:
    """Yield ONNX files of models of these configs, with random weights and the head of
    `kind`, deleted on exit.

    precision: of all files, or by name. kind: None for no head. segments: whether the
    tokenizer makes token types (`exporters.onnx.makes_segments`). The weights are the
    same each time, and torch's generator is not affected.
    """
    precisions = (
        dict.fromkeys(configs, precision) if isinstance(precision, str) else precision
    )
    for each in precisions.values():
        if each not in BUNDLE_FILES:
            raise SearchError(
                f"precision {each}: no such "
                f"precision.{did_you_mean(each, BUNDLE_FILES)}"
            )
    if not configs:
        raise SearchError("no shapes to measure; expected at least one config")
    with tempfile.TemporaryDirectory(prefix="compress-shapes-") as scratch:
        files = {}
        say(f"exporting {len(configs)} shapes with random weights")
        for number, (name, config) in enumerate(
            show_progress(configs.items(), "exporting", len(configs), "shapes")
        ):
            files[name] = Path(scratch) / f"{number}.onnx"
            model = _build_model(name, config, setting, kind)
            full = files[name].with_suffix(".fp32.onnx")
            to_onnx(model, full, segments=segments, max_length=setting.seq)
            _convert(
                full,
                files[name],
                setting,
                precisions[name],
            )
            full.unlink(missing_ok=True)
        yield files


def race(
    files: Mapping[str, Path],
    device: Device,
    setting: Setting,
    *,
    rounds: int = 4,
    runs: int = 10,
    say: Say = lambda _: None,
) -> dict[str, Latency]:
    """Measure the latency of files, by name, robustly against other work on the
    machine.

    RACED_TOGETHER files at a time take turns in races of two passes of `rounds` x
    `runs` forwards in all. Every file races SWEEPS times; if its best passes in two
    races do not agree, it races again, MORE times at most. p50_ms is the median of an
    undisturbed pass: the least p10 of a pass, times the least ratio of median to p10.
    `noisy`: no second race has a pass whose p10 is within AGREE of the least.
    """
    races: list[dict[str, Latency]] = []
    for sweep in range(SWEEPS + MORE):
        left = [
            name for name in files if sweep < SWEEPS or _summarise(name, races).noisy
        ]
        if sweep % 2:
            left.reverse()
        if left:
            why = "" if sweep < SWEEPS else ", all disturbed so far"
            say(
                f"{device.name}: timing {len(left)} files at {setting}, turn "
                f"{sweep + 1}{why}"
            )
        for at in show_progress(
            range(0, len(left), RACED_TOGETHER),
            "timing",
            -(-len(left) // RACED_TOGETHER),
            "groups",
        ):
            together = list(dict.fromkeys([*left[at : at + RACED_TOGETHER], *files]))[
                :RACED_TOGETHER
            ]
            # alone, a file would have the CPU caches to itself
            some = {name: files[name] for name in together}
            races.append(
                {
                    each.name: each
                    for each in device.race(some, [setting], rounds=rounds, runs=runs)
                }
            )
    return {name: _summarise(name, races) for name in files}


def choose_spread(
    candidates: Configs,
    count: int,
    setting: Setting,
    kind: Kind | None = "classification",
) -> list[str]:
    """Choose the names of `count` candidates (or all, if there are fewer) whose terms
    are far apart.

    Start with the fewest and the most FLOPs, then add the one farthest from all chosen
    ones, in the logarithms of the terms, each scaled to its range: so that all kinds of
    shapes are measured, and few predictions are extrapolations. The choice does not
    depend on the order of the candidates. Raises SearchError for fewer than 2.
    """
    if count < 2 or not candidates:
        raise SearchError(
            f"{count} of {len(candidates)} shapes to measure: expected at least 2, of "
            "at least 1 shape"
        )
    names = sorted(candidates)
    terms = [Terms.from_config(candidates[name], setting, kind) for name in names]
    columns = sorted({column for each in terms for column in each.counts})
    logs_SN = np.log1p(
        [[each.counts.get(column, 0.0) for column in columns] for each in terms]
    )
    spread_N = np.ptp(logs_SN, axis=0)
    placed_SN = (logs_SN - logs_SN.min(0)) / np.where(spread_N > 0, spread_N, 1.0)
    flops = [each.flops for each in terms]
    chosen = list(dict.fromkeys([int(np.argmin(flops)), int(np.argmax(flops))]))
    while len(chosen) < min(count, len(names)):
        distance_S = np.min(
            [np.square(placed_SN - placed_SN[each]).sum(1) for each in chosen], axis=0
        )
        distance_S[chosen] = -1.0
        chosen.append(int(np.argmax(distance_S)))
    return [names[each] for each in chosen]


def _build_model(name: str, config: Any, setting: Setting, kind: Kind | None) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            model = heads.create(config, "task" if kind else "encoder", kind).eval()
        except StudentError as error:
            raise SearchError(f"{name}: {error}") from error
    share_again(model)
    limit = positions(model)
    if limit is not None and setting.seq > limit:
        raise SearchError(
            f"{name}: {setting.seq} tokens to measure at; this shape has {limit} "
            "positions"
        )
    return model


def _convert(full: Path, path: Path, setting: Setting, precision: Precision) -> None:
    converters: Mapping[Precision, Callable[[], object]] = {
        "fp32": lambda: full.replace(path),
        "fp16": lambda: to_float16(full, path, rows_for(full, setting.seq)),
        "w8": lambda: quantize_weights(full, path, bits=8),
        "int8": lambda: quantize_dynamic(full, path),
        "q4": lambda: quantize_weights(full, path, bits=4),
    }
    converters[precision]()


def _summarise(name: str, races: Sequence[Mapping[str, Latency]]) -> Latency:
    """Summarise the races of one file."""
    own = sorted(
        (each[name] for each in races if name in each), key=lambda each: min(each.lows)
    )
    least, confirming = (min(each.lows) for each in own[:2])
    spread = min(
        p50 / low
        for each in own
        for p50, low in zip(each.passes, each.lows, strict=True)
    )
    noisy = confirming > AGREE * least
    noise = (
        f"the fastest runs took {least:.2f} ms in one of {len(own)} races, "
        f"{confirming:.2f} ms in the next best"
    )
    return replace(
        own[0],
        p50_ms=least * spread,
        noisy=noisy,
        noise=noise if noisy else "",
        passes=tuple(p50 for each in own for p50 in each.passes),
        lows=tuple(low for each in own for low in each.lows),
    )
