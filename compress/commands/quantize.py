"""Quantise a bundle to int8 by one of several methods, and certify the file on its
data."""

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from datasets import Dataset
from rich.console import Console

from compress import io
from compress.arguments import (
    BundleLike,
    DataLike,
    PathName,
    SeedNumber,
    Share,
    check_arguments,
)
from compress.benchmark.device import Device
from compress.benchmark.devices import open_chosen
from compress.commands.distill import distill
from compress.config.options import (
    ColumnOptions,
    DataOptions,
    DeviceOptions,
    Int8Options,
    RunOptions,
)
from compress.console import Screen
from compress.data.cache import home
from compress.data.objects import data_path
from compress.errors import BundleError, CompressError
from compress.exporters.artifact import Bundle, check_place, check_writable
from compress.exporters.int8 import quantize_static
from compress.exporters.rewrite.graph import products
from compress.exporters.session import read_model
from compress.quantization.calibration import choose_ranges, observe
from compress.quantization.certify import (
    RESOLVED,
    ROWS,
    QuantizationEvaluator,
    attach_certificate,
    certify,
    compute_logits,
)
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
from compress.quantization.smoothquant import observe_channels, smooth
from compress.records.forecast import Forecast, Phase, size_mb, time_call
from compress.records.latency import Latency, Setting
from compress.training.trainer import peak_rss_mb

RECIPE = "q8bert"


@contextmanager
def train_for_int8(
    bundle: Bundle,
    data: DataLike,
    *,
    overrides: Sequence[str] = (),
    columns: ColumnOptions = ColumnOptions(),
    seed: int = 0,
    console: Console | None = None,
) -> Iterator[Bundle]:
    """Yield a new bundle: the model trained to answer in int8 as it does in float, and
    its static int8 file.

    The model learns from its own float answers, on the train split of `data`;
    `overrides` change the recipe. The run is kept under $COMPRESS_HOME/qat until the
    caller is done with the bundle: after an interruption, the same call continues from
    its last checkpoint. Raises BundleError for data of another task.
    """
    data = data_path(data)
    files = [asdict(stamp) for stamp in bundle.manifest.files.values()]
    run = (
        home()
        / "qat"
        / io.hash_value(
            [files, data, RECIPE, list(overrides), columns.text, columns.label, seed]
        )[:24]
    )
    arguments = _training_arguments(
        bundle, data, columns=columns, seed=seed, overrides=overrides
    )
    options = replace(
        arguments.pop("options"), resume=(run / "run.json").is_file(), gate="warn"
    )
    yield distill(**arguments, out=run, options=options, console=console)
    shutil.rmtree(run)


def _training_arguments(
    bundle: Bundle,
    data: DataLike,
    *,
    columns: ColumnOptions,
    seed: int,
    overrides: Sequence[str],
) -> dict[str, Any]:
    """Return the arguments of `distill`, or of its forecast, for training in int8."""
    task = bundle.load_data(
        data, text=columns.text, label=columns.label, seed=seed
    ).task
    length = f"stages.0.max_length={bundle.manifest.max_length}"
    return {
        "teacher": str(bundle.path),
        "recipe": RECIPE,
        "data": data,
        "columns": DataOptions(
            text=columns.text, label=columns.label, kind=task.kind, metric=task.metric
        ),
        "options": RunOptions(overrides=[length, *overrides], seed=seed),
    }


TOKENS, ROUNDS, RUNS = 64, 6, 10
"""Tokens, rounds and runs of the race between the files before and after."""

Say = Callable[[str], None]


