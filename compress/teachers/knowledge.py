"""A checkpoint as the teacher, which reads each text together with the facts about the
names in it, from a table of triples. The student learns its answers from the text
alone.

Context distillation: Snell et al. 2022, arXiv:2209.15189. Learning with privileged
information: Lopez-Paz et al. 2016, arXiv:1511.03643, eq. 4 with the loss of
`hinton.soft_targets`. Facts in the input: Liu et al. 2020, arXiv:1909.07606 (K-BERT).

Deviation from K-BERT: the facts are the second text of the row, not branches of the
sentence at its names. So there are no soft positions and no visible matrix: every
token sees all facts, and any pre-trained encoder can be the teacher.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from datasets import Dataset

from compress.arrays import Array
from compress.config.options import RunOptions
from compress.config.recipe import Recipe
from compress.data import cache
from compress.data.collate import Batching
from compress.data.encoder import encoder_of
from compress.data.knowledge import Knowledge, add_facts, load_knowledge
from compress.data.task import TaskData
from compress.data.tokenize import encode
from compress.errors import DataError, RecipeError
from compress.evaluation import metrics
from compress.jobs.job import Job
from compress.jobs.phase import Estimated, Phase
from compress.jobs.stages import StageModels
from compress.models.teacher import Teacher
from compress.prompting.labels import starting_checkpoint
from compress.records.forecast import PhaseEstimate, time_call
from compress.slicing.shape import positions
from compress.teachers.checkpoint import CheckpointTeacher, FineTune
from compress.teachers.source import Taught, TeacherSource
from compress.training.finetune import check_logits
from compress.training.stage import stage_seed

FACT_TOKENS = 128
"""Maximum tokens that the facts add to the length of a text."""
TRIED_ROWS = 64
"""Rows that are answered to estimate the time for all of them."""


@dataclass(frozen=True, kw_only=True)
class InformedTeacher(Teacher):
    """A teacher that answers rows of the task after reading them with their facts.

    max_length  tokens of a text with its facts
    """

    knowledge: Knowledge
    max_length: int
    collate: Batching
    bf16: bool

    answers_any_rows: ClassVar[bool] = False

    def known_answers(self, split: Dataset) -> Array:
        """Return the logits of a split, from the cache if they were computed before."""
        encoder = encoder_of(self.tokenizer)
        informed = add_facts(
            split,
            self.knowledge,
            encoder,
            self.max_length,
        )
        rows = encode(informed, encoder, self.max_length)
        key = cache.digest(
            self.digest,
            rows._fingerprint,
            self.model.device.type,
            str(self.bf16),
            torch.__version__,
        )

        def write(folder: Path) -> None:
            logits = metrics.logits(
                self.model,
                rows,
                self.collate,
                bf16=self.bf16,
            )
            np.save(folder / "logits.npy", logits)

        entry = cache.load_or_create(cache.home() / "teacher-outputs" / key, write)
        found: Array = np.load(entry / "logits.npy")
        return found

    def origin(self, base: Teacher) -> dict[str, str]:
        more = (
            f"{base.name}, which read each text with the facts of "
            f"{self.knowledge.name} about the names in it; this model is given the "
            "text alone"
        )
        return {**super().origin(base), "teacher": more}


@dataclass(frozen=True)
class TeachFacts(Phase[Job]):
    """Fine-tune a teacher on texts with their facts, unless it has a head for the task,
    and check its answers. If `strict`, refuse one that is no better than the majority
    answer."""

    knowledge: Knowledge
    strict: bool

    def informed(self, job: Job) -> Job:
        """Return the job whose texts have their facts."""
        models = job.models
        teacher = models.base_teacher
        stage = models.recipe.teacher
        length = stage.length + FACT_TOKENS
        most = positions(teacher.model)
        if most is not None:
            length = min(length, most)
        stage = stage.model_copy(update={"max_length": length})
        data = self.inform(models.context.data, teacher, length)
        context = replace(models.context, task_data=data)
        recipe = models.recipe.model_copy(update={"teacher": stage})
        models = replace(models, context=context, recipe=recipe)
        tried = job.tried
        if tried is not None:
            tried = replace(tried, context=replace(tried.context, task_data=data))
        return replace(job, models=models, tried=tried)

    def inform(self, data: TaskData, teacher: Teacher, length: int) -> TaskData:
        """Return the data to fine-tune the teacher on."""
        encoder = encoder_of(teacher.tokenizer)
        train = add_facts(data.train, self.knowledge, encoder, length)
        validation = add_facts(data.validation, self.knowledge, encoder, length)
        text = (data.task.text[0], "facts")
        return replace(
            data,
            name=f"{data.name} with {self.knowledge.name}",
            task=replace(data.task, text=text),
            train=train,
            validation=validation,
            test=None,
            fingerprint=cache.digest(
                data.fingerprint,
                train._fingerprint,
                validation._fingerprint,
            ),
        )

    def pending(self, job: Job) -> dict[str, str]:
        return FineTune().pending(self.informed(job))

    def run(self, job: Job) -> Job:
        informed = self.informed(job)
        tuned = FineTune().run(informed).teacher
        context = job.models.context
        name = f"{tuned.name} with {self.knowledge.name}"
        own = vars(tuned) | {"name": name}
        teacher = InformedTeacher(
            **own,
            knowledge=self.knowledge,
            max_length=informed.models.recipe.teacher.length,
            collate=context.collate,
            bf16=context.bf16,
        )
        check = check_logits(
            teacher.name,
            teacher.known_answers(context.data.validation),
            context.data,
            strict=self.strict,
        )
        notes = (self.describe(informed), *check.notes)
        return job.with_teacher(teacher, replace(check, notes=notes))

    def describe(self, informed: Job) -> str:
        """Say what the teacher knows that the student does not."""
        counts = np.asarray(informed.models.context.data.train["facts"][:])
        return (
            f"The teacher read each text with the facts of {self.knowledge.name} "
            "about the names in it; the student is given the text alone. "
            f"{np.count_nonzero(counts):,} of {len(counts):,} training texts have "
            f"facts, on average {counts.mean():.1f}."
        )

    def estimate(self, job: Job) -> Estimated[Job]:
        informed = self.informed(job)
        tried, found = FineTune().estimate(informed)
        teacher = tried.teacher
        context = informed.models.context
        length = informed.models.recipe.teacher.length
        rows = encode(context.data.train, teacher.tokenizer, length)
        few = rows.select(range(min(TRIED_ROWS, len(rows))))
        ask = partial(
            metrics.logits,
            teacher.model,
            few,
            context.collate,
            bf16=context.bf16,
        )
        data = job.models.context.data
        sizes = {data.train._fingerprint: self.count_read(job.models)}
        for split in filter(None, (data.validation, data.test)):
            sizes[split._fingerprint] = len(split)
        answers = dict[str, Array]()
        for key, size in sizes.items():
            answers[key] = np.zeros((size, data.task.outputs), np.float32)
        count = sum(sizes.values())
        seconds = time_call(ask) / len(few) * count
        name = f"{teacher.name} with {self.knowledge.name}"
        asking = PhaseEstimate(
            f"asking {name}",
            seconds=(seconds, seconds),
            note=f"{count:,} rows",
        )
        made_up = teacher.record(name, teacher.digest, answers)
        return job.with_teacher(made_up), [*found, asking]

    def count_read(self, models: StageModels) -> int:
        """Count the task's training texts, including a corpus if a stage reads it."""
        context = models.context
        most = len(context.data.train)
        for stage in models.recipe.training:
            if stage.corpus:
                plain = stage.model_copy(update={"augment": None})
                read = context.split(plain, stage_seed(stage, models.run))
                most = max(most, len(read))
        return most


