"""The state that the phases of a search share: models, data, time budget, evaluators,
and records of its students."""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from math import ceil, floor
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedModel

from compress.config.stages import Stage
from compress.console import warn
from compress.data.task import TaskData
from compress.errors import SearchError
from compress.evaluation import metrics
from compress.evaluation.evaluator import EvaluationBatches, Evaluator
from compress.io import atomic_folder, keep_if_intact, load_json, write_json
from compress.jobs.stages import StageModels
from compress.models.checkpoints import save_tokenizer
from compress.models.teacher import Teacher
from compress.nas.config import SearchConfig
from compress.nas.costs import CostModel
from compress.nas.space import Choice, architecture_key
from compress.nas.supernet import Supernet
from compress.records.json_text import load_record
from compress.records.search_report import ScoreStage
from compress.training.context import TrainingContext
from compress.training.finetune import TeacherCheck
from compress.training.run import Run
from compress.training.stage import Trained, plan_steps

# ---- time

PROBES = (8, 24)
"""Steps of two short trainings; the difference of their times gives the time of a
step."""
LEAST_STEP_SHARE = 0.5
"""The least time of a step, as a share of the longer training's mean: the difference of
two short times is noisy."""
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

    def score(self, choice: Choice, rung: int) -> float:
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

    def score(self, choice: Choice, rung: int) -> float:
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

    def find_trained(self, choice: Choice) -> Path | None:
        """Return the checkpoint of the last leg; None if it is not on this machine."""
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
            for at, (begin, end) in enumerate(
                zip([0, *ends], ends, strict=False), start=1
            )
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
    among: tuple[Choice, ...]
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
        return float(fmean(rows["length"][:]))

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
        remedy = "Remove it and repeat the command with --resume: winners are rechosen"
        return load_record(tuple[int, ...], file, remedy) if file.is_file() else ()

    def decide_winner(self, at: int, choose: Callable[[Sequence[int]], int]) -> int:
        """Return the trial chosen at this place, in this session or an earlier one:
        later scores do not change it."""
        known = self.winners
        if at >= len(known):
            known = (*known, choose(known))
            write_json(self.run.path / WINNERS, known)
        return known[at]

    def student_checkpoint(self, number: int, choice: Choice) -> Path:
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
