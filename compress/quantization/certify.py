"""Certify what a file of a bundle lost, measured on the device that is to run it; the file carries the certificate."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from compress.benchmark.devices import Device
from compress.evaluation.evaluator import Evaluator
from compress.exporters.artifact import FILES, Bundle, Precision
from compress.exporters.session import certified, read_model
from compress.io import sha256
from compress.quantization.evaluator import ROUNDING, ScoreDrop, compare_logits
from compress.quantization.sensitivity import FloatCost
from compress.records.certificate import Certificate, Sensitivity
from compress.records.class_scores import describe, fallen
from compress.records.latency import identity


def certify(
    bundle: Bundle,
    precision: Precision,
    exam: Evaluator,
    *,
    max_drop: float,
    device: Device,
    method: str,
    split: str,
    data: str,
    kept: Sequence[str] = (),
    cost: FloatCost | None = None,
    exact: Path | None = None,
) -> Certificate:
    """Compare the bundle's file of this precision with its fp32 file, both run on the device, on every row.

    exact     another fp32 file to hold it against: of a model that was trained again, the one before
    max_drop  of the score, in its own unit: 0.005 is half a point
    method, split, data, kept, cost   as the certificate tells them
    Raises DeviceError where the device fails, CompressError for logits that are not finite.
    """
    files = (exact or bundle.path / FILES["fp32"], bundle.path / FILES[precision])
    before, after = (_logits(device, file, exam) for file in files)
    threshold = bundle.manifest.threshold if bundle.task.unanswerable else None
    outcome = compare_logits(exam, before, after, threshold=threshold)
    facts = device.facts()
    kept_to, reason = verdict(outcome, max_drop)
    return Certificate(
        artefact=FILES[precision],
        method=method,
        metric=bundle.task.metric,
        before=outcome.before,
        after=outcome.after,
        max_drop=max_drop,
        agreement=outcome.agreement,
        max_logit_difference=outcome.difference,
        rows=len(exam),
        split=split,
        data=data,
        device=identity(device.name, facts),
        runtime=facts.get("runtime", ""),
        certified=kept_to,
        reason=reason,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        kept=tuple(kept),
        exact_sha256=sha256(files[0]),
        classes=outcome.classes,
        kept_ms=cost.ms if cost else None,
        kept_mb=cost.mb if cost else None,
        kept_at=cost.setting if cost else "",
    )


def verdict(outcome: ScoreDrop, max_drop: float) -> tuple[bool, str]:
    """Decide whether the drop is within the limit and no class has collapsed by more, and say why in a sentence."""
    lost, limit = 100 * outcome.drop, 100 * max_drop
    change = f"gains {-lost:.2f}" if lost < 0 else f"loses {lost:.2f}"
    hurt = fallen(outcome.classes)
    named = f"; finds {describe(hurt)}" if hurt else ""
    if outcome.drop <= max_drop + ROUNDING:
        kept = not any(one.collapsed and one.before - one.after > max_drop + ROUNDING for one in hurt)
        return kept, f"{change} points where {limit:g} are allowed{named}"
    more = f"{change} points, {lost - limit:.2f} more than the {limit:g} allowed"
    if outcome.keeps_score(max_drop):
        return not hurt, f"{more}, by {outcome.changed} changed answers: these rows do not tell that from chance{named}"
    return False, f"{more}{named}"


def attach_certificate(
    bundle: Bundle, precision: Precision, proof: Certificate, sensitivity: Sequence[Sensitivity] = ()
) -> tuple[Bundle, Certificate]:
    """Write the certificate into the file's own metadata and into report.json; return it as `sign_file` does."""
    bundle, proof = sign_file(bundle, precision, proof)
    return bundle.attach_evidence(certificates=(proof,), sensitivity=sensitivity), proof


def sign_file(bundle: Bundle, precision: Precision, proof: Certificate) -> tuple[Bundle, Certificate]:
    """Write the certificate into the file's own metadata; return it with the digest that the file has from then on."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "certified.onnx"
        certified(bundle.path / FILES[precision], file, proof)
        bundle = bundle.put(precision, file)
    return bundle, replace(proof, sha256=bundle.manifest.files[FILES[precision]].sha256)


def _logits(device: Device, file: Path, exam: Evaluator) -> NDArray[np.float32]:
    """Compute the logits of all rows: stacked, or concatenated for tasks that answer per token."""
    names = {each.name for each in read_model(file).graph.input}
    columns = [name for name in exam.rows.column_names if name in names]
    answers = device.logits(file, list(exam.rows.select_columns(columns)))
    return np.concatenate(answers) if exam.task.tokenwise else np.stack(answers)
