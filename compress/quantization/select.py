"""Choose the method that makes the int8 file of a bundle: its calibration or alpha, by
real rows."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from datasets import Dataset

from compress.benchmark.devices import open_device
from compress.errors import ExportError
from compress.evaluation.evaluator import Evaluator
from compress.exporters.artifact import Bundle
from compress.exporters.int8 import (
    LEARNED_KEY,
    Int8Form,
    Ranges,
    quantize_dynamic,
    quantize_learned,
    quantize_static,
)
from compress.exporters.rewrite.graph import products
from compress.exporters.session import read_model
from compress.io import parse_json
from compress.progress import Say
from compress.quantization.calibration import Method as Calibration
from compress.quantization.calibration import choose_ranges, observe
from compress.quantization.certify import QuantizationEvaluator
from compress.quantization.sensitivity import (
    Make,
    Mixed,
    estimate_costs,
    mix,
    price_float,
)
from compress.quantization.smoothquant import observe_channels, smooth
from compress.records.certificate import Certificate
from compress.records.latency import Latency

Name = Literal["auto", "dynamic", "static", "smoothquant", "qat"]
"""auto: static if that is near enough, else smoothquant."""

CALIBRATIONS: tuple[tuple[Calibration, float], ...] = (
    ("minmax", 100.0),
    ("percentile", 99.999),
    ("percentile", 99.99),
    ("entropy", 100.0),
)
"""The methods to compare by default, and their percentiles."""
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Xiao et al. 2022 find 0.5 right for OPT and BLOOM, 0.75 and more for models with more
outliers (section 4.1)."""
CALIBRATION_PERCENTILE = 99.99
DYNAMIC = "dynamic int8"
CALIBRATION_ROWS = 512
SHIPPED_WORTH = 0.2
"""The share of the error that a product must cause to stay in float32 in a newly
written bundle."""


@dataclass(frozen=True)
class Attempt:
    """A way to make int8. method: its name in the certificate; make: writes the file,
    with some products in float32."""

    method: str
    make: Make


@dataclass(frozen=True)
class Way:
    """A way to calibrate: a float file, which may be smoothed, and the ranges of its
    activations."""

    method: str
    source: Path
    ranges: Ranges


def calibrate_each(
    source: Path,
    rows: Dataset,
    methods: Sequence[tuple[Calibration, float]],
    *,
    names: Sequence[str] | None = None,
    threads: int,
) -> list[Way]:
    """Calibrate a file by each method and percentile; `names`: see `observe`."""
    seen = observe(source, rows, names=names, threads=threads)
    return [
        Way(describe_calibration(*each), source, choose_ranges(seen, *each))
        for each in methods
    ]


def smooth_each(
    source: Path,
    rows: Dataset,
    scratch: Path,
    find_ranges: Callable[[Path, Ranges], Ranges],
    *,
    threads: int,
) -> list[Way]:
    """Smooth a file with each alpha; `find_ranges` gets the smoothed file, and the
    extremes of what its products read."""
    seen = observe_channels(source, rows, threads=threads)
    ways = []
    for alpha in ALPHAS:
        file = scratch / f"smooth-{alpha}.onnx"
        extremes = smooth(source, file, seen, alpha=alpha)
        ways.append(Way(f"alpha {alpha:g}", file, find_ranges(file, extremes)))
    return ways


@dataclass(frozen=True)
class Calibrated:
    """Makes int8 with calibration on rows. `scratch`: a folder that outlives the
    attempts."""

    rows: Dataset
    evaluator: QuantizationEvaluator
    scratch: Path
    calibration: Calibration | None = None
    percentile: float = CALIBRATION_PERCENTILE
    form: Int8Form = "fused"
    full_range: bool = False

    def static(self, source: Path, say: Say) -> Attempt:
        """Quantise with the requested calibration, or the one with the least error of
        the logits."""
        methods = CALIBRATIONS
        if self.calibration is not None:
            methods = ((self.calibration, self.percentile),)
        threads = self.evaluator.threads
        ways = calibrate_each(source, self.rows, methods, threads=threads)
        return self._choose_nearest(ways, "static int8", say)

    def smoothquant(self, source: Path, say: Say) -> Attempt:
        """Quantise the smoothed graph, with the alpha with the least error of the
        logits; by default with min-max."""
        threads = self.evaluator.threads
        method = self.calibration or "minmax"

        def find_ranges(file: Path, extremes: Ranges) -> Ranges:
            error = self.evaluator.error(file)
            if not error <= 1e-6 * max(1.0, float((self.evaluator.expected**2).mean())):
                raise ExportError(
                    f"{file.name}: the smoothed float graph answers differently (mean "
                    f"squared error {error:.2g}); use --method static, and please "
                    "report this model's config.json"
                )
            if method == "minmax":
                return extremes
            seen = observe(file, self.rows, threads=threads)
            return choose_ranges(seen, method, self.percentile)

        calibration = describe_calibration(method, self.percentile)
        ways = [
            replace(way, method=f"{way.method}, {calibration}")
            for way in smooth_each(
                source, self.rows, self.scratch, find_ranges, threads=threads
            )
        ]
        return self._choose_nearest(ways, "SmoothQuant static int8", say)

    def auto(self, source: Path, limit: float, say: Say) -> Attempt:
        """Choose static if its file is near enough at `limit`, else smoothquant, which
        costs a little time."""
        attempt = self.static(source, say)
        file = self.scratch / "auto.onnx"
        attempt.make(file)
        return (
            attempt
            if self.evaluator.outcome(file).near(limit)
            else self.smoothquant(source, say)
        )

    def _choose_nearest(self, ways: Sequence[Way], name: str, say: Say) -> Attempt:
        """Choose the way whose all-int8 file has the least error."""
        form = ", qdq" if self.form == "qdq" else ""
        weights = ", full range" if self.full_range else ""
        quantize = partial(quantize_static, form=self.form, full_range=self.full_range)
        makes = {
            f"{name}, {way.method}": partial(quantize, way.source, ranges=way.ranges)
            for way in ways
        }
        title = choose_least_error(
            makes, self.evaluator, self.scratch / "variant.onnx", say
        )
        return Attempt(f"{title}{weights}{form}", makes[title])


