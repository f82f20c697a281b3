"""Hold a new model against the one it is to replace: latency, score and size, with what chance may have done."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from math import ceil, expm1, inf, isfinite, log, log1p
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from compress.benchmark.devices import Device, open_chosen
from compress.benchmark.jobs import check_settings
from compress.benchmark.options import LONE
from compress.config.limits import check_max_drop, check_minutes, check_number
from compress.config.options import DeviceOptions
from compress.errors import BundleError
from compress.evaluation.statistics import bootstrap_interval, paired_share_interval, signed_rank_interval
from compress.exporters.artifact import FILES, Bundle, Precision
from compress.exporters.manifest import is_bundle
from compress.exporters.predictor import open_predictor
from compress.io import sha256
from compress.provenance import command_line
from compress.records.gate_result import GateCheck, GateResult, Outcome
from compress.records.latency import DeviceError, Setting

if TYPE_CHECKING:
    from datasets import Dataset

    from compress.data.objects import DataLike

LEVEL = 0.025
"""The chance, on each side, that the interval of the latency misses: over all looks together."""
LOOKS = (8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Paired passes after which is asked whether they tell; the last, again and again."""
ROUNDS = 8
"""Interleaved rounds of a race, half of them in each of its two passes."""
TURN_MS, MOST_RUNS, FIRST_RUNS = 40.0, 500, 10
"""How long one file runs in its turn, and the number of runs at most, and in the first race."""
DEFAULT_SEQ = 128


def gate(
    old: str | Path,
    new: str | Path,
    *,
    max_slower: float = 0.05,
    max_drop: float = 0.005,
    max_larger: float | None = None,
    data: "DataLike | None" = None,
    text: Sequence[str] | None = None,
    label: str | None = None,
    precision: Precision = "int8",
    device: DeviceOptions = DeviceOptions(),
    threads: int = 1,
    batch: int = 1,
    seq: int | None = None,
    minutes: float = 5.0,
    say: Callable[[str], None] = lambda _: None,
) -> GateResult:
    """Compare two models of one task, and tell whether the new one may take the place of the old one.

    old, new     bundles, or their .onnx files
    max_slower   how much longer than the old one the new one may take, as a share; max_larger: the same of its size
    max_drop     how much lower the new one may score, in the score's own unit
    data         rows to score both on, named as for `distill`; without, no score is compared. text, label: its columns
    precision    the file of the bundles that is compared
    device       where they run; threads, batch, seq: at which setting. seq: None takes 128 tokens, or what a bundle
                 was made for if that is less
    minutes      the most that latency may take: measuring ends as soon as it can tell

    Raises BundleError for what is no bundle or does another task, DeviceError for a device that fails.
    """
    started = time.monotonic()
    check_max_drop(max_drop)
    check_minutes(minutes)
    for name, share in (("max_slower", max_slower), ("max_larger", max_larger)):
        check_number(name, 0.0 if share is None else share, 0, 100)
    found = [_open(Path(each), precision) for each in (old, new)]
    files, bundles = [file for _, file in found], [bundle for bundle, _ in found if bundle is not None]
    tasks = {(each.task.kind, each.task.labels, each.task.pair) for each in bundles if each.manifest.task}
    if len(tasks) > 1:
        raise BundleError(f"{old} and {new} do not do the same task: expected the same kind, labels and texts")
    setting = Setting(threads, batch, seq or min([DEFAULT_SEQ, *(each.manifest.max_length for each in bundles)]))
    checks, name, split = [compare_sizes(files, max_larger=max_larger)], "", ""
    if data is not None:
        if len(bundles) < len(files):
            raise BundleError(f"--data: {old} and {new} must both be of bundles, whose tokenizers read the rows")
        loaded = bundles[0].load_data(data, text=text, label=label)
        name, split = loaded.name, "validation" if loaded.test is None else "test"
        rows = loaded.validation if loaded.test is None else loaded.test
        say(f"scoring both on {len(rows):,} {split} rows of {name}")
        checks.append(compare_scores(bundles, files, rows, max_drop=max_drop))
    progress = (lambda _: None) if device.device == "local" else say  # which other devices need to ask for something
    with open_chosen(device, say=progress) as there:
        checks.append(compare_latency(there, files, setting, max_slower=max_slower, minutes=minutes, say=say))
        facts = there.facts()
    return GateResult(
        old=str(files[0]), new=str(files[1]), checks=tuple(checks), device=device.device, machine=facts,
        setting=str(setting), data=name, split=split, sha256=(sha256(files[0]), sha256(files[1])),
        command=command_line(), date=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=time.monotonic() - started,
    )  # fmt: skip


def _open(path: Path, precision: Precision) -> tuple[Bundle | None, Path]:
    """Find the bundle, if it is of one, and the file that is compared."""
    if path.suffix in LONE and path.is_file():
        folder = next((each for each in path.resolve().parents[:2] if is_bundle(each)), None)
        return (None if folder is None else Bundle.load(folder)), path
    bundle = Bundle.load(path)
    bundle.check_has(precision)
    return bundle, bundle.path / FILES[precision]


def compare_sizes(files: Sequence[Path], *, max_larger: float | None) -> GateCheck:
    """Compare the bytes of the old file and the new one."""
    before, after = (each.stat().st_size / 1e6 for each in files)
    change = after / before - 1
    outcome: Outcome = "passed" if max_larger is None or change <= max_larger else "failed"
    limit = "" if max_larger is None else f", {max_larger:.1%} allowed"
    reason = f"{after:.2f} MB after {before:.2f} MB, {change:+.1%}{limit}"
    return GateCheck("size", outcome, before, after, "MB", change, None, None, max_larger, 1, reason)


