"""The ways to make an int8 file of a bundle's fp32 file, each settled on real rows: calibration, alpha."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from datasets import Dataset

from compress.errors import ExportError
from compress.export.bundle import Bundle
from compress.export.int8 import quantize_dynamic
from compress.quantize import calibrate
from compress.quantize.histogram import Method as Calibration
from compress.quantize.judge import Judge
from compress.quantize.learned import KEY as LEARNED
from compress.quantize.learned import quantize_learned
from compress.quantize.mixed import Make
from compress.quantize.smooth import channels, smooth
from compress.quantize.static import Form, Ranges, quantize_static

Name = Literal["auto", "dynamic", "static", "smoothquant", "qat"]
"""auto: static where that is near enough, else smoothquant."""

CALIBRATIONS: tuple[tuple[Calibration, float], ...] = (
    ("minmax", 100.0),
    ("percentile", 99.999),
    ("percentile", 99.99),
    ("entropy", 100.0),
)
"""Those compared where none is asked for, and their percentiles."""
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Xiao et al. 2022 find 0.5 right for OPT and BLOOM, 0.75 and more for models with more outliers (section 4.1)."""
PERCENTILE = 99.99
DYNAMIC = "dynamic int8"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Attempt:
    """A settled way: `method` for the certificate, `make` for the file, with or without products left in float32."""

    method: str
    make: Make


@dataclass(frozen=True)
class Calibrated:
    """What the methods with calibration need: rows to calibrate on, judge, a folder that outlives the attempt."""

    rows: Dataset
    judge: Judge
    scratch: Path
    calibration: Calibration | None = None
    percentile: float = PERCENTILE
    form: Form = "fused"
    reduce_range: bool = False

    def static(self, source: Path, say: Say) -> Attempt:
        """Static int8 with the calibration asked for, or the one that brings the logits nearest to fp32's."""
        seen = calibrate.observe(source, self.rows, threads=self.judge.threads)
        asked = CALIBRATIONS if self.calibration is None else ((self.calibration, self.percentile),)
        return self._nearest([(told(*each), source, calibrate.cut(seen, *each)) for each in asked], "static int8", say)

    def smoothquant(self, source: Path, say: Say) -> Attempt:
        """Static int8 of the smoothed graph, with the alpha that brings the logits nearest to fp32's; min-max unless
        another calibration is asked for."""
        seen = channels(source, self.rows, threads=self.judge.threads)
        found = []
        for alpha in ALPHAS:
            file = self.scratch / f"smooth-{alpha}.onnx"
            ranges: Ranges = smooth(source, file, seen, alpha=alpha)
            self._exact(file)
            if self.calibration not in (None, "minmax"):
                watched = calibrate.observe(file, self.rows, threads=self.judge.threads)
                ranges = calibrate.cut(watched, self.calibration, self.percentile)
            found.append((f"alpha {alpha:g}, {told(self.calibration or 'minmax', self.percentile)}", file, ranges))
        return self._nearest(found, "SmoothQuant static int8", say)

    def auto(self, source: Path, limit: float, say: Say) -> Attempt:
        """Static where all of it is near enough at `limit`; else smoothquant, whose multiplications cost a little."""
        attempt, file = self.static(source, say), self.scratch / "auto.onnx"
        attempt.make(file, ())
        return attempt if self.judge.outcome(file).near(limit) else self.smoothquant(source, say)

    def _nearest(self, ways: Sequence[tuple[str, Path, Ranges]], name: str, say: Say) -> Attempt:
        errors = []
        for at, (way, source, ranges) in enumerate(ways):
            file = self.scratch / f"way-{at}.onnx"
            self._make(source, ranges)(file, ())
            errors.append(self.judge.error(file))
            say(f"  {name}, {way}: mean squared error of the logits {errors[-1]:.5f}")
        way, source, ranges = ways[min(range(len(ways)), key=errors.__getitem__)]
        bits = ", 7-bit weights" if self.reduce_range else ""
        form = ", qdq" if self.form == "qdq" else ""
        return Attempt(f"{name}, {way}{bits}{form}", self._make(source, ranges))

    def _make(self, source: Path, ranges: Ranges) -> Make:
        def make(target: Path, keep: Sequence[str]) -> None:
            quantize_static(source, target, ranges, keep=keep, form=self.form, reduce_range=self.reduce_range)

        return make

    def _exact(self, smoothed: Path) -> None:
        """Smoothing must not change what the float graph computes; a graph it misread would."""
        error = self.judge.error(smoothed)
        if not error <= 1e-6 * max(1.0, float((self.judge.expected**2).mean())):
            raise ExportError(
                f"{smoothed.name}: the smoothed float graph answers differently (mean squared error {error:.2g}); "
                "use --method static, and please report this model's config.json"
            )


def told(calibration: Calibration, percentile: float) -> str:
    return f"percentile {percentile:g}" if calibration == "percentile" else calibration


def dynamic(source: Path) -> Attempt:
    def make(target: Path, keep: Sequence[str]) -> None:
        quantize_dynamic(source, target, keep=keep)

    return Attempt(DYNAMIC, make)


def as_written(bundle: Bundle) -> Attempt:
    """How `Bundle.write` makes int8: dynamic, or with the ranges that the model learned in training."""
    source = bundle.files()["fp32"]
    config = json.loads((bundle.path / "config.json").read_text(encoding="utf-8"))
    if not (ranges := config.get(LEARNED)):
        return dynamic(source)

    def make(target: Path, keep: Sequence[str]) -> None:
        quantize_learned(source, target, ranges, keep=keep)

    return Attempt("static int8, ranges learned in training", make)
