"""`compress quantize`, from a bundle and its data to a certified int8 file."""

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
from datasets import Dataset
from rich.console import Console

from compress import io
from compress.benchmark.devices import Device, open_chosen
from compress.commands.distill import distill
from compress.config.limits import check_max_drop, check_seed
from compress.config.options import DataOptions, DeviceOptions, Int8Options, RunOptions
from compress.data.cache import home
from compress.data.objects import DataLike, data_path
from compress.errors import BundleError, CompressError
from compress.exporters.artifact import Bundle, check_place, check_writable
from compress.exporters.int8 import quantize_static
from compress.exporters.rewrite.graph import Product, products
from compress.exporters.session import read_model
from compress.quantization.calibration import choose_ranges, observe
from compress.quantization.certify import ROWS, QuantizationEvaluator, attach_certificate, certify, compute_logits
from compress.quantization.select import (
    ALPHAS,
    BEFORE,
    CALIBRATIONS,
    Attempt,
    Calibrated,
    Name,
    Quantized,
    attempt_as_written,
    dynamic,
)
from compress.quantization.sensitivity import ROUNDS as PRICED_ROUNDS
from compress.quantization.sensitivity import RUNS as PRICED_RUNS
from compress.quantization.sensitivity import mix, price_float, race_products
from compress.quantization.smoothquant import channels, smooth
from compress.records.forecast import Forecast, Phase, size_mb, time_call
from compress.records.latency import Latency, Setting
from compress.training.trainer import peak_rss_mb

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
    asked = [asdict(stamp) for stamp in bundle.manifest.files.values()]
    key = io.hash_value([asked, data, recipe, list(overrides), text, label, seed])
    run = home() / "qat" / key[:24]
    given = _int8_training(bundle, data, text=text, label=label, seed=seed, overrides=overrides, recipe=recipe)
    options = replace(given.pop("options"), resume=(run / "run.json").is_file(), gate="warn")
    yield distill(**given, out=run, options=options, console=console)
    shutil.rmtree(run)