def compare_scores(bundles: Sequence[Bundle], files: Sequence[Path], split: "Dataset", *, max_drop: float) -> GateCheck:
    """Score a file of each bundle on the same rows, and tell whether the new one falls by more than `max_drop`.

    Of metrics that are shares of rows the interval is that of paired shares, of others of rows drawn again.
    """
    task = bundles[0].task
    exams = [replace(bundle.evaluator(split), task=task) for bundle in bundles]
    rows = len(exams[0])
    thresholds = [inf if each.manifest.threshold is None else each.manifest.threshold for each in bundles]
    logits = [
        open_predictor(
            bundle.path, file, task=task, max_length=bundle.manifest.max_length, threads=os.cpu_count() or 1
        ).logits(exam.rows)
        for bundle, file, exam in zip(bundles, files, exams, strict=True)
    ]
    both = list(zip(exams, logits, thresholds, strict=True))
    old, new = (exam.scores(found, threshold=threshold)[task.metric] for exam, found, threshold in both)
    one, other = (exam.example_scores(found, threshold=threshold) for exam, found, threshold in both)
    if one is None or other is None:
        (before, count), (after, _) = (exam.metric_of_examples(found) for exam, found, _ in both)
        low, high = bootstrap_interval(lambda drawn: before(drawn) - after(drawn), count)
    elif np.isin([one, other], (0.0, 1.0)).all():
        lost, won = int((one > other).sum()), int((one < other).sum())
        low, high = paired_share_interval(lost, won, len(one)) if lost or won else (0.0, 0.0)
    else:
        apart = one - other
        low, high = bootstrap_interval(lambda drawn: float(apart[drawn].mean()), len(apart))
    outcome: Outcome = "passed" if high <= max_drop else "failed" if low > max_drop else "cannot be told"
    points, limit = [100 * each for each in (new - old, 0.0 - high, 0.0 - low)], 100 * max_drop
    said = (
        f"{points[0]:+.2f} points of {task.metric} ({points[1]:+.2f} to {points[2]:+.2f}), a fall of {limit:g} allowed"
    )
    hint = (
        "; cannot be told with these rows: give more of them, or another limit" if outcome == "cannot be told" else ""
    )
    return GateCheck(
        "score",
        outcome,
        old,
        new,
        task.metric,
        new - old,
        0.0 - high,
        0.0 - low,
        max_drop,
        rows,
        f"{said}; {rows:,} rows{hint}",
    )


def compare_latency(
    device: Device,
    files: Sequence[Path],
    setting: Setting,
    *,
    max_slower: float,
    minutes: float,
    say: Callable[[str], None],
) -> GateCheck:
    """Race the old file and the new one in turns until the ratio of medians is told from the limit, or time is up.

    Each race has two passes with processes of their own, in opposite orders; a pass gives one ratio of medians. The
    interval of the centre of these ratios is that of the signed-rank test, which takes them to scatter evenly and no
    more. The k-th look at it may miss by LEVEL / (k (k + 1)) on each side: by LEVEL all looks together (the union
    bound), however many there are.
    """
    pair, end = dict(zip(("old", "new"), files, strict=True)), time.monotonic() + 60 * minutes
    check_settings(device.name, device.facts().get("cores", ""), pair, [setting])
    ratios, medians = list[float](), list[tuple[float, float]]()
    allowed, low, high, centre = log1p(max_slower), -inf, inf, 0.0
    looks, runs, late = 0, FIRST_RUNS, False
    outcome: Outcome = "cannot be told"
    while outcome == "cannot be told" and not late:
        times = {each.name: each for each in device.race(pair, [setting], rounds=ROUNDS, runs=runs)}
        passes = times["old"].passes, times["new"].passes
        for before, after in zip(*passes, strict=True):
            if min(before, after) <= 0:
                raise DeviceError(f"{device.name}: a forward takes less than its clock shows; give a larger --batch")
            ratios.append(log(after / before))
            medians.append((before, after))
        runs = max(5, min(MOST_RUNS, ceil(TURN_MS / min(passes[0] + passes[1]))))
        late = time.monotonic() >= end
        due = LOOKS[looks] if looks < len(LOOKS) else LOOKS[-1] * 2 ** (looks - len(LOOKS) + 1)
        if len(ratios) >= due or late:
            looks += 1
            centre, low, high = signed_rank_interval(np.array(ratios), LEVEL / (looks * (looks + 1)))
            outcome = "passed" if high <= allowed else "failed" if low > allowed else "cannot be told"
            say(f"{len(ratios)} passes: {_percent(centre)} ({_percent(low)} to {_percent(high)})")
    least, most = (expm1(each) if isfinite(each) else None for each in (low, high))
    said = f"{_percent(centre)} ({_percent(low)} to {_percent(high)}), {max_slower:+.1%} allowed; {len(ratios)} passes"
    hint = (
        "; cannot be told in this time: give more minutes or a quieter machine" if outcome == "cannot be told" else ""
    )
    before, after = map(float, np.median(medians, axis=0))
    return GateCheck(
        "latency", outcome, before, after, "ms", expm1(centre), least, most, max_slower, len(ratios), said + hint
    )


def _percent(log_ratio: float) -> str:
    return f"{expm1(log_ratio):+.1%}" if isfinite(log_ratio) else "unknown"
