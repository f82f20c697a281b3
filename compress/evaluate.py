"""How good a set of answers is: the metrics of a task, the agreement of two models, and two baselines without a model.

Logits are float arrays (rows, outputs), labels are what a split's `label` column holds: (rows,) class ids or numbers,
or (rows, classes) of 0.0 / 1.0. Everything here is deterministic.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compress.errors import CompressError, DataError

if TYPE_CHECKING:
    from datasets import Dataset
    from torch.nn import Module

    from compress.data.task import Task, TaskData

Array = NDArray[Any]
Collate = Callable[[list[dict[str, Any]]], Mapping[str, Any]]

BAG_ROWS = 100_000
BAG_CHARACTERS = 20_000_000


def scores(task: Task, logits: Array, labels: Array) -> dict[str, float]:
    """Every metric of the task's kind by name; `task.metric` is always one of them.

    classification  accuracy, f1 (two classes: of the last class; more: macro over the classes that occur), matthews
    multilabel      f1 (micro), f1_macro, accuracy (all of a row's labels right); a label is given where logit > 0
    regression      pearson, spearman, mse

    A metric that constant answers leave undefined is 0.0. Raises CompressError for logits that are not finite or do
    not fit the labels, DataError for labels that are none of the task's.
    """
    logits, labels = _checked(task, logits, labels)
    if task.kind == "regression":
        return _regression_scores(logits[:, 0], labels)
    if task.kind == "multilabel":
        return _multilabel_scores(logits > 0, labels > 0.5)
    return _classification_scores(logits.argmax(axis=1), labels, classes=task.outputs)


def agreement(task: Task, student: Array, teacher: Array) -> float:
    """How much the student answers as the teacher does, from the logits of both over the same rows.

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


def logits(model: Module, encoded: Dataset, collate: Collate, *, batch: int = 64, bf16: bool = False) -> Array:
    """The model's logits for every row of `encoded`, in its order: float32 (rows, outputs).

    `encoded` has a `length` column (tokens); rows run longest first, so that batches carry little padding and memory
    runs out at once or never. `collate` turns a list of rows into a batch of tensors; what `model.forward` does not
    name, and labels, are left out. Runs in eval mode without gradients on the model's device, bf16: under bfloat16
    autocast; the mode of every module is as before afterwards.
    """
    import torch

    order = np.argsort(-np.asarray(encoded["length"][:]), kind="stable")
    if not len(order):
        raise DataError("logits: the split has no rows; evaluation needs at least one.")
    accepted = inspect.signature(model.forward).parameters.keys() - {"labels"}
    device = next(model.parameters()).device
    rows_only = encoded.remove_columns("length")
    training = [module for module in model.modules() if module.training]
    parts = []
    model.eval()
    try:
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            for start in range(0, len(order), batch):
                columns = rows_only[order[start : start + batch].tolist()]
                rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
                inputs = {name: tensor.to(device) for name, tensor in collate(rows).items() if name in accepted}
                parts.append(model(**inputs).logits.float().cpu().numpy())
    finally:
        for module in training:
            module.training = True
    answers = np.concatenate(parts)
    restored = np.empty_like(answers)
    restored[order] = answers
    return restored


def majority(data: TaskData, split: Dataset) -> dict[str, float]:
    """Scores on `split` of always giving the training set's commonest class, its mean, or its common labels."""
    known, labels = _labels(data.train), _labels(split)
    if data.task.kind == "regression":
        answer = np.array([known.mean()])
    elif data.task.kind == "multilabel":
        answer = known.mean(axis=0) - 0.5
    else:
        answer = np.bincount(known, minlength=data.task.outputs).astype(np.float64)
    return scores(data.task, np.tile(answer, (len(labels), 1)), labels)


def bag_of_words(data: TaskData, split: Dataset) -> dict[str, float]:
    """Scores on `split` of words and pairs of words, TF-IDF weighted, under one linear model per class.

    Logistic regression (one against the rest) for classes and labels, ridge regression for numbers. A pair shows both
    texts, their product, their difference and their cosine. Learns from at most BAG_ROWS evenly spaced training rows,
    of these at most about BAG_CHARACTERS characters. Raises DataError for training texts without a word.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import Ridge

    texts, known = _bag(data)
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\w+|[^\w\s]")
    try:
        words.fit([text for column in texts for text in column])
    except ValueError as error:
        raise DataError(f"{data.name}: train's texts hold no words ({error}); look at the text columns.") from error
    features, asked = _features(words, texts), _features(words, _texts(split))
    if data.task.kind == "regression":
        answers = Ridge(alpha=1.0).fit(features, known).predict(asked)[:, None]
    elif data.task.kind == "multilabel":
        answers = np.stack([_separate(features, column > 0.5, asked) for column in known.T], axis=1)
    elif data.task.outputs == 2:
        margin = _separate(features, known == 1, asked)
        answers = np.stack([-margin, margin], axis=1)
    else:
        answers = np.stack([_separate(features, known == one, asked) for one in range(data.task.outputs)], axis=1)
    return scores(data.task, answers, _labels(split))


def _checked(task: Task, logits: Array, labels: Array) -> tuple[Array, Array]:
    logits, labels = np.asarray(logits, dtype=np.float64), np.asarray(labels)
    expected = labels.shape if task.kind == "multilabel" else (len(labels), task.outputs)
    if logits.shape != expected or not len(labels):
        raise CompressError(
            f"scores: logits of shape {logits.shape} do not answer {len(labels)} rows with {task.outputs} outputs "
            f"(expected {expected}, at least one row); check that the model's head is the task's."
        )
    broken = int((~np.isfinite(logits)).any(axis=1).sum())
    if broken:
        raise CompressError(
            f"scores: the logits of {broken} of {len(logits)} rows are not finite, so the model's weights or its "
            "precision are broken. Look at the training loss; a lower learning rate or fp32 are the usual remedies."
        )
    if task.kind == "classification" and not ((labels >= 0) & (labels < task.outputs)).all():
        raise DataError(
            f"scores: labels from {labels.min()} to {labels.max()} where {task.outputs} classes allow "
            f"0 to {task.outputs - 1}; a split with hidden labels (-1) cannot be scored, choose another."
        )
    if task.kind != "classification" and not np.isfinite(labels).all():
        raise DataError("scores: some labels are not finite numbers; drop or mend these rows.")
    return logits, labels


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
    """All values equal, up to the rounding of float64: where scipy would warn, or answer with noise."""
    return float(np.ptp(values)) <= 1e-12 * math.fabs(float(values[0]))


def _labels(split: Dataset) -> Array:
    return np.asarray(split["label"][:])


def _texts(split: Dataset) -> list[list[str]]:
    return [split[name][:] for name in ("text", "text_pair") if name in split.column_names]


def _bag(data: TaskData) -> tuple[list[list[str]], Array]:
    """The texts and labels of train that the bag of words learns from."""
    rows = np.arange(0, len(data.train), math.ceil(len(data.train) / BAG_ROWS))
    train = data.train.select(rows)
    texts = _texts(train)
    stride = max(1, math.ceil(sum(len(text) for column in texts for text in column) / BAG_CHARACTERS))
    return [column[::stride] for column in texts], _labels(train)[::stride]


def _features(words: Any, texts: Sequence[list[str]]) -> Any:
    """Sparse features (rows, features) of one text, or of two and what they share."""
    from scipy.sparse import csr_matrix, hstack

    if len(texts) == 1:
        return words.transform(texts[0])
    one, other = (words.transform(column) for column in texts)
    shared = one.multiply(other)
    return hstack([one, other, shared, abs(one - other), csr_matrix(shared.sum(axis=1))]).tocsr()


def _separate(features: Any, inside: Array, asked: Any) -> Array:
    """Log odds (rows of `asked`) of being inside; certain where training rows all are, or none is."""
    from sklearn.linear_model import LogisticRegression

    if inside.all() or not inside.any():
        return np.full(asked.shape[0], 1e3 if inside.all() else -1e3)
    model = LogisticRegression(solver="liblinear", max_iter=1000)
    return np.asarray(model.fit(features, inside).decision_function(asked))
