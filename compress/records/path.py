"""The path that a run has walked from its teacher to the smallest student that keeps a
share of its score.

Kept as `path.json` in the run, from which an interrupted run continues, and in
report.json, from which its page is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Training = Literal["brief", "long", "finished"]
"""How long a student has recovered from its last cut, from the shortest to the
longest."""
Least = Literal["latency", "mb", "params"]
ROUNDING = 1e-9
"""The rounding error of a chance."""
COST_UNITS: Mapping[Least, str] = {
    "latency": "ms",
    "mb": "MB",
    "params": "parameters",
}
"""The units of the costs of shapes."""


@dataclass(frozen=True)
class KeptScore:
    """A student's score relative to its teacher's on the same examples.

    share      of the teacher's score; low, high: its lower and upper bound, each with
               90 % confidence
    chance     the probability that it keeps the share that was asked for
    required   the chance that it must have: the confidence that was asked for, or where
               so few examples cannot show that, the chance of a student that scores as
               its teacher
    examples   the number of examples; needed: how many could show with 90 % that a
               student that scores as its teacher keeps the share; None if no number can
    """

    score: float
    share: float
    low: float
    high: float
    chance: float
    required: float
    examples: int
    needed: int | None

    @property
    def keeps(self) -> bool:
        return self.chance >= self.required - ROUNDING

    @property
    def resolved(self) -> bool:
        """Return True if there are enough examples to be sure."""
        return self.needed is not None and self.needed <= self.examples


@dataclass(frozen=True)
class PathStudent:
    """A student on the path, and how much it keeps after each training.

    cost      of its file, in the unit of what is to be least; file_mb: 10^6 bytes,
              estimated
    """

    name: str
    sizes: Mapping[str, int]
    parameters: int
    cost: float
    file_mb: float
    looks: Mapping[Training, KeptScore] = field(default_factory=dict)


@dataclass(frozen=True)
class WalkedPath:
    """The question, the shapes that were tried, and the answer.

    keep       the share of the teacher's score to keep; least: what is to be least
    where      device, setting and precision of latencies; '' for other costs
    whole      the cost of the teacher
    rungs      the largest first, each cut out of the one before; far: the static
               student, if it was tried
    stopped    why the path ended; chosen: the name of the rung that ships
    measured, whole_measured   ms of the files of the chosen shape and of the teacher's
               in one race, of the same precision
    tested     the shipped file on the measured split
    """

    keep: float
    least: Least
    where: str
    whole: float
    rungs: tuple[PathStudent, ...] = ()
    far: PathStudent | None = None
    stopped: str = ""
    chosen: str = ""
    measured: float | None = None
    whole_measured: float | None = None
    tested: KeptScore | None = None

    @property
    def students(self) -> tuple[PathStudent, ...]:
        """Return all students that were trained, the largest first."""
        return (*self.rungs, self.far) if self.far else self.rungs

    def rung(self, name: str) -> PathStudent:
        """Return the student of this name."""
        return next(each for each in self.students if each.name == name)

    def with_student(self, student: PathStudent) -> WalkedPath:
        """Return the path with another student at its end."""
        return replace(self, rungs=(*self.rungs, student))

    def with_look(self, name: str, training: Training, kept: KeptScore) -> WalkedPath:
        """Return the path with what a student keeps after a training."""
        rungs = list(self.rungs)
        at = [rung.name for rung in rungs].index(name)
        looks = {**rungs[at].looks, training: kept}
        rungs[at] = replace(rungs[at], looks=looks)
        return replace(self, rungs=tuple(rungs))

    def looked_at(self, training: Training) -> list[PathStudent]:
        """List the students that have had a training."""
        return [rung for rung in self.rungs if training in rung.looks]

    @property
    def student(self) -> PathStudent | None:
        """Return the rung that ships, once it is chosen."""
        return self.rung(self.chosen) if self.chosen else None
