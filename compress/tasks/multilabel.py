"""Give a text, or a pair of texts, any number of labels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.arrays import Longs
from compress.data.answers import AnswerColumns, Prediction, label_columns
from compress.data.task import Task, TaskData
from compress.evaluation import metrics
from compress.evaluation.metrics import Scores
from compress.records.class_scores import ClassScore

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor

    from compress.arrays import Array, Doubles
    from compress.data.labels import Coding, LabelColumn
    from compress.evaluation.evaluator import Evaluator


class Multilabel(Task):
    """Give each of `labels` whose logit is above 0.

    f1 (micro), f1_macro, accuracy (rows with every label right)
    """

    kind = "multilabel"
    metrics = ("f1", "f1_macro", "accuracy")
    has_labels = True
    problem = "multi_label_classification"
    many_labels = True
    form = "labels"
    columns = ("prediction_score",)
    json_columns = ("prediction_scores",)
    headline = "The model in this page says which labels fit what you type."

    @classmethod
    def encode_labels(cls, labels: LabelColumn, coding: Coding) -> Array:
        return labels.flags(coding)

    def describe_label(self, label: Any) -> str:
        return "the same labels"

    def count_classes(self, split: Dataset) -> Longs:
        lists = split.data.table[self.label_column].combine_chunks()
        flags = lists.flatten().to_numpy().reshape(len(split), len(self.labels))
        return np.asarray(flags.sum(axis=0, dtype=np.float64), np.int64)

    @classmethod
    def averages_classes(cls, metric: str, labels: int) -> bool:
        return metric == "f1_macro"

    def describe_answer(self) -> str:
        return "gives each of these labels a probability of its own:"

    def answer(self, logits: Array) -> Prediction:
        """Answer with all labels whose probability is above 0.5."""
        return Prediction.first(self.answer_logits(logits[None]))

    def answer_columns(self, predictor: Any, texts: Sequence[Any]) -> AnswerColumns:
        return self.answer_logits(self.finite_logits(predictor, texts))

    def answer_logits(self, logits_RV: Doubles) -> AnswerColumns:
        """Answer each row with the labels whose probability is above 0.5."""
        # a sigmoid; exp(-x) would overflow
        scores = 0.5 * (1.0 + np.tanh(0.5 * logits_RV))
        likely = [
            ", ".join(compress(self.labels, row)) for row in (logits_RV > 0).tolist()
        ]
        return label_columns(likely, scores, self.labels)

    def score_rows(self, logits: Array, labels: Array) -> Scores:
        predicted, true = self._compare(logits, labels)
        together = (each.reshape(-1, 1) for each in (predicted, true))
        (micro,) = metrics.count_classes([""], *together)
        classes = metrics.count_classes(self.labels, predicted, true)
        return {
            "f1": micro.f1,
            "f1_macro": fmean(one.f1 for one in classes),
            "accuracy": float((predicted == true).all(axis=1).mean()),
        }

    def _compare(self, logits: Array, labels: Array) -> tuple[Array, Array]:
        """Return which labels are predicted, and which are true, each bool (rows,
        labels)."""
        labels = np.asarray(labels)
        logits = metrics.check_logits(logits, labels.shape)
        metrics.check_numbers(labels)
        return logits > 0, labels > 0.5

    def by_class(self, exam: Evaluator, logits: Array) -> tuple[ClassScore, ...]:
        return metrics.count_classes(self.labels, *self._compare(logits, exam.labels))

    def decide(self, exam: Evaluator, logits: Array, threshold: float | None) -> Array:
        """Return for each label whether a row has it."""
        return logits > 0

    def distance(self, exam: Evaluator, student: Array, teacher: Array) -> float:
        """Measure the mean KL divergence from the teacher's probabilities to the
        student's, in nats, summed over the labels."""
        binary = (
            np.stack([values, np.zeros_like(values)], axis=-1)
            for values in (student, teacher)
        )
        return float(metrics.divergence(*binary).sum(axis=1).mean())

    def example_scores(
        self,
        exam: Evaluator,
        logits: Array,
        threshold: float | None,
    ) -> Array | None:
        if self.metric != "accuracy":
            return None
        right = (logits > 0) == (exam.labels > 0.5)
        return np.asarray(right.all(axis=1).astype(float))

    @classmethod
    def distributions(cls, logits: Tensor, mask_BL: Tensor) -> Tensor:
        """Return the two logits of each label, with it and without."""
        import torch

        return torch.stack([logits, torch.zeros_like(logits)], -1).flatten(0, 1)

    def baselines(self, data: TaskData, split: Dataset) -> dict[str, Scores]:
        from compress.evaluation import baselines

        return baselines.of_labels(data, split)

    def constant(self, labels: Array) -> Array:
        """Return the labels that more than half of the rows have."""
        return np.asarray(labels.mean(axis=0) - 0.5)

    def fit_linear(self, features: Any, labels: Array, inputs: Any) -> Array:
        """Fit a logistic regression to each label."""
        from compress.evaluation.baselines import log_odds

        columns = [log_odds(features, column > 0.5, inputs) for column in labels.T]
        return np.stack(columns, axis=1)
