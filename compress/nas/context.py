"""The state that the phases of a search share: models, data, time, evaluators, and the records of its students."""

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

from pydantic import TypeAdapter, ValidationError
from transformers import PreTrainedModel

from compress.config.recipe import Stage
from compress.console import warn
from compress.data.task import TaskData
from compress.errors import DamagedError, SearchError
from compress.evaluation import metrics
from compress.evaluation.evaluator import EvaluationBatches, Evaluator
from compress.exporters.artifact import Bundle
from compress.io import atomic_folder, keep_if_intact, load_json, write_json
from compress.models.checkpoints import save_tokenizer
from compress.models.teacher import Teacher
from compress.nas.config import SearchConfig
from compress.nas.costs import CostModel
from compress.nas.space import Choice, architecture_key
from compress.nas.supernet import Supernet
from compress.records.search_report import ScoreStage
from compress.training.context import TrainingContext
from compress.training.finetune import TeacherCheck
from compress.training.run import Run
from compress.training.stage import Trained, plan_steps

# ---- time

PROBES = (8, 24)
"""Steps of two short trainings that are timed: what the longer one took more is what steps take."""
LEAST = 0.5
"""The least share of the longer one's mean step that a step takes, whatever the difference of two short times says."""
SPARE = 0.9
"""Share of a stage's time that its steps are planned to fill: it is scored, and written, in the rest."""

REMEDY = "Remove {} and repeat the command with --resume: what it says of time is begun anew"

Parts = Mapping[str, float]
SUPERNET: Parts = {
    "measuring": 0.08, "supernet": 0.42, "trials": 0.12, "short distillations": 0.16, "timing finalists": 0.04,
    "final": 0.18,
}  # fmt: skip
PLAIN: Parts = {"measuring": 0.08, "trials": 0.66, "timing finalists": 0.04, "final": 0.22}
"""The share of a stated time that each part of a search may take."""


@dataclass(frozen=True)
class TimeBudget:
    """The time that the parts of a search have taken and may still take; kept in its folder.

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
            write_json(self.folder / "costs.json", costs)

    def left(self, name: str) -> float | None:
        """Return the seconds that this part may still take: its share of what those before it have left over."""
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
                spent = ", ".join(f"{part} {seconds / 60:.1f}" for part, seconds in self.costs.items())
                raise SearchError(
                    f"{self.folder}: its {self.total / 60:g} minutes are spent ({spent}), and {part} is to come. "
                    "Nothing is lost: repeat the command with more --minutes and --resume"
                )
            known[part] = _fit_steps(stages, data, seconds, train, self.folder)
            write_json(file, known)
        return [stage.model_copy(update={"steps": known[part][stage.name]}) for stage in stages]


def _fit_steps(
    stages: Sequence[Stage], data: TaskData, seconds: float, train: Callable[[Stage, Run], object], folder: Path
) -> dict[str, int]:
    """Compute the steps of each stage so that all fit, by the time of short trainings, in runs that are thrown away."""
    fixed, wanted = 0.0, 0.0
    with TemporaryDirectory(dir=folder, prefix=".timing-") as scratch:
        for stage in stages:
            seconds_of = dict[int, float]()
            for steps in PROBES:
                run = Run(Path(scratch) / f"{stage.name}-{steps}", 0, main=True)
                run.path.mkdir()
                train(stage.model_copy(update={"steps": steps, "evaluate": 0, "checkpoint": steps}), run)
                seconds_of[steps] = Trained.read(run.result(stage.name)).seconds
            (few, short), (many, long) = seconds_of.items()
            step = max((long - short) / (many - few), LEAST * long / many)
            fixed += max(0.0, short - few * step)
            wanted += count_steps(stage, data) * step
    share = (SPARE * seconds - fixed) / wanted if wanted else 1.0
    return {stage.name: max(1, floor(count_steps(stage, data) * min(1.0, share))) for stage in stages}


def count_steps(stage: Stage, data: TaskData) -> int:
    """Count the optimiser steps that a stage takes."""
    return plan_steps(stage, max(1, len(data.train) // stage.batch))


# ---- evaluators

RunStages = Callable[..., PreTrainedModel]
"""Run stages of a recipe in a run's folder and return the last model: (recipe, run, stages, teacher_logits=None)."""


@dataclass(frozen=True)
class SupernetEvaluator:
    """Scores the part of a trained supernet that a choice is, on growing shares of the validation rows."""

    costs: CostModel
    net: Supernet
    batches: Sequence[EvaluationBatches]
    bf16: bool

    @staticmethod
    def from_model(
        costs: CostModel, whole: PreTrainedModel, evaluator: Evaluator, training: TrainingContext
    ) -> "SupernetEvaluator":
        """Make it of the supernet as its training left it, and the evaluator of the validation rows."""
        device = next(whole.parameters()).device
        batches = [
            EvaluationBatches.from_evaluator(
                evaluator.spread(ceil(share * len(evaluator.split))), training.collate, device=device
            )
            for share in costs.search.space.rungs
        ]
        return SupernetEvaluator(costs, Supernet(whole.eval()), batches, training.bf16)

    @property
    def rungs(self) -> int:
        return len(self.batches)

    def score(self, choice: Choice, rung: int) -> float:
        return self.net.score(self.costs.shapes.sizes(choice), self.batches[rung], bf16=self.bf16)


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
        """The parts of the stage that end at the rungs' shares of its steps."""
        steps = count_steps(self.stage, self.training.data)
        ends = [max(at + 1, round(share * steps)) for at, share in enumerate(self.costs.search.space.rungs)]
        return tuple(
            self.stage.model_copy(update={"name": f"{self.stage.name}-{at}", "steps": max(1, end - begin)})
            for at, (begin, end) in enumerate(zip([0, *ends], ends, strict=False), start=1)
        )


