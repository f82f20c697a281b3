"""Compare files of a bundle with its fp32 file: many on this machine, to choose one;
the chosen one on the device that will run it, for the certificate in the file."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from datasets import Dataset

from compress.arrays import Floats
from compress.benchmark.device import Device
from compress.evaluation.evaluator import Evaluator
from compress.exporters.artifact import Bundle
from compress.exporters.manifest import BUNDLE_FILES, Precision
from compress.exporters.predictor import open_predictor
from compress.exporters.rewrite.saturation import list_saturating
from compress.exporters.session import read_model, save_certified
from compress.io import sha256
from compress.provenance import timestamp
from compress.quantization.saturation import saturate
from compress.records.certificate import Certificate, Saturation, Sensitivity
from compress.records.class_scores import (
    ClassChange,
    compare_classes,
    describe_changes,
    select_fallen,
)
from compress.records.latency import describe_device

CERTIFIED_ROWS = 2000
"""Rows that decide whether the score is kept, spread evenly over the split."""
PROBE = 128
"""Rows for comparing variants by the error of their logits, also spread evenly."""
RESOLVED = 2
"""Answers that may change whatever the limit. Two changed answers prove nothing (sign
test, p = 0.25), so limits below RESOLVED / rows are not enforced."""
SATURATED_ROWS = 100
"""Rows on which answers without VNNI are computed, also spread evenly: a row takes
about twice as long as in the certificate."""
SCORE_ROUNDING = 1e-9
"""The rounding error of the difference of two scores."""
FEWEST_ROWS = 32
MANY_PRODUCTS = 48
"""If there are more products than MANY_PRODUCTS, fewer rows probe them, down to
FEWEST_ROWS."""


@dataclass(frozen=True)
class FloatCost:
    """The cost of keeping products in float32, compared with the all-int8 file.

    ms          p50 of one forward at `setting` on the device; mb: 10^6 bytes of the
                file
    max_drop    the lowest limit, in the score's own unit, with which all products would
                be int8
    """

    ms: float
    mb: float
    setting: str
    max_drop: float


@dataclass(frozen=True)
class ScoreDrop:
    """The difference of a file's score from fp32's.

    before, after  the score of fp32 and of the file
    agreement      the share of equal answers; for a regression Pearson's r; for a
                   ranking the share of pairs of passages in the same order
    difference     the largest |logit difference|; classes: the recall of each class
    changed        the number of changed answers; None for a regression, where all
                   change
    same           the share of equal answers, if `agreement` is something else
    """

    before: float
    after: float
    agreement: float
    difference: float
    classes: tuple[ClassChange, ...] = ()
    changed: int | None = None
    same: float | None = None

    @property
    def drop(self) -> float:
        return self.before - self.after

    @property
    def unresolved(self) -> bool:
        """Return True if so few answers changed that it may be chance: see RESOLVED."""
        return self.changed is not None and self.changed <= RESOLVED

    @property
    def changed_share(self) -> float:
        """Return the share of other answers; of a regression 1 - r, of vectors 1 - the
        mean cosine."""
        return 1 - (self.agreement if self.same is None else self.same)

    @property
    def least_limit(self) -> float:
        """Return the lowest limit for which the file is near, regardless of
        RESOLVED."""
        return max(0.0, self.drop, self.changed_share)

    def keeps_score(self, limit: float) -> bool:
        """Return True if the score drops by at most `limit`, or so little that it may
        be chance."""
        return self.unresolved or self.drop <= limit + SCORE_ROUNDING

    def near(self, limit: float) -> bool:
        """Return True if the score drops by at most `limit` and at most that share of
        the answers changes, which is the more stable figure: the score of few rows
        crosses a limit by chance. Unresolved changes are near."""
        return self.unresolved or self.least_limit <= limit + SCORE_ROUNDING


def compare_logits(
    evaluator: Evaluator,
    exact: Floats,
    other: Floats,
    *,
    threshold: float | None = None,
) -> ScoreDrop:
    """Compare `other` with `exact`, logits of the evaluator's rows. `threshold`: qa,
    see `Evaluator.scores`."""
    before = evaluator.scores(exact, threshold=threshold)[evaluator.task.metric]
    after = evaluator.scores(other, threshold=threshold)[evaluator.task.metric]
    thresholds = (threshold, threshold)
    changed = evaluator.count_changed(other, exact, thresholds=thresholds)
    same = None
    if changed is not None and evaluator.task.ranks:
        same = 1 - changed / len(evaluator)
    return ScoreDrop(
        before,
        after,
        evaluator.agreement(other, exact, thresholds=thresholds),
        float(np.abs(other - exact).max()),
        compare_classes(evaluator.by_class(exact), evaluator.by_class(other)),
        changed,
        same,
    )


@dataclass(frozen=True)
class QuantizationEvaluator:
    """Compares files of a bundle with its fp32 file on this machine, on the rows of
    `evaluator`.

    exact  fp32's logits of those rows; probe: a few of the rows; expected: fp32's
           logits of the probe
    """

    bundle: Bundle
    evaluator: Evaluator
    exact: Floats
    probe: Dataset
    expected: Floats
    threads: int

    @staticmethod
    def from_bundle(
        bundle: Bundle,
        evaluator: Evaluator,
        *,
        threads: int,
        products: int = MANY_PRODUCTS,
    ) -> "QuantizationEvaluator":
        """Run the fp32 file. The more `products` will be tried, the fewer rows the
        probe has."""
        evaluator = evaluator.subsample(CERTIFIED_ROWS)
        probe = evaluator.subsample(
            max(FEWEST_ROWS, min(PROBE, PROBE * MANY_PRODUCTS // max(1, products)))
        ).rows
        exact = bundle.logits(evaluator.rows, precision="fp32", threads=threads)
        expected = bundle.logits(probe, precision="fp32", threads=threads)
        return QuantizationEvaluator(bundle, evaluator, exact, probe, expected, threads)

    def error(self, file: Path) -> float:
        """Compute the mean squared difference of the logits from fp32's, on the
        probe."""
        return float(np.square(self.logits(file, self.probe) - self.expected).mean())

    def outcome(self, file: Path) -> ScoreDrop:
        """Compare the file's score and answers with fp32's."""
        return compare_logits(
            self.evaluator, self.exact, self.logits(file, self.evaluator.rows)
        )

    def logits(self, file: Path, rows: Dataset) -> Floats:
        """Compute a file's logits of rows."""
        task = self.bundle.task
        length = self.bundle.manifest.max_length
        predictor = open_predictor(
            self.bundle.path, file, task=task, max_length=length, threads=self.threads
        )
        return predictor.logits(rows)


