"""Hold what the phases of a training command work on, and hand on to each other."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel

from compress.config.recipe import Recipe
from compress.exporters.artifact import Bundle
from compress.jobs.phase import Phase
from compress.jobs.stages import StageModels
from compress.jobs.trials import Trials
from compress.models.teacher import Teacher
from compress.records.path import WalkedPath
from compress.training.context import TrainingContext
from compress.training.finetune import TeacherCheck


@dataclass(frozen=True)
class Job:
    """The recipe of a command, its models and data, and the results of its phases.

    notes     warnings for the report
    started   time.time() when the command began
    check     of the teacher; student: the model of the last stage
    path      the path to the student, if a share of the score is to be kept; asked: the
              recipe that asks for it
    tried     tries stages, if the command is only estimated
    """

    models: StageModels
    notes: tuple[str, ...] = ()
    started: float = field(default_factory=time.time)
    check: TeacherCheck | None = None
    student: PreTrainedModel | None = None
    bundle: Bundle | None = None
    path: WalkedPath | None = None
    asked: Recipe | None = None
    tried: Trials | None = None

    @property
    def teacher(self) -> Teacher:
        """The teacher with a head for the task, once a phase has made it."""
        assert self.models.task_teacher is not None, "its phase comes first"
        return self.models.task_teacher

    @property
    def teacher_logits(self) -> Any:
        """The teacher's logits on the validation split; None before it is checked."""
        return None if self.check is None else self.check.logits

    @property
    def trials(self) -> Trials:
        """Return the trials of a command that is only estimated."""
        assert self.tried is not None, "the job was opened to be estimated"
        return self.tried

    def with_recipe(self, recipe: Recipe) -> "Job":
        """Return the job with this recipe."""
        return replace(self, models=replace(self.models, recipe=recipe))

    def with_context(self, context: TrainingContext) -> "Job":
        """Return the job whose stages work on this context."""
        return replace(self, models=replace(self.models, context=context))

    def with_teacher(
        self,
        teacher: Teacher,
        check: TeacherCheck | None = None,
    ) -> "Job":
        """Return the job with this teacher for the task."""
        models = replace(self.models, task_teacher=teacher)
        notes = () if check is None else check.notes
        return replace(self, models=models, check=check, notes=(*self.notes, *notes))

    def for_trial(self, folder: Path) -> "Job":
        """Return the job for an estimate, which prints nothing. folder: holds its
        cache."""
        context = replace(self.models.context, console=Console(quiet=True))
        trials = Trials(context, self.models.run, folder / "home")
        return replace(self.with_context(context), tried=trials)


def describe_pending(phases: Sequence[Phase[Job]], job: Job) -> str:
    """List what is still to do in a run, in order, the stages with their names."""
    parts = dict[str, str]()
    for phase in phases:
        parts |= phase.pending(job)
    run = job.models.run
    data = job.models.context.data
    _, measured = data.measured
    done = [at for at, name in enumerate(parts) if name and run.result(name).is_dir()]
    left = list(parts.values())[max(done, default=-1) + 1 :]
    examples = data.task.count_examples(measured)
    unit = data.task.scored_unit(data.task.metric)
    return f"{', '.join(left)}, and measure on {examples:,} {unit}"
