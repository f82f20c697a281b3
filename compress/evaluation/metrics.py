"""Compute a model's logits for a split, the metrics of a task, and the agreement of two models.

Logits are float arrays (rows, outputs). Where the task is tokenwise they are (tokens, outputs): the real tokens of all
rows, one row after another. Everything here is deterministic.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from compress.data.conll import entities
from compress.errors import CompressError, DataError
from compress.progress import Progress
from compress.records.class_scores import ClassScore

if TYPE_CHECKING:
    from datasets import Dataset
    from torch.nn import Module

    from compress.data.task import Task


Array = NDArray[Any]
Collate = Callable[[list[dict[str, Any]]], Mapping[str, Any]]


def scores(task: Task, logits: Array, labels: Array) -> dict[str, float]:
    """Compute every metric of a task on texts by name, `task.metric` among them; `labels` are as a split holds them.

    classification  accuracy, f1 (two classes: of the last class; more: macro over the classes that occur), matthews
    multilabel      f1 (micro), f1_macro, accuracy (all of a row's labels right); a label is given where logit > 0
    regression      pearson, spearman, mse

    A metric that constant answers leave undefined is 0.0. Raises CompressError for logits that are not finite or do
    not fit the labels, DataError for labels that are none of the task's.
    """
    logits, labels = check_logits(task, logits, labels)
    if task.kind == "regression":
        return _regression_scores(logits[:, 0], labels)
    if task.kind == "multilabel":
        return _multilabel_scores(logits > 0, labels > 0.5)
    return _classification_scores(logits.argmax(axis=1), labels, classes=task.outputs)


def scores_by_class(task: Task, logits: Array, labels: Array) -> tuple[ClassScore, ...]:
    """Score each label of a task on texts apart; () of numbers. Raises as `scores`."""
    if task.numeric:
        return ()
    logits, labels = check_logits(task, logits, labels)
    if task.kind == "multilabel":
        said, true = logits > 0, labels > 0.5
    else:
        said, true = (each[:, None] == np.arange(task.outputs) for each in (logits.argmax(axis=1), labels))
    counts = zip(task.labels, (said & true).sum(axis=0), said.sum(axis=0), true.sum(axis=0), strict=True)
    return tuple(ClassScore.from_counts(label, *map(int, numbers)) for label, *numbers in counts)


def agreement(task: Task, student: Array, teacher: Array) -> float:
    """Measure how often the student answers as the teacher does on texts, from the logits of both over the same rows.

    classification: share of rows with the same class; multilabel: share of the (row, label) decisions that are the
    same; regression: Pearson's r between the two, 0.0 where one of them is constant.
    """
    if student.shape != teacher.shape:
        raise CompressError(
            f"agreement: the student's logits have shape {student.shape}, the teacher's {teacher.shape}; "
            "both must come from the same rows and the same labels."
        )
    if task.kind == "regression":
        return _pearson(student[:, 0], teacher[:, 0])
    if task.kind == "multilabel":
        return float(((student > 0) == (teacher > 0)).mean())
    return float((student.argmax(axis=1) == teacher.argmax(axis=1)).mean())


def distance(task: Task, student: Array, teacher: Array) -> float:
    """Measure how far the student's logits are from the teacher's: smooth where `agreement` counts answers.

    Of classes, the mean KL divergence from the teacher's probabilities to the student's, in nats (several labels: of
    each label, summed up); of numbers and of answers in a text, the mean squared difference; of vectors, one minus
    their mean cosine.
    """
    mine, theirs = student.astype(np.float64), teacher.astype(np.float64)
    if task.kind == "embedding":
        lengths = np.linalg.norm(mine, axis=1) * np.linalg.norm(theirs, axis=1)
        return float(1 - ((mine * theirs).sum(1) / np.maximum(lengths, 1e-12)).mean())
    if task.kind in ("regression", "qa"):
        return float(np.square(mine - theirs).mean())
    if task.kind == "multilabel":
        mine, theirs = (np.stack([each, np.zeros_like(each)], axis=-1) for each in (mine, theirs))
    mine, theirs = (each - logsumexp(each, axis=-1, keepdims=True) for each in (mine, theirs))
    return float((np.exp(theirs) * (theirs - mine)).sum(axis=-1).sum(axis=tuple(range(1, mine.ndim - 1))).mean())


def logits(model: Module, encoded: Dataset, collate: Collate, *, batch: int = 64, bf16: bool = False) -> Array:
    """Compute the model's logits for every row of `encoded`, in its order.

    float32 (rows, outputs), or (tokens, outputs) of a head that answers per token; a head that answers with spans gives
    their starts and ends. `encoded` has a `length` column (tokens); rows run longest first, so that batches carry
    little padding and memory runs out at once or never. `collate` turns a list of rows into a batch of tensors; what
    `model.forward` does not name, and labels, are left out. Runs in eval mode without gradients on the model's device,
    bf16: under bfloat16 autocast; the mode of every module is as before afterwards.
    """
    import torch

    from compress.models.signals import evaluating, logits_of

    order = np.argsort(-np.asarray(encoded["length"][:]), kind="stable")
    if not len(order):
        raise DataError("logits: the split has no rows; evaluation needs at least one.")
    accepted = inspect.signature(model.forward).parameters.keys() - {"labels"}
    device = next(model.parameters()).device
    rows_only = encoded.remove_columns("length")
    parts = []
    bar = Progress("scoring", len(order), "rows")
    with evaluating(model), torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=bf16), bar:
        for start in range(0, len(order), batch):
            columns = rows_only[order[start : start + batch].tolist()]
            rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
            inputs = {name: tensor.to(device) for name, tensor in collate(rows).items() if name in accepted}
            values = logits_of(model(**inputs)).float().cpu().numpy()
            if values.ndim == 3:
                tokens = inputs["attention_mask"].bool().cpu().numpy()
                parts += [row[real] for row, real in zip(values, tokens, strict=True)]
            else:
                parts += list(values[:, None])
            bar.advance(len(rows))
    return np.concatenate([parts[n] for n in np.argsort(order)])


def check_logits(task: Task, logits: Array, labels: Array) -> tuple[Array, Array]:
    """Return logits and labels as arrays, checked: see `scores`."""
    logits, labels = np.asarray(logits, dtype=np.float64), np.asarray(labels)
    expected = labels.shape if task.kind == "multilabel" else (len(labels), task.outputs)
    if logits.shape != expected or not len(labels):
        raise CompressError(
            f"scores: logits of shape {logits.shape} do not answer {len(labels)} rows with {task.outputs} outputs "
            f"(expected {expected}, at least one row); check that the model's head is the task's."
        )
    broken = int((~np.isfinite(logits)).any(axis=1).sum())
    if broken:
        raise not_finite(broken, len(logits), "rows")
    if task.kind == "classification" and not ((labels >= 0) & (labels < task.outputs)).all():
        raise DataError(
            f"scores: labels from {labels.min()} to {labels.max()} where {task.outputs} classes allow "
            f"0 to {task.outputs - 1}; a split with hidden labels (-1) cannot be scored, choose another."
        )
    if task.kind != "classification" and not np.isfinite(labels).all():
        raise DataError("scores: some labels are not finite numbers; drop or mend these rows.")
    return logits, labels


def not_finite(broken: int, of: int, what: str) -> CompressError:
    return CompressError(
        f"scores: the logits of {broken} of {of} {what} are not finite, so the model's weights or its precision are "
        "broken. Look at the training loss; a lower learning rate or fp32 are the usual remedies."
    )


def _classification_scores(answers: Array, labels: Array, *, classes: int) -> dict[str, float]:
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    average = "binary" if classes == 2 else "macro"
    constant = _constant(answers) or _constant(labels)
    return {
        "accuracy": float(accuracy_score(labels, answers)),
        "f1": float(f1_score(labels, answers, average=average, zero_division=0.0)),
        "matthews": 0.0 if constant else float(matthews_corrcoef(labels, answers)),
    }


def _multilabel_scores(answers: Array, labels: Array) -> dict[str, float]:
    from sklearn.metrics import f1_score

    # Column by column: scikit-learn takes a (rows, 1) array for a binary task and would count the zeros as a class.
    columns = [f1_score(labels[:, one], answers[:, one], zero_division=0.0) for one in range(labels.shape[1])]
    return {
        "f1": float(f1_score(labels.ravel(), answers.ravel(), zero_division=0.0)),
        "f1_macro": float(np.mean(columns)),
        "accuracy": float((answers == labels).all(axis=1).mean()),
    }


def _regression_scores(answers: Array, labels: Array) -> dict[str, float]:
    from scipy.stats import rankdata

    return {
        "pearson": _pearson(answers, labels),
        "spearman": _pearson(rankdata(answers), rankdata(labels)),
        "mse": float(np.square(answers - labels).mean()),
    }


def _pearson(one: Array, other: Array) -> float:
    from scipy.stats import pearsonr

    if _constant(one) or _constant(other):
        return 0.0
    return float(pearsonr(one.astype(np.float64), other.astype(np.float64)).statistic)


def _constant(values: Array) -> bool:
    """Check that all values are equal up to the rounding of float64: scipy would warn, or answer with noise."""
    return float(np.ptp(values)) <= 1e-12 * math.fabs(float(values[0]))


def scores_by_label(answers: Sequence[Sequence[str]], truth: Sequence[Sequence[str]]) -> tuple[ClassScore, ...]:
    """Score the entities of each label apart, labels in alphabetical order; `entity_scores` counts all together."""
    said = {(n, *entity) for n, tags in enumerate(answers) for entity in entities(tags)}
    true = {(n, *entity) for n, tags in enumerate(truth) for entity in entities(tags)}
    right, given, there = (Counter(one[1] for one in each) for each in (said & true, said, true))
    return tuple(
        ClassScore.from_counts(label, right[label], given[label], there[label]) for label in sorted(given | there)
    )


def entity_scores(answers: Sequence[Sequence[str]], truth: Sequence[Sequence[str]]) -> dict[str, float]:
    """Compute f1, precision and recall over all sentences' entities, accuracy over their words; 0.0 without any.

    Sentences come in the same order and with the same number of words.
    """
    said = {(n, *entity) for n, tags in enumerate(answers) for entity in entities(tags)}
    true = {(n, *entity) for n, tags in enumerate(truth) for entity in entities(tags)}
    right = len(said & true)
    words = sum(map(len, truth))
    same = sum(one == other for pair in zip(answers, truth, strict=True) for one, other in zip(*pair, strict=True))
    return {
        "f1": 2 * right / max(1, len(said) + len(true)),
        "precision": right / max(1, len(said)),
        "recall": right / max(1, len(true)),
        "accuracy": same / max(1, words),
    }
