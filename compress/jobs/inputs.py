"""Load what the stages of a run share: data, text, and the teacher as it was named;
limit the time that they take."""

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from accelerate import PartialState
from rich.console import Console

from compress.config.options import DataOptions
from compress.config.recipe import Recipe
from compress.config.stages import Stage
from compress.console import print_note
from compress.data import load_task
from compress.data.collate import Collate
from compress.data.corpus import load_corpus
from compress.exporters.manifest import kind_of_bundle
from compress.models import checkpoints
from compress.models import teacher as teachers
from compress.models.padding import pads_left
from compress.models.teacher import Teacher
from compress.training.context import TrainingContext, use_bf16
from compress.training.finetune import with_pretrained_head
from compress.training.reranker import load_reranker, score_passages
from compress.training.run import Run
from compress.training.schedule import TimeLimit
from compress.training.teacher_vectors import VectorSource, with_teacher, with_vectors

TRAINING = 0.8
"""Share of a time limit for training; the rest is for exporting, certifying and
measuring."""


def limit_time(minutes: float, stages: Sequence[Stage], run: Run) -> TimeLimit:
    """Divide the minutes that a run may take over its stages; earlier sessions of the
    run count."""
    ends = time.monotonic() + TRAINING * 60 * minutes - run.before
    return TimeLimit(ends, tuple(stage.name for stage in stages), minutes)


def load_inputs(
    checkpoint: str,
    data: str,
    recipe: Recipe,
    run: Run,
    *,
    corpus: str | None = None,
    columns: DataOptions = DataOptions(),
    unlabelled: bool = False,
    vectors: VectorSource | None = None,
    reranker: Path | None = None,
    number_format: str = "fp32",
    allow_pickle: bool = False,
    console: Console,
) -> tuple[Teacher, TrainingContext]:
    """Load the base teacher and what the stages share. The first process fetches.
    Raises TeacherError, DataError.

    vectors, reranker: teach instead of `checkpoint`, which the student then begins as,
    or is cut out of
    """
    with PartialState().main_process_first():
        folder = checkpoints.resolve(checkpoint, allow_pickle=allow_pickle)
        columns = replace(columns, kind=columns.kind or kind_of_bundle(folder))
        task_data = load_task(
            data, **asdict(columns), seed=run.seed, unlabelled=unlabelled
        )
        base_teacher = teachers.load(
            checkpoint, folder, task_data.task, allow_pickle=allow_pickle
        )
        texts = load_corpus(corpus) if corpus else None
        checkpoint_digest = base_teacher.digest
        if vectors is not None:
            task_data, base_teacher = with_vectors(task_data, vectors, base_teacher)
        else:
            task_data = with_teacher(task_data, base_teacher)
        scorer = (
            load_reranker(reranker, allow_pickle=allow_pickle) if reranker else None
        )
        if scorer is not None:
            task_data = score_passages(task_data, scorer, bf16=number_format == "bf16")
    source = vectors or scorer
    digests = {
        "student" if unlabelled or source else "teacher": checkpoint_digest,
        "data": task_data.fingerprint,
    }
    if source is not None:
        digests["teacher"] = source.digest
    if texts is not None:
        digests["corpus"] = texts.fingerprint
    run.confirm(**digests)
    for note in task_data.notes:
        print_note(console, note)
    tokenizer = base_teacher.tokenizer
    collate = Collate(tokenizer, left=pads_left(base_teacher.model))
    bf16 = use_bf16(number_format, recipe, base_teacher, console)
    context = TrainingContext(
        task_data,
        texts,
        tokenizer,
        collate,
        bf16,
        console,
        base_teacher=base_teacher,
        masked_lm=lambda: with_pretrained_head(
            base_teacher, "masked_lm", recipe.teacher_lm, context, run
        ),
    )
    return base_teacher, context
