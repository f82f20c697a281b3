"""Stages that fit into a time: their steps are timed first, then as many are planned as there is time for."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, floor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from compress.config.recipe import Stage
from compress.data.task import TaskData
from compress.errors import SearchError
from compress.io import load_json, written
from compress.training.run import Run
from compress.training.stage import Trained

PROBES = (8, 24)
"""Steps of two short trainings that are timed: what the longer one took more is what steps take."""
LEAST = 0.5
"""Of the longer one's mean step: a step takes no less, whatever the difference of two short times says."""
SPARE = 0.9
"""Share of a stage's time that its steps are planned to fill: it is scored, and written, in the rest."""

REMEDY = "Remove {} and repeat the command with --resume: what it says of time is begun anew"

Parts = Mapping[str, float]
SUPERNET: Parts = {
    "measuring": 0.08, "supernet": 0.42, "trials": 0.12, "short distillations": 0.16, "timing finalists": 0.04,
    "final": 0.18,
}  # fmt: skip
PLAIN: Parts = {"measuring": 0.08, "trials": 0.66, "timing finalists": 0.04, "final": 0.22}
"""What each part of a search may take of the time that is stated for all of it."""


@dataclass(frozen=True)
class TimeBudget:
    """What the parts of a search have taken so far, and may still take; kept in its folder.

    total   seconds for all of it, of all its sessions; None: each part takes what its stages say
    """

    folder: Path
    parts: Parts
    total: float | None

    @property
    def costs(self) -> dict[str, float]:
        """Part -> seconds."""
        file = self.folder / "costs.json"
        return load_json(file, REMEDY.format(file.name)) if file.is_file() else {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time while open as this part's; also where it ends in an error or an interruption."""
        began = time.monotonic()
        try:
            yield
        finally:
            costs = self.costs
            costs[name] = round(costs.get(name, 0.0) + time.monotonic() - began, 3)
            self._keep("costs.json", costs)

    def left(self, name: str) -> float | None:
        """Return the seconds that this part may still take: its share of what those before it have left over; 0:
        none."""
        if self.total is None:
            return None
        costs, names = self.costs, list(self.parts)
        ahead = names[names.index(name) :]
        rest = self.total - sum(spent for part, spent in costs.items() if part not in ahead)
        return max(0.0, rest * self.parts[name] / sum(self.parts[part] for part in ahead) - costs.get(name, 0.0))

    def fit(
        self, part: str, stages: Sequence[Stage], data: TaskData, train: Callable[[Stage, Run], object], *,
        share: float = 1.0,
    ) -> list[Stage]:  # fmt: skip
        """Give the stages as many steps as fit into this share of the part's time, as decided when first asked.

        None takes more than it says itself, and all what they say where no time is stated. train: runs a stage in a
        run, to be timed. Raises SearchError when no time is left.
        """
        if self.total is None:
            return list(stages)
        file = self.folder / "steps.json"
        known: dict[str, dict[str, int]] = load_json(file, REMEDY.format(file.name)) if file.is_file() else {}
        if part not in known:
            seconds = share * (self.left(part) or 0.0)
            if seconds <= 0:
                raise SearchError(
                    f"{self.folder}: its {self.total / 60:g} minutes are spent ({_minutes(self.costs)}), and {part} is "
                    "to come. Nothing is lost: repeat the command with more --minutes and --resume"
                )
            known[part] = _fitted(stages, data, seconds, train, self.folder)
            self._keep("steps.json", known)
        return [stage.model_copy(update={"steps": known[part][stage.name]}) for stage in stages]

    def _keep(self, name: str, value: Any) -> None:
        with written(self.folder / name) as partial:
            partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def planned(stage: Stage, data: TaskData) -> int:
    """Count the optimiser steps that a stage takes."""
    return stage.steps or max(1, ceil(stage.epochs * max(1, len(data.train) // stage.batch)))


def _fitted(
    stages: Sequence[Stage], data: TaskData, seconds: float, train: Callable[[Stage, Run], object], folder: Path
) -> dict[str, int]:
    """Steps of each stage so that all fit, by the time that short trainings take, in runs that are thrown away."""
    fixed, wanted = 0.0, 0.0
    with TemporaryDirectory(dir=folder, prefix=".timing-") as scratch:
        for stage in stages:
            short, long = (_timed(stage, steps, train, Path(scratch)) for steps in PROBES)
            more = PROBES[1] - PROBES[0]
            step = max((long - short) / more, LEAST * long / PROBES[1])
            fixed += max(0.0, short - PROBES[0] * step)
            wanted += planned(stage, data) * step
    share = (SPARE * seconds - fixed) / wanted if wanted else 1.0
    return {stage.name: max(1, floor(planned(stage, data) * min(1.0, share))) for stage in stages}


def _timed(stage: Stage, steps: int, train: Callable[[Stage, Run], object], scratch: Path) -> float:
    """Time a training of so many steps, in seconds."""
    run = Run(scratch / f"{stage.name}-{steps}", 0, main=True)
    run.path.mkdir()
    train(stage.model_copy(update={"steps": steps, "evaluate": 0, "checkpoint": steps}), run)
    return Trained.read(run.result(stage.name)).seconds


def _minutes(costs: Parts) -> str:
    return ", ".join(f"{part} {seconds / 60:.1f}" for part, seconds in costs.items())
