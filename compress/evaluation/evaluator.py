"""Score the logits of a model on a split, for every kind of task.

evaluator = Evaluator.from_split(task, data.validation, tokenizer, max_length=128)
evaluator.scores(metrics.logits(model, evaluator.rows, collate))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from compress.arrays import Array, Longs, whole_numbers
from compress.data.collate import Batching
from compress.data.conll import OUTSIDE
from compress.data.task import Task, Thresholds
from compress.data.tokenize import encode
from compress.errors import CompressError
from compress.evaluation import metrics, qa
from compress.evaluation.qa import Spans, Windows
from compress.evaluation.ranking import Candidates
from compress.evaluation.statistics import bootstrap_interval, wilson_interval
from compress.records.class_scores import ClassScore

if TYPE_CHECKING:
    import torch
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from compress.data.encoder import Encoder

SCORE_RESAMPLES = 200
"""Resamples for the interval of an F1 or a correlation: each takes some
milliseconds."""


@dataclass(frozen=True)
class Evaluator:
    """Hold a split and its tokenised rows, and score the logits that a model computes
    for these rows."""

    task: Task
    split: Dataset
    rows: Dataset

    @staticmethod
    def from_split(
        task: Task,
        split: Dataset,
        tokenizer: PreTrainedTokenizerBase | Encoder,
        max_length: int,
    ) -> Evaluator:
        return Evaluator(
            task,
            split,
            encode(split, tokenizer, max_length, preparation=task.preparation),
        )

    def __len__(self) -> int:
        """Count the examples that are scored: texts, sentences, questions, queries with
        their passages, or pairs."""
        return self.task.count_examples(self.split)

    def subsample(self, count: int) -> Evaluator:
        """Keep at most `count` rows of the split, evenly spaced; of a ranking, whole
        queries."""
        return self._select(self.task.subsample(self, count))[0]

    def sample(
        self, count: int, logits: Array | None
    ) -> tuple[Evaluator, Array | None]:
        """Keep the rows that `subsample` keeps, with their logits; None for logits that
        are None, or of other rows."""
        if len(self.rows) <= count:
            return self, logits
        part, rows = self._select(self.task.subsample(self, count))
        known = int(self.lengths.sum()) if self.task.tokenwise else len(self.rows)
        if logits is None or len(logits) != known:
            return part, None
        return part, self._logits_of(rows, logits)

    def leave_groups_out(
        self, logits: Array, groups: int, most: int
    ) -> list[tuple[Evaluator, Array]]:
        """Divide at most `most` examples, evenly spaced and shuffled the same way every
        time, into groups, and return for each group an evaluator of all other examples,
        with their logits."""
        examples = self.task.choose_examples(self, most)
        chosen = np.random.default_rng(0).permutation(examples)
        parts = []
        for group in range(groups):
            part, rows = self._select(
                np.sort(np.delete(chosen, np.arange(group, len(chosen), groups)))
            )
            parts.append((part, self._logits_of(rows, logits)))
        return parts

    def _logits_of(self, rows: Array, logits: Array) -> Array:
        """Select the logits of these rows."""
        mask = np.isin(np.arange(len(self.rows)), rows)
        if self.task.tokenwise:
            mask = np.repeat(mask, self.lengths)
        return logits[mask]

    def _select(self, examples: Array) -> tuple[Evaluator, Array]:
        """Select examples, and return the numbers of their rows too."""
        split, rows = self.task.select(self, examples)
        return Evaluator(self.task, split, self.rows.select(rows)), rows

    def rows_of(self, examples: Array) -> Array:
        """Return the numbers of the rows of these examples."""
        return np.flatnonzero(np.isin(self.examples, examples))

    def scores(
        self, logits: Array, *, threshold: float | None = None
    ) -> dict[str, float]:
        """Compute every metric of the task's kind by name; `task.metric` is always one
        of them.

        threshold   qa: the margin over the best span from which no answer is given;
                    None: the best threshold here

        Raises CompressError for logits that are not finite or do not match the rows.
        """
        return self.task.scores(self, logits, threshold)

    def by_class(self, logits: Array) -> tuple[ClassScore, ...]:
        """Score each label, or each type of entity; () for tasks without labels."""
        return self.task.by_class(self, logits)

    def agreement(
        self,
        student: Array,
        teacher: Array,
        *,
        thresholds: Thresholds = (None, None),
    ) -> float:
        """Measure how far the student predicts what the teacher predicts; each model
        has its own threshold. Raises CompressError for logits of different rows."""
        if not self.task.vectors and student.shape != teacher.shape:
            raise CompressError(
                f"agreement: the student's logits have shape {student.shape}, the "
                f"teacher's {teacher.shape}; both must come from the same rows and the "
                "same labels."
            )
        return self.task.agreement(self, student, teacher, thresholds)

    def count_changed(
        self,
        student: Array,
        teacher: Array,
        *,
        thresholds: Thresholds = (None, None),
    ) -> int | None:
        """Count the examples with different predictions: the class, any label, any
        word's tag, the answer, or the first passage. None for regression and vectors,
        where every prediction differs slightly."""
        return self.task.count_changed(self, student, teacher, thresholds)

    def distance(self, student: Array, teacher: Array) -> float:
        """Measure how far the student's logits are from the teacher's; smooth, unlike
        `agreement`, which counts."""
        return self.task.distance(
            self, student.astype(np.float64), teacher.astype(np.float64)
        )

    def example_scores(
        self, logits: Array, *, threshold: float | None = None
    ) -> Array | None:
        """Compute the value of each example if the task's metric is their mean; None
        for other metrics."""
        return self.task.example_scores(self, logits, threshold)

    def metric_of_examples(self, logits: Array) -> tuple[Callable[[Array], float], int]:
        """Return a function that computes the task's metric over the examples of these
        numbers, which may repeat, and the number of examples. It serves metrics that
        are not a mean over examples: see `example_scores`."""
        return self.task.metric_of_examples(self, logits)

    def interval(
        self, logits: Array, *, threshold: float | None = None
    ) -> tuple[float, float]:
        """Compute the 95 % interval of the task's metric: Wilson's for a share of
        examples, else by resampling."""
        values = self.example_scores(logits, threshold=threshold)
        if values is None:
            return bootstrap_interval(
                *self.metric_of_examples(logits), resamples=SCORE_RESAMPLES
            )
        if np.isin(values, (0.0, 1.0)).all():
            return wilson_interval(float(values.mean()), len(values))
        return bootstrap_interval(
            lambda drawn: float(values[drawn].mean()), len(values)
        )

    def threshold(self, logits: Array) -> float:
        """Choose the margin of no answer over the best span that yields the highest
        score; 0.0 for tasks other than qa.

        It is infinite if every question has an answer, so that one is always given.
        """
        return self.task.choose_threshold(self, logits)

    def texts(self, logits: Array, *, threshold: float | None = None) -> list[str]:
        """Return the answers of a qa task."""
        return self.texts_of(self.spans(logits), threshold)

    def texts_of(self, spans: Spans, threshold: float | None) -> list[str]:
        """Return the answers of a qa task that has these best spans."""
        threshold = self.best_threshold(spans) if threshold is None else threshold
        return spans.texts(self.split["context"][:], threshold)

    def best_threshold(self, spans: Spans) -> float:
        """Choose the threshold of a qa task with the highest score: see `threshold`."""
        if not self.task.unanswerable:
            return math.inf
        return qa.best_threshold(
            spans,
            self.split["context"][:],
            self.split["answers"][:],
            metric=self.task.metric,
        )

    def spans(self, logits: Array) -> Spans:
        """Find the best span of every question of a qa task."""
        return qa.best_spans(self._check_tokens(logits), self._windows)

    def tags(self, logits: Array) -> list[list[str]]:
        """Return a tag for every word of every sentence of a tagging task."""
        ends = np.cumsum([len(tags) for tags in self.true_tags])
        return [self._names(ids) for ids in np.split(self.tag_ids(logits), ends[:-1])]

    def tag_ids(self, logits: Array) -> Array:
        """Return the tag of every word of all sentences: "O" for a word that has no
        token, and so no logits."""
        predicted_T = self._check_tokens(logits).argmax(axis=1)
        place_T, words = self._word_places
        tags = np.full(
            words, self.task.labels.index(OUTSIDE) if OUTSIDE in self.task.labels else 0
        )
        tags[place_T[place_T >= 0]] = predicted_T[place_T >= 0]
        return tags

    @cached_property
    def _word_places(self) -> tuple[Array, int]:
        """Return the word that begins at each token, numbered over all sentences, -1
        elsewhere; and the word count."""
        sizes = np.array(
            [len(words) for words in self.split["words"][:]], dtype=np.int64
        )
        begins = np.cumsum(sizes) - sizes
        word_T = self._column("word")
        return np.where(
            word_T >= 0, begins[np.repeat(self.examples, self.lengths)] + word_T, -1
        ), int(sizes.sum())

    @cached_property
    def true_tags(self) -> list[list[str]]:
        return [self._names(ids) for ids in self.split["tags"][:]]

    @cached_property
    def labels(self) -> Array:
        return np.asarray(self.split["label"][:])

    def _names(self, ids: Sequence[int] | Array) -> list[str]:
        return [self.task.labels[n] for n in ids]

    def _check_tokens(self, logits: Array) -> Array:
        logits = np.asarray(logits, dtype=np.float64)
        metrics.check_finite(
            logits, (int(self.lengths.sum()), self.task.outputs), "tokens"
        )
        return logits

    @cached_property
    def candidates(self) -> Candidates:
        """Group the rows of a ranking by query."""
        return Candidates.from_split(self.split)

    @cached_property
    def lengths(self) -> Array:
        return whole_numbers(self.rows, "length")

    @cached_property
    def examples(self) -> Array:
        """Return the example of each row, counted from 0 without gaps."""
        if "query" in self.rows.column_names:
            return self.candidates.query_R
        return np.unique(self.rows["example"][:], return_inverse=True)[1]

    @cached_property
    def _windows(self) -> Windows:
        nulls_R = np.asarray(self.rows["null"][:])
        return Windows(
            self._column("starts"),
            self._column("ends"),
            self.lengths,
            nulls_R,
            self.examples,
        )

    def _column(self, name: str) -> Array:
        """Flatten a column of one number per token."""
        table = self.rows.select_columns(name).with_format("arrow")[:]
        return table[name].combine_chunks().flatten().to_numpy()


@dataclass(frozen=True, eq=False)
class EvaluationBatches:
    """Hold an evaluator's rows as padded batches on a device, for models that are
    scored many times.

    tokens_U: the token ids that occur; order_R: the numbers of the rows in the order of
    the batches, longest first.
    """

    evaluator: Evaluator
    batches: tuple[dict[str, Tensor], ...]
    tokens_U: Tensor
    order_R: Longs

    @staticmethod
    def from_evaluator(
        evaluator: Evaluator,
        collate: Batching,
        *,
        batch: int = 64,
        device: torch.device | str = "cpu",
    ) -> EvaluationBatches:
        """Batch rows of similar length, so that little is padded."""
        import torch

        order_R = np.argsort(-whole_numbers(evaluator.rows, "length"), kind="stable")
        rows = evaluator.rows.remove_columns("length")
        batches = []
        for start in range(0, len(order_R), batch):
            inputs = collate([rows[int(n)] for n in order_R[start : start + batch]])
            batches.append(
                {
                    name: tensor.to(device)
                    for name, tensor in inputs.items()
                    if name not in ("labels", "index", "query")
                }
            )
        tokens_U = torch.cat(
            [inputs["input_ids"].flatten() for inputs in batches]
        ).unique()
        return EvaluationBatches(evaluator, tuple(batches), tokens_U, order_R)

    def answers(self, logits: Sequence[Tensor]) -> Array:
        """Join the batches' logits in the order of the rows: (rows, outputs), or
        (tokens, outputs)."""
        parts = list[Array]()
        for values, inputs in zip(logits, self.batches, strict=True):
            parts += metrics.split_rows(values.numpy(), inputs["attention_mask"])
        return np.concatenate([parts[n] for n in np.argsort(self.order_R)])

    def score(self, logits: Sequence[Tensor]) -> float:
        """Compute the task's metric. Raises CompressError for logits that are not
        finite."""
        return self.evaluator.scores(self.answers(logits))[self.evaluator.task.metric]