@dataclass(frozen=True)
class Claim:
    """The part of a certificate that is not measured.

    method       how the file was made
    max_drop     the allowed drop of the score, in its own unit: 0.005 is half a point
    split, data  where the rows are from
    kept, cost   the parts that stay more precise, and what they cost, if it was
                 measured
    """

    method: str
    max_drop: float
    split: str
    data: str
    kept: tuple[str, ...] = ()
    cost: FloatCost | None = None


def certify(
    bundle: Bundle,
    precision: Precision,
    evaluator: Evaluator,
    device: Device,
    claim: Claim,
    *,
    exact: Path | None = None,
) -> Certificate:
    """Compare the bundle's file of this precision with its fp32 file, both on the
    device, on every row.

    exact  another fp32 file to compare with, such as that of the model before it was
           trained again

    Raises DeviceError if the device fails, CompressError for logits that are not
    finite."""
    files = (
        exact or bundle.path / BUNDLE_FILES["fp32"],
        bundle.path / BUNDLE_FILES[precision],
    )
    before = compute_logits(device, files[0], evaluator)
    after = compute_logits(device, files[1], evaluator)
    facts = device.facts()
    proof = judge(
        bundle,
        evaluator,
        before,
        after,
        claim,
        artefact=BUNDLE_FILES[precision],
        device=describe_device(device.name, facts),
        runtime=facts.get("runtime", ""),
    )
    proof = replace(
        proof,
        exact_sha256=sha256(files[0]),
        saturation=compute_saturation(bundle, files[1], evaluator),
    )
    if claim.cost is None:
        return proof
    cost = claim.cost
    return replace(proof, kept_ms=cost.ms, kept_mb=cost.mb, kept_at=cost.setting)


