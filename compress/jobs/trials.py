"""Try the stages of a run for a few steps, to forecast their time and memory."""

import copy
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from compress.arrays import Longs, whole_numbers
from compress.config.reference import Call
from compress.config.reference import options as options_of
from compress.config.stages import Stage
from compress.data.collate import LengthGrouped, Order
from compress.data.tokenize import select_rows
from compress.models.memory import to_device
from compress.models.teacher import Teacher
from compress.records.forecast import PhaseEstimate, size_mb
from compress.slicing.shape import Shape
from compress.training.augment import asks_language_model
from compress.training.context import TrainingContext
from compress.training.finetune import is_ready, with_head
from compress.training.objective import Objective
from compress.training.run import Run
from compress.training.schedule import Length
from compress.training.stage import (
    Trained,
    batches,
    cache_pays,
    plan_steps,
    rows_per_query,
    run_stage,
    stage_seed,
    steps_per_epoch,
)
from compress.training.step import Score

SHORT = 4
LONG = (20, 60)
"""Steps of a short trial, and minimum and maximum of a long one; the difference yields
the time of a step."""
SECONDS = 6.0
"""Seconds that a long trial should take."""
ROWS = 64
SCORED = 256
"""Batches to train on, and rows of the validation split to score, in a trial."""


@dataclass(frozen=True)
class FewRows(TrainingContext):
    """A TrainingContext whose stages train on the rows `few`."""

    few: Dataset | None = None

    def rows(self, stage: Stage, seed: int, *, held_out: bool = False) -> Dataset:
        """Return these rows; held-out rows are unchanged."""
        return (
            super().rows(stage, seed, held_out=held_out)
            if held_out or self.few is None
            else self.few
        )

    def split(self, stage: Stage, seed: int) -> Dataset:
        """Return the rows with recorded answers: all training rows in a trial on few
        rows."""
        return super().split(stage, seed) if self.few is None else self.data.train


