"""Who judges a search's choices: a supernet of which each is a part, or a short training of each by itself."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path

from transformers import PreTrainedModel

from compress.config.recipe import Stage
from compress.data.task import TaskData
from compress.evaluation import metrics
from compress.evaluation.batches import Sheets
from compress.evaluation.evaluator import Evaluator
from compress.models.teacher import Teacher
from compress.nas.costs import CostModel
from compress.nas.schedule import planned
from compress.nas.space import Choice, architecture_key
from compress.nas.supernet import Supernet
from compress.stages import StageModels
from compress.training.run import Run
from compress.training.stage import TrainingContext


@dataclass(frozen=True)
class SupernetEvaluator:
    """Scores the part of a trained supernet that a choice is, on growing shares of the validation rows."""

    costs: CostModel
    net: Supernet
    sheets: Sequence[Sheets]
    bf16: bool

    @staticmethod
    def of(costs: CostModel, whole: PreTrainedModel, exam: Evaluator, material: TrainingContext) -> "SupernetEvaluator":
        """`exam`: the validation rows, `whole`: the supernet as its training left it."""
        counts = [ceil(share * len(exam)) for share in costs.search.space.rungs]
        device = next(whole.parameters()).device
        sheets = [Sheets.of(exam.spread(count), material.collate, device=device) for count in counts]
        return SupernetEvaluator(costs, Supernet(whole.eval()), sheets, material.bf16)

    @property
    def rungs(self) -> int:
        return len(self.sheets)

    def score(self, choice: Choice, rung: int) -> float:
        return self.net.score(self.costs.shapes.sizes(choice), self.sheets[rung], bf16=self.bf16)


@dataclass(frozen=True)
class ScratchEvaluator:
    """Builds a choice, trains it in as many legs as there are rungs, and scores it on the validation rows after each.

    Each leg has the stage's schedule for itself, warm-up and decay. What is trained is kept in `folder`, by shape: a
    trial that was interrupted goes on with the leg it was in, where the folder is the same.
    """

    costs: CostModel
    given: Teacher
    tutor: Teacher
    material: TrainingContext
    exam: Evaluator
    folder: Path
    stage: Stage

    @property
    def rungs(self) -> int:
        return len(self.legs)

    def score(self, choice: Choice, rung: int) -> float:
        key, space = architecture_key(choice), self.costs.search.space
        run = Run(self.folder / key, self.costs.search.seed, main=True)
        run.path.mkdir(parents=True, exist_ok=True)
        recipe = space.recipe(f"trial {key}", self.legs, self.costs.shapes.spec(choice))
        student = StageModels(recipe, self.given, self.tutor, self.material, run).run_stages(recipe.stages[: rung + 1])
        if rung:
            shutil.rmtree(run.stage(self.legs[rung - 1].name), ignore_errors=True)
        return scored(student, self.exam, self.material)

    def trained(self, choice: Choice) -> Path | None:
        """The folder of the student as its last leg left it; None where it is not here."""
        run = Run(self.folder / architecture_key(choice), self.costs.search.seed, main=True)
        return run.remaining(self.legs, self.material.console)[0]

    @cached_property
    def legs(self) -> tuple[Stage, ...]:
        return legs(self.stage, self.costs.search.space.rungs, self.material.data)


StudentEvaluator = ScratchEvaluator | SupernetEvaluator
"""Scores a choice: `rungs` times, on more rows or after more training each time; the last one is its score."""


def legs(stage: Stage, rungs: Sequence[float], data: TaskData) -> tuple[Stage, ...]:
    """The stage's steps in parts that end at these shares of them."""
    ends = [max(at + 1, round(share * planned(stage, data))) for at, share in enumerate(rungs)]
    lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return tuple(
        stage.model_copy(update={"name": f"{stage.name}-{at + 1}", "steps": max(1, steps)})
        for at, steps in enumerate(lengths)
    )


def scored(student: PreTrainedModel, exam: Evaluator, material: TrainingContext) -> float:
    """The task's metric."""
    logits = metrics.logits(student, exam.rows, material.collate, bf16=material.bf16)
    return float(exam.scores(logits)[exam.task.metric])
