"""Choose the method that makes the int8 file of a bundle: its calibration or alpha, by real rows."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from datasets import Dataset

from compress.benchmark.devices import open_device
from compress.errors import ExportError
from compress.evaluation.evaluator import Evaluator
from compress.exporters.artifact import Bundle
from compress.exporters.int8 import LEARNED_KEY, Form, Ranges, quantize_dynamic, quantize_learned, quantize_static
from compress.exporters.rewrite.graph import products
from compress.exporters.session import read_model
from compress.quantization import calibration as calibrate
from compress.quantization.calibration import Method as Calibration
from compress.quantization.certify import QuantizationEvaluator
from compress.quantization.sensitivity import Make, Mixed, by_size, mix, price_float
from compress.quantization.smoothquant import channels, smooth
from compress.records.certificate import Certificate
from compress.records.latency import Latency

Name = Literal["auto", "dynamic", "static", "smoothquant", "qat"]
"""auto: static where that is near enough, else smoothquant."""

CALIBRATIONS: tuple[tuple[Calibration, float], ...] = (
    ("minmax", 100.0),
    ("percentile", 99.999),
    ("percentile", 99.99),
    ("entropy", 100.0),
)
"""The methods compared where none is asked for, and their percentiles."""
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Xiao et al. 2022 find 0.5 right for OPT and BLOOM, 0.75 and more for models with more outliers (section 4.1)."""
PERCENTILE = 99.99
DYNAMIC = "dynamic int8"
CALIBRATION_ROWS = 512
SHIPPED_WORTH = 0.2
"""The share of the error that a product must carry to be left in float32 where nobody asked what answers are worth."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Attempt:
    """One way to int8: `method` names it in the certificate, `make` writes the file with some products in float32."""

    method: str
    make: Make


@dataclass(frozen=True)
class Calibrated:
    """Makes int8 with calibration: rows to calibrate on, evaluator, a folder that outlives the attempt."""

    rows: Dataset
    evaluator: QuantizationEvaluator
    scratch: Path
    calibration: Calibration | None = None
    percentile: float = PERCENTILE
    form: Form = "fused"
    reduce_range: bool = False

    def static(self, source: Path, say: Say) -> Attempt:
        """Quantise with the calibration asked for, or the one that brings the logits nearest to fp32's."""
        seen = calibrate.observe(source, self.rows, threads=self.evaluator.threads)
        asked = CALIBRATIONS if self.calibration is None else ((self.calibration, self.percentile),)
        return self._nearest(
            [(describe_calibration(*each), source, calibrate.choose_ranges(seen, *each)) for each in asked],
            "static int8",
            say,
        )

    def smoothquant(self, source: Path, say: Say) -> Attempt:
        """Quantise the smoothed graph, with the alpha that brings the logits nearest to fp32's; min-max unless another
        calibration is asked for."""
        seen = channels(source, self.rows, threads=self.evaluator.threads)
        found = []
        for alpha in ALPHAS:
            file = self.scratch / f"smooth-{alpha}.onnx"
            ranges: Ranges = smooth(source, file, seen, alpha=alpha)
            error = self.evaluator.error(file)
            if not error <= 1e-6 * max(1.0, float((self.evaluator.expected**2).mean())):
                raise ExportError(
                    f"{file.name}: the smoothed float graph answers differently (mean squared error {error:.2g}); "
                    "use --method static, and please report this model's config.json"
                )
            if self.calibration not in (None, "minmax"):
                watched = calibrate.observe(file, self.rows, threads=self.evaluator.threads)
                ranges = calibrate.choose_ranges(watched, self.calibration, self.percentile)
            way = f"alpha {alpha:g}, {describe_calibration(self.calibration or 'minmax', self.percentile)}"
            found.append((way, file, ranges))
        return self._nearest(found, "SmoothQuant static int8", say)

    def auto(self, source: Path, limit: float, say: Say) -> Attempt:
        """Choose static where all of it is near enough at `limit`; else smoothquant, which costs a little time."""
        attempt, file = self.static(source, say), self.scratch / "auto.onnx"
        attempt.make(file)
        return attempt if self.evaluator.outcome(file).near(limit) else self.smoothquant(source, say)

    def _nearest(self, ways: Sequence[tuple[str, Path, Ranges]], name: str, say: Say) -> Attempt:
        """Choose the way whose file, all of it in int8, has the least error."""
        bits, form = ", 7-bit weights" if self.reduce_range else "", ", qdq" if self.form == "qdq" else ""
        quantize = partial(quantize_static, form=self.form, reduce_range=self.reduce_range)
        errors: dict[float, Attempt] = {}
        for way, source, ranges in ways:
            attempt = Attempt(f"{name}, {way}{bits}{form}", partial(quantize, source, ranges=ranges))
            attempt.make(self.scratch / "way.onnx")
            error = self.evaluator.error(self.scratch / "way.onnx")
            errors.setdefault(error, attempt)
            say(f"  {name}, {way}: mean squared error of the logits {error:.5f}")
        return errors[min(errors)]


