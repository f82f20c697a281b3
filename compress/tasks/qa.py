"""Answer a question with a span of a context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compress.data.constants import MASKED
from compress.data.task import Task, TaskData, Thresholds
from compress.evaluation import qa

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor

    from compress.evaluation.evaluator import Evaluator

Array = NDArray[Any]


class Qa(Task):
    """Answer with the span whose first and last token have the highest sum of logits,
    or with nothing.

    f1, exact, and more if some questions have no answer: see `evaluation.qa`
    """

    kind = "qa"
    metrics = ("f1", "exact")
    tokenwise = True
    head = "AutoModelForQuestionAnswering"
    takes_texts = False

    @property
    def outputs(self) -> int:
        return 2

    @property
    def output_names(self) -> tuple[str, ...]:
        return ("start", "end")

    @classmethod
    def spread(cls, values: Tensor, mask_BL: Tensor) -> Tensor:
        """Reshape (B, L, 2) logits to (2 B, L), scores of starting, and of ending, at
        each position, where padding never wins; so that a mean over rows is the mean of
        both, as in Sanh et al. and Devlin et al. Labels (B, 2) become (2 B,)."""
        if values.dim() < 3:
            return values.flatten()
        return values.mT.masked_fill(mask_BL[:, None] == 0, MASKED).flatten(0, 1)

    @classmethod
    def distributions(cls, logits: Tensor, mask_BL: Tensor) -> Tensor:
        return cls.spread(logits, mask_BL)

    def select(self, exam: Evaluator, examples: Array) -> tuple[Dataset, Array]:
        return exam.split.select(examples), exam.rows_of(examples)

    def scores(
        self, exam: Evaluator, logits: Array, threshold: float | None
    ) -> dict[str, float]:
        spans = exam.spans(logits)
        contexts = exam.split["context"][:]
        answers = exam.split["answers"][:]
        values = qa.answer_scores(exam.texts_of(spans, threshold), answers, contexts)
        if self.unanswerable:
            always = qa.f1_of_spans(spans, contexts, answers)
            if always is not None:
                values["f1_of_spans"] = always
        return values

    def agreement(
        self, exam: Evaluator, student: Array, teacher: Array, thresholds: Thresholds
    ) -> float:
        """Measure the share of questions with the same answer."""
        changed = self.count_changed(exam, student, teacher, thresholds)
        return (len(exam) - changed) / len(exam)

    def count_changed(
        self, exam: Evaluator, student: Array, teacher: Array, thresholds: Thresholds
    ) -> int:
        """Count the questions whose answers differ, normalised as the score normalises
        them."""
        own, other = thresholds
        answers = zip(
            exam.texts(student, threshold=own),
            exam.texts(teacher, threshold=other),
            map(qa.is_unspaced, exam.split["context"][:]),
            strict=True,
        )
        return sum(
            qa.normalise_answer(one, unspaced=unspaced)
            != qa.normalise_answer(another, unspaced=unspaced)
            for one, another, unspaced in answers
        )

    def distance(self, exam: Evaluator, student: Array, teacher: Array) -> float:
        """Measure the mean squared difference."""
        return float(np.square(student - teacher).mean())

    def example_scores(
        self, exam: Evaluator, logits: Array, threshold: float | None
    ) -> Array:
        score = {"f1": qa.f1, "exact": qa.exact}[self.metric]
        questions = zip(
            exam.texts(logits, threshold=threshold),
            map(qa.right_answers, exam.split["answers"][:]),
            exam.split["context"][:],
            strict=True,
        )
        return np.array(
            [score(text, right, context) for text, right, context in questions]
        )

    def choose_threshold(self, exam: Evaluator, logits: Array) -> float:
        return exam.best_threshold(exam.spans(logits))

    def baselines(self, data: TaskData, split: Dataset) -> dict[str, dict[str, float]]:
        from compress.evaluation.baselines import nearest_sentence

        return {
            "majority": self.majority(data, split),
            "nearest sentence": nearest_sentence(split),
        }

    def majority(self, data: TaskData, split: Dataset) -> dict[str, float]:
        """Score answering no question."""
        return qa.answer_scores(
            [""] * len(split), split["answers"][:], split["context"][:]
        )