@dataclass
class Trials:
    """Tries stages of a run. home: a temporary cache for the trials."""

    context: TrainingContext
    run: Run
    home: Path
    seconds_per_scored_row: float = 0.0
    student_mb: float = 0.0

    def try_teacher(
        self,
        stage: Stage,
        base_teacher: Teacher,
    ) -> tuple[PhaseEstimate, Teacher]:
        """Forecast the fine-tuning of a teacher; return it with a head for the task,
        trained or not."""
        teacher = base_teacher
        if teacher.trained:
            phase = PhaseEstimate(
                stage.name, cached=True, note="has a head for the task"
            )
        elif is_ready(teacher, stage, self.context, self.run):
            phase = PhaseEstimate(stage.name, cached=True)
            teacher = with_head(teacher, stage, self.context, self.run)
        else:
            phase, _ = self.try_stage(
                stage, copy.deepcopy(teacher.model).requires_grad_(True), None
            )
        to_device(teacher.model, PartialState().device)
        return phase, teacher

    @contextmanager
    def scratch_cache(self) -> Iterator[None]:
        """Use `home` as the cache."""
        before = os.environ.get("COMPRESS_HOME")
        os.environ["COMPRESS_HOME"] = str(self.home)
        try:
            yield
        finally:
            if before is None:
                del os.environ["COMPRESS_HOME"]
            else:
                os.environ["COMPRESS_HOME"] = before

    def try_stage(
        self,
        stage: Stage,
        student: PreTrainedModel,
        teacher: Teacher | None,
        origin_D: Tensor | None = None,
        wrap_score: Callable[[Score], Score] | None = None,
    ) -> tuple[PhaseEstimate, PreTrainedModel]:
        """Try a stage for a few steps, with and without scoring, and for more; return
        its forecast and the student.

        origin_D, wrap_score  as for `run_stage`
        """
        notes = (
            ["until the validation score stops improving"] if stage.open_ended else []
        )
        variants = 1
        if isinstance(stage.augment, Call) and asks_language_model(stage.augment):
            variants += int(
                stage.augment.options.get(
                    "copies", options_of(stage.augment.function)["copies"].default
                )
            )
            notes.append(
                f"on up to {variants - 1} variants of each row; making them is not "
                "counted"
            )
            stage = stage.model_copy(update={"augment": None})
        rows = self.context.rows(stage, stage_seed(stage, self.run))
        order = batches(stage, rows, self.run.seed)
        per_epoch = variants * steps_per_epoch(stage, order)
        batch = variants * len(rows) / per_epoch
        cached = _caches_outputs(stage, student, teacher, rows, self.context)
        few = sample_rows(
            rows, min(len(rows), math.ceil(ROWS * batch)), math.ceil(batch)
        )
        context, teacher = self._with_few_rows(few, teacher)

        def train(
            name: str,
            steps: int,
            model: PreTrainedModel,
            *,
            scored: bool,
        ) -> tuple[Any, float, float]:
            """Return the trained model, the seconds of its training, and the seconds
            before it."""
            length = {
                "name": name,
                "steps": steps,
                "epochs": 1.0,
                "max_epochs": None,
                "evaluate": int(scored),
            }
            trial = stage.model_copy(
                update={**length, "cache_teacher": cached, "improve": False}
            )
            began = time.perf_counter()
            with self.scratch_cache():
                trained = run_stage(
                    trial,
                    model,
                    teacher,
                    context,
                    self.run,
                    origin_D=origin_D,
                    wrap_score=wrap_score,
                )
            seconds = Trained.read(self.run.result(name)).seconds
            return trained, seconds, time.perf_counter() - began - seconds

        outputs_mb = size_mb(self.home / "teacher-outputs")
        # to warm up
        train(f"{stage.name}-first", SHORT, copy.deepcopy(student), scored=True)
        _, short, before = train(
            f"{stage.name}-short", SHORT, copy.deepcopy(student), scored=False
        )
        _, with_score, _ = train(
            f"{stage.name}-scored",
            SHORT,
            copy.deepcopy(student),
            scored=stage.evaluate > 0,
        )
        least, most = LONG
        more = min(most, max(least, round(SECONDS * SHORT / short)))
        student, long, _ = train(stage.name, more, student, scored=False)
        tokens = np.resize(
            count_padded_tokens(batches(stage, few, self.run.seed)), more
        )[SHORT:].mean()
        step = (long - short) / (more - SHORT) if long > short else long / more
        step *= count_padded_tokens(order).mean() / tokens
        scored = len(context.data.validation) if context.task_data else 1
        per_row = max(0.0, with_score - short) / scored
        on_task = stage.data == "task" and stage.head == "task"
        held_out = len(self.context.data.validation) if on_task else 0
        self.seconds_per_scored_row = (
            per_row if on_task else self.seconds_per_scored_row
        )
        if stage.open_ended:
            length = Length.plan(
                stage, per_epoch, rows=held_out, per_query=rows_per_query(rows)
            )
            steps = (length.least, length.most)
            every = length.every
        else:
            steps = (plan_steps(stage, per_epoch),) * 2
            every = max(1, min(steps[0], per_epoch) // max(1, stage.evaluate))
        outputs = before / len(few) * len(rows) if cached else 0.0
        seconds = [
            outputs + count * step + count / every * per_row * max(held_out, scored)
            for count in steps
        ]
        folder = self.run.stage(f"{stage.name}-scored")
        self.student_mb = size_mb(self.run.result(folder.name))
        outputs_mb = (
            (size_mb(self.home / "teacher-outputs") - outputs_mb) / len(few) * len(rows)
        )
        # the newest two checkpoints are kept
        disk = size_mb(folder, folder / "checkpoints") + outputs_mb
        speed = batch / step if step else None
        return PhaseEstimate(
            stage.name, steps, (seconds[0], seconds[1]), speed, ", ".join(notes), disk
        ), student

    def _with_few_rows(
        self,
        rows: Dataset,
        teacher: Teacher | None,
    ) -> tuple[FewRows, Teacher | None]:
        """Return the context with these rows to train on, and few rows to score; and
        the teacher, with as many recorded answers as rows if it has any."""
        values = {
            each.name: getattr(self.context, each.name) for each in fields(self.context)
        }
        if data := self.context.task_data:
            scored = data.task.thin(data.validation, SCORED)
            values["task_data"] = replace(data, validation=scored)
            if teacher is not None:
                teacher = teacher.with_first_answers(data.train, len(rows))
        return FewRows(**values, few=rows), teacher


def count_padded_tokens(order: Order) -> Longs:
    """Count the tokens of each batch of an epoch, with padding."""
    if not isinstance(order, LengthGrouped):
        return np.ones(len(order), np.int64)
    longest = (
        np.asarray(order.lengths)[list(order)].reshape(-1, order.batch_size).max(1)
    )
    return np.asarray(longest * order.batch_size, np.int64)


def sample_rows(rows: Dataset, count: int, longest: int) -> Dataset:
    """Sample rows, including the longest ones, which take the most memory."""
    drawn = np.random.default_rng(0).permutation(len(rows))[:count]
    drawn[: min(count, longest)] = np.argsort(
        -whole_numbers(rows, "length"), kind="stable"
    )[: min(count, longest)]
    return select_rows(rows, np.unique(drawn))


def _caches_outputs(
    stage: Stage,
    student: PreTrainedModel,
    teacher: Teacher | None,
    rows: Dataset,
    context: TrainingContext,
) -> bool:
    """Return True if the stage will cache its teacher's outputs."""
    if teacher is not None and not teacher.answers_any_rows:
        return False
    if stage.cache_teacher != "auto" or teacher is None or not stage.objective:
        return bool(stage.cache_teacher)
    shapes = (Shape.from_config(model.config) for model in (student, teacher.model))
    kind = context.kind if stage.head == "task" else None
    objective = Objective(stage.objective, *shapes, kind=kind)
    return cache_pays(stage, objective, teacher, rows, context.time_limit)
