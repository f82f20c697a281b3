"""Check a teacher before a student learns from it: its answers must be finite and better than chance."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from compress.data.collate import Batching
from compress.data.task import TaskData
from compress.errors import TeacherError
from compress.evaluation import baselines, metrics
from compress.evaluation.evaluator import Evaluator
from compress.models.teacher import Teacher

SURE = 1.645
"""Standard errors by which a teacher must lead the majority's answer: 95 %, one-sided."""
HALFWAY, HARDLY = 0.5, 0.1
"""Of the way from the majority's score to 1: below, a teacher is compared with a bag of words, or is none."""


@dataclass(frozen=True)
class TeacherCheck:
    """Hold what a check found: the validation scores of the teacher and the majority answer, its logits, warnings."""

    scores: dict[str, float]
    majority: dict[str, float]
    logits: NDArray[np.float32]
    notes: tuple[str, ...]


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
    ahead, error = baselines.lead(data, exam, logits)
    figures = (
        f"{metric} {scores[metric]:.3f} on the {len(exam):,} validation rows, always giving the most frequent answer "
        f"gets {majority[metric]:.3f}"
    )
    way = ahead / (1 - majority[metric]) if majority[metric] < 1 else 0.0
    if ahead > SURE * error and way >= HARDLY:
        notes = _outdone(name, data, scores[metric], figures) if way < HALFWAY else ()
        return TeacherCheck(scores, majority, logits, tuple(notes))
    if 0 < ahead <= SURE * error:
        least = f"a lead below {SURE * error:.3f}" if np.isfinite(error) else "any lead"
        figures += f"; on so few rows {least} is no more than chance"
    problem = f"teacher {name} is no teacher for this task: {figures}. {remedy or _why(exam, logits)}"
    if strict:
        raise TeacherError(f"{problem}. --check_teacher warn goes on all the same" if remedy is None else problem)
    return TeacherCheck(scores, majority, logits, (problem,))


def _outdone(name: str, data: TaskData, score: float, figures: str) -> Iterator[str]:
    """Warn of a teacher that an answer without a model outdoes."""
    for other, found in baselines.baselines(data, data.validation).items():
        if found[data.task.metric] >= score:
            yield (
                f"teacher {name} teaches little: {figures}, and {other}, without a model, "
                f"{found[data.task.metric]:.3f}: train a better teacher, or learn from the labels alone"
            )


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
