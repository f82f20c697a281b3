"""Compare a new model with the one it is to replace: latency, score and size, with
their uncertainty."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, count
from math import ceil, expm1, inf, isfinite, log, log1p
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np

from compress.arguments import (
    MINUTES,
    BundleLike,
    DataLike,
    Share,
    check_arguments,
    name_of,
)
from compress.benchmark.arguments import DEFAULT_SEQ, RUNTIME_CHOICES
from compress.benchmark.device import Device
from compress.benchmark.devices import open_chosen
from compress.benchmark.jobs import check_settings, parts
from compress.config.options import ColumnOptions, DeviceSettingOptions
from compress.errors import ArgumentError, BundleError
from compress.evaluation.statistics import (
    bootstrap_interval,
    paired_share_interval,
    signed_rank_interval,
)
from compress.exporters.artifact import Bundle
from compress.exporters.manifest import BUNDLE_FILES, Precision, is_bundle
from compress.exporters.predictor import open_predictor
from compress.io import sha256
from compress.progress import Say
from compress.provenance import command_line, timestamp
from compress.records.gate_result import GateCheck, GateOutcome, GateResult
from compress.records.latency import DeviceError, Setting
from compress.values import Range

if TYPE_CHECKING:
    from datasets import Dataset


GROWTH = Range(0, 100)
"""The range of a limit on growth, as a share."""
GATE_LEVEL = 0.025
"""The probability, on each side, that the interval of the latency is wrong, over all
looks together."""
GATE_LOOKS = (8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of paired passes after which the interval is computed; beyond the last, after
each doubling."""
GATE_ROUNDS = 8
"""Interleaved rounds of a race, half of them in each of its two passes."""
TURN_MS = 40.0
MOST_RUNS = 500
FIRST_RUNS = 10
"""Milliseconds that a file runs in its turn; the maximum number of runs; and the runs
in the first race."""


@check_arguments
def gate(
    old: BundleLike,
    new: BundleLike,
    *,
    max_slower: Annotated[float, GROWTH] = 0.05,
    max_drop: Share | None = None,
    max_larger: Annotated[float | None, GROWTH] = None,
    data: DataLike | None = None,
    columns: ColumnOptions = ColumnOptions(),
    precision: Precision = "int8",
    device: DeviceSettingOptions = DeviceSettingOptions(),
    minutes: Annotated[float, MINUTES] = 5.0,
    say: Say = lambda _: None,
) -> GateResult:
    """Compare two models of one task, and decide whether the new one may replace the
    old one.

    old, new     bundles, or their .onnx files
    max_slower   how much longer the new one may take, as a share of the old one's
                 latency
    max_larger   how much larger its file may be, as a share of the old one's size;
                 None: any size
    max_drop     how much lower the new one may score on `data`, in the score's own
                 unit; None: 0.005
    data         rows to score both on, as for `distill`; None: compare no scores.
                 columns: its columns
    precision    the file of the bundles to compare
    device       where they run, and at which setting
    minutes      maximum time for latency: measuring ends as soon as the result is clear

    Raises ArgumentError for `max_drop` without `data`, BundleError for a path that is
    not a bundle or has another task, DeviceError for a device that fails."""
    if max_drop is not None and data is None:
        raise ArgumentError(
            "data", "rows to compare scores on, since a maximum drop is given", "none"
        )
    if data is None:
        columns.refuse()
    started = time.monotonic()
    old = name_of(old)
    new = name_of(new)
    opened = [_open(Path(path), precision) for path in (old, new)]
    files = [file for _, file in opened]
    bundles = [bundle for bundle, _ in opened if bundle is not None]
    tasks = {
        (bundle.task.kind, bundle.task.labels, bundle.task.pair)
        for bundle in bundles
        if bundle.manifest.task
    }
    if len(tasks) > 1:
        raise BundleError(
            f"{old} and {new} have different tasks: expected the same kind, labels and "
            "texts"
        )
    length = device.seq or min(
        [DEFAULT_SEQ, *(bundle.manifest.max_length for bundle in bundles)]
    )
    setting = Setting(device.threads, device.batch, length)
    checks = [compare_sizes(files, max_larger=max_larger)]
    name = ""
    split = ""
    if data is not None:
        if len(bundles) < len(files):
            raise BundleError(
                f"--data: {old} and {new} must both be in bundles, whose tokenizers "
                "read the rows"
            )
        loaded = bundles[0].load_data(data, text=columns.text, label=columns.label)
        name = loaded.name
        split, rows = loaded.measured
        say(f"scoring both on {len(rows):,} {split} rows of {name}")
        most = 0.005 if max_drop is None else max_drop
        checks.append(compare_scores(bundles, files, rows, max_drop=most))
    # other devices need the user to do something
    instruct = (lambda _: None) if device.device == "local" else say
    with open_chosen(device, say=instruct) as target:
        checks.append(
            compare_latency(
                target,
                files,
                setting,
                max_slower=max_slower,
                minutes=minutes,
                say=say,
            )
        )
        facts = target.facts()
    return GateResult(
        old=str(files[0]),
        new=str(files[1]),
        checks=tuple(checks),
        device=device.device,
        machine=facts,
        setting=str(setting),
        data=name,
        split=split,
        sha256=(sha256(files[0]), sha256(files[1])),
        command=command_line(),
        date=timestamp(),
        seconds=time.monotonic() - started,
    )


