"""How near an int8 file is to the fp32 file of its bundle, on the rows of an exam."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from compress.classes import ClassChange, changes
from compress.exam import Exam
from compress.export.bundle import Bundle
from compress.export.predictor import open_predictor

ROWS = 2000
"""Rows that decide whether the score is kept, spread evenly over the split."""
PROBE = 128
"""Rows, spread likewise, that compare variants by how far they move the logits."""
FEWEST = 32
MANY = 48
"""Products; where there are more, fewer rows probe them, down to FEWEST."""

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Outcome:
    """Score of fp32 and of the other file, the share of rows that both answer alike (Pearson's r of a regression), the
    largest |logit difference|, and the recalls of each class."""

    before: float
    after: float
    agreement: float
    difference: float
    classes: tuple[ClassChange, ...] = ()

    @property
    def drop(self) -> float:
        return self.before - self.after

    def near(self, limit: float) -> bool:
        """Whether the score falls by at most `limit` and at most that share of the answers changes, which is the
        steadier figure: scores of few rows cross a limit by chance."""
        return self.drop <= limit and self.agreement >= 1 - limit


def compared(exam: Exam, exact: Logits, other: Logits, *, threshold: float | None = None) -> Outcome:
    """Compare `other` with `exact`, logits of the exam's rows. `threshold`: qa, see `Exam.scores`."""
    before, after = (exam.scores(each, threshold=threshold)[exam.task.metric] for each in (exact, other))
    agreement = exam.agreement(other, exact, thresholds=(threshold, threshold))
    recalls = changes(exam.by_class(exact), exam.by_class(other))
    return Outcome(before, after, agreement, float(np.abs(other - exact).max()), recalls)


@dataclass(frozen=True)
class Judge:
    """An exam for many files of one bundle, run here; `probe`: a few of its rows, `expected`: fp32's logits of them."""

    bundle: Bundle
    exam: Exam
    exact: Logits
    probe: Dataset
    expected: Logits
    threads: int

    @staticmethod
    def of(bundle: Bundle, exam: Exam, *, threads: int, products: int = MANY) -> "Judge":
        """`products`: how many there are to be tried; the more there are, the fewer rows the probe has."""
        exam = exam.spread(ROWS)
        probe = exam.spread(max(FEWEST, min(PROBE, PROBE * MANY // max(1, products)))).rows
        exact, expected = (bundle.logits(rows, precision="fp32", threads=threads) for rows in (exam.rows, probe))
        return Judge(bundle, exam, exact, probe, expected, threads)

    def error(self, file: Path) -> float:
        """Mean squared difference of the logits from fp32's, on the probe."""
        return float(np.square(self._logits(file, self.probe) - self.expected).mean())

    def nearest(self, files: Sequence[Path]) -> int:
        """The place of the file with the least error."""
        return int(np.argmin([self.error(file) for file in files]))

    def outcome(self, file: Path) -> Outcome:
        return compared(self.exam, self.exact, self._logits(file, self.exam.rows))

    def _logits(self, file: Path, rows: Dataset) -> Logits:
        made = self.bundle.manifest
        opened = open_predictor(
            self.bundle.path, file, task=made.task, max_length=made.max_length, threads=self.threads
        )
        return opened.logits(rows)
