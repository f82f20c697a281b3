"""Kusupati et al. 2022: another loss over the first dimensions."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.papers import leaf, rkd, seed
from tests.papers.case import Case
from tests.papers.reimers import MASK, STUDENT, TEACHER
from tests.papers.vectors import unit

INNER = {"leaf.l2": leaf.l2, "rkd.distances": rkd.distances, "seed.own_similarities": seed.own_similarities}
BEARS_ANY_WIDTH = ("rkd.distances", "seed.own_similarities")


def nested(
    student: Any,
    teacher: Any,
    mask: Any,
    *,
    of: str | Mapping[str, Any],
    sizes: Sequence[float],
    weights: Sequence[float] | None = None,
) -> float:
    name, options = (of, {}) if isinstance(of, str) else (of["by"], {k: v for k, v in of.items() if k != "by"})
    total = 0.0
    for at, size in enumerate(sizes):
        m = int(size if size > 1 else size * len(student[0]))
        mine = [unit(s[:m]) if m < len(s) else s for s in student]
        theirs = teacher if name in BEARS_ANY_WIDTH else [unit(t[:m]) if m < len(t) else t for t in teacher]
        total += (1 if weights is None else weights[at]) * INNER[name](mine, theirs, mask, **options)
    return total


# The whole and the first three dimensions of a student that repeats itself are alike, as its teacher then is.
TWICE = TEACHER[:, :3].repeat(1, 2)
CASES = {
    "nested": Case(STUDENT, TEACHER, MASK, nested, options={"of": "leaf.l2", "sizes": [6, 4, 2]}),
    "nested weighted": Case(
        STUDENT, TEACHER, MASK, nested, options={"of": "leaf.l2", "sizes": [1.0, 0.5], "weights": [0.5, 2.0]}
    ),
    "nested relations": Case(
        STUDENT,
        TWICE,
        MASK,
        nested,
        options={"of": {"by": "seed.own_similarities", "temperature": 0.3}, "sizes": [1.0, 0.5]},
        across=True,
    ),
    "nested distances": Case(
        STUDENT,
        TWICE / TWICE.norm(dim=-1, keepdim=True),
        MASK,
        nested,
        options={"of": "rkd.distances", "sizes": [6, 3]},
        across=True,
    ),
}