@check_arguments
def quantize(
    bundle: BundleLike,
    data: DataLike,
    *,
    method: Name = "auto",
    out: PathName | None = None,
    int8: Int8Options = Int8Options(),
    max_drop: Share = 0.005,
    device: DeviceOptions = DeviceOptions(),
    columns: ColumnOptions = ColumnOptions(),
    seed: SeedNumber = 0,
    overrides: Sequence[str] = (),
    say: Say = lambda _: None,
) -> Quantized:
    """Quantise a bundle again by `method`, in place or into a new folder `out`, and
    certify the int8 file on `device`.

    method       dynamic, static, smoothquant; auto: static if that is close enough,
                 else smoothquant; qat trains the model again, so it needs `out`
    int8         how it is calibrated and written: see `Int8Options`
    max_drop     allowed loss of the score, in its own unit, but never finer than the
                 rows resolve (`certify.RESOLVED`). Products stay in float32 until it is
                 met on the validation split. The certificate is for the test split, or
                 the validation split if there is none with labels, and compares int8
                 with the fp32 file of the given bundle, before any training
    columns, seed   for the data, as in `distill`
    overrides    changes of the recipe q8bert, for qat

    If the target is missed, the certificate says so, and the best file is kept. The
    bundle is unchanged until everything is done. Raises BundleError for data of another
    task, and the errors of its parts.
    """
    out = None if out is None else Path(out)
    bundle = _open(bundle, method, out, overrides=overrides)
    task_data = bundle.load_data(
        data, text=columns.text, label=columns.label, seed=seed
    )
    exact, threads = bundle.files()["fp32"], os.cpu_count() or 1
    with ExitStack() as stack:
        if method == "qat":
            say(
                "training for int8; after an interruption, the same command continues "
                "from the last checkpoint"
            )
            training = train_for_int8(
                bundle,
                data,
                columns=columns,
                seed=seed,
                overrides=overrides,
                console=Screen(stderr=True),
            )
            bundle = stack.enter_context(training)
        scratch = Path(stack.enter_context(TemporaryDirectory()))
        target = stack.enter_context(open_chosen(device, say=say))
        graph = read_model(bundle.files()["fp32"]).graph
        parts = products(graph)
        files = QuantizationEvaluator.from_bundle(
            bundle,
            bundle.evaluator(task_data.validation),
            threads=threads,
            products=len(parts),
        )
        settings = Calibrated(
            bundle.evaluator(task_data.train).subsample(int8.rows).rows,
            files,
            scratch,
            int8.calibration,
            int8.percentile,
            int8.form,
            int8.reduce_range,
        )
        attempt = choose_attempt(method, bundle, settings, max_drop, say)
        say(f"{attempt.method}: scored on {len(files.evaluator):,} validation rows")
        length = bundle.manifest.max_length
        mixed = mix(
            attempt.make,
            parts,
            files,
            limit=max_drop,
            say=say,
            costs=lambda: race_products(
                attempt.make, parts, graph, target, max_length=length
            ),
        )
        mixed = price_float(mixed, attempt.make, target, max_length=length)
        attempt.make(scratch / "int8.onnx", keep=mixed.keep)
        split = "validation" if task_data.test is None else "test"
        evaluator = bundle.evaluator(
            task_data.validation if task_data.test is None else task_data.test
        )
        say(f"certifying on {len(evaluator):,} {split} rows, {target.name}")
        candidate = bundle.copy_to(scratch / "candidate" / bundle.path.name)
        candidate = candidate.put("int8", scratch / "int8.onnx")
        proof = certify(
            candidate,
            "int8",
            evaluator,
            max_drop=max_drop,
            device=target,
            method=attempt.method,
            split=split,
            data=task_data.name,
            kept=mixed.keep,
            cost=mixed.cost,
            exact=exact,
        )
        candidate, proof = attach_certificate(
            candidate, "int8", proof, mixed.sensitivity
        )
        times, sizes = race_before_after(bundle, candidate, target)
        result = (
            bundle.adopt(candidate, ("int8",))
            if out is None
            else candidate.copy_to(out)
        )
        return Quantized(result, proof, mixed, times, sizes)


SCORED, COMPARED = 64, 256
"""Rows on which a forecast calibrates and scores, and on which it compares the file
with float."""