def compute_saturation(
    bundle: Bundle,
    file: Path,
    evaluator: Evaluator,
) -> Saturation:
    """Compute on this machine what an int8 file of the bundle answers on x86 processors
    without VNNI, on few of the rows; nothing is run if no sum can leave 16 bits."""
    products = list_saturating(file)
    if not products:
        return Saturation()
    few = evaluator.subsample(SATURATED_ROWS)
    threads = os.cpu_count() or 1
    found = saturate(file, few.rows, bundle.task, threads=threads)
    outcome = compare_logits(
        few, found.exact, found.saturated, threshold=bundle.threshold
    )
    return Saturation(
        products=len(products),
        shares=found.shares,
        rows=len(few),
        changed=outcome.changed,
        difference=outcome.difference,
        before=outcome.before,
        after=outcome.after,
    )


def judge(
    bundle: Bundle,
    evaluator: Evaluator,
    before: Floats,
    after: Floats,
    claim: Claim,
    *,
    artefact: str,
    device: str,
    runtime: str,
) -> Certificate:
    """Compare the logits of a file, `after`, with those of fp32, and build the
    certificate with the verdict."""
    outcome = compare_logits(evaluator, before, after, threshold=bundle.threshold)
    is_certified, reason = verdict(outcome, claim.max_drop)
    return Certificate(
        artefact=artefact,
        method=claim.method,
        metric=bundle.task.metric,
        before=outcome.before,
        after=outcome.after,
        max_drop=claim.max_drop,
        agreement=outcome.agreement,
        max_logit_difference=outcome.difference,
        rows=len(evaluator),
        split=claim.split,
        data=claim.data,
        device=device,
        runtime=runtime,
        certified=is_certified,
        reason=reason,
        date=timestamp(),
        kept=claim.kept,
        classes=outcome.classes,
        chose=claim.split == "validation",
    )


def verdict(outcome: ScoreDrop, max_drop: float) -> tuple[bool, str]:
    """Decide whether the drop is within the limit and no class has collapsed by more;
    also return the reason."""
    lost = 100 * outcome.drop
    limit = 100 * max_drop
    change = f"gains {-lost:.2f}" if lost < 0 else f"loses {lost:.2f}"
    fallen = select_fallen(outcome.classes)
    details = f"; finds {describe_changes(fallen)}" if fallen else ""
    if outcome.drop <= max_drop + SCORE_ROUNDING:
        passed = not any(
            each.collapsed and each.before - each.after > max_drop + SCORE_ROUNDING
            for each in fallen
        )
        return passed, f"{change} points where {limit:g} are allowed{details}"
    excess = f"{change} points, {lost - limit:.2f} more than the {limit:g} allowed"
    if outcome.keeps_score(max_drop):
        return (
            not fallen,
            f"{excess}, by {outcome.changed} changed answers, which may be "
            f"chance{details}",
        )
    return False, f"{excess}{details}"


def attach_certificate(
    bundle: Bundle,
    precision: Precision,
    proof: Certificate,
    sensitivity: Sequence[Sensitivity] = (),
) -> tuple[Bundle, Certificate]:
    """Write the certificate into the file's own metadata and into report.json; return
    it as `sign_file` does."""
    bundle, proof = sign_file(bundle, precision, proof)
    return bundle.attach_evidence(certificates=(proof,), sensitivity=sensitivity), proof


def sign_file(
    bundle: Bundle,
    precision: Precision,
    proof: Certificate,
) -> tuple[Bundle, Certificate]:
    """Write the certificate into the file's own metadata; return it with the digest
    that the file has from then on."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "certified.onnx"
        save_certified(bundle.path / BUNDLE_FILES[precision], file, proof)
        bundle = bundle.put(precision, file)
    return bundle, replace(
        proof, sha256=bundle.manifest.files[BUNDLE_FILES[precision]].sha256
    )


def compute_logits(device: Device, file: Path, evaluator: Evaluator) -> Floats:
    """Compute the logits of all rows on a device: stacked, or concatenated for
    tokenwise tasks."""
    inputs = {node.name for node in read_model(file).graph.input}
    columns = [name for name in evaluator.rows.column_names if name in inputs]
    logits = device.logits(file, list(evaluator.rows.select_columns(columns)))
    return np.concatenate(logits) if evaluator.task.tokenwise else np.stack(logits)
