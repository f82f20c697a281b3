"""Read the probabilities of labels that a teacher has given texts, as `compress label`
writes them.

    {"text": "a good film", "label": "positive",
     "probabilities": {"negative": 0.1, "positive": 0.9}}

A table has a column for each: probabilities.negative, probabilities.positive. A row
without a label gets the most probable one; a row with neither label nor probabilities,
which the teacher did not answer, is left out. Shapes: N rows, C labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from compress.data.labels import list_rows
from compress.errors import DataError

if TYPE_CHECKING:
    from compress.arrays import Doubles
    from compress.data.tables import Table

PROBABILITIES: Final = "probabilities"
LEAST_SHARE: Final = 1e-7
"""The probability that stands for zero: its logarithm must be finite."""
SUM_TOLERANCE: Final = 0.02
"""How far from 1 the sum of rounded probabilities may be."""


@dataclass(frozen=True)
class SoftLabelColumns:
    """Name the columns of the probabilities of each label."""

    labels: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(f"{PROBABILITIES}.{label}" for label in self.labels)

    @staticmethod
    def find(split: Table) -> SoftLabelColumns | None:
        """Find the columns of a split; None if it has none. Raises DataError for
        objects that are written as text."""
        start = f"{PROBABILITIES}."
        found = [
            name.removeprefix(start) for name in split.columns if name.startswith(start)
        ]
        if found:
            return SoftLabelColumns(tuple(found))
        cells = split.sample.get(PROBABILITIES, ())
        if any(isinstance(cell, str) and cell.startswith("{") for cell in cells):
            raise DataError(
                f"{split.place}: column 'probabilities' has objects as text. Write "
                f"jsonl or parquet, or a column for each label ({start}positive, ...)."
            )
        return None

    def check(self, split: Table) -> None:
        """Raise DataError for a split without one of the columns."""
        missing = [name for name in self.columns if name not in split.columns]
        if missing:
            raise DataError(
                f"{split.place}: has no {missing[0]!r}, but the training split has: "
                "every split needs the teacher's probabilities. Let the same teacher "
                "answer these texts (compress label), and add its column "
                "'probabilities' to your labels; or leave this file out; or remove the "
                "column from the training split, to learn from labels alone."
            )

    def read(self, table: pa.Table, label: str, split: Table) -> tuple[pa.Table, int]:
        """Return the labelled rows with the column `teacher` (log-probabilities), and
        the number of rows that were left out.

        Raises DataError for rows that are labelled without probabilities, or with
        invalid ones.
        """
        shares_NC = np.stack([_numbers(table[name]) for name in self.columns], axis=1)
        absent_N = np.isnan(shares_NC).all(axis=1)
        given = table[label] if label in table.column_names else None
        unlabelled_N = np.ones(len(table), bool)
        if given is not None:
            trimmed = pc.utf8_trim_whitespace(pc.fill_null(given, ""))
            unlabelled_N = np.asarray(pc.equal(trimmed, ""))
        total_N = shares_NC.sum(axis=1)
        whole_N = np.abs(total_N - 1) <= SUM_TOLERANCE
        right_N = whole_N & (shares_NC >= 0).all(axis=1)
        wrong_N = ~absent_N & ~right_N
        for mask_N, problem in (
            (wrong_N, "expected a number from 0 to 1 for each label, summing to 1"),
            (absent_N & ~unlabelled_N, "there is a label, but no probabilities"),
        ):
            if mask_N.any():
                rows = np.flatnonzero(mask_N) + split.first
                raise DataError(
                    f"{split.place}, {list_rows(rows[:5].tolist(), len(rows))}: "
                    f"{PROBABILITIES}: {problem}. Correct or remove these rows."
                )
        best_N = np.nan_to_num(shares_NC).argmax(axis=1)
        likeliest = pa.array(self.labels).take(pa.array(best_N))
        if given is None:
            labels = pa.chunked_array([likeliest])
        else:
            labels = pc.if_else(pa.array(unlabelled_N), likeliest, given)
            table = table.drop_columns([label])
        floor_NC = np.maximum(np.nan_to_num(shares_NC), LEAST_SHARE)
        log_p_NC = np.log(floor_NC / floor_NC.sum(axis=1, keepdims=True))
        values = pa.array(log_p_NC.astype(np.float32).reshape(-1))
        starts = np.arange(len(table) + 1, dtype=np.int32) * len(self.labels)
        answers = pa.ListArray.from_arrays(pa.array(starts), values)
        table = table.append_column(label, labels)
        table = table.append_column("teacher", answers)
        return table.filter(pa.array(~absent_N)), int(absent_N.sum())


def _numbers(column: pa.ChunkedArray) -> Doubles:
    """Parse a column of numbers; nan for an empty cell, infinity for any other text."""
    try:
        cells = pc.cast(pc.utf8_trim_whitespace(column), pa.float64())
    except pa.ArrowInvalid:
        return np.full(len(column), np.inf)
    return np.asarray(pc.fill_null(cells, np.nan))