def choose_least_error(
    makes: Mapping[str, Callable[[Path], None]],
    evaluator: QuantizationEvaluator,
    file: Path,
    say: Say,
) -> str:
    """Make each file in turn, and return the name of the first with the least error."""
    errors = {}
    for name, make in makes.items():
        make(file)
        errors[name] = evaluator.error(file)
        say(f"  {name}: mean squared error of the logits {errors[name]:.5f}")
    return min(errors, key=errors.__getitem__)


def describe_calibration(calibration: Calibration, percentile: float) -> str:
    return f"percentile {percentile:g}" if calibration == "percentile" else calibration


def dynamic(source: Path, *, full_range: bool = False) -> Attempt:
    """Quantise activations at run time."""
    weights = ", full range" if full_range else ""
    make = partial(quantize_dynamic, source, full_range=full_range)
    return Attempt(f"{DYNAMIC}{weights}", make)


def attempt_as_written(bundle: Bundle) -> Attempt:
    """Make int8 as `Bundle.write` does: dynamic, or with ranges learned in training."""
    source = bundle.files()["fp32"]
    config = parse_json(bundle.path / "config.json")
    if not (ranges := config.get(LEARNED_KEY)):
        return dynamic(source)
    return Attempt(
        "static int8, ranges learned in training",
        partial(quantize_learned, source, learned=ranges),
    )


def keep_score(
    bundle: Bundle,
    evaluator: Evaluator,
    *,
    limit: float,
    threads: int,
    rows: Callable[[], Dataset] | None = None,
) -> tuple[Bundle, Mixed, str]:
    """Return a bundle just written with an int8 file that is near enough to fp32, its
    comparison, and its method.

    In this order: the file as written, if it is near enough at `limit`
    (`ScoreDrop.near`); SmoothQuant on `rows`, which is as fast, if they are given and
    ranges were not learned; the nearer of the two, with the products in float32 that it
    needs (see `mix`). Products that carry little of the error never stay in float32: if
    the others do not suffice, int8 stays as it is.
    """
    source = bundle.files()["fp32"]
    graph = read_model(source).graph
    parts = products(graph)
    attempt = written = attempt_as_written(bundle)
    files = QuantizationEvaluator.from_bundle(
        bundle, evaluator, threads=threads, products=len(parts)
    )
    with tempfile.TemporaryDirectory() as scratch:
        if (
            rows is not None
            and attempt.method == DYNAMIC
            and not files.outcome(bundle.files()["int8"]).near(limit)
        ):
            settings = Calibrated(rows(), files, Path(scratch))
            smoothed = settings.smoothquant(source, lambda _: None)
            file = Path(scratch) / "smoothed.onnx"
            smoothed.make(file)
            if files.error(file) < files.error(bundle.files()["int8"]):
                attempt = smoothed
        mixed = mix(
            attempt.make,
            parts,
            files,
            limit=limit,
            worth=SHIPPED_WORTH,
            whatever_it_takes=False,
            costs=lambda: estimate_costs(parts, graph),
        )
        if mixed.keep:
            with open_device("local") as device:
                mixed = price_float(
                    mixed, attempt.make, device, max_length=bundle.manifest.max_length
                )
        if mixed.keep or attempt is not written:
            attempt.make(Path(scratch) / "int8.onnx", keep=mixed.keep)
            bundle = bundle.put("int8", Path(scratch) / "int8.onnx")
    return bundle, mixed, attempt.method


BEFORE = "int8 before"


@dataclass(frozen=True)
class Quantized:
    """The bundle with its new int8 file, the certificate, and the choice of products.

    times, sizes   latency on the device and size in 10^6 bytes, of fp32, the earlier
                   int8 file, and int8
    """

    bundle: Bundle
    proof: Certificate
    mixed: Mixed
    times: tuple[Latency, ...]
    sizes: Mapping[str, float]
