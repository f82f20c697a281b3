"""What is to be predicted, and the examples it is learned from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from datasets import Dataset

Kind = Literal["classification", "multilabel", "regression"]

METRICS: Final[Mapping[Kind, tuple[str, ...]]] = MappingProxyType(
    {
        "classification": ("accuracy", "f1", "matthews"),
        "multilabel": ("f1", "f1_macro", "accuracy"),
        "regression": ("pearson", "spearman"),
    }
)
"""The metrics that can choose a checkpoint, by kind; the first is the default."""


@dataclass(frozen=True)
class Task:
    """One prediction task over a sentence or a pair of sentences.

    kind    classification (one of `labels`), multilabel (any of `labels`), regression (one number)
    text    the source's own names of the one or two text columns
    label   the source's own name of the label column; several 0/1 columns are joined by commas
    labels  the class names in the order of the logits; empty for regression
    metric  the score that chooses the best checkpoint, higher is better: one of METRICS[kind]
    """

    kind: Kind
    text: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    metric: str

    @property
    def outputs(self) -> int:
        """Logits per example."""
        return len(self.labels) or 1

    @property
    def pair(self) -> bool:
        return len(self.text) == 2


@dataclass(frozen=True)
class TaskData:
    """A task with its splits.

    Every split has the columns `text`, `text_pair` (pairs only) and `label`, whatever the source called them:
    label is an int class id, a float, or a list of 0.0/1.0 floats (one per class), as `task.kind` says.
    `test` is None where the source has none, or one without labels. `fingerprint` changes when any row or name does.
    """

    name: str
    task: Task
    train: Dataset
    validation: Dataset
    test: Dataset | None
    fingerprint: str
    notes: tuple[str, ...] = ()
    """What the reader should know: splits made or passed over, guesses that were taken."""