def _int8_training(
    bundle: Bundle,
    data: DataLike,
    *,
    text: Sequence[str] | None,
    label: str | None,
    seed: int,
    overrides: Sequence[str],
    recipe: str = RECIPE,
) -> dict[str, Any]:
    """Return what `distill`, and its forecast, are given for it."""
    task = bundle.load_data(data, text=text, label=label, seed=seed).task
    length = f"stages.0.max_length={bundle.manifest.max_length}"
    return {
        "teacher": str(bundle.path), "recipe": recipe, "data": data,
        "columns": DataOptions(text=list(text) if text else None, label=label, kind=task.kind, metric=task.metric),
        "options": RunOptions(overrides=[length, *overrides], seed=seed),
    }  # fmt: skip


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
    _check_out(bundle, method, out, overrides)
    found = bundle.load_data(data, text=text, label=label, seed=seed)
    given = bundle
    threads = os.cpu_count() or 1
    with ExitStack() as stack:
        if method == "qat":
            training = _training(bundle, say, data=data, text=text, label=label, seed=seed, overrides=overrides)
            bundle = stack.enter_context(training)
        scratch = Path(stack.enter_context(TemporaryDirectory()))
        there = stack.enter_context(open_chosen(device, say=say))
        source = bundle.files()["fp32"]
        graph = read_model(source).graph
        parts = products(graph)
        files = QuantizationEvaluator.from_bundle(
            bundle, bundle.evaluator(found.validation), threads=threads, products=len(parts)
        )
        settings = Calibrated(
            bundle.evaluator(found.train).subsample(int8.rows).rows,
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


SCORED = 64
"""Rows that a forecast calibrates on and scores."""


def forecast_quantization(
    bundle: Bundle,
    data: DataLike,
    *,
    method: Name = "auto",
    out: Path | None = None,
    int8: Int8Options = Int8Options(),
    device: DeviceOptions = DeviceOptions(),
    text: Sequence[str] | None = None,
    label: str | None = None,
    seed: int = 0,
    overrides: Sequence[str] = (),
    console: Console | None = None,
) -> Forecast:
    """Forecast what `compress.quantize` would take with the same arguments, on this machine and `device`.

    One file of each kind is made, calibrated and scored on few rows, and counted up to all files and rows. At least,
    static is near enough for `auto` and all-int8 for any method; at most, each product is tried in float32.
    """
    console = console or Console(quiet=True)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    check_seed(seed)
    _check_numbers(int8.rows, int8.percentile)
    _check_out(bundle, method, out, overrides)
    found, threads = bundle.load_data(data, text=text, label=label, seed=seed), os.cpu_count() or 1
    source = bundle.files()["fp32"]
    split = found.validation if found.test is None else found.test
    graph, phases = read_model(source).graph, list[Phase]()
    parts = products(graph)
    if method == "qat":
        from compress.commands.forecast import forecast

        given = _int8_training(bundle, data, text=text, label=label, seed=seed, overrides=overrides)
        phases += forecast(**given).phases
    with TemporaryDirectory() as scratch, open_chosen(device, say=say) as there, console.status("trying each phase"):
        judging, testing = bundle.evaluator(found.validation).subsample(ROWS), bundle.evaluator(split)
        file, smoothed = Path(scratch) / "int8.onnx", Path(scratch) / "smooth.onnx"
        few, tested = judging.subsample(SCORED), testing.subsample(SCORED)
        rows = bundle.evaluator(found.train).subsample(min(SCORED, int8.rows)).rows
        files = QuantizationEvaluator.from_bundle(bundle, few, threads=threads, products=len(parts))
        seen = observe(source, rows, threads=threads)
        write = partial(quantize_static, form=int8.form, reduce_range=int8.reduce_range)
        made = time_call(lambda: write(source, file, ranges=choose_ranges(seen, "minmax")))
        exact, scored = (_by_rows(partial(files.logits, each), few.rows) for each in (source, file))
        judged, probed = len(judging.rows), len(files.probe)
        way, answers = made + scored(probed), exact(judged) + exact(probed)
        phases.append(Phase("fp32 answers", seconds=(answers, answers), note=f"{judged:,} validation rows"))
        observed = _by_rows(lambda some: observe(source, some, threads=threads), rows)(int8.rows)
        static = observed + (len(CALIBRATIONS) if int8.calibration is None else 1) * way
        watched = _by_rows(lambda some: channels(source, some, threads=threads), rows)(int8.rows)
        smoothing = time_call(
            lambda: smooth(source, smoothed, channels(source, rows, threads=threads), alpha=ALPHAS[0])
        )
        again = observed if int8.calibration not in (None, "minmax") else 0.0
        smoothquant = watched + len(ALPHAS) * (smoothing + exact(probed) + again + way)
        least, most = {
            "auto": (static + made + scored(judged), static + made + scored(judged) + smoothquant),
            "static": (static, static), "smoothquant": (smoothquant, smoothquant),
        }.get(method, (0.0, 0.0))  # fmt: skip
        if most:
            phases.append(Phase("calibration", seconds=(least, most), note=f"{int8.rows:,} rows"))
        whole = made + scored(judged)
        setting = Setting(1, 1, min(TOKENS, bundle.manifest.max_length))
        raced = {"fp32": source, "int8": file, BEFORE: bundle.files().get("int8", file)}
        racing = time_call(lambda: there.race(raced, [setting], rounds=2, runs=RUNS))
        tried = (2 * len(parts) + 1) * way + 2 * math.log2(2 * len(parts)) * whole
        tried += (_count_kinds(parts, graph) + 3) * (
            made + racing / len(raced) * PRICED_ROUNDS * PRICED_RUNS / (2 * RUNS)
        )
        note = f"{len(parts)} products are tried in float32 if all-int8 is not near enough"
        phases.append(Phase("choice of products", seconds=(whole, whole + tried), note=note))

        def answer(file: Path, some: Dataset) -> object:
            return compute_logits(there, file, replace(tested, rows=some))

        proof = sum(_by_rows(partial(answer, each), tested.rows)(len(testing.rows)) for each in (source, file))
        proof += ROUNDS / 2 * racing
        phases.append(
            Phase(
                "certificate",
                seconds=(proof, proof),
                note=f"{len(testing.rows):,} rows",
                disk_mb=size_mb(bundle.path, file) + len(ALPHAS) * size_mb(smoothed),
            )
        )
    return Forecast(f"{bundle.path}: int8 by {method} on {found.name}", tuple(phases), peak_rss_mb())


def _count_kinds(parts: Sequence[Product], graph: onnx.GraphProto) -> int:
    """Count the shapes of products, which are raced one by one, as `race_products` does."""
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    return len({(shapes[each.weight], each.gemm) for each in parts})


def _by_rows(run: Callable[[Dataset], object], rows: Dataset) -> Callable[[int], float]:
    """Time a run over one row, and over all of `rows`; return the seconds that it takes over any number of them."""
    one, whole = time_call(lambda: run(rows.select(range(1)))), time_call(lambda: run(rows))
    each = max(0.0, whole - one) / max(1, len(rows) - 1)
    return lambda count: one + each * count


def _check_out(bundle: Bundle, method: Name, out: Path | None, overrides: Sequence[str]) -> None:
    """Raise CompressError where this method cannot write the file, or would not read the changes of its recipe."""
    if overrides and method != "qat":
        raise CompressError(f"--set: {overrides[0]}: is for training, and {method} does not train; give --method qat")
    if method == "qat" and (out is None or out.resolve() == bundle.path.resolve()):
        raise BundleError(
            f"{bundle.path}: --method qat trains the weights, which makes another bundle: give --out another folder"
        )
    if out is not None:
        check_place(out)
    else:
        check_writable(bundle.path)


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
    say: Say,
    *,
    data: DataLike,
    text: Sequence[str] | None,
    label: str | None,
    seed: int,
    overrides: Sequence[str],
) -> AbstractContextManager[Bundle]:
    from compress.console import Screen

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
    return bundle.adopt(candidate, ("int8",))
