"""Score the students a search chooses: as parts of one supernet, or by a short training of each."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path

from transformers import PreTrainedModel

from compress.config.recipe import Stage
from compress.data.task import TaskData
from compress.evaluation import metrics
from compress.evaluation.evaluator import EvaluationBatches, Evaluator
from compress.nas.costs import CostModel
from compress.nas.schedule import planned
from compress.nas.space import Choice, architecture_key
from compress.nas.supernet import Supernet
from compress.training.context import TrainingContext
from compress.training.run import Run

RunStages = Callable[..., PreTrainedModel]
"""Run stages of a recipe in a run's folder and return the last model: (recipe, run, stages, teacher_logits=None)."""


@dataclass(frozen=True)
class SupernetEvaluator:
    """Scores the part of a trained supernet that a choice is, on growing shares of the validation rows."""

    costs: CostModel
    net: Supernet
    sheets: Sequence[EvaluationBatches]
    bf16: bool

    @staticmethod
    def of(
        costs: CostModel, whole: PreTrainedModel, evaluator: Evaluator, training: TrainingContext
    ) -> "SupernetEvaluator":
        """`evaluator`: the validation rows, `whole`: the supernet as its training left it."""
        counts = [ceil(share * len(evaluator)) for share in costs.search.space.rungs]
        device = next(whole.parameters()).device
        sheets = [
            EvaluationBatches.from_evaluator(evaluator.spread(count), training.collate, device=device)
            for count in counts
        ]
        return SupernetEvaluator(costs, Supernet(whole.eval()), sheets, training.bf16)

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
    run_stages: RunStages
    training: TrainingContext
    evaluator: Evaluator
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
        student = self.run_stages(recipe, run, recipe.stages[: rung + 1])
        if rung:
            shutil.rmtree(run.stage(self.legs[rung - 1].name), ignore_errors=True)
        return score_student(student, self.evaluator, self.training)

    def trained(self, choice: Choice) -> Path | None:
        """Find the folder of the student as its last leg left it; None where it is not here."""
        run = Run(self.folder / architecture_key(choice), self.costs.search.seed, main=True)
        return run.remaining(self.legs, self.training.console)[0]

    @cached_property
    def legs(self) -> tuple[Stage, ...]:
        return split_stage(self.stage, self.costs.search.space.rungs, self.training.data)


StudentEvaluator = ScratchEvaluator | SupernetEvaluator
"""Scores a choice: `rungs` times, on more rows or after more training each time; the last one is its score."""


def split_stage(stage: Stage, rungs: Sequence[float], data: TaskData) -> tuple[Stage, ...]:
    """Split the stage's steps into parts that end at these shares of them."""
    ends = [max(at + 1, round(share * planned(stage, data))) for at, share in enumerate(rungs)]
    lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return tuple(
        stage.model_copy(update={"name": f"{stage.name}-{at + 1}", "steps": max(1, steps)})
        for at, steps in enumerate(lengths)
    )


def score_student(student: PreTrainedModel, evaluator: Evaluator, training: TrainingContext) -> float:
    """Compute the task's metric of a student on the validation rows."""
    logits = metrics.logits(student, evaluator.rows, training.collate, bf16=training.bf16)
    return float(evaluator.scores(logits)[evaluator.task.metric])
