"""Compute a model's logits for a split, the metrics of a task, and the agreement of two
models.

Logits are float arrays of shape (rows, outputs); of a tokenwise task (tokens, outputs),
with the tokens of all rows one after another and without padding. All results are
deterministic.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.arrays import Array, whole_numbers
from compress.data.conll import Entity, entities
from compress.errors import CompressError, DataError
from compress.progress import Progress
from compress.records.class_scores import ClassScore

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor
    from torch.nn import Module

TagRows = Sequence[Sequence[str]]
"""The tag of each word, by sentence."""

Scores = dict[str, float]
"""Results, by the name of the metric."""

CollateFunction = Callable[[list[dict[str, Any]]], Mapping[str, Any]]


def pearson(one: Array, other: Array) -> float:
    """Compute Pearson's r; 0.0 where either is constant."""
    from scipy.stats import pearsonr

    if is_constant(one) or is_constant(other):
        return 0.0
    return float(pearsonr(one.astype(np.float64), other.astype(np.float64)).statistic)


def is_constant(values: Array) -> bool:
    """Check that all values are equal up to the rounding of float64: scipy would warn,
    or return noise."""
    return float(np.ptp(values)) <= 1e-12 * math.fabs(float(values[0]))


def count_classes(
    labels: Sequence[str],
    predicted: Array,
    true: Array,
) -> tuple[ClassScore, ...]:
    """Score each class by which rows are predicted to have it, and which do, each bool
    (rows, classes)."""
    columns = ((predicted & true).sum(axis=0), predicted.sum(axis=0), true.sum(axis=0))
    return tuple(
        ClassScore.from_counts(label, *map(int, numbers))
        for label, *numbers in zip(labels, *columns, strict=True)
    )


def divergence(student: Array, teacher: Array) -> Array:
    """Compute the KL divergence from the teacher's probabilities to the student's, in
    nats, over the last axis of their logits."""
    from scipy.special import log_softmax

    student = log_softmax(student, axis=-1)
    teacher = log_softmax(teacher, axis=-1)
    return np.asarray((np.exp(teacher) * (teacher - student)).sum(axis=-1))


def logits(
    model: Module,
    encoded: Dataset,
    collate: CollateFunction,
    *,
    batch: int = 64,
    bf16: bool = False,
) -> Array:
    """Compute the logits of every row of `encoded`, in its order: float32 (rows,
    outputs) or (tokens, outputs).

    A head that answers with spans has two outputs per token, for starts and ends.
    `encoded` has a column `length`, in tokens: the longest rows come first, so that
    little is padded and memory runs out at once or never. `collate` makes a batch of
    tensors from a list of rows; labels, and what `model.forward` does not take, are
    left out. Runs without gradients, in eval mode (every module's mode is restored), on
    the model's device, with `bf16` under autocast.
    """
    import torch

    from compress.models.memory import input_device
    from compress.models.signals import evaluating, logits_of

    lengths = whole_numbers(encoded, "length")
    order = np.argsort(-lengths, kind="stable")
    if not len(order):
        raise DataError("logits: the split has no rows; evaluation needs at least one.")
    accepted = inspect.signature(model.forward).parameters.keys() - {"labels"}
    device = input_device(model)
    rows_only = encoded.remove_columns("length")
    parts = list[Array]()
    tokens = np.append(0, np.cumsum(lengths[order]))
    bar = Progress(
        "scoring",
        len(order),
        "rows",
        share=lambda done: float(tokens[int(done)] / tokens[-1]),
    )
    with (
        evaluating(model),
        torch.inference_mode(),
        torch.autocast(device.type, torch.bfloat16, enabled=bf16),
        bar,
    ):
        for start in range(0, len(order), batch):
            rows = rows_only.__getitems__(order[start : start + batch].tolist())
            inputs = {
                name: tensor.to(device)
                for name, tensor in collate(rows).items()
                if name in accepted
            }
            values = logits_of(model(**inputs)).float().cpu().numpy()
            parts += split_rows(values, inputs.get("attention_mask"))
            bar.advance(len(rows))
    return np.concatenate([parts[n] for n in np.argsort(order)])


