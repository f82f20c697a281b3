"""Divide the time that a search may take over its parts."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import floor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from compress.config.stages import Stage
from compress.data.task import TaskData
from compress.errors import SearchError
from compress.io import load_json, write_json
from compress.training.run import Run
from compress.training.stage import Trained, plan_steps

PROBES = (8, 24)
"""Steps of two short trainings; the difference of their times gives the time of a
step."""
LEAST_STEP_SHARE = 0.5
"""The lowest plausible time of a step, as a share of the longer training's mean: the
difference of two short times is noisy."""
SPARE = 0.9
"""Share of a stage's time that its steps may fill; scoring and writing take the
rest."""

Parts = Mapping[str, float]
SUPERNET: Parts = {
    "measuring": 0.08,
    "supernet": 0.42,
    "trials": 0.12,
    "short distillations": 0.16,
    "timing finalists": 0.04,
    "final": 0.18,
}
PLAIN_PARTS: Parts = {
    "measuring": 0.08,
    "trials": 0.66,
    "timing finalists": 0.04,
    "final": 0.22,
}
"""The share of the total time that each part of a search may take."""


@dataclass(frozen=True)
class TimeBudget:
    """The time that the parts of a search have taken and may still take, kept in the
    search's folder.

    total   seconds for the whole search across sessions; None: each part takes as long
            as its stages need
    """

    folder: Path
    parts: Parts
    total: float | None

    @property
    def costs(self) -> dict[str, float]:
        """Seconds spent, by part."""
        return self._load("costs.json")

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time spent in the `with` block to this part, even if it ends in an
        error or an interruption."""
        began = time.monotonic()
        try:
            yield
        finally:
            costs = self.costs
            costs[name] = round(costs.get(name, 0.0) + time.monotonic() - began, 3)
            write_json(self.folder / "costs.json", costs)

    def left(self, name: str) -> float | None:
        """Return the seconds that this part may still take: its share of what earlier
        parts have left over."""
        if self.total is None:
            return None
        costs = self.costs
        names = list(self.parts)
        ahead = names[names.index(name) :]
        rest = self.total - sum(
            spent for part, spent in costs.items() if part not in ahead
        )
        return max(
            0.0,
            rest * self.parts[name] / sum(self.parts[part] for part in ahead)
            - costs.get(name, 0.0),
        )

    def fit(
        self,
        part: str,
        stages: Sequence[Stage],
        data: TaskData,
        train: Callable[[Stage, Run], object],
        *,
        share: float = 1.0,
    ) -> list[Stage]:
        """Limit the stages to as many steps as fit into this share of the part's time;
        the first decision is kept.

        No stage takes more steps than it states itself. train: runs a stage in a run,
        so that it can be timed. Raises SearchError when no time is left.
        """
        if self.total is None:
            return list(stages)
        known = self._load("steps.json")
        if part not in known:
            seconds = share * (self.left(part) or 0.0)
            if seconds <= 0:
                spent = ", ".join(
                    f"{part} {seconds / 60:.1f}" for part, seconds in self.costs.items()
                )
                raise SearchError(
                    f"{self.folder}: its {self.total / 60:g} minutes are spent "
                    f"({spent}) before {part}. Nothing is lost: repeat the command "
                    "with more --minutes and --resume"
                )
            known[part] = _fit_steps(stages, data, seconds, train, self.folder)
            write_json(self.folder / "steps.json", known)
        return [
            stage.model_copy(update={"steps": known[part][stage.name]})
            for stage in stages
        ]

    def _load(self, name: str) -> dict[str, Any]:
        remedy = (
            f"Remove {name} and repeat the command with --resume: time is then counted "
            "anew"
        )
        return (
            load_json(self.folder / name, remedy)
            if (self.folder / name).is_file()
            else {}
        )


def _fit_steps(
    stages: Sequence[Stage],
    data: TaskData,
    seconds: float,
    train: Callable[[Stage, Run], object],
    folder: Path,
) -> dict[str, int]:
    """Compute each stage's steps so that all fit into `seconds`, by timing short
    trainings in temporary runs."""
    fixed = 0.0
    wanted = 0.0
    with TemporaryDirectory(dir=folder, prefix=".timing-") as scratch:
        for stage in stages:
            seconds_of = dict[int, float]()
            for steps in PROBES:
                run = Run(Path(scratch) / f"{stage.name}-{steps}", 0, main=True)
                run.path.mkdir()
                train(
                    stage.model_copy(
                        update={"steps": steps, "evaluate": 0, "checkpoint": steps}
                    ),
                    run,
                )
                seconds_of[steps] = Trained.read(run.result(stage.name)).seconds
            (few, short), (many, long) = seconds_of.items()
            step = max((long - short) / (many - few), LEAST_STEP_SHARE * long / many)
            fixed += max(0.0, short - few * step)
            wanted += count_steps(stage, data) * step
    share = (SPARE * seconds - fixed) / wanted if wanted else 1.0
    return {
        stage.name: max(1, floor(count_steps(stage, data) * min(1.0, share)))
        for stage in stages
    }


def count_steps(stage: Stage, data: TaskData) -> int:
    """Count the optimiser steps of a stage."""
    return plan_steps(stage, max(1, len(data.train) // stage.batch))
