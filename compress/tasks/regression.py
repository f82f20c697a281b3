"""Give a text, or a pair of texts, a number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from compress.data.task import Task, TaskData, Thresholds
from compress.errors import ExportError
from compress.evaluation import metrics
from compress.evaluation.metrics import Scores

if TYPE_CHECKING:
    from datasets import Dataset

    from compress.arrays import Array
    from compress.data.labels import Coding, LabelColumn
    from compress.evaluation.evaluator import Evaluator
    from compress.models.folder import ModelFolder


class Regression(Task):
    """Give a number, which is the logit.

    pearson, spearman, mse
    """

    kind = "regression"
    metrics = ("pearson", "spearman")
    numeric = True
    problem = "regression"
    one_word = True
    scaled = True
    headline = "The model in this page gives a number to what you type."

    @classmethod
    def encode_labels(cls, labels: LabelColumn, coding: Coding) -> Array:
        return labels.numbers(coding)

    @classmethod
    def from_checkpoint(
        cls, source: ModelFolder, problem: str | None, text: tuple[str, ...]
    ) -> Task:
        names = source.labels()
        if len(names) != 1:
            raise ExportError(
                f"{source.where}: a regression of {len(names)} numbers; expected one"
            )
        label = "score" if names[0].startswith("LABEL_") else names[0]
        return cls(cls.kind, text, label, (), cls.metrics[0])

    def score_rows(self, logits: Array, labels: Array) -> Scores:
        from scipy.stats import rankdata

        labels = np.asarray(labels)
        predicted = metrics.check_logits(logits, (len(labels), self.outputs))[:, 0]
        metrics.check_numbers(labels)
        return {
            "pearson": metrics.pearson(predicted, labels),
            "spearman": metrics.pearson(rankdata(predicted), rankdata(labels)),
            "mse": float(np.square(predicted - labels).mean()),
        }

    def agreement(
        self, exam: Evaluator, student: Array, teacher: Array, thresholds: Thresholds
    ) -> float:
        """Compute Pearson's r, 0.0 where either is constant."""
        return metrics.pearson(student[:, 0], teacher[:, 0])

    def baselines(self, data: TaskData, split: Dataset) -> dict[str, Scores]:
        from compress.evaluation import baselines

        return baselines.of_labels(data, split)

    def constant(self, labels: Array) -> Array:
        """Return the mean."""
        return np.array([labels.mean()])

    def fit_linear(self, features: Any, labels: Array, inputs: Any) -> Array:
        """Fit a ridge regression."""
        from sklearn.linear_model import Ridge

        predicted = Ridge(alpha=1.0).fit(features, labels).predict(inputs)
        return np.asarray(predicted[:, None])