@check_arguments
def forecast_quantization(
    bundle: BundleLike,
    data: DataLike,
    *,
    method: Name = "auto",
    out: PathName | None = None,
    int8: Int8Options = Int8Options(),
    max_drop: Share = 0.005,
    device: DeviceOptions = DeviceOptions(),
    columns: ColumnOptions = ColumnOptions(),
    seed: SeedNumber = 0,
    overrides: Sequence[str] = (),
    console: Console | None = None,
) -> Forecast:
    """Forecast what `compress.quantize` would take with the same arguments, on this
    machine and `device`.

    One file of each kind is written, calibrated and scored on few rows, and
    extrapolated to all files and rows. The minimum assumes that static is close enough
    for `auto`, and all-int8 for any method; the maximum, that each product is tried in
    float32. The trial's file tells which is probable, except for `qat`, which trains
    for the minimum.
    """
    console = console or Console(quiet=True)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    bundle = _open(
        bundle, method, None if out is None else Path(out), overrides=overrides
    )
    task_data, threads = (
        bundle.load_data(data, text=columns.text, label=columns.label, seed=seed),
        os.cpu_count() or 1,
    )
    source, length = bundle.files()["fp32"], bundle.manifest.max_length
    graph, phases = read_model(source).graph, list[Phase]()
    parts = products(graph)
    if method == "qat":
        from compress.commands.forecast import forecast

        training = _training_arguments(
            bundle, data, columns=columns, seed=seed, overrides=overrides
        )
        phases += forecast(**training).phases
    with (
        TemporaryDirectory() as scratch,
        open_chosen(device, say=say) as target,
        console.status("trying each phase"),
    ):
        file, smoothed = Path(scratch) / "int8.onnx", Path(scratch) / "smooth.onnx"
        validation = bundle.evaluator(task_data.validation).subsample(ROWS)
        test = bundle.evaluator(
            task_data.validation if task_data.test is None else task_data.test
        )
        few, few_test = validation.subsample(SCORED), test.subsample(SCORED)
        rows = bundle.evaluator(task_data.train).subsample(min(SCORED, int8.rows)).rows
        files = QuantizationEvaluator.from_bundle(
            bundle, validation.subsample(COMPARED), threads=threads, products=len(parts)
        )
        judged, probed = len(validation.rows), len(files.probe)
        # seconds of each step; those that depend on the number of rows are functions of
        # it
        ranges = choose_ranges(observe(source, rows, threads=threads), "minmax")
        write = time_call(
            lambda: quantize_static(
                source,
                file,
                ranges=ranges,
                form=int8.form,
                reduce_range=int8.reduce_range,
            )
        )
        score_float, score_int8 = (
            _time_rows(partial(files.logits, each), few.rows) for each in (source, file)
        )
        observing = _time_rows(
            lambda some: observe(source, some, threads=threads), rows
        )(int8.rows)
        watching = _time_rows(
            lambda some: observe_channels(source, some, threads=threads), rows
        )(int8.rows)
        smoothing = time_call(
            lambda: smooth(
                source,
                smoothed,
                observe_channels(source, rows, threads=threads),
                alpha=ALPHAS[0],
            )
        )
        setting = Setting(1, 1, min(TOKENS, length))
        raced = {"fp32": source, "int8": file, BEFORE: bundle.files().get("int8", file)}
        racing = time_call(lambda: target.race(raced, [setting], rounds=2, runs=RUNS))
        attempt, judging = write + score_int8(probed), write + score_int8(judged)
        answers = score_float(judged) + score_float(probed)
        likely = float(
            method != "qat"
            and files.outcome(file).least_limit > max(max_drop, RESOLVED / judged)
        )
        phases.append(
            Phase(
                "fp32 answers",
                seconds=(answers, answers),
                note=f"{judged:,} validation rows",
            )
        )
        static = (
            observing + (len(CALIBRATIONS) if int8.calibration is None else 1) * attempt
        )
        again = observing if int8.calibration not in (None, "minmax") else 0.0
        smoothquant = watching + len(ALPHAS) * (
            smoothing + score_float(probed) + again + attempt
        )
        calibration = {
            "auto": (static + judging, static + judging + smoothquant),
            "static": (static, static),
            "smoothquant": (smoothquant, smoothquant),
        }
        if method in calibration:
            phases.append(
                Phase(
                    "calibration",
                    seconds=calibration[method],
                    note=f"{int8.rows:,} rows",
                    likely=likely,
                )
            )
        pricing = write + racing / len(raced) * PRICED_ROUNDS * PRICED_RUNS / (2 * RUNS)
        trying = (2 * len(parts) + 1) * attempt + 2 * math.log2(
            2 * len(parts)
        ) * judging
        shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
        # by `race_products`
        trying += (
            len({(shapes[part.weight], part.gemm) for part in parts}) + 3
        ) * pricing
        note = (
            f"{len(parts)} products are tried in float32 if all-int8 is not close "
            "enough"
        )
        phases.append(
            Phase(
                "choice of products",
                seconds=(judging, judging + trying),
                note=note,
                likely=likely,
            )
        )

        def answer(file: Path, some: Dataset) -> object:
            return compute_logits(target, file, replace(few_test, rows=some))

        proof = sum(
            _time_rows(partial(answer, each), few_test.rows)(len(test.rows))
            for each in (source, file)
        )
        proof += ROUNDS / 2 * racing
        disk_mb = size_mb(bundle.path, file) + len(ALPHAS) * size_mb(smoothed)
        phases.append(
            Phase(
                "certificate",
                seconds=(proof, proof),
                note=f"{len(test.rows):,} rows",
                disk_mb=disk_mb,
            )
        )
    return Forecast(
        f"{bundle.path}: int8 by {method} on {task_data.name}",
        tuple(phases),
        peak_rss_mb(),
    )


