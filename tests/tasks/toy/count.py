"""Count how often a text says something: a kind of task that the package does not have."""

from __future__ import annotations

from typing import Any

import numpy as np

from compress.data.answers import Prediction
from compress.data.task import Task, TaskData
from compress.evaluation import metrics


class Count(Task):
    """Answer with a whole number: the logit, rounded."""

    kind = "count"
    metrics = ("right", "near")
    numeric = True
    problem = "regression"
    scaled = True
    headline = "The model in this page counts."

    @classmethod
    def encode_labels(cls, labels: Any, coding: Any) -> np.ndarray:
        return labels.numbers(coding)

    def score_rows(self, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        away = np.abs(metrics.check_logits(logits, (len(labels), 1))[:, 0].round() - labels)
        return {"right": float((away < 0.5).mean()), "near": float((1 / (1 + away)).mean())}

    def decide(self, exam: Any, logits: np.ndarray, threshold: float | None) -> np.ndarray:
        return logits.round()

    def distance(self, exam: Any, student: np.ndarray, teacher: np.ndarray) -> float:
        return float(np.square(student - teacher).mean())

    def baselines(self, data: TaskData, split: Any) -> dict[str, dict[str, float]]:
        return {"the median": self.majority(data, split)}

    def constant(self, labels: np.ndarray) -> np.ndarray:
        return np.array([np.median(labels)])

    def answer(self, logits: np.ndarray) -> Prediction:
        return Prediction("", float(logits[0].round()), {})
