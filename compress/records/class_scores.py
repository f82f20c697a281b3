"""Scores of single classes, and how they change between two models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FAR_FROM_TEACHER = 0.8
"""A recall below this share of the other model's has fallen far."""
SIGNIFICANCE = 0.025
"""The one-sided p-value below which a fall is not due to chance: 95 % on both sides."""
MOST_CLASSES_NAMED = 3
"""Classes that a sentence names before it counts the others."""


@dataclass(frozen=True)
class ClassScore:
    """Precision, recall and F1 of one class (a label, or a type of entity), which
    `support` rows have."""

    label: str
    precision: float
    recall: float
    f1: float
    support: int

    @staticmethod
    def from_counts(label: str, correct: int, predicted: int, true: int) -> ClassScore:
        """Compute the scores of a class from its counts; a score that is undefined is
        0.0."""
        f1 = 2 * correct / max(1, predicted + true)
        return ClassScore(
            label,
            correct / max(1, predicted),
            correct / max(1, true),
            f1,
            true,
        )


@dataclass(frozen=True)
class ClassChange:
    """The recall of one class before and after, on the same rows, of which `support`
    have it."""

    label: str
    before: float
    after: float
    support: int

    @property
    def lost(self) -> bool:
        """Return True if no row of the class is found any more."""
        return self.after == 0 < self.before

    @property
    def collapsed(self) -> bool:
        """Return True if the recall has fallen far, and by more than chance explains on
        so few rows.

        Fisher's exact test takes both recalls as independent. Models of the same rows
        err together, so that in truth a fall is detected a little sooner.
        """
        if self.after >= FAR_FROM_TEACHER * self.before:
            return False
        from scipy.stats import fisher_exact

        found = [round(recall * self.support) for recall in (self.before, self.after)]
        table = [[count, self.support - count] for count in found]
        return bool(fisher_exact(table, alternative="greater").pvalue < SIGNIFICANCE)

    def __str__(self) -> str:
        how = "nothing" if self.lost else "far less"
        return (
            f"{how} of {self.label} (recall {self.before:.3f} to {self.after:.3f}, "
            f"support {self.support:,})"
        )


def compare_classes(
    before: Sequence[ClassScore], after: Sequence[ClassScore]
) -> tuple[ClassChange, ...]:
    """Pair the recalls of two models on the same rows by class; classes without rows
    are left out."""
    recalls = {one.label: one.recall for one in after}
    return tuple(
        ClassChange(one.label, one.recall, recalls[one.label], one.support)
        for one in before
        if one.support and one.label in recalls
    )


def select_fallen(changes: Sequence[ClassChange]) -> tuple[ClassChange, ...]:
    """Select the classes that are lost, however few rows they have, or have collapsed;
    the largest fall first."""
    return tuple(
        sorted(
            (one for one in changes if one.lost or one.collapsed),
            key=lambda one: one.after - one.before,
        )
    )


def describe_changes(changes: Sequence[ClassChange]) -> str:
    """Describe the first few classes with their recalls, and count the others."""
    named = ", ".join(map(str, changes[:MOST_CLASSES_NAMED]))
    return (
        f"{named} and {len(changes) - MOST_CLASSES_NAMED} more"
        if len(changes) > MOST_CLASSES_NAMED
        else named
    )


def macro_f1(scores: Sequence[ClassScore]) -> float | None:
    """Average the F1 of the classes that occur, or None if none does."""
    values = [one.f1 for one in scores if one.support]
    return sum(values) / len(values) if values else None
