"""A checkpoint as the teacher, which is fine-tuned if it has no head for the task."""

from collections.abc import Sequence
from dataclasses import dataclass

from accelerate import PartialState

from compress.config.options import RunOptions
from compress.config.recipe import Recipe
from compress.config.stages import Stage
from compress.console import warn
from compress.data.corpus import Corpus
from compress.data.task import TaskData
from compress.evaluation.evaluator import Evaluator
from compress.jobs.job import Job
from compress.jobs.phase import Estimated, Phase
from compress.models.memory import to_device
from compress.models.teacher import Teacher, with_scores
from compress.prompting.labels import starting_checkpoint
from compress.teachers.recorded import RecordedScores
from compress.teachers.source import Taught, TeacherSource
from compress.training.finetune import check_teacher, is_ready, with_head
from compress.training.processes import node_first
from compress.training.teacher_vectors import with_similarities, with_teacher
from compress.training.unlabelled import add_texts


class FineTune(Phase[Job]):
    """Fine-tune a teacher that has no head for the task."""

    def pending(self, job: Job) -> dict[str, str]:
        models = job.models
        stage = models.recipe.teacher
        teacher = models.base_teacher
        if is_ready(teacher, stage, models.context, models.run):
            return {}
        return {stage.name: f"fine-tune {teacher.name}"}

    def run(self, job: Job) -> Job:
        models = job.models
        stage = models.recipe.teacher
        teacher = with_head(models.base_teacher, stage, models.context, models.run)
        to_device(teacher.model, PartialState().device)
        return job.with_teacher(teacher)

    def estimate(self, job: Job) -> Estimated[Job]:
        models = job.models
        found, teacher = job.trials.try_teacher(
            models.recipe.teacher, models.base_teacher
        )
        return job.with_teacher(teacher), [found]


@dataclass(frozen=True)
class CheckTeacher(Phase[Job]):
    """Score the teacher on the validation split. If `strict`, refuse one that is no
    better than the majority answer."""

    strict: bool

    def run(self, job: Job) -> Job:
        context = job.models.context
        teacher = job.teacher
        rows = Evaluator.from_split(
            context.data.task,
            context.data.validation,
            teacher.tokenizer,
            job.models.recipe.stages[-1].length,
        ).rows
        check = check_teacher(
            teacher,
            context.data,
            rows,
            context.collate,
            bf16=context.bf16,
            strict=self.strict,
        )
        for note in check.notes:
            warn(context.console, note)
        return job.with_teacher(teacher, check)


@dataclass(frozen=True)
class CheckpointTeacher(TeacherSource):
    """An alias, a folder or a hub id of a model."""

    tuned = True

    def teach(self, data: TaskData, start: Teacher, *, bf16: bool) -> Taught:
        return with_teacher(data, start.model.config), start, {"teacher": start.digest}

    def compare(self, data: TaskData, teacher: Teacher, max_length: int) -> TaskData:
        with node_first():  # the others read from the cache
            return with_similarities(data, teacher, max_length)

    def take_scores(
        self, data: TaskData, teacher: Teacher, recipe: Recipe
    ) -> tuple[TeacherSource, Teacher]:
        if "teacher" not in data.train.column_names or recipe.pruning:
            return self, teacher
        start = starting_checkpoint(recipe, default=self.start)
        source = RecordedScores(self.name, start, self.allow_pickle)
        return source, with_scores(teacher, data)

    def extend(self, recipe: Recipe, data: TaskData, corpus: Corpus | None) -> Recipe:
        return add_texts(recipe, data, corpus)

    def untrained(self, teacher: Teacher, recipe: Recipe) -> Sequence[Stage]:
        return () if teacher.trained else (recipe.teacher,)

    def phases(self, options: RunOptions) -> list[Phase[Job]]:
        return [FineTune(), CheckTeacher(options.gate == "refuse")]