def _time_rows(
    run: Callable[[Dataset], object], rows: Dataset
) -> Callable[[int], float]:
    """Time a run over one row and over all of `rows`; return the seconds for any number
    of rows."""
    first, total = (
        time_call(lambda: run(rows.select(range(1)))),
        time_call(lambda: run(rows)),
    )
    more = max(0.0, total - first) / max(1, len(rows) - 1)
    return lambda count: first + more * count


def _open(
    place: BundleLike, method: Name, out: Path | None, *, overrides: Sequence[str]
) -> Bundle:
    """Load a bundle. Raises CompressError for options that this method does not use,
    and for an unusable `out`."""
    bundle = Bundle.load(place)
    if overrides and method != "qat":
        raise CompressError(
            f"--set: {overrides[0]}: changes training, and {method} does not train; "
            "give --method qat"
        )
    if method == "qat" and (out is None or out.resolve() == bundle.path.resolve()):
        raise BundleError(
            f"{bundle.path}: --method qat trains the weights, which makes a new "
            "bundle: give --out another folder"
        )
    if out is not None:
        check_place(out)
    else:
        check_writable(bundle.path)
    return bundle


def choose_attempt(
    method: Name, bundle: Bundle, settings: Calibrated, limit: float, say: Say
) -> Attempt:
    """Prepare the int8 file by the method; of several calibrations, choose the one
    closest to float."""
    source = bundle.files()["fp32"]
    if method == "auto":
        return settings.auto(source, limit, say)
    if method == "static":
        return settings.static(source, say)
    if method == "smoothquant":
        return settings.smoothquant(source, say)
    return attempt_as_written(bundle) if method == "qat" else dynamic(source)


def race_before_after(
    bundle: Bundle, candidate: Bundle, device: Device
) -> tuple[tuple[Latency, ...], dict[str, float]]:
    """Race the files before and after, and return their sizes in MB. An interrupted
    bundle has no int8 file before."""
    before = {BEFORE: bundle.files()["int8"]} if "int8" in bundle.files() else {}
    files = {
        "fp32": bundle.files()["fp32"],
        **before,
        "int8": candidate.files()["int8"],
    }
    setting = Setting(1, 1, min(TOKENS, bundle.manifest.max_length))
    times = device.race(files, [setting], rounds=ROUNDS, runs=RUNS)
    return tuple(times), {
        name: path.stat().st_size / 1e6 for name, path in files.items()
    }
