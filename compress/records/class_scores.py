"""Scores of each class apart, and what became of a class between two models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FAR = 0.8
"""A recall below this share of the other model's has fallen far."""
SIGNIFICANCE = 0.025
"""The p-value, one-sided, below which a fall is no accident of few rows: 95 % of both sides."""
MOST_NAMED = 3
"""Classes that a sentence names before it counts."""


@dataclass(frozen=True)
class ClassScore:
    """Precision, recall and F1 of one class (a label, a type of entity); `support`: how many there are of it."""

    label: str
    precision: float
    recall: float
    f1: float
    support: int

    @staticmethod
    def from_counts(label: str, right: int, said: int, true: int) -> ClassScore:
        """Score a class that was rightly answered, answered, and there so many times; 0.0 where that is undefined."""
        f1 = 2 * right / max(1, said + true)
        return ClassScore(label, right / max(1, said), right / max(1, true), f1, true)


@dataclass(frozen=True)
class ClassChange:
    """The recall of one class before and after, on the same rows; `support`: how many there are of it."""

    label: str
    before: float
    after: float
    support: int

    @property
    def lost(self) -> bool:
        """Say whether nothing of the class is found any more."""
        return self.after == 0 < self.before

    @property
    def collapsed(self) -> bool:
        """Say whether the recall has fallen far, by more than chance does to so few rows.

        Fisher's exact test, both recalls taken as independent: models of the same rows err together, so that in truth
        a fall is told from chance a little sooner.
        """
        if self.after >= FAR * self.before:
            return False
        from scipy.stats import fisher_exact

        found = [round(recall * self.support) for recall in (self.before, self.after)]
        table = [[each, self.support - each] for each in found]
        return bool(fisher_exact(table, alternative="greater").pvalue < SIGNIFICANCE)

    def __str__(self) -> str:
        how = "nothing" if self.lost else "far less"
        return f"{how} of {self.label} (recall {self.before:.3f} to {self.after:.3f}, support {self.support:,})"


def compare_classes(before: Sequence[ClassScore], after: Sequence[ClassScore]) -> tuple[ClassChange, ...]:
    """Pair the recalls that two models have on the same rows, class by class; classes without a row are left out."""
    recalls = {one.label: one.recall for one in after}
    return tuple(
        ClassChange(one.label, one.recall, recalls[one.label], one.support)
        for one in before
        if one.support and one.label in recalls
    )


def select_fallen(found: Sequence[ClassChange]) -> tuple[ClassChange, ...]:
    """Choose the classes that are lost, however few rows they have, or have collapsed; the largest fall first."""
    return tuple(sorted((one for one in found if one.lost or one.collapsed), key=lambda one: one.after - one.before))


def describe_changes(found: Sequence[ClassChange]) -> str:
    """Say what is found of the first few classes, with their recalls, and count the others."""
    named = ", ".join(map(str, found[:MOST_NAMED]))
    return f"{named} and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else named


def macro_f1(scores: Sequence[ClassScore]) -> float | None:
    """Average the F1 of the classes that occur; None where none does."""
    found = [one.f1 for one in scores if one.support]
    return sum(found) / len(found) if found else None
