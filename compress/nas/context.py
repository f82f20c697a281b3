"""The state that the phases of a search share: models, data, time budget, evaluators,
and records of its students."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from compress.arrays import whole_numbers
from compress.config.stages import Stage
from compress.console import warn
from compress.evaluation import metrics
from compress.evaluation.evaluator import EvaluationBatches, Evaluator
from compress.io import atomic_folder, keep_if_intact, write_json
from compress.jobs.stages import StageModels
from compress.models.checkpoints import save_tokenizer
from compress.models.teacher import Teacher
from compress.nas.config import SearchConfig
from compress.nas.costs import CostModel
from compress.nas.space import ShapeChoice, architecture_key
from compress.nas.supernet import Supernet
from compress.nas.time_budget import TimeBudget, count_steps
from compress.records.json_text import load_record
from compress.records.search_report import ScoreStage
from compress.training.context import TrainingContext
from compress.training.finetune import TeacherCheck
from compress.training.run import Run

# ---- evaluators


@dataclass(frozen=True)
class SupernetEvaluator:
    """Scores a choice as a part of the trained supernet, on growing shares of the
    validation rows."""

    costs: CostModel
    net: Supernet
    batches: Sequence[EvaluationBatches]
    bf16: bool

    @staticmethod
    def from_model(
        costs: CostModel,
        whole: PreTrainedModel,
        evaluator: Evaluator,
        training: TrainingContext,
    ) -> "SupernetEvaluator":
        """Create it from the trained supernet `whole` and the evaluator of the
        validation rows."""
        device = next(whole.parameters()).device
        batches = [
            EvaluationBatches.from_evaluator(
                evaluator.subsample(ceil(share * len(evaluator.split))),
                training.collate,
                device=device,
            )
            for share in costs.search.space.rungs
        ]
        return SupernetEvaluator(costs, Supernet(whole.eval()), batches, training.bf16)

    @property
    def rungs(self) -> int:
        return len(self.batches)

    def score(self, choice: ShapeChoice, rung: int) -> float:
        return self.net.score(
            self.costs.shapes.sizes(choice), self.batches[rung], bf16=self.bf16
        )


@dataclass(frozen=True)
class ScratchEvaluator:
    """Builds a choice, trains it in one leg per rung, and scores it on the validation
    rows after each leg.

    Each leg runs the stage's whole schedule, warm-up and decay. Checkpoints are kept in
    `folder`, by shape, so that an interrupted trial continues with the leg it was in.
    """

    costs: CostModel
    task_teacher: Teacher
    training: TrainingContext
    evaluator: Evaluator
    folder: Path
    stage: Stage

    @property
    def rungs(self) -> int:
        return len(self.legs)

    def score(self, choice: ShapeChoice, rung: int) -> float:
        key = architecture_key(choice)
        space = self.costs.search.space
        run = Run(self.folder / key, self.costs.search.seed, main=True)
        run.path.mkdir(parents=True, exist_ok=True)
        recipe = space.recipe(f"trial {key}", self.legs, self.costs.shapes.spec(choice))
        models = StageModels.from_teacher(recipe, self.task_teacher, self.training, run)
        student = models.run_stages(recipe.stages[: rung + 1])
        if rung:
            shutil.rmtree(run.stage(self.legs[rung - 1].name), ignore_errors=True)
        return score_student(student, self.evaluator, self.training)

    def find_trained(self, choice: ShapeChoice) -> Path | None:
        """Return the checkpoint of the last leg, or None if it is not on this
        machine."""
        run = Run(
            self.folder / architecture_key(choice), self.costs.search.seed, main=True
        )
        return run.remaining(self.legs, self.training.console)[0]

    @cached_property
    def legs(self) -> tuple[Stage, ...]:
        """The stage split at the rungs' shares of its steps."""
        steps = count_steps(self.stage, self.training.data)
        ends = [
            max(at + 1, round(share * steps))
            for at, share in enumerate(self.costs.search.space.rungs)
        ]
        return tuple(
            self.stage.model_copy(
                update={"name": f"{self.stage.name}-{at}", "steps": max(1, end - begin)}
            )
            for at, (begin, end) in enumerate(pairwise([0, *ends]), start=1)
        )


StudentEvaluator = ScratchEvaluator | SupernetEvaluator
"""Scores a choice `rungs` times, each time on more rows or after more training; the
last is its score."""


def score_student(
    student: PreTrainedModel, evaluator: Evaluator, training: TrainingContext
) -> float:
    """Compute the task's metric of a student on the validation rows."""
    logits = metrics.logits(
        student, evaluator.rows, training.collate, bf16=training.bf16
    )
    return float(evaluator.scores(logits)[evaluator.task.metric])


