"""Give every word of a sentence a tag, and so find entities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from compress.data.conll import standard_labels
from compress.data.task import Task, TaskData, Thresholds
from compress.evaluation import metrics
from compress.records.class_scores import ClassScore

if TYPE_CHECKING:
    from datasets import Dataset

    from compress.evaluation.evaluator import Evaluator

Array = NDArray[Any]


class Tagging(Task):
    """Give every word one of `labels`, IOB2 tags: the highest logit at its first token.

    f1, precision and recall of entities, accuracy of words
    """

    kind = "tagging"
    metrics = ("f1", "precision", "recall", "accuracy")
    tokenwise = True
    has_labels = True
    head = "AutoModelForTokenClassification"
    word_labels = True

    @classmethod
    def standard_labels(cls, names: Sequence[str], place: str) -> tuple[str, ...]:
        return standard_labels(names, place)

    def select(self, exam: Evaluator, examples: Array) -> tuple[Dataset, Array]:
        return exam.split.select(examples), exam.rows_of(examples)

    def scores(
        self, exam: Evaluator, logits: Array, threshold: float | None
    ) -> dict[str, float]:
        return metrics.entity_scores(exam.tags(logits), exam.true_tags)

    def by_class(self, exam: Evaluator, logits: Array) -> tuple[ClassScore, ...]:
        """Score each type of entity."""
        return metrics.scores_by_label(exam.tags(logits), exam.true_tags)

    def agreement(
        self, exam: Evaluator, student: Array, teacher: Array, thresholds: Thresholds
    ) -> float:
        """Measure the share of words with the same tag."""
        return float((exam.tag_ids(student) == exam.tag_ids(teacher)).mean())

    def count_changed(
        self, exam: Evaluator, student: Array, teacher: Array, thresholds: Thresholds
    ) -> int:
        """Count the sentences in which any word has another tag."""
        pairs = zip(exam.tags(student), exam.tags(teacher), strict=True)
        return sum(one != other for one, other in pairs)

    def distance(self, exam: Evaluator, student: Array, teacher: Array) -> float:
        """Measure the mean KL divergence from the teacher's probabilities to the
        student's, over tokens, in nats."""
        return float(metrics.divergence(student, teacher).mean())

    def metric_of_examples(
        self, exam: Evaluator, logits: Array
    ) -> tuple[Callable[[Array], float], int]:
        tags = exam.tags(logits)
        true = exam.true_tags

        def score(drawn: Array) -> float:
            values = metrics.entity_scores(
                [tags[n] for n in drawn], [true[n] for n in drawn]
            )
            return values[self.metric]

        return score, len(exam)

    def baselines(self, data: TaskData, split: Dataset) -> dict[str, dict[str, float]]:
        from compress.evaluation.baselines import tag_of_each_word

        return {
            "majority": self.majority(data, split),
            "tag of each word": tag_of_each_word(data, split),
        }

    def majority(self, data: TaskData, split: Dataset) -> dict[str, float]:
        """Score giving every word the most frequent tag."""
        from compress.evaluation.baselines import tag_scores

        counts = Counter(tag for tags in data.train["tags"] for tag in tags)
        commonest = counts.most_common(1)[0][0]
        predicted = [[commonest] * len(tags) for tags in split["tags"][:]]
        return tag_scores(data, predicted, split)
