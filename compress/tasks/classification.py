"""Choose one of several classes for a text, or a pair of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.data.answers import AnswerColumns, Prediction, label_columns
from compress.data.task import Task, TaskData
from compress.evaluation import metrics
from compress.evaluation.metrics import Scores
from compress.kinds import find
from compress.records.class_scores import ClassScore

if TYPE_CHECKING:
    from datasets import Dataset

    from compress.arrays import Array, Doubles
    from compress.data.labels import Coding, LabelColumn
    from compress.evaluation.evaluator import Evaluator
    from compress.models.folder import ModelFolder


class Classification(Task):
    """Choose one of `labels`: the one with the highest logit.

    accuracy, f1 (with two classes, of the last; with more, macro over the classes that
    occur), matthews
    """

    kind = "classification"
    metrics = ("accuracy", "f1", "matthews")
    has_labels = True
    problem = "single_label_classification"
    one_label = True
    one_word = True
    form = "label"
    columns = ("prediction_score",)
    json_columns = ("prediction_scores",)

    @classmethod
    def encode_labels(cls, labels: LabelColumn, coding: Coding) -> Array:
        return labels.class_ids(coding)

    def describe_label(self, label: Any) -> str:
        return f"the class {self.labels[int(label)]!r}"

    @classmethod
    def averages_classes(cls, metric: str, labels: int) -> bool:
        return metric == "f1" and labels > 2

    def describe_answer(self) -> str:
        return "chooses one of these labels:"

    @classmethod
    def from_checkpoint(
        cls,
        source: ModelFolder,
        problem: str | None,
        text: tuple[str, ...],
    ) -> Task:
        """Read the task of a sequence classifier, which may be of another kind."""
        names = source.labels()
        if problem == find("multilabel").problem:
            metric = find("multilabel").metrics[0]
            return Task("multilabel", text, "labels", names, metric)
        regression: type[Task] = find("regression")
        if problem == regression.problem or len(names) == 1:
            return regression.from_checkpoint(source, problem, text)
        return cls(cls.kind, text, "label", names, cls.metrics[0])

    def answer(self, logits: Array) -> Prediction:
        """Answer with the most probable label."""
        return Prediction.first(self.answer_logits(logits[None]))

    def answer_columns(self, predictor: Any, texts: Sequence[Any]) -> AnswerColumns:
        return self.answer_logits(self.finite_logits(predictor, texts))

    def answer_logits(self, logits_RV: Doubles) -> AnswerColumns:
        """Answer with the most probable label of each row."""
        powers = np.exp(logits_RV - logits_RV.max(axis=1, keepdims=True))
        scores = powers / powers.sum(axis=1, keepdims=True)
        best = [self.labels[number] for number in scores.argmax(axis=1).tolist()]
        return label_columns(best, scores, self.labels)

    def score_rows(self, logits: Array, labels: Array) -> Scores:
        from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

        labels = np.asarray(labels)
        logits = metrics.check_logits(logits, (len(labels), self.outputs))
        metrics.check_classes(labels, self.outputs)
        predicted = logits.argmax(axis=1)
        average = "binary" if self.outputs == 2 else "macro"
        constant = metrics.is_constant(predicted) or metrics.is_constant(labels)
        f1 = f1_score(labels, predicted, average=average, zero_division=0.0)
        matthews = 0.0 if constant else float(matthews_corrcoef(labels, predicted))
        return {
            "accuracy": float(accuracy_score(labels, predicted)),
            "f1": float(f1),
            "matthews": matthews,
        }

    def _compare(self, logits: Array, labels: Array) -> tuple[Array, Array]:
        """Return the class that is predicted, and the true one, each bool (rows,
        classes)."""
        labels = np.asarray(labels)
        logits = metrics.check_logits(logits, (len(labels), self.outputs))
        metrics.check_classes(labels, self.outputs)
        classes = np.arange(self.outputs)
        return logits.argmax(axis=1)[:, None] == classes, labels[:, None] == classes

    def by_class(self, exam: Evaluator, logits: Array) -> tuple[ClassScore, ...]:
        return metrics.count_classes(self.labels, *self._compare(logits, exam.labels))

    def decide(self, exam: Evaluator, logits: Array, threshold: float | None) -> Array:
        """Choose a class for each row."""
        return logits.argmax(axis=1)

    def distance(self, exam: Evaluator, student: Array, teacher: Array) -> float:
        """Measure the mean KL divergence from the teacher's probabilities to the
        student's, in nats."""
        return float(metrics.divergence(student, teacher).mean())

    def example_scores(
        self,
        exam: Evaluator,
        logits: Array,
        threshold: float | None,
    ) -> Array | None:
        if self.metric != "accuracy":
            return None
        return np.asarray((logits.argmax(axis=1) == exam.labels).astype(float))

    def explain_errors(self, exam: Evaluator, logits: Array) -> str:
        """Find out whether the labels are in another order."""
        from scipy.optimize import linear_sum_assignment
        from sklearn.metrics import confusion_matrix

        labels = exam.labels
        counts = confusion_matrix(labels, logits.argmax(1), labels=range(self.outputs))
        truth, output = linear_sum_assignment(-counts)
        matched = counts[truth, output].sum() / counts.sum()
        as_is = np.trace(counts) / counts.sum()
        most_frequent = np.bincount(labels.astype(int)).max() / len(labels)
        if matched <= max(most_frequent, as_is) + 0.1:
            return ""
        pairs = ", ".join(
            f"output {o} means {self.labels[t]}"
            for t, o in zip(truth, output, strict=True)
        )
        return (
            f"Its labels are in another order: with {pairs} it scores "
            f"{matched:.3f}. Correct id2label in its config.json"
        )

    def baselines(self, data: TaskData, split: Dataset) -> dict[str, Scores]:
        from compress.evaluation import baselines

        return baselines.of_labels(data, split)

    def constant(self, labels: Array) -> Array:
        """Return the most frequent class."""
        return np.bincount(labels, minlength=self.outputs).astype(np.float64)

    def fit_linear(self, features: Any, labels: Array, inputs: Any) -> Array:
        """Fit logistic regressions, of each class against the rest."""
        from compress.evaluation.baselines import log_odds

        if self.outputs == 2:
            odds = log_odds(features, labels == 1, inputs)
            return np.stack([-odds, odds], axis=1)
        columns = [log_odds(features, labels == n, inputs) for n in range(self.outputs)]
        return np.stack(columns, axis=1)