# ---- state

FACTS = "student.json"
WINNERS = "winners.json"


@dataclass(frozen=True)
class StudentState:
    """The results of one student beyond its trial, kept in students/N/student.json.

    measured   setting -> ms; bundle: its path
    """

    scores: Mapping[ScoreStage, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    bundle: str | None = None
    file_mb: float | None = None


@dataclass(frozen=True)
class SearchContext:
    """The search, its folder, and everything that trains and scores its students.

    evaluator: of the validation rows; among: shapes within the budget
    """

    search: SearchConfig
    run: Run
    task_teacher: Teacher
    teacher_check: TeacherCheck
    training: TrainingContext
    evaluator: Evaluator
    costs: CostModel
    among: tuple[ShapeChoice, ...]
    time_budget: TimeBudget
    _student_evaluator: StudentEvaluator | None = None

    @property
    def student_evaluator(self) -> StudentEvaluator:
        """The evaluator of choices, which exists once the supernet is trained."""
        assert self._student_evaluator is not None, (
            "the context has its student evaluator"
        )
        return self._student_evaluator

    def with_student_evaluator(
        self, student_evaluator: StudentEvaluator
    ) -> "SearchContext":
        return replace(self, _student_evaluator=student_evaluator)

    def say(self, line: str) -> None:
        self.training.console.print(line, markup=False, highlight=False, soft_wrap=True)

    @cached_property
    def mean_tokens(self) -> float:
        """Mean length of the training rows."""
        rows = self.training.rows(self.search.space.short, self.run.seed)
        return float(whole_numbers(rows, "length").mean())

    def student_run(self, number: int) -> Run:
        """Create the run of the student's own folder."""
        run = Run(
            self.run.path / "students" / str(number),
            self.run.seed,
            main=True,
            track=self.run.track,
        )
        run.path.mkdir(parents=True, exist_ok=True)
        return run

    def student_state(self, number: int) -> StudentState:
        return load_student_state(self.run.path, number)

    def update_student(self, number: int, **more: Any) -> StudentState:
        """Update a student's results: scores and measured times are merged, the rest is
        replaced."""
        before = self.student_state(number)
        merged = {
            name: {**getattr(before, name), **more.get(name, {})}
            for name in ("scores", "measured")
        }
        after = replace(before, **more | merged)
        write_json(self.student_run(number).path / FACTS, asdict(after))
        return after

    @property
    def winners(self) -> tuple[int, ...]:
        """The trials chosen for the final distillation, in the order of the choice."""
        file = self.run.path / WINNERS
        remedy = "Remove it and repeat the command with --resume to choose them again"
        return load_record(tuple[int, ...], file, remedy) if file.is_file() else ()

    def decide_winner(self, at: int, choose: Callable[[Sequence[int]], int]) -> int:
        """Return the trial chosen at this place, in this session or an earlier one;
        later scores do not change the choice."""
        known = self.winners
        if at >= len(known):
            known = (*known, choose(known))
            write_json(self.run.path / WINNERS, known)
        return known[at]

    def student_checkpoint(self, number: int, choice: ShapeChoice) -> Path:
        """Find or make the student's checkpoint as of its trial: its part of the
        supernet, or the last of its legs.

        Legs that a worker trained elsewhere are trained again here.
        """
        evaluator = self.student_evaluator
        if isinstance(evaluator, ScratchEvaluator):
            if evaluator.find_trained(choice) is None:
                self.training.console.print(
                    f"trial {number} was trained elsewhere: training it again here"
                )
                for rung in range(evaluator.rungs):
                    evaluator.score(choice, rung)
            trained = evaluator.find_trained(choice)
            assert trained is not None, "its last leg is done"
            return trained
        folder = self.student_run(number).path / "subnet"
        if not keep_if_intact(folder, partial(warn, self.training.console)):
            with atomic_folder(folder, sealed=True) as new:
                evaluator.net.extract(self.costs.shapes.sizes(choice)).save_pretrained(
                    new
                )
                save_tokenizer(new, self.training.tokenizer)
        return folder


def load_student_state(study: Path, number: int) -> StudentState:
    """Load the results of a student from the search's folder. Raises DamagedError."""
    file = study / "students" / str(number) / FACTS
    remedy = (
        f"Remove it and show the trial again: compress search show {study} {number} "
        f"--bundle student-{number}"
    )
    return load_record(StudentState, file, remedy) if file.is_file() else StudentState()
