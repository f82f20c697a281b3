"""Which trials go on: asynchronous successive halving among shapes of like cost.

A trial is scored at rung 0 (few rows, or little training), then at rung 1, and so on; after each but the last it goes
on or is cut. Optuna's pruners know one objective, and by score alone every small shape would be cut. Here a trial is
held against the trials that were scored at the same rung before it, and goes on when

1. it could be on the front: none of them costs no more and scores no less (and is better in one of the two); or
2. it is in the best 1/`ETA` by score of its field, rounded up. Its field are those whose every cost is within a factor
   `ALIKE` of its own; where they are fewer than `ETA`, all those that cost no more than `ALIKE` times as much; or
3. its field is smaller than `ETA`: there is nothing to judge by yet.

Costs are the objectives to be minimised; a study of the score alone has none, and all trials are one field. Nobody
waits for a rung to fill, and who is cut does not come back (Li et al. 2020, "A System for Massively Parallel
Hyperparameter Tuning", arXiv:1810.05934, has the asynchronous rule for one objective).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

ETA = 3
ALIKE = 1.2


@dataclass(frozen=True)
class Standing:
    """A trial at a rung: its score there, more is better, and its costs, less is better."""

    score: float
    costs: tuple[float, ...] = ()


def cut(one: Standing, before: Sequence[Standing]) -> str:
    """Why `one` does not go on, in words; empty if it does. `before`: the others that have a score at its rung."""
    if not any(_beats(other, one) for other in before):
        return ""
    field = [other for other in before if _alike(one, other)]
    about = "cost about the same"
    if len(field) < ETA:
        field = [other for other in before if _no_costlier(other, one, ALIKE)]
        about = "cost no more"
    if len(field) < ETA:
        return ""
    place = 1 + sum(other.score > one.score for other in field)
    on = ceil((len(field) + 1) / ETA)
    if place <= on:
        return ""
    return f"{one.score:.4g} is place {place} of {len(field) + 1} that {about}; the best {on} go on"


def _beats(other: Standing, one: Standing) -> bool:
    return other.score >= one.score and _no_costlier(other, one) and other != one


def _no_costlier(other: Standing, one: Standing, factor: float = 1.0) -> bool:
    return all(a <= b * factor for a, b in zip(other.costs, one.costs, strict=True))


def _alike(one: Standing, other: Standing) -> bool:
    return _no_costlier(one, other, ALIKE) and _no_costlier(other, one, ALIKE)
