"""The phases of quantising a bundle to int8."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from datasets import Dataset
from onnx import GraphProto
from rich.console import Console

from compress.arguments import (
    BundleLike,
    DataLike,
    PathName,
    SeedNumber,
    Share,
    check_arguments,
)
from compress.benchmark.device import Device
from compress.config.options import ColumnOptions, DeviceOptions, Int8Options
from compress.data.task import TaskData
from compress.errors import BundleError, CompressError
from compress.evaluation.evaluator import Evaluator
from compress.exporters.artifact import Bundle, check_destination
from compress.exporters.int8 import quantize_static
from compress.exporters.rewrite.graph import Product, products
from compress.exporters.session import read_model
from compress.jobs.phase import Estimated, Phase
from compress.progress import Say
from compress.quantization.calibration import choose_ranges, observe
from compress.quantization.certify import (
    CERTIFIED_ROWS,
    RESOLVED,
    Claim,
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
from compress.quantization.sensitivity import SENSITIVITY_ROUNDS as PRICED_ROUNDS
from compress.quantization.sensitivity import SENSITIVITY_RUNS as PRICED_RUNS
from compress.quantization.sensitivity import Mixed, mix, price_float, race_products
from compress.quantization.smoothquant import observe_channels, smooth
from compress.records.forecast import PhaseEstimate, size_mb, time_call
from compress.records.latency import Latency, Setting

TRIAL_TOKENS = 64
QUANTIZE_ROUNDS = 6
QUANTIZE_RUNS = 10
"""Tokens, rounds and runs of the race between the files before and after."""
ROWS_COMPARED = 64
COMPARED = 256
"""Rows on which a trial calibrates and scores, and on which it compares the file with
float."""


@check_arguments
@dataclass(frozen=True)
class QuantizeRequest:
    """The keywords that `compress.quantize` and its forecast share. See there."""

    bundle: BundleLike
    data: DataLike
    _: KW_ONLY
    method: Name = "auto"
    out: PathName | None = None
    int8: Int8Options = Int8Options()
    max_drop: Share = 0.005
    device: DeviceOptions = DeviceOptions()
    columns: ColumnOptions = ColumnOptions()
    seed: SeedNumber = 0
    overrides: Sequence[str] = ()

    @cached_property
    def source(self) -> Bundle:
        """The bundle before anything is changed."""
        return Bundle.load(self.bundle)

    @property
    def place(self) -> Path:
        """The folder of the bundle to write."""
        return self.source.path if self.out is None else Path(self.out)

    def check(self) -> None:
        """Raise CompressError for options that the method does not use, and for an
        unusable `out`."""
        path = self.source.path
        if self.overrides and self.method != "qat":
            raise CompressError(
                f"--set: {self.overrides[0]}: changes training, and {self.method} does "
                "not train; give --method qat"
            )
        unread = {
            "dynamic": ("calibration", "percentile", "rows", "form"),
            "qat": ("calibration", "percentile", "rows"),
        }.get(self.method, ())
        for name in unread:
            if getattr(self.int8, name) != getattr(Int8Options, name):
                raise CompressError(
                    f"--{name}: --method {self.method} does not read it; leave it out"
                )
        narrowed = self.int8.percentile != Int8Options.percentile
        if narrowed and self.int8.calibration != "percentile":
            raise CompressError("--percentile: is for --calibration percentile")
        if self.method == "qat" and self.int8.full_range:
            raise CompressError(
                "--target-cpu vnni: qat trains weights that are rounded for any "
                "processor; leave it out"
            )
        if self.method == "qat" and self.place.resolve() == path.resolve():
            raise BundleError(
                f"{path}: --method qat trains the weights, which makes a new "
                "bundle: give --out another folder"
            )
        check_destination(path, None if self.out is None else self.place)

    @cached_property
    def task_data(self) -> TaskData:
        """The rows to calibrate, choose and certify on."""
        return self.source.load_data(
            self.data, text=self.columns.text, label=self.columns.label, seed=self.seed
        )


@check_arguments
@dataclass(frozen=True)
class QuantizeArguments(QuantizeRequest):
    """The keywords of `compress.quantize`. See there."""

    say: Say = field(default=lambda _: None, kw_only=True)


@check_arguments
@dataclass(frozen=True)
class ForecastQuantizeArguments(QuantizeRequest):
    """The keywords of `compress.forecast_quantization`. See there."""

    console: Console | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class QuantizeJob:
    """A bundle, its device, and what the phases have made so far.

    bundle   the request's bundle, or the same trained again
    scratch  a folder for intermediate files
    timed    seconds of the steps, if the command is only estimated
    """

    request: QuantizeRequest
    bundle: Bundle
    device: Device
    scratch: Path
    say: Say
    attempt: Attempt | None = None
    mixed: Mixed | None = None
    quantized: Quantized | None = None
    timed: "StepTimes | None" = None

    @property
    def data(self) -> TaskData:
        return self.request.task_data

    @cached_property
    def graph(self) -> GraphProto:
        return read_model(self.bundle.files()["fp32"]).graph

    @cached_property
    def parts(self) -> list[Product]:
        """The products of the graph."""
        return list(products(self.graph))

    @cached_property
    def files(self) -> QuantizationEvaluator:
        """The evaluator of files on the validation split."""
        return self.evaluate_on(self.bundle.evaluator(self.data.validation))

    def evaluate_on(self, rows: Evaluator) -> QuantizationEvaluator:
        """Return an evaluator of files on these rows."""
        threads = os.cpu_count() or 1
        return QuantizationEvaluator.from_bundle(
            self.bundle, rows, threads=threads, products=len(self.parts)
        )

    @property
    def certified(self) -> tuple[Evaluator, str]:
        """The rows that the certificate is for, and the name of their split."""
        name, split = self.data.measured
        return self.bundle.evaluator(split), name

    @property
    def times(self) -> "StepTimes":
        """The seconds of the steps."""
        assert self.timed is not None, "`Calibrate` measures them"
        return self.timed


@dataclass(frozen=True)
class StepTimes:
    """The seconds of the steps of a quantisation, measured on few rows.

    write     writing a file; probe, judge: writing it, and scoring it on few or many
              rows
    judged    the number of the many rows
    race      a race of `raced` files in two rounds
    likely    0 if all-int8 is probably close enough to float, 1 if not
    """

    write: float
    score_float: Callable[[int], float]
    score_int8: Callable[[int], float]
    probed: int
    judged: int
    race: float
    raced: int
    likely: float
    file: Path
    smoothed: Path

    @property
    def probe(self) -> float:
        return self.write + self.score_int8(self.probed)

    @property
    def judge(self) -> float:
        return self.write + self.score_int8(self.judged)


class Calibrate(Phase[QuantizeJob]):
    """Prepare the int8 file by the method; of several calibrations, choose the one
    closest to float."""

    def run(self, job: QuantizeJob) -> QuantizeJob:
        int8 = job.request.int8
        files = job.files
        settings = Calibrated(
            job.bundle.evaluator(job.data.train).subsample(int8.rows).rows,
            files,
            job.scratch,
            int8.calibration,
            int8.percentile,
            int8.form,
            int8.full_range,
        )
        attempt = choose_attempt(
            job.request.method, job.bundle, settings, job.request.max_drop, job.say
        )
        rows = len(files.evaluator)
        job.say(f"{attempt.method}: scored on {rows:,} validation rows")
        return replace(job, attempt=attempt)

    def estimate(self, job: QuantizeJob) -> Estimated[QuantizeJob]:
        bundle = job.bundle
        int8 = job.request.int8
        threads = os.cpu_count() or 1
        source = bundle.files()["fp32"]
        file = job.scratch / "int8.onnx"
        smoothed = job.scratch / "smooth.onnx"
        validation = bundle.evaluator(job.data.validation).subsample(CERTIFIED_ROWS)
        few = validation.subsample(ROWS_COMPARED)
        train = bundle.evaluator(job.data.train)
        rows = train.subsample(min(ROWS_COMPARED, int8.rows)).rows
        files = job.evaluate_on(validation.subsample(COMPARED))
        judged = len(validation.rows)
        probed = len(files.probe)
        ranges = choose_ranges(observe(source, rows, threads=threads), "minmax")
        write = time_call(
            lambda: quantize_static(
                source,
                file,
                ranges=ranges,
                form=int8.form,
                full_range=int8.full_range,
            )
        )
        score_float = _time_rows(partial(files.logits, source), few.rows)
        score_int8 = _time_rows(partial(files.logits, file), few.rows)
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
        setting = Setting(1, 1, min(TRIAL_TOKENS, bundle.manifest.max_length))
        raced = {"fp32": source, "int8": file, BEFORE: bundle.files().get("int8", file)}
        race = time_call(
            lambda: job.device.race(raced, [setting], rounds=2, runs=QUANTIZE_RUNS)
        )
        close = files.outcome(file).least_limit <= max(
            job.request.max_drop, RESOLVED / judged
        )
        times = StepTimes(
            write,
            score_float,
            score_int8,
            probed,
            judged,
            race,
            len(raced),
            float(job.request.method != "qat" and not close),
            file,
            smoothed,
        )
        answers = score_float(judged) + score_float(probed)
        note = f"{judged:,} validation rows"
        found = [PhaseEstimate("fp32 answers", seconds=(answers, answers), note=note)]
        tries = len(CALIBRATIONS) if int8.calibration is None else 1
        static = observing + tries * times.probe
        again = observing if int8.calibration not in (None, "minmax") else 0.0
        smoothquant = watching + len(ALPHAS) * (
            smoothing + score_float(probed) + again + times.probe
        )
        seconds = {
            "auto": (static + times.judge, static + times.judge + smoothquant),
            "static": (static, static),
            "smoothquant": (smoothquant, smoothquant),
        }
        if job.request.method in seconds:
            found.append(
                PhaseEstimate(
                    "calibration",
                    seconds=seconds[job.request.method],
                    note=f"{int8.rows:,} rows",
                    likely=times.likely,
                )
            )
        return replace(job, timed=times), found


class ChooseProducts(Phase[QuantizeJob]):
    """Leave products in float32 until the file keeps the score on the validation
    split."""

    def run(self, job: QuantizeJob) -> QuantizeJob:
        attempt = job.attempt
        length = job.bundle.manifest.max_length
        assert attempt is not None, "the calibration comes first"
        mixed = mix(
            attempt.make,
            job.parts,
            job.files,
            limit=job.request.max_drop,
            say=job.say,
            costs=lambda: race_products(
                attempt.make, job.parts, job.graph, job.device, max_length=length
            ),
        )
        mixed = price_float(mixed, attempt.make, job.device, max_length=length)
        attempt.make(job.scratch / "int8.onnx", keep=mixed.keep)
        return replace(job, mixed=mixed)

    def estimate(self, job: QuantizeJob) -> Estimated[QuantizeJob]:
        times = job.times
        parts = job.parts
        pricing = (
            times.race / times.raced * PRICED_ROUNDS * PRICED_RUNS / (2 * QUANTIZE_RUNS)
        )
        pricing += times.write
        trying = (2 * len(parts) + 1) * times.probe
        trying += 2 * math.log2(2 * len(parts)) * times.judge
        shapes = {tensor.name: tuple(tensor.dims) for tensor in job.graph.initializer}
        # by `race_products`
        raced = {(shapes[part.weight], part.gemm) for part in parts}
        trying += (len(raced) + 3) * pricing
        found = PhaseEstimate(
            "choice of products",
            seconds=(times.judge, times.judge + trying),
            note=f"{len(parts)} products are tried in float32 if all-int8 is not close "
            "enough",
            likely=times.likely,
        )
        return job, [found]


class CertifyInt8(Phase[QuantizeJob]):
    """Certify the file, race it with the files before, and put it into the bundle, or
    the whole into `out`."""

    def run(self, job: QuantizeJob) -> QuantizeJob:
        bundle = job.bundle
        attempt = job.attempt
        mixed = job.mixed
        assert attempt is not None and mixed is not None, "the file is chosen first"
        evaluator, split = job.certified
        job.say(f"certifying on {len(evaluator):,} {split} rows, {job.device.name}")
        candidate = bundle.copy_to(job.scratch / "candidate" / bundle.path.name)
        candidate = candidate.put("int8", job.scratch / "int8.onnx")
        proof = certify(
            candidate,
            "int8",
            evaluator,
            job.device,
            Claim(
                attempt.method,
                job.request.max_drop,
                split,
                job.data.name,
                mixed.keep,
                mixed.cost,
            ),
            exact=job.request.source.files()["fp32"],
        )
        candidate, proof = attach_certificate(
            candidate, "int8", proof, mixed.sensitivity
        )
        times, sizes = race_before_after(bundle, candidate, job.device)
        if job.request.out is None:
            result = bundle.adopt(candidate, ("int8",))
        else:
            result = candidate.copy_to(job.request.place)
        return replace(job, quantized=Quantized(result, proof, mixed, times, sizes))

    def estimate(self, job: QuantizeJob) -> Estimated[QuantizeJob]:
        times = job.times
        source = job.bundle.files()["fp32"]
        test, _ = job.certified
        few = test.subsample(ROWS_COMPARED)

        def answer(file: Path, some: Dataset) -> object:
            return compute_logits(job.device, file, replace(few, rows=some))

        seconds = QUANTIZE_ROUNDS / 2 * times.race
        for file in (source, times.file):
            seconds += _time_rows(partial(answer, file), few.rows)(len(test.rows))
        disk_mb = size_mb(job.bundle.path, times.file)
        disk_mb += len(ALPHAS) * size_mb(times.smoothed)
        found = PhaseEstimate(
            "certificate",
            seconds=(seconds, seconds),
            note=f"{len(test.rows):,} rows",
            disk_mb=disk_mb,
        )
        return job, [found]


QUANTIZE_PHASES: tuple[Phase[QuantizeJob], ...] = (
    Calibrate(),
    ChooseProducts(),
    CertifyInt8(),
)


def _time_rows(
    run: Callable[[Dataset], object],
    rows: Dataset,
) -> Callable[[int], float]:
    """Time a run over one row and over all of `rows`; return the seconds for any number
    of rows."""
    first = time_call(lambda: run(rows.select(range(1))))
    total = time_call(lambda: run(rows))
    more = max(0.0, total - first) / max(1, len(rows) - 1)
    return lambda count: first + more * count


def choose_attempt(
    method: Name,
    bundle: Bundle,
    settings: Calibrated,
    limit: float,
    say: Say,
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
    if method == "qat":
        return attempt_as_written(bundle)
    return dynamic(source, full_range=settings.full_range)


def race_before_after(
    bundle: Bundle,
    candidate: Bundle,
    device: Device,
) -> tuple[tuple[Latency, ...], dict[str, float]]:
    """Race the files before and after, and return their sizes in MB. An interrupted
    bundle has no int8 file before."""
    before = {BEFORE: bundle.files()["int8"]} if "int8" in bundle.files() else {}
    files = {
        "fp32": bundle.files()["fp32"],
        **before,
        "int8": candidate.files()["int8"],
    }
    setting = Setting(1, 1, min(TRIAL_TOKENS, bundle.manifest.max_length))
    times = device.race(files, [setting], rounds=QUANTIZE_ROUNDS, runs=QUANTIZE_RUNS)
    return tuple(times), {
        name: path.stat().st_size / 1e6 for name, path in files.items()
    }