def _open(path: Path, precision: Precision) -> tuple[Bundle | None, Path]:
    """Return the bundle that a path is or belongs to (None without one), and the file
    to compare."""
    if path.suffix in RUNTIME_CHOICES and path.is_file():
        folder = next(filter(is_bundle, path.resolve().parents[:2]), None)
        return (None if folder is None else Bundle.load(folder)), path
    bundle = Bundle.load(path)
    bundle.check_has(precision)
    return bundle, bundle.path / BUNDLE_FILES[precision]


def _weigh(file: Path) -> float:
    """Return the megabytes of a model with all its files."""
    return sum(part.stat().st_size for part in parts(file)) / 1e6


def compare_sizes(files: Sequence[Path], *, max_larger: float | None) -> GateCheck:
    """Compare the sizes of the old and the new file, with their weights."""
    before, after = map(_weigh, files)
    change = after / before - 1
    outcome: GateOutcome = "passed"
    limit = ""
    if max_larger is not None:
        outcome = _decide(change, change, max_larger)
        limit = f", {max_larger:.1%} allowed"
    reason = f"{after:.2f} MB after {before:.2f} MB, {change:+.1%}{limit}"
    return GateCheck(
        "size",
        outcome,
        before,
        after,
        "MB",
        change,
        None,
        None,
        max_larger,
        1,
        reason,
    )


def compare_scores(
    bundles: Sequence[Bundle],
    files: Sequence[Path],
    split: "Dataset",
    *,
    max_drop: float,
) -> GateCheck:
    """Score a file of each bundle on the same rows, and check that the new score is not
    lower by more than `max_drop`.

    The interval is for paired shares if the metric is a share of rows, else from the
    bootstrap.
    """
    task = bundles[0].task
    evaluators = [replace(bundle.evaluator(split), task=task) for bundle in bundles]
    rows = len(evaluators[0])
    thresholds = [each.manifest.margin for each in bundles]
    logits = [
        open_predictor(
            bundle.path,
            file,
            task=task,
            max_length=bundle.manifest.max_length,
            threads=os.cpu_count() or 1,
        ).logits(evaluator.rows)
        for bundle, file, evaluator in zip(bundles, files, evaluators, strict=True)
    ]
    models = list(zip(evaluators, logits, thresholds, strict=True))
    old, new = (
        evaluator.scores(own, threshold=threshold)[task.metric]
        for evaluator, own, threshold in models
    )
    old_rows, new_rows = (
        evaluator.example_scores(own, threshold=threshold)
        for evaluator, own, threshold in models
    )
    if old_rows is None or new_rows is None:
        (before, examples), (after, _) = (
            evaluator.metric_of_examples(own) for evaluator, own, _ in models
        )
        low, high = bootstrap_interval(
            lambda drawn: before(drawn) - after(drawn), examples
        )
    elif np.isin([old_rows, new_rows], (0.0, 1.0)).all():
        lost = int((old_rows > new_rows).sum())
        won = int((old_rows < new_rows).sum())
        decided = [task.decide(*model) for model in models]
        answers = logits if decided[0] is None else decided
        low = high = 0.0
        if not np.array_equal(*answers):
            low, high = paired_share_interval(lost, won, len(old_rows))
    else:
        drops = old_rows - new_rows
        low, high = bootstrap_interval(
            lambda drawn: float(drops[drawn].mean()), len(drops)
        )
    outcome = _decide(low, high, max_drop)
    change = new - old
    least = 0.0 - high
    most = 0.0 - low
    reason = (
        f"{100 * change:+.2f} points of {task.metric} ({100 * least:+.2f} to "
        f"{100 * most:+.2f}), a drop of {100 * max_drop:g} allowed; {rows:,} rows"
    )
    if outcome == "cannot be told":
        reason += "; undecided with these rows: give more rows, or another limit"
    return GateCheck(
        "score",
        outcome,
        old,
        new,
        task.metric,
        change,
        least,
        most,
        max_drop,
        rows,
        reason,
    )


