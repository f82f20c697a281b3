"""Give a teacher a head for the task, fine-tuned here once and kept, and check it before a student learns from it."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from datasets import Dataset
from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedModel, set_seed

from compress import io
from compress.config.recipe import Head, Recipe, Stage
from compress.console import warn
from compress.data.cache import cached, home, is_whole
from compress.data.collate import Batching
from compress.data.task import Kind, TaskData
from compress.errors import TeacherError
from compress.evaluation import baselines, metrics
from compress.evaluation.evaluator import Evaluator
from compress.models import heads
from compress.models.teacher import Teacher, check_vocabulary, explain_load_errors, identify, load, load_config
from compress.training.context import TrainingContext
from compress.training.run import Run, from_first
from compress.training.stage import run_stage

SURE = 1.645
"""Standard errors by which a teacher must lead the majority's answer: 95 %, one-sided."""
HALFWAY, HARDLY = 0.5, 0.1
"""Shares of the way from the majority's score to 1: below, a teacher is compared with a bag of words, or is none."""


def with_head(teacher: Teacher, stage: Stage, context: TrainingContext, run: Run) -> Teacher:
    """Return `teacher` itself when it was trained for this task, else its fine-tuned self.

    The result is kept under $COMPRESS_HOME/teachers by what it depends on: the checkpoint, the data, the stage's
    numbers, seed and precision.
    """
    if teacher.trained:
        return teacher
    data = context.data

    def fresh() -> PreTrainedModel:
        """Load the model with a new head, drawn from the run's seed."""
        return load(teacher.name, teacher.folder, data.task, allow_pickle=teacher.pickled).model

    said = (f"{teacher.name} has no head for {data.name}: fine-tuning it first", f"fine-tuned on {data.name}")
    kept = trained_once(teacher, data.name, data.fingerprint, stage, context, run=run, fresh=fresh, said=said)
    return replace(load(teacher.name, kept, data.task), tokenizer=teacher.tokenizer)


def trained_once(
    teacher: Teacher,
    on: str,
    fingerprint: str,
    stage: Stage,
    context: TrainingContext,
    *,
    run: Run,
    fresh: Callable[[], PreTrainedModel],
    said: tuple[str, str],
) -> Path:
    """Return the folder of what `stage` makes of `fresh()` on this data: trained now, or kept from an earlier run.

    `said`: what to tell where it is trained, and what it is called where it was kept.
    """
    kept, console = kept_folder(teacher, (on, fingerprint), stage, context, run), context.console
    if from_first(lambda: is_whole(kept)):
        console.print(f"{teacher.name}, {said[1]}: kept from an earlier run in {kept}")
    else:
        console.print(said[0])
        if not run.done(stage.name, console):
            set_seed(run.seed)
            run_stage(stage, fresh().requires_grad_(True), None, context, run)
        if run.main:
            cached(kept, lambda folder: shutil.copytree(run.result(stage.name), folder, dirs_exist_ok=True))
    PartialState().wait_for_everyone()  # until the first process has kept it
    return kept


def kept_folder(teacher: Teacher, trained_on: Sequence[str], stage: Stage, context: TrainingContext, run: Run) -> Path:
    """Name the folder that keeps what `stage` makes of this teacher, on data of this name and fingerprint."""
    name, fingerprint = trained_on
    numbers = stage.model_dump(exclude_defaults=True)
    limited = [context.time_limit.minutes] if context.time_limit else []
    key = io.hash_value([teacher.digest, fingerprint, numbers, run.seed, context.bf16, *limited])
    name = "".join(c if c.isalnum() else "-" for c in f"{teacher.name}-{name}"[-60:]).strip("-")
    return home() / "teachers" / f"{name}-{key[:12]}"


