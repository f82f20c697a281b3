"""Compare an int8 file with the fp32 file of its bundle on the rows of an evaluator."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from compress.evaluation.evaluator import Evaluator
from compress.exporters.artifact import Bundle
from compress.exporters.predictor import open_predictor
from compress.records.class_scores import ClassChange, changes

ROWS = 2000
"""Rows that decide whether the score is kept, spread evenly over the split."""
PROBE = 128
"""Rows, spread likewise, that compare variants by how far they move the logits."""
RESOLVED = 2
"""Examples that may be answered otherwise whatever the limit. Two changes are both for the worse one time in four where
int8 does neither good nor harm (sign test): a limit below RESOLVED / rows is finer than the rows resolve."""
ROUNDING = 1e-9
"""The difference of two scores is not exact."""
FEWEST = 32
MANY = 48
"""Products; where there are more, fewer rows probe them, down to FEWEST."""

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class ScoreDrop:
    """Score of fp32 and of the other file, the share of answers that are alike (Pearson's r of a regression), the
    largest |logit difference|, the recalls of each class, and how many examples are answered otherwise (None: of a
    regression, all are)."""

    before: float
    after: float
    agreement: float
    difference: float
    classes: tuple[ClassChange, ...] = ()
    changed: int | None = None

    @property
    def drop(self) -> float:
        return self.before - self.after

    @property
    def unresolved(self) -> bool:
        """Whether so few answers changed that these rows cannot tell it from chance: see RESOLVED."""
        return self.changed is not None and self.changed <= RESOLVED

    @property
    def least_limit(self) -> float:
        """The lowest limit within which it is near, whatever the rows resolve."""
        return max(0.0, self.drop, 1 - self.agreement)

    def keeps_score(self, limit: float) -> bool:
        """Check that the score falls by at most `limit`, or by no more than the rows resolve."""
        return self.unresolved or self.drop <= limit + ROUNDING

    def near(self, limit: float) -> bool:
        """Check that the score falls by at most `limit` and at most that share of the answers changes, which is the
        steadier figure: scores of few rows cross a limit by chance. What the rows do not resolve is near anyway."""
        return self.unresolved or self.least_limit <= limit + ROUNDING


def compare_logits(exam: Evaluator, exact: Logits, other: Logits, *, threshold: float | None = None) -> ScoreDrop:
    """Compare `other` with `exact`, logits of the exam's rows. `threshold`: qa, see `Evaluator.scores`."""
    before, after = (exam.scores(each, threshold=threshold)[exam.task.metric] for each in (exact, other))
    thresholds = (threshold, threshold)
    return ScoreDrop(
        before,
        after,
        exam.agreement(other, exact, thresholds=thresholds),
        float(np.abs(other - exact).max()),
        changes(exam.by_class(exact), exam.by_class(other)),
        exam.changed(other, exact, thresholds=thresholds),
    )


@dataclass(frozen=True)
class QuantizationEvaluator:
    """An exam for many files of one bundle, run here; `probe`: a few of its rows, `expected`: fp32's logits of them."""

    bundle: Bundle
    exam: Evaluator
    exact: Logits
    probe: Dataset
    expected: Logits
    threads: int

    @staticmethod
    def from_bundle(bundle: Bundle, exam: Evaluator, *, threads: int, products: int = MANY) -> "QuantizationEvaluator":
        """`products`: how many there are to be tried; the more there are, the fewer rows the probe has."""
        exam = exam.spread(ROWS)
        probe = exam.spread(max(FEWEST, min(PROBE, PROBE * MANY // max(1, products)))).rows
        exact, expected = (bundle.logits(rows, precision="fp32", threads=threads) for rows in (exam.rows, probe))
        return QuantizationEvaluator(bundle, exam, exact, probe, expected, threads)

    def error(self, file: Path) -> float:
        """Compute the mean squared difference of the logits from fp32's, on the probe."""
        return float(np.square(self._logits(file, self.probe) - self.expected).mean())

    def nearest(self, files: Sequence[Path]) -> int:
        """Return the place of the file with the least error."""
        return int(np.argmin([self.error(file) for file in files]))

    def outcome(self, file: Path) -> ScoreDrop:
        return compare_logits(self.exam, self.exact, self._logits(file, self.exam.rows))

    def _logits(self, file: Path, rows: Dataset) -> Logits:
        task, length = self.bundle.task, self.bundle.manifest.max_length
        opened = open_predictor(self.bundle.path, file, task=task, max_length=length, threads=self.threads)
        return opened.logits(rows)