def split_rows(logits: Array, attention_mask: Tensor | None) -> list[Array]:
    """Split the logits of a batch by row, each (1, outputs) or, without padding,
    (tokens, outputs)."""
    if logits.ndim == 3:
        assert attention_mask is not None
        real = attention_mask.bool().cpu().numpy()
        return [row[tokens] for row, tokens in zip(logits, real, strict=True)]
    return list(logits[:, None])


def check_logits(logits: Array, expected: tuple[int, ...]) -> Array:
    """Return the logits of rows, as float64. Raises as `check_finite` does."""
    logits = np.asarray(logits, dtype=np.float64)
    check_finite(logits, expected, "rows")
    return logits


def check_classes(labels: Array, count: int) -> None:
    """Raise DataError for class ids outside `count` classes."""
    if not ((labels >= 0) & (labels < count)).all():
        raise DataError(
            f"scores: labels from {labels.min()} to {labels.max()}, but {count} "
            f"classes allow 0 to {count - 1}; a split with hidden labels (-1) "
            "cannot be scored, choose another."
        )


def check_numbers(labels: Array) -> None:
    """Raise DataError for labels that are not finite numbers."""
    if not np.isfinite(labels).all():
        raise DataError(
            "scores: some labels are not finite numbers; remove or correct these rows."
        )


def check_finite(values: Array, expected: tuple[int, ...], unit: str) -> None:
    """Raise CompressError for model outputs without the shape `expected`, without any
    `unit`, or with values that are not finite."""
    if values.shape != expected or not len(values):
        raise CompressError(
            f"scores: the model's outputs have shape {values.shape}; expected "
            f"{expected}, one row for each of at least one of the {unit}. Check that "
            "the model's head fits the task."
        )
    if broken := int((~np.isfinite(values)).any(axis=1).sum()):
        raise CompressError(
            f"scores: the model's outputs for {broken} of {len(values)} {unit} are not "
            "finite, so its weights or its precision are broken. Look at the training "
            "loss; try a lower learning rate or fp32."
        )


def scores_by_label(
    predicted: TagRows,
    truth: TagRows,
) -> tuple[ClassScore, ...]:
    """Score the entities of each label, in alphabetical order; see `entity_scores`."""
    found = _entities(predicted)
    true = _entities(truth)
    right, given, support = (
        Counter(entity.label for _, entity in group)
        for group in (found & true, found, true)
    )
    return tuple(
        ClassScore.from_counts(label, right[label], given[label], support[label])
        for label in sorted(given | support)
    )


def entity_scores(
    predicted: TagRows,
    truth: TagRows,
) -> Scores:
    """Compute f1, precision and recall over the entities of all sentences, and accuracy
    over their words; 0.0 if there are none.

    Sentences come in the same order and have the same number of words.
    """
    return score_counts(count_entities(predicted, truth))


def count_entities(
    predicted: TagRows,
    truth: TagRows,
) -> Array:
    """Count in each sentence the entities that are right, predicted and true, and the
    words that are right and all: (sentences, 5)."""
    counts = []
    for tags, true_tags in zip(predicted, truth, strict=True):
        found = set(entities(tags))
        true = set(entities(true_tags))
        same = sum(one == other for one, other in zip(tags, true_tags, strict=True))
        counts.append([len(found & true), len(found), len(true), same, len(tags)])
    return np.array(counts)


def score_counts(counts_N5: Array) -> Scores:
    """Compute the metrics of `entity_scores` from the counts of `count_entities`."""
    right, found, true, same, words = counts_N5.sum(axis=0).tolist()
    return {
        "f1": 2 * right / max(1, found + true),
        "precision": right / max(1, found),
        "recall": right / max(1, true),
        "accuracy": same / max(1, words),
    }


def _entities(sentences: TagRows) -> set[tuple[int, Entity]]:
    return {
        (n, entity) for n, tags in enumerate(sentences) for entity in entities(tags)
    }