def load_general(
    name: str, folder: Path, head: Head, *, kind: Kind | None = None, allow_pickle: bool = False
) -> Teacher:
    """Load tokenizer and model of a folder under `head`, in eval mode; `trained` says whether the folder has that head.

    Raises TeacherError for a folder that cannot be read, or whose encoder is not whole.
    """
    with explain_load_errors(folder):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if tokenizer.pad_token is None:  # GPT-2's; masks tell padding from the end of a text
            tokenizer.pad_token = tokenizer.eos_token
        config = load_config(folder)
        chosen: Any = heads.model_class(config, head, kind)
        model, found = chosen.from_pretrained(
            folder,
            config=config,
            use_safetensors=None if allow_pickle else True,
            ignore_mismatched_sizes=head == "task",
            output_loading_info=True,
        )
    check_vocabulary(folder, tokenizer, model)
    absent = {*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}
    if head == "encoder":
        above: set[str] = set()
        below = {key for key in absent if "pooler" not in key}
    else:
        above = {key for key in absent if not key.startswith(f"{model.base_model_prefix}.")}
        below = {key for key in absent - above if "pooler" not in key}
    if below:
        raise TeacherError(
            f"{folder}: {len(below)} of its encoder's tensors are missing, such as {min(below)}: weights and config "
            "do not belong together, or the file is not whole; fetch both again"
        )
    model.eval().requires_grad_(False)
    return Teacher(name, folder, model, tokenizer, identify(folder), not above, allow_pickle)


def general(teacher: Teacher, head: Head, stage: Stage, context: TrainingContext, run: Run) -> Teacher:
    """Return `teacher` as it was pre-trained, with `head`.

    A masked language model's head that the checkpoint lacks is trained by `stage` on the run's text, once: the result
    is kept under $COMPRESS_HOME/teachers by what it depends on. Raises TeacherError for other heads it lacks.
    """
    found = load_general(teacher.name, teacher.folder, head, kind=context.kind, allow_pickle=teacher.pickled)
    if found.trained:
        return found
    check_head(teacher, head, context.kind)
    text = context.text

    def fresh() -> PreTrainedModel:
        return load_general(teacher.name, teacher.folder, head, allow_pickle=teacher.pickled).model

    said = (
        f"{teacher.name} has no language model's head: training one on {text.name}",
        "with a language model's head",
    )
    on = f"lm-{text.name}"
    kept = trained_once(teacher, on, text.fingerprint, stage, context, run=run, fresh=fresh, said=said)
    return load_general(teacher.name, kept, head)


def check_head(teacher: Teacher, head: Head, kind: Kind | None) -> None:
    """Raise TeacherError where the checkpoint lacks a head that is not trained here; no weights are read.

    Raises StudentError for a family that has no such head at all.
    """
    chosen: Any = heads.model_class(teacher.model.config, head, kind)
    if head in ("encoder", "masked_lm"):
        return
    with explain_load_errors(teacher.folder):
        config = load_config(teacher.folder)
        model, found = chosen.from_pretrained(
            teacher.folder, config=config, use_safetensors=None if teacher.pickled else True, device_map="meta",
            output_loading_info=True,
        )  # fmt: skip
    if [key for key in found["missing_keys"] if not key.startswith(f"{model.base_model_prefix}.")]:
        raise TeacherError(
            f"teacher {teacher.name} ({config.model_type}) has no {head} head, and only a masked language model's is "
            "trained here; give a checkpoint that was saved with one, or another recipe (`compress recipes`)"
        )


@dataclass(frozen=True)
class TeacherCheck:
    """Hold what a check found: the validation scores of the teacher and the majority answer, its logits, warnings."""

    scores: dict[str, float]
    majority: dict[str, float]
    logits: NDArray[np.float32]
    notes: tuple[str, ...]


def load_task_teacher(
    teacher: Teacher, recipe: Recipe, context: TrainingContext, run: Run, *, strict: bool
) -> tuple[Teacher, TeacherCheck]:
    """Load the teacher with a head for the task, fine-tuned by `recipe.teacher` where it has none, and check it.

    Warns of what the check notes. Raises TeacherError where it is no better than the majority answer, and `strict`.
    """
    task_teacher = with_head(teacher, recipe.teacher, context, run)
    task_teacher.model.to(PartialState().device)
    task, length = context.data.task, recipe.stages[-1].max_length
    exam = Evaluator.from_split(task, context.data.validation, task_teacher.tokenizer, length)
    check = check_teacher(task_teacher, context.data, exam.rows, context.collate, bf16=context.bf16, strict=strict)
    for note in check.notes:
        warn(context.console, note)
    return task_teacher, check