StudentEvaluator = ScratchEvaluator | SupernetEvaluator
"""Scores a choice: `rungs` times, on more rows or after more training each time; the last one is its score."""


def score_student(student: PreTrainedModel, evaluator: Evaluator, training: TrainingContext) -> float:
    """Compute the task's metric of a student on the validation rows."""
    logits = metrics.logits(student, evaluator.rows, training.collate, bf16=training.bf16)
    return float(evaluator.scores(logits)[evaluator.task.metric])


# ---- state

FACTS, WINNERS = "student.json", "winners.json"


@dataclass(frozen=True)
class StudentState:
    """A search's knowledge of one student beyond its trial; students/N/student.json.

    measured   setting -> ms; bundle: where it was written to
    """

    scores: Mapping[ScoreStage, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    bundle: str | None = None
    file_mb: float | None = None


@dataclass(frozen=True)
class SearchContext:
    """The search, its folder, and all that trains and scores its students.

    evaluator: the validation rows; among: shapes that keep the budget; ship: `commands.ship.ship`
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
    run_stages: RunStages
    ship: Callable[..., Bundle]
    _student_evaluator: StudentEvaluator | None = None

    @property
    def student_evaluator(self) -> StudentEvaluator:
        """Return what scores the choices; there is one once the supernet is trained."""
        assert self._student_evaluator is not None, "the context has its student evaluator"
        return self._student_evaluator

    def with_student_evaluator(self, student_evaluator: StudentEvaluator) -> "SearchContext":
        return replace(self, _student_evaluator=student_evaluator)

    def say(self, line: str) -> None:
        self.training.console.print(line, markup=False, highlight=False, soft_wrap=True)

    @cached_property
    def mean_tokens(self) -> float:
        """Mean length of the training rows."""
        rows = self.training.rows(self.search.space.short, self.run.seed)
        return float(fmean(rows["length"][:]))

    def student_run(self, number: int) -> Run:
        """Return the student's own folder, as a run's."""
        run = Run(self.run.path / "students" / str(number), self.run.seed, main=True, track=self.run.track)
        run.path.mkdir(parents=True, exist_ok=True)
        return run

    def student_state(self, number: int) -> StudentState:
        return load_student_state(self.run.path, number)

    def update_student(self, number: int, **more: Any) -> StudentState:
        """Add to what is kept of a student: scores and measured times are merged, the rest replaced."""
        before = self.student_state(number)
        merged = {name: {**getattr(before, name), **more.get(name, {})} for name in ("scores", "measured")}
        changes: dict[str, Any] = more | merged
        after = replace(before, **changes)
        write_json(self.student_run(number).path / FACTS, asdict(after))
        return after

    @property
    def winners(self) -> tuple[int, ...]:
        """The trials that were chosen to be distilled fully, in the order of the choice."""
        file = self.run.path / WINNERS
        try:
            return TypeAdapter(tuple[int, ...]).validate_json(file.read_bytes()) if file.is_file() else ()
        except ValidationError:
            remedy = "Remove it and repeat the command with --resume: the winners are chosen again"
            raise DamagedError(file, ["it cannot be read"], remedy) from None

    def decide_winner(self, at: int, choose: Callable[[Sequence[int]], int]) -> int:
        """Return the trial chosen at this place, now or in an earlier session; what it scores later changes nothing."""
        known = self.winners
        if at >= len(known):
            known = (*known, choose(known))
            write_json(self.run.path / WINNERS, known)
        return known[at]

    def student_checkpoint(self, number: int, choice: Choice) -> Path:
        """Find or make the student as its trial knew it: the part of the supernet, or what its legs left.

        Legs that a worker trained elsewhere are trained again here.
        """
        if isinstance(self.student_evaluator, ScratchEvaluator):
            found = self.student_evaluator.trained(choice)
            if found is None:
                self.training.console.print(f"trial {number} was trained elsewhere: training it again here")
                for rung in range(self.student_evaluator.rungs):
                    self.student_evaluator.score(choice, rung)
                found = self.student_evaluator.trained(choice)
            assert found is not None, "its last leg is done"
            return found
        folder = self.student_run(number).path / "subnet"
        if not keep_if_intact(folder, partial(warn, self.training.console)):
            with atomic_folder(folder, sealed=True) as new:
                self.student_evaluator.net.extract(self.costs.shapes.sizes(choice)).save_pretrained(new)
                save_tokenizer(new, self.training.tokenizer)
        return folder


def load_student_state(study: Path, number: int) -> StudentState:
    """Load what the search in this folder keeps of a student. Raises DamagedError."""
    file = study / "students" / str(number) / FACTS
    try:
        return TypeAdapter(StudentState).validate_json(file.read_bytes()) if file.is_file() else StudentState()
    except ValidationError:
        remedy = f"Remove it and show the trial again: compress search show {study} {number} --bundle student-{number}"
        raise DamagedError(file, ["it cannot be read"], remedy) from None
