"""Whether the variants of a model answer as they should, on the device that is to run them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from compress.benchmark.devices import Device
from compress.errors import CompressError
from compress.exporters.artifact import Bundle
from compress.exporters.session import difference, onnx_run, read_model, rows_for
from compress.quantization.evaluator import ScoreDrop, compare_logits
from compress.records.latency import DeviceError
from compress.tuning.variants import Variant

if TYPE_CHECKING:
    from compress.evaluation.evaluator import Evaluator
    from compress.exporters.session import EncodedRow

PARITY = 1e-4
"""How far the logits of another form may be from the traced graph's, relative to the largest logit (or to 1)."""
ROWS = 400
"""Rows of the exam that judge an int8 file, spread evenly over it."""

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Checked:
    """A variant and what its answers are worth: wrong says why they are not good enough, '' when they are.

    own  whether it is the bundle's file as it is
    """

    variant: Variant
    difference: float | None
    wrong: str
    agreement: float | None = None
    own: bool = False


def check_exact(bundle: Bundle, device: Device, variants: Sequence[Variant]) -> list[Checked]:
    """Compare the bundle's own file, then the variants, with the first of these, which is as traced: on the device row
    by row, and here in a padded batch."""
    first = variants[0]
    own = Variant("fp32 of the bundle", bundle.files()["fp32"]).counted()
    rows = rows_for(first.path, bundle.manifest.max_length)
    lists: list[EncodedRow] = [{name: array[0].tolist() for name, array in row.items()} for row in rows]
    exact = device.logits(first.path, lists)
    largest = max(1.0, *(float(np.abs(each).max()) for each in exact))
    found = []
    for variant in (own, *variants):
        try:
            pairs = zip(device.logits(variant.path, lists), exact, strict=True)
            there = float(np.max([np.abs(one - two).max() for one, two in pairs])) / largest
        except DeviceError as error:  # this form is not for this device; a device that is gone fails the race too
            found.append(Checked(variant, None, str(error), own=variant is own))
            continue
        here = difference(onnx_run(first.path), onnx_run(variant.path), [_padded(rows)]).relative
        apart = float(np.max([there, here]))  # NaN stays NaN
        wrong = "" if apart <= PARITY else f"its logits differ by {apart:.2g} of the largest; at most {PARITY:g} may"
        found.append(Checked(variant, apart if isfinite(apart) else None, wrong, own=variant is own))
    return found


def check_int8(
    bundle: Bundle, device: Device, exact: Variant, variants: Sequence[Variant], *, exam: "Evaluator", max_drop: float
) -> list[Checked]:
    """Compare each with fp32, on the device, on the rows of the exam; the bundle's own first."""
    threshold = bundle.manifest.threshold if bundle.task.unanswerable else None
    names = [each.name for each in read_model(exact.path).graph.input]
    rows = list(exam.rows.select_columns([name for name in exam.rows.column_names if name in names]))

    def logits(path: Path) -> Logits:
        found = device.logits(path, rows)
        return np.concatenate(found) if bundle.task.tokenwise else np.stack(found)

    expected = logits(exact.path)
    own = Variant("int8 of the bundle", bundle.files()["int8"]).counted()
    usual = compare_logits(exam, expected, logits(own.path), threshold=threshold)
    found = [Checked(own, usual.difference, "", usual.agreement, own=True)]
    for variant in variants:
        try:
            outcome = compare_logits(exam, expected, logits(variant.path), threshold=threshold)
        except CompressError as error:  # does not run there, or answers what is no number
            found.append(Checked(variant, None, str(error)))
            continue
        found.append(Checked(variant, outcome.difference, _loss(outcome, usual, max_drop), outcome.agreement))
    return found


def _loss(outcome: ScoreDrop, own: ScoreDrop, max_drop: float) -> str:
    """Say why an int8 file is not near enough to fp32; '' when it is, or no worse than the one that is there."""
    no_worse = outcome.drop <= own.drop and outcome.agreement >= own.agreement
    if outcome.near(max_drop) or no_worse:
        return ""
    return (
        f"loses {100 * outcome.drop:.2f} points and changes {100 * (1 - outcome.agreement):.1f} % of the answers; "
        f"at most {100 * max_drop:g} of each are allowed"
    )


def _padded(rows: "Sequence[Mapping[str, NDArray[np.int64]]]") -> dict[str, NDArray[np.int64]]:
    """Join the rows into one batch, the shorter ones masked at the end."""
    longest = max(row["input_ids"].shape[1] for row in rows)
    return {
        name: np.concatenate([np.pad(row[name], ((0, 0), (0, longest - row[name].shape[1]))) for row in rows])
        for name in rows[0]
    }