def check_teacher(
    teacher: Teacher, data: TaskData, rows: Dataset, collate: Batching, *, bf16: bool, strict: bool = True
) -> TeacherCheck:
    """Score the teacher on the validation split before anybody learns from it. Raises TeacherError with the remedy.

    Refused: logits that are not finite; a score that does not lead always answering the most frequent label by more
    than chance gives on so many rows, as of an untrained head or a permuted label order. With `strict` false such a
    score is a note; of a teacher that leads by little there are notes in any case.
    """
    logits = metrics.logits(teacher.model, rows, collate, bf16=bf16)
    return check_logits(teacher.name, logits, data, rows=rows, strict=strict)


def check_logits(
    name: str,
    logits: NDArray[np.float32],
    data: TaskData,
    *,
    rows: Dataset | None = None,
    strict: bool = True,
    remedy: str | None = None,
) -> TeacherCheck:
    """Check a teacher by the logits that it gives for the validation split; see `check_teacher`.

    rows     the encoded split, which says which token the logits are of where the task is tokenwise
    remedy   what the user should do, where fine-tuning is not the answer
    """
    if not np.isfinite(logits).all():
        bad, what = int((~np.isfinite(logits)).any(axis=1).sum()), "tokens" if data.task.tokenwise else "rows"
        raise TeacherError(f"teacher {name}: its logits are not finite on {bad} of {len(logits)} validation {what}")
    exam = Evaluator(data.task, data.validation, data.validation if rows is None else rows)
    scores, majority = exam.scores(logits), baselines.majority(data, data.validation)
    metric = data.task.metric
    ahead, error = baselines.lead_over_majority(data, exam, logits)
    ranking = data.task.kind == "ranking"
    rows, other = ("queries", "a random order") if ranking else ("rows", "always giving the most frequent answer")
    figures = (
        f"{metric} {scores[metric]:.3f} on the {len(exam):,} validation {rows}, {other} gets {majority[metric]:.3f}"
    )
    way = ahead / (1 - majority[metric]) if majority[metric] < 1 else 0.0
    if ahead > SURE * error and way >= HARDLY:
        others = baselines.baselines(data, data.validation) if way < HALFWAY else {}
        notes = [
            f"teacher {name} teaches little: {figures}, and {other}, without a model, {found[metric]:.3f}: train a "
            "better teacher, or learn from the labels alone"
            for other, found in others.items()
            if found[metric] >= scores[metric]
        ]
        return TeacherCheck(scores, majority, logits, tuple(notes))
    if 0 < ahead <= SURE * error:
        least = f"a lead below {SURE * error:.3f}" if np.isfinite(error) else "any lead"
        figures += f"; on so few rows {least} is no more than chance"
    problem = f"teacher {name} is no teacher for this task: {figures}. {remedy or _why(exam, logits)}"
    if strict:
        raise TeacherError(f"{problem}. --gate warn goes on all the same" if remedy is None else problem)
    return TeacherCheck(scores, majority, logits, (problem,))


def _why(exam: Evaluator, logits: NDArray[np.float32]) -> str:
    task = exam.task
    if task.kind == "classification":
        from scipy.optimize import linear_sum_assignment
        from sklearn.metrics import confusion_matrix

        labels = np.asarray(exam.split["label"][:])
        counts = confusion_matrix(labels, logits.argmax(1), labels=range(task.outputs))
        truth, said = linear_sum_assignment(-counts)
        matched, as_is = counts[truth, said].sum() / counts.sum(), np.trace(counts) / counts.sum()
        if matched > max(np.bincount(labels.astype(int)).max() / len(labels), as_is) + 0.1:
            pairs = ", ".join(f"output {s} means {task.labels[t]}" for t, s in zip(truth, said, strict=True))
            return (
                f"Its labels are in another order: with {pairs} it scores {matched:.3f}. Correct id2label in its "
                "config.json"
            )
    return (
        "Fine-tune it on this task first (give the checkpoint without its task head, and this tool does it), or check "
        "that teacher, tokenizer and labels belong to this data"
    )
