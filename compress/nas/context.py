"""The state that the phases of a search share: its models, data and evaluators, and the records of its students."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter, ValidationError

from compress.console import warn
from compress.errors import DamagedError
from compress.evaluation.evaluator import Evaluator
from compress.exporters.artifact import Bundle
from compress.io import filled, usable, written
from compress.models.checkpoints import save_tokenizer
from compress.models.teacher import Teacher
from compress.nas.config import SearchConfig
from compress.nas.costs import CostModel
from compress.nas.evaluators import RunStages, ScratchEvaluator, StudentEvaluator
from compress.nas.schedule import TimeBudget
from compress.nas.space import Choice
from compress.records.search_report import ScoreStage
from compress.training.context import TrainingContext
from compress.training.finetune import TeacherCheck
from compress.training.run import Run

FACTS, WINNERS = "student.json", "winners.json"


@dataclass(frozen=True)
class StudentState:
    """What a search knows of one student beyond its trial; students/N/student.json.

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
        run = Run(self.run.path / "students" / str(number), self.run.seed, main=True)
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
        with written(self.student_run(number).path / FACTS) as partial:
            partial.write_text(json.dumps(asdict(after), indent=1) + "\n", encoding="utf-8")
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
        """Return the trial chosen at this place, now or in an earlier session: what it scores later changes no
        choice."""
        known = self.winners
        if at >= len(known):
            known = (*known, choose(known))
            with written(self.run.path / WINNERS) as partial:
                partial.write_text(json.dumps(known) + "\n", encoding="utf-8")
        return known[at]

    def student_checkpoint(self, number: int, choice: Choice) -> Path:
        """Find or make the folder with the student as its trial knew it: the part of the supernet, or what its legs
        left.

        Where a worker elsewhere trained those, they are trained again here.
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
        if not usable(folder, partial(warn, self.training.console)):
            with filled(folder, sealed=True) as new:
                self.student_evaluator.net.extract(self.costs.shapes.sizes(choice)).save_pretrained(new)
                save_tokenizer(new, self.training.tokenizer)
        return folder


def load_student_state(study: Path, number: int) -> StudentState:
    """Load what the search in this folder keeps of a student. Raises DamagedError."""
    file = study / "students" / str(number) / FACTS
    try:
        return TypeAdapter(StudentState).validate_json(file.read_bytes()) if file.is_file() else StudentState()
    except ValidationError:
        remedy = f"Remove it and show the trial again: compress search show {study} {number} --bundle OUT"
        raise DamagedError(file, ["it cannot be read"], remedy) from None