def _decide(low: float, high: float, limit: float) -> GateOutcome:
    """Decide from the interval of a loss whether it is within the limit."""
    if high <= limit:
        return "passed"
    return "failed" if low > limit else "cannot be told"


def compare_latency(
    device: Device,
    files: Sequence[Path],
    setting: Setting,
    *,
    max_slower: float,
    minutes: float,
    say: Say,
) -> GateCheck:
    """Race the old and the new file until the ratio of medians clearly differs from the
    limit, or time is up.

    Each race has two passes in separate processes, in opposite orders; a pass yields
    one ratio of medians. The interval of the centre of these ratios comes from the
    signed-rank test, which only assumes that they scatter symmetrically. The k-th look
    at it may be wrong with probability GATE_LEVEL / (k (k + 1)) on each side, all looks
    together with GATE_LEVEL (the union bound), however many there are.
    """
    pair = dict(zip(("old", "new"), files, strict=True))
    end = time.monotonic() + 60 * minutes
    check_settings(device.name, device.facts().get("cores", ""), pair, [setting])
    ratios = list[float]()
    medians = list[tuple[float, float]]()
    allowed = log1p(max_slower)
    low = -inf
    high = inf
    centre = 0.0
    looks = 0
    due = chain(GATE_LOOKS, (GATE_LOOKS[-1] * 2**power for power in count(1)))
    next_look = next(due)
    runs = FIRST_RUNS
    late = False
    outcome: GateOutcome = "cannot be told"
    while outcome == "cannot be told" and not late:
        times = {
            latency.name: latency
            for latency in device.race(pair, [setting], rounds=GATE_ROUNDS, runs=runs)
        }
        passes = times["old"].passes, times["new"].passes
        for before, after in zip(*passes, strict=True):
            if min(before, after) <= 0:
                raise DeviceError(
                    f"{device.name}: a forward pass is shorter than its clock "
                    "resolves; give a larger --batch"
                )
            ratios.append(log(after / before))
            medians.append((before, after))
        runs = max(5, min(MOST_RUNS, ceil(TURN_MS / min(passes[0] + passes[1]))))
        late = time.monotonic() >= end
        if len(ratios) >= next_look or late:
            looks += 1
            next_look = next(due)
            centre, low, high = signed_rank_interval(
                np.array(ratios), GATE_LEVEL / (looks * (looks + 1))
            )
            outcome = _decide(low, high, allowed)
            say(
                f"{len(ratios)} passes: {_percent(centre)} ({_percent(low)} to "
                f"{_percent(high)})"
            )
    least = expm1(low) if isfinite(low) else None
    most = expm1(high) if isfinite(high) else None
    reason = (
        f"{_percent(centre)} ({_percent(low)} to {_percent(high)}), {max_slower:+.1%} "
        f"allowed; {len(ratios)} passes"
    )
    if outcome == "cannot be told":
        reason += "; undecided in this time: give more minutes or a quieter machine"
    before, after = map(float, np.median(medians, axis=0))
    return GateCheck(
        "latency",
        outcome,
        before,
        after,
        "ms",
        expm1(centre),
        least,
        most,
        max_slower,
        len(ratios),
        reason,
    )


def _percent(log_ratio: float) -> str:
    return f"{expm1(log_ratio):+.1%}" if isfinite(log_ratio) else "unknown"