def describe_calibration(calibration: Calibration, percentile: float) -> str:
    return f"percentile {percentile:g}" if calibration == "percentile" else calibration


def dynamic(source: Path) -> Attempt:
    """Quantise activations as they come."""
    return Attempt(DYNAMIC, partial(quantize_dynamic, source))


def attempt_as_written(bundle: Bundle) -> Attempt:
    """Make int8 as `Bundle.write` does: dynamic, or with the ranges that the model learned in training."""
    source = bundle.files()["fp32"]
    config = json.loads((bundle.path / "config.json").read_text(encoding="utf-8"))
    if not (ranges := config.get(LEARNED_KEY)):
        return dynamic(source)
    return Attempt("static int8, ranges learned in training", partial(quantize_learned, source, learned=ranges))


def keep_score(
    bundle: Bundle, evaluator: Evaluator, *, limit: float, threads: int, rows: Callable[[], Dataset] | None = None
) -> tuple[Bundle, Mixed, str]:
    """Return the bundle with an int8 file that is near enough to fp32 on these rows, how near, and how it was made.

    The file it was written with, where that is near enough at `limit` (`ScoreDrop.near`); else SmoothQuant of `rows`,
    as fast, where they are given and the ranges are not learned ones; else the nearer of the two with the products left
    in float32 that it takes: see `mix`. For a bundle just written: what carries little of the error is not worth its
    time in float32, so where those that do carry it do not suffice, int8 stays as near as it is.
    """
    source = bundle.files()["fp32"]
    graph = read_model(source).graph
    parts, attempt = products(graph), attempt_as_written(bundle)
    written_as = attempt.method
    files = QuantizationEvaluator.from_bundle(bundle, evaluator, threads=threads, products=len(parts))
    with tempfile.TemporaryDirectory() as scratch:
        if rows is not None and attempt.method == DYNAMIC and not files.outcome(bundle.files()["int8"]).near(limit):
            settings = Calibrated(rows(), files, Path(scratch))
            other, file = settings.smoothquant(source, lambda _: None), Path(scratch) / "other.onnx"
            other.make(file)
            if files.error(file) < files.error(bundle.files()["int8"]):
                attempt = other
        mixed = mix(
            attempt.make, parts, files, limit=limit, worth=SHIPPED_WORTH, whatever_it_takes=False,
            costs=lambda: by_size(parts, graph),
        )  # fmt: skip
        if mixed.keep:
            with open_device("local") as here:
                mixed = price_float(mixed, attempt.make, here, max_length=bundle.manifest.max_length)
        if mixed.keep or attempt.method != written_as:
            attempt.make(Path(scratch) / "int8.onnx", keep=mixed.keep)
            bundle = bundle.put("int8", Path(scratch) / "int8.onnx")
    return bundle, mixed, attempt.method


BEFORE = "int8 before"


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
