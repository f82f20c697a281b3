"""`compress quantize`, from a bundle and its data to a certified int8 file."""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from datasets import Dataset

from compress.bench.device import Device, open_device
from compress.bench.protocol import Latency, Setting
from compress.data_of import data_of, exam_of
from compress.errors import BundleError, CompressError
from compress.evidence import Certificate
from compress.exam import Exam
from compress.export.bundle import FILES, Bundle, check_place, check_writable
from compress.export.session import read_model
from compress.limits import check_max_drop, check_seed
from compress.objects import DataLike
from compress.quantize.certify import carried, certify
from compress.quantize.costs import priced, raced
from compress.quantize.histogram import Method as Calibration
from compress.quantize.judge import Judge
from compress.quantize.methods import DYNAMIC, PERCENTILE, Attempt, Calibrated, Name, as_written, dynamic
from compress.quantize.mixed import Mixed, by_size, mix
from compress.quantize.products import products
from compress.quantize.static import Form
from compress.report.evidence import NAME as REPORT

CALIBRATION_ROWS = 512
BEFORE = "int8 before"
TOKENS, ROUNDS, RUNS = 64, 6, 10
"""Of the race of the files before and after."""
SHIPPED_WORTH = 0.2
"""Of the error, that a product must carry to be left in float32 where nobody asked what the answers are worth."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Quantized:
    """The bundle with its new int8 file, the proof, and how products were chosen.

    times, sizes   of fp32, the int8 file until now, and int8: latency on the device, 10^6 bytes
    """

    bundle: Bundle
    proof: Certificate
    mixed: Mixed
    times: tuple[Latency, ...]
    sizes: Mapping[str, float]


def quantize(
    bundle: Bundle,
    data: DataLike,
    *,
    method: Name = "auto",
    out: Path | None = None,
    calibration: Calibration | None = None,
    percentile: float = PERCENTILE,
    rows: int = CALIBRATION_ROWS,
    max_drop: float = 0.005,
    form: Form = "fused",
    reduce_range: bool = False,
    device: str = "local",
    lan: bool = False,
    timeout: float = 60.0,
    python: str = "python3",
    text: Sequence[str] | None = None,
    label: str | None = None,
    seed: int = 0,
    overrides: Sequence[str] = (),
    say: Say = lambda _: None,
) -> Quantized:
    """Make the bundle's int8 file anew by `method`, in place or in a new folder `out`, and certify it on `device`.

    method       dynamic, static, smoothquant; auto: static where that is near enough, else smoothquant; qat trains the
                 model again, so it needs `out`
    calibration  static, smoothquant: minmax, percentile (with `percentile`) or entropy, of `rows` rows of the train
                 split; the one that comes nearest where none is given (of smoothquant: minmax)
    max_drop     of the score, in its own unit, but never finer than the rows resolve (`judge.RESOLVED`). Products stay
                 in float32 until the validation split says that it is met; the certificate is of the test split, or of
                 the validation split where there is none with labels, and holds int8 against the fp32 file of the
                 bundle that was given, before any training
    form         fused for onnxruntime on CPUs, qdq for other runtimes
    lan, timeout, python   of the device, as in `open_device`
    seed, text, label   of the data, as in `distill`; overrides: of the recipe q8bert, for qat

    A target that is missed is in the certificate, and the file that came nearest is there. The bundle is untouched
    until that is done. Raises BundleError for data of another task, and whatever its parts raise.
    """
    check_seed(seed)
    check_max_drop(max_drop)
    _check_numbers(rows, percentile)
    if overrides and method != "qat":
        raise CompressError(f"--set: {overrides[0]}: is for training, and {method} does not train; give --method qat")
    if out is not None:
        check_place(out)
    elif method != "qat":  # which says that it needs one
        check_writable(bundle.path)
    found = data_of(bundle, data, text=text, label=label, seed=seed)
    given = bundle
    threads = os.cpu_count() or 1
    reach = partial(open_device, device, lan=lan, timeout=timeout, python=python)
    with ExitStack() as stack:
        if method == "qat":
            training = _training(bundle, out, say, data=data, text=text, label=label, seed=seed, overrides=overrides)
            bundle = stack.enter_context(training)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        there = stack.enter_context(reach(say=say))
        source = bundle.files()["fp32"]
        graph = read_model(source).graph
        parts = products(graph)
        judge = Judge.of(bundle, exam_of(bundle, found.validation), threads=threads, products=len(parts))
        settings = Calibrated(
            exam_of(bundle, found.train).spread(rows).rows,
            judge,
            scratch,
            calibration,
            percentile,
            form,
            reduce_range,
        )
        attempt = _attempt(method, bundle, settings, max_drop, say)
        say(f"{attempt.method}: judged on {len(judge.exam):,} validation rows")
        length = bundle.manifest.max_length
        mixed = mix(
            attempt.make, parts, judge, limit=max_drop, say=say,
            costs=lambda: raced(attempt.make, parts, graph, there, max_length=length),
        )  # fmt: skip
        mixed = priced(mixed, attempt.make, there, max_length=length)
        attempt.make(scratch / "int8.onnx", mixed.keep)
        split = "validation" if found.test is None else "test"
        exam = exam_of(bundle, found.validation if found.test is None else found.test)
        say(f"certifying on {len(exam):,} {split} rows, {there.name}")
        candidate = bundle.copied(scratch / "candidate" / bundle.path.name)
        candidate = candidate.put("int8", scratch / "int8.onnx")
        proof = certify(
            candidate, "int8", exam, max_drop=max_drop, device=there, method=attempt.method, split=split,
            data=found.name, kept=mixed.keep, cost=mixed.cost, exact=given.files()["fp32"],
        )  # fmt: skip
        candidate, proof = carried(candidate, "int8", proof, mixed.sensitivity)
        times, sizes = _beside(bundle, candidate, there)
        return Quantized(_taken(bundle, candidate, out), proof, mixed, times, sizes)


def _check_numbers(rows: int, percentile: float) -> None:
    """Raise CompressError for numbers that nothing can be calibrated with."""
    if rows < 1:
        raise CompressError(f"rows {rows}: expected at least 1 row of the train split to calibrate on")
    if not 50 <= percentile <= 100:
        raise CompressError(
            f"percentile {percentile:g}: expected 50 to 100, the middle share of all values, in per cent"
        )


def keep_score(
    bundle: Bundle, exam: Exam, *, limit: float, threads: int, rows: Callable[[], Dataset] | None = None
) -> tuple[Bundle, Mixed, str]:
    """The bundle with an int8 file that is near enough to fp32 on the exam's rows, how near, and how it was made.

    The file it was written with, where that is near enough at `limit` (`Outcome.near`); else SmoothQuant of `rows`, as
    fast, where they are given and the ranges are not learned ones; else the nearer of the two with the products left in
    float32 that it takes: see `mix`. For a bundle just written: what carries little of the error is not worth its time
    in float32, so where those that do carry it do not suffice, int8 stays as near as it is.
    """
    source = bundle.files()["fp32"]
    graph = read_model(source).graph
    parts, attempt = products(graph), as_written(bundle)
    written_as = attempt.method
    judge = Judge.of(bundle, exam, threads=threads, products=len(parts))
    with tempfile.TemporaryDirectory() as scratch:
        if rows is not None and attempt.method == DYNAMIC and not judge.outcome(bundle.files()["int8"]).near(limit):
            settings = Calibrated(rows(), judge, Path(scratch))
            attempt = _nearer(attempt, settings.smoothquant(source, _unsaid), judge, Path(scratch))
        mixed = mix(
            attempt.make, parts, judge, limit=limit, worth=SHIPPED_WORTH, whatever_it_takes=False,
            costs=lambda: by_size(parts, graph),
        )  # fmt: skip
        if mixed.keep:
            with open_device("local") as here:
                mixed = priced(mixed, attempt.make, here, max_length=bundle.manifest.max_length)
        if mixed.keep or attempt.method != written_as:
            attempt.make(Path(scratch) / "int8.onnx", mixed.keep)
            bundle = bundle.put("int8", Path(scratch) / "int8.onnx")
    return bundle, mixed, attempt.method


def _nearer(one: Attempt, other: Attempt, judge: Judge, scratch: Path) -> Attempt:
    """The way whose file, all of it in int8, has the least error."""
    files = [scratch / name for name in ("one.onnx", "other.onnx")]
    for attempt, file in zip((one, other), files, strict=True):
        attempt.make(file, ())
    return (one, other)[judge.nearest(files)]


def _unsaid(_: str) -> None:
    """Says nothing."""


def _attempt(method: Name, bundle: Bundle, settings: Calibrated, limit: float, say: Say) -> Attempt:
    source = bundle.files()["fp32"]
    if method == "auto":
        return settings.auto(source, limit, say)
    if method == "static":
        return settings.static(source, say)
    if method == "smoothquant":
        return settings.smoothquant(source, say)
    return as_written(bundle) if method == "qat" else dynamic(source)


def _training(
    bundle: Bundle,
    out: Path | None,
    say: Say,
    *,
    data: DataLike,
    text: Sequence[str] | None,
    label: str | None,
    seed: int,
    overrides: Sequence[str],
) -> AbstractContextManager[Bundle]:
    from compress.quantize.qat import trained_for_int8
    from compress.screen import Screen

    if out is None or out.resolve() == bundle.path.resolve():
        raise BundleError(
            f"{bundle.path}: --method qat trains the weights, which makes another bundle: give --out another folder"
        )
    say("training for int8; interrupted, the same command goes on from its last checkpoint")
    progress = Screen(stderr=True)
    return trained_for_int8(bundle, data, text=text, label=label, seed=seed, overrides=overrides, console=progress)


def _beside(bundle: Bundle, candidate: Bundle, there: Device) -> tuple[tuple[Latency, ...], dict[str, float]]:
    """Race the files before and after, and tell their sizes. A bundle whose change was cut short has no int8 before."""
    before = {BEFORE: bundle.files()["int8"]} if "int8" in bundle.files() else {}
    files = {"fp32": bundle.files()["fp32"], **before, "int8": candidate.files()["int8"]}
    setting = Setting(1, 1, min(TOKENS, bundle.manifest.max_length))
    times = there.race(files, [setting], rounds=ROUNDS, runs=RUNS)
    return tuple(times), {name: path.stat().st_size / 1e6 for name, path in files.items()}


def _taken(bundle: Bundle, candidate: Bundle, out: Path | None) -> Bundle:
    """Make what was proved the bundle, or another one in `out`."""
    if out is not None:
        return candidate.copied(out)
    return bundle.adopt(candidate, (FILES["int8"], REPORT))