@dataclass(frozen=True)
class KnowingCheckpoint(CheckpointTeacher):
    """A checkpoint that reads the facts of a table with each text."""

    knowledge: Knowledge

    @property
    def note(self) -> str:
        return (
            f"{self.name} reads each text with the facts of {self.knowledge.name}; the "
            "student reads the text alone"
        )

    @staticmethod
    def from_table(
        name: str, path: str, recipe: Recipe, *, allow_pickle: bool
    ) -> "KnowingCheckpoint":
        """Read a table of triples. Raises DataError for one that cannot be read, and
        RecipeError for a recipe that learns more than answers to the task's texts."""
        if recipe.pruning:
            raise RecipeError(
                [
                    f"{recipe.name}: prunes the teacher itself, which --knowledge lets "
                    "read facts that the student is not given; use --recipe knowledge, "
                    "or another that distils answers"
                ]
            )
        starting_checkpoint(_without_texts(recipe), default=name)
        return KnowingCheckpoint(name, name, allow_pickle, load_knowledge(Path(path)))

    def teach(self, data: TaskData, start: Teacher, *, bf16: bool) -> Taught:
        columns = data.train.column_names
        if data.task.vectors or "text" not in columns:
            raise DataError(
                f"--knowledge: {data.name} is a task of {data.task.kind}; expected "
                "texts, or pairs of texts, with a label or a score."
            )
        if "teacher" in columns:
            raise DataError(
                f"--knowledge: {data.name} has the scores of another teacher. Leave "
                "one of the two out."
            )
        named = [name for name in ("text", "text_pair") if name in columns]
        texts = (text for name in named for text in data.train[name])
        if not any(map(self.knowledge.find_names, texts)):
            raise DataError(
                f"--knowledge: no training text of {data.name} contains a name from "
                f"{self.knowledge.name}. Names are found as whole words, written as in "
                "the column head."
            )
        data, start, digests = super().teach(data, start, bf16=bf16)
        return data, start, {**digests, "knowledge": self.knowledge.digest}

    def take_scores(
        self, data: TaskData, teacher: Teacher, recipe: Recipe
    ) -> tuple[TeacherSource, Teacher]:
        return self, teacher

    def phases(self, options: RunOptions) -> list[Phase[Job]]:
        return [TeachFacts(self.knowledge, options.gate == "refuse")]


def _without_texts(recipe: Recipe) -> Recipe:
    """Return the recipe without what this teacher can do and recorded answers cannot:
    lend its layers to a student, and answer for texts beyond the task's own."""
    own = {"augment": None, "corpus": False}
    stages = tuple(stage.model_copy(update=own) for stage in recipe.stages)
    student = recipe.student.model_copy(update={"init": "teacher"})
    return recipe.model_copy(update={"stages": stages, "student": student})
