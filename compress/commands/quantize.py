"""`compress quantize`, from a bundle and its data to a certified int8 file."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from compress import io
from compress.benchmark.devices import Device, open_chosen
from compress.commands.distill import distill
from compress.config.limits import check_max_drop, check_seed
from compress.config.options import DataOptions, DeviceOptions, Int8Options, RunOptions
from compress.data.cache import home
from compress.data.objects import DataLike, data_path
from compress.errors import BundleError, CompressError
from compress.exporters.artifact import FILES, Bundle, check_place, check_writable
from compress.exporters.rewrite.graph import products
from compress.exporters.session import read_model
from compress.quantization.certify import QuantizationEvaluator, attach_certificate, certify
from compress.quantization.select import (
    BEFORE,
    Attempt,
    Calibrated,
    Name,
    Quantized,
    attempt_as_written,
    dynamic,
)
from compress.quantization.sensitivity import mix, price_float, race_products
from compress.records.latency import Latency, Setting
from compress.records.run_report import NAME as REPORT

RECIPE = "q8bert"


@contextmanager
def trained_for_int8(
    bundle: Bundle,
    data: DataLike,
    *,
    recipe: str = RECIPE,
    overrides: Sequence[str] = (),
    text: Sequence[str] | None = None,
    label: str | None = None,
    seed: int = 0,
    console: Console | None = None,
) -> Iterator[Bundle]:
    """Yield a new bundle: the model trained to answer in int8 as it does in float, and its static int8 file.

    It learns from itself in float, on the train split of `data`; a recipe with a `step` of its own and `overrides` say
    how long. The run with the bundle in it is kept under $COMPRESS_HOME/qat until the caller is done with it:
    interrupted, the same call goes on from its last checkpoint. Raises BundleError for a bundle whose task `data` is
    not.
    """
    data = data_path(data)
    task = bundle.load_data(data, text=text, label=label, seed=seed).task
    length = f"stages.0.max_length={bundle.manifest.max_length}"
    asked = [asdict(stamp) for stamp in bundle.manifest.files.values()]
    key = io.of_value([asked, data, recipe, list(overrides), text, label, seed])
    run = home() / "qat" / key[:24]
    yield distill(
        teacher=str(bundle.path), recipe=recipe, data=data, out=run, console=console,
        columns=DataOptions(text=list(text) if text else None, label=label, kind=task.kind, metric=task.metric),
        options=RunOptions(overrides=[length, *overrides], seed=seed, resume=(run / "run.json").is_file(), gate="warn"),
    )  # fmt: skip
    shutil.rmtree(run)


TOKENS, ROUNDS, RUNS = 64, 6, 10
"""Tokens, rounds and runs of the race of the files before and after."""

Say = Callable[[str], None]


def quantize(
    bundle: Bundle,
    data: DataLike,
    *,
    method: Name = "auto",
    out: str | Path | None = None,
    int8: Int8Options = Int8Options(),
    max_drop: float = 0.005,
    device: DeviceOptions = DeviceOptions(),
    text: Sequence[str] | None = None,
    label: str | None = None,
    seed: int = 0,
    overrides: Sequence[str] = (),
    say: Say = lambda _: None,
) -> Quantized:
    """Make the bundle's int8 file anew by `method`, in place or in a new folder `out`, and certify it on `device`.

    method       dynamic, static, smoothquant; auto: static where that is near enough, else smoothquant; qat trains the
                 model again, so it needs `out`
    int8         how it is calibrated and written: see `Int8Options`
    max_drop     of the score, in its own unit, but never finer than the rows resolve (`certify.RESOLVED`). Products
                 stay in float32 until the validation split says that it is met; the certificate is of the test split,
                 or of the validation split where there is none with labels, and holds int8 against the fp32 file of the
                 bundle that was given, before any training
    seed, text, label   of the data, as in `distill`; overrides: of the recipe q8bert, for qat

    A target that is missed is in the certificate, and the file that came nearest is there. The bundle is untouched
    until that is done. Raises BundleError for data of another task, and whatever its parts raise.
    """
    out = None if out is None else Path(out)
    check_seed(seed)
    check_max_drop(max_drop)
    _check_numbers(int8.rows, int8.percentile)
    if overrides and method != "qat":
        raise CompressError(f"--set: {overrides[0]}: is for training, and {method} does not train; give --method qat")
    if out is not None:
        check_place(out)
    elif method != "qat":  # which says that it needs one
        check_writable(bundle.path)
    found = bundle.load_data(data, text=text, label=label, seed=seed)
    given = bundle
    threads = os.cpu_count() or 1
    with ExitStack() as stack:
        if method == "qat":
            training = _training(bundle, out, say, data=data, text=text, label=label, seed=seed, overrides=overrides)
            bundle = stack.enter_context(training)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        there = stack.enter_context(open_chosen(device, say=say))
        source = bundle.files()["fp32"]
        graph = read_model(source).graph
        parts = products(graph)
        files = QuantizationEvaluator.from_bundle(
            bundle, bundle.evaluator(found.validation), threads=threads, products=len(parts)
        )
        settings = Calibrated(
            bundle.evaluator(found.train).spread(int8.rows).rows,
            files,
            scratch,
            int8.calibration,
            int8.percentile,
            int8.form,
            int8.reduce_range,
        )
        attempt = _attempt(method, bundle, settings, max_drop, say)
        say(f"{attempt.method}: judged on {len(files.evaluator):,} validation rows")
        length = bundle.manifest.max_length
        mixed = mix(
            attempt.make, parts, files, limit=max_drop, say=say,
            costs=lambda: race_products(attempt.make, parts, graph, there, max_length=length),
        )  # fmt: skip
        mixed = price_float(mixed, attempt.make, there, max_length=length)
        attempt.make(scratch / "int8.onnx", keep=mixed.keep)
        split = "validation" if found.test is None else "test"
        evaluator = bundle.evaluator(found.validation if found.test is None else found.test)
        say(f"certifying on {len(evaluator):,} {split} rows, {there.name}")
        candidate = bundle.copy_to(scratch / "candidate" / bundle.path.name)
        candidate = candidate.put("int8", scratch / "int8.onnx")
        proof = certify(
            candidate, "int8", evaluator, max_drop=max_drop, device=there, method=attempt.method, split=split,
            data=found.name, kept=mixed.keep, cost=mixed.cost, exact=given.files()["fp32"],
        )  # fmt: skip
        candidate, proof = attach_certificate(candidate, "int8", proof, mixed.sensitivity)
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


def _attempt(method: Name, bundle: Bundle, settings: Calibrated, limit: float, say: Say) -> Attempt:
    source = bundle.files()["fp32"]
    if method == "auto":
        return settings.auto(source, limit, say)
    if method == "static":
        return settings.static(source, say)
    if method == "smoothquant":
        return settings.smoothquant(source, say)
    return attempt_as_written(bundle) if method == "qat" else dynamic(source)


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
    from compress.console import Screen

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
        return candidate.copy_to(out)
    return bundle.adopt(candidate, (FILES["int8"], REPORT))
