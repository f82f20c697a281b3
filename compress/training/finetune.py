"""Fine-tune a teacher that has no head for the task, cache the result, and check
teachers before they are used."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedModel, set_seed

from compress import io
from compress.arrays import Floats
from compress.config.stages import Head, Stage
from compress.data.cache import home, is_whole, load_or_create
from compress.data.collate import Batching
from compress.data.task import TaskData
from compress.errors import TeacherError
from compress.evaluation import baselines, metrics
from compress.evaluation.evaluator import Evaluator
from compress.kinds import Kind
from compress.models import heads
from compress.models.folder import ModelFolder, identify
from compress.models.loader import (
    check_vocabulary,
    load_config,
    load_model,
    load_tokenizer,
)
from compress.models.padding import hide_padding
from compress.models.saved_head import has_saved_head
from compress.models.teacher import Teacher, load
from compress.training.context import TrainingContext
from compress.training.processes import from_first, share_folder
from compress.training.run import Run
from compress.training.stage import run_stage

SURE_ERRORS = 1.645
"""Standard errors by which a teacher must lead the majority answer: 95 %, one-sided."""
WEAK = 0.5
USELESS = 0.1
"""Shares of the distance from the majority's score to 1: a teacher below WEAK is
compared with a bag of words, a teacher below USELESS is refused."""

TRAIN_IT = (
    "Fine-tune it on this task first (pass a checkpoint without a task head, and "
    "compress does it), or check that teacher, tokenizer and labels belong to this data"
)


def with_head(
    teacher: Teacher, stage: Stage, context: TrainingContext, run: Run
) -> Teacher:
    """Return `teacher` if it was trained for this task, else fine-tune it.

    The result is cached under $COMPRESS_HOME/teachers; the key covers the checkpoint,
    the data, the stage's numbers, seed and precision.
    """
    if teacher.trained:
        return teacher
    data = context.data
    folder = _train_once(
        teacher,
        (data.name, data.fingerprint),
        stage,
        context,
        run,
        load_model=lambda: (
            load(
                teacher.name, teacher.folder, data.task, allow_pickle=teacher.pickled
            ).model
        ),
        started=_describe_start(teacher, data.name),
        reused=f"{teacher.name}, fine-tuned on {data.name}",
    )
    return replace(load(teacher.name, folder, data.task), tokenizer=teacher.tokenizer)


def _describe_start(teacher: Teacher, data: str) -> str:
    """Say why a teacher is fine-tuned, and which head is dropped."""
    if teacher.other_head:
        return (
            f"the head of {teacher.name}, {teacher.other_head}, is not for {data} and "
            "is dropped: fine-tuning it first"
        )
    return f"{teacher.name} has no head for {data}: fine-tuning it first"


def is_ready(
    teacher: Teacher, stage: Stage, context: TrainingContext, run: Run
) -> bool:
    """Return True if `with_head` has nothing to train: the teacher has a head, or an
    earlier run fine-tuned it."""
    key = context.data.name, context.data.fingerprint
    return teacher.trained or is_whole(cache_folder(teacher, key, stage, context, run))


def _train_once(
    teacher: Teacher,
    data: tuple[str, str],
    stage: Stage,
    context: TrainingContext,
    run: Run,
    *,
    load_model: Callable[[], PreTrainedModel],
    started: str,
    reused: str,
) -> Path:
    """Return the folder of the model that `stage` trains, from the cache if an earlier
    run has trained it.

    load_model   loads the model to train, with a new head that is drawn from the run's
                 seed
    started      the message when training begins; reused: the name of a model from the
                 cache
    """
    cache = cache_folder(teacher, data, stage, context, run)
    console = context.console
    if from_first(lambda: is_whole(cache)):
        console.print(f"{reused}: kept from an earlier run in {cache}")
    else:
        console.print(started)
        if context.sharding is not None:
            console.print(f"{stage.name}: its weights are split over the processes")
        if not run.done(stage.name, console):
            set_seed(run.seed)
            model = load_model().requires_grad_(True)
            run_stage(stage, model, None, context, run, sharding=context.sharding)
        if run.main:
            load_or_create(
                cache,
                lambda folder: shutil.copytree(
                    run.result(stage.name), folder, dirs_exist_ok=True
                ),
            )
    return share_folder(cache)


def cache_folder(
    teacher: Teacher,
    data: tuple[str, str],
    stage: Stage,
    context: TrainingContext,
    run: Run,
) -> Path:
    """Return the cache folder for the model that `stage` makes of this teacher. data:
    name and fingerprint of the data.

    Under a time limit, a cached teacher that was trained without a limit is also used,
    unless there is one for this limit.
    """
    name, fingerprint = data
    # chooses the best checkpoint
    metric = context.data.task.metric if context.task_data else ""
    numbers = stage.model_dump(exclude_defaults=True)
    name = "".join(
        c if c.isalnum() else "-" for c in f"{teacher.name}-{name}"[-60:]
    ).strip("-")

    def folder(*minutes: float) -> Path:
        key = io.hash_value(
            [
                *(teacher.digest, fingerprint, numbers, metric),
                *(run.seed, context.bf16, *minutes),
            ]
        )
        return home() / "teachers" / f"{name}-{key[:12]}"

    if context.time_limit is None:
        return folder()
    limited = folder(context.time_limit.minutes)
    return folder() if is_whole(folder()) and not is_whole(limited) else limited


def load_with_head(
    name: str,
    folder: Path,
    head: Head,
    *,
    kind: Kind | None = None,
    allow_pickle: bool = False,
) -> Teacher:
    """Load tokenizer and model of a folder, in eval mode, with `head`; `trained` is
    False if the head is new.

    Raises TeacherError for a folder that cannot be read, or whose encoder is
    incomplete.
    """
    config = load_config(folder)
    tokenizer = load_tokenizer(folder, config)
    heads.model_class(config, head, kind)
    loaded = load_model(
        folder,
        heads.auto(head, kind),
        config,
        new="pooler" if head == "encoder" else "head",
        drop_heads=True,
        allow_pickle=allow_pickle,
    )
    check_vocabulary(folder, tokenizer, loaded.model)
    hide_padding(loaded.model)
    trained = not loaded.has_new_head
    return Teacher(
        name,
        folder,
        loaded.model,
        tokenizer,
        identify(folder),
        trained,
        pickled=allow_pickle,
    )


def with_pretrained_head(
    teacher: Teacher, head: Head, stage: Stage, context: TrainingContext, run: Run
) -> Teacher:
    """Return `teacher` as it was pre-trained, with `head`.

    If its masked language model's head is missing, `stage` trains one on the run's
    text, and the result is cached as in `with_head`. Raises TeacherError for other
    missing heads.
    """
    loaded = load_with_head(
        teacher.name,
        teacher.folder,
        head,
        kind=context.kind,
        allow_pickle=teacher.pickled,
    )
    if loaded.trained:
        return loaded
    check_head(teacher, head, context.kind)
    text = context.text
    folder = _train_once(
        teacher,
        (f"lm-{text.name}", text.fingerprint),
        stage,
        context,
        run,
        load_model=lambda: (
            load_with_head(
                teacher.name, teacher.folder, head, allow_pickle=teacher.pickled
            ).model
        ),
        started=f"{teacher.name} has no language model's head: training one on "
        f"{text.name}",
        reused=f"{teacher.name}, with a language model's head",
    )
    return load_with_head(teacher.name, folder, head)


def check_head(teacher: Teacher, head: Head, kind: Kind | None) -> None:
    """Raise TeacherError if the checkpoint lacks a head that cannot be trained here; no
    weights are read.

    Raises StudentError for a family that has no such head.
    """
    model_class: Any = heads.model_class(teacher.model.config, head, kind)
    if head in ("encoder", "masked_lm"):
        return
    source = ModelFolder(teacher.folder)
    config = load_config(teacher.folder)
    if not has_saved_head(source, config, model_class, allow_pickle=teacher.pickled):
        raise TeacherError(
            f"teacher {teacher.name} ({config.model_type}) has no {head} head, and "
            "only a masked language model's can be trained here; choose a checkpoint "
            "that was saved with one, or another recipe (`compress recipes`)"
        )


@dataclass(frozen=True)
class TeacherCheck:
    """The validation scores of the teacher and of the majority answer, the teacher's
    logits, and warnings."""

    scores: dict[str, float]
    majority: dict[str, float]
    logits: Floats
    notes: tuple[str, ...]


def check_teacher(
    teacher: Teacher,
    data: TaskData,
    rows: Dataset,
    collate: Batching,
    *,
    bf16: bool,
    strict: bool = True,
) -> TeacherCheck:
    """Score the teacher on the validation split before a student learns from it. Raises
    TeacherError with the remedy.

    A teacher is refused if its logits are not finite, or if its score beats the most
    frequent label by no more than chance, as with an untrained head or permuted labels.
    Unless `strict`, such a score only leads to a warning. A small lead always does.
    """
    logits = metrics.logits(teacher.model, rows, collate, bf16=bf16)
    return check_logits(teacher.name, logits, data, rows=rows, strict=strict)


def check_logits(
    name: str,
    logits: Floats,
    data: TaskData,
    *,
    rows: Dataset | None = None,
    strict: bool = True,
    remedy: str | None = None,
) -> TeacherCheck:
    """Check a teacher by its logits on the validation split; see `check_teacher`.

    rows     the encoded split, from which tokenwise tasks read the position of each
             logit
    remedy   what the user should do; by default, fine-tune the teacher
    """
    if not np.isfinite(logits).all():
        bad = int((~np.isfinite(logits)).any(axis=1).sum())
        what = "tokens" if data.task.tokenwise else "rows"
        raise TeacherError(
            f"teacher {name}: its logits are not finite on {bad} of {len(logits)} "
            f"validation {what}"
        )
    evaluator = Evaluator(
        data.task, data.validation, data.validation if rows is None else rows
    )
    scores = evaluator.scores(logits)
    majority = data.task.majority(data, data.validation)
    metric = data.task.metric
    ahead, error = baselines.lead_over_majority(data, evaluator, logits)
    _, units = data.task.unit
    figures = (
        f"{metric} {scores[metric]:.3f} on the {len(evaluator):,} validation {units}"
    )
    figures = f"{figures}, {data.task.naive} gets {majority[metric]:.3f}"
    way = ahead / (1 - majority[metric]) if majority[metric] < 1 else 0.0
    if ahead > SURE_ERRORS * error and way >= USELESS:
        others = data.task.baselines(data, data.validation) if way < WEAK else {}
        notes = [
            f"teacher {name} teaches little: {figures}, and {other}, without a neural "
            f"model, {baseline[metric]:.3f}: train a better teacher, or learn from the "
            "labels alone"
            for other, baseline in others.items()
            if baseline[metric] >= scores[metric]
        ]
        return TeacherCheck(scores, majority, logits, tuple(notes))
    if 0 < ahead <= SURE_ERRORS * error:
        least = (
            f"a lead below {SURE_ERRORS * error:.3f}"
            if np.isfinite(error)
            else "any lead"
        )
        figures += f"; on so few rows, {least} is no more than chance"
    advice = remedy or data.task.explain_errors(evaluator, logits) or TRAIN_IT
    problem = f"teacher {name} cannot teach this task: {figures}. {advice}"
    if strict:
        raise TeacherError(
            f"{problem}. --gate warn continues with a warning"
            if remedy is None
            else problem
        )
    return TeacherCheck(scores, majority, logits, (problem,))
