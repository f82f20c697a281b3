"""Score the logits of a model on a split, for every kind of task.

evaluator = Evaluator.from_split(task, data.validation, tokenizer, max_length=128)
evaluator.scores(metrics.logits(model, evaluator.rows, collate))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compress.data.collate import Batching
from compress.data.conll import OUTSIDE
from compress.data.tokenize import encode
from compress.evaluation import embedding, metrics, qa
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
    from compress.data.task import Task

Array = NDArray[Any]
RESAMPLES = 200
"""Resamples for the interval of an F1 or a correlation: each takes some
milliseconds."""


def count_examples(task: Task, split: Dataset) -> int:
    """Count the examples of a split that the task's metric is computed over: see
    `Evaluator.__len__`."""
    match task.kind:
        case "ranking":
            return len(Candidates.from_split(split))
        case "embedding":
            return embedding.count_examples(split)
    return len(split)


def count_differing(
    one: Sequence[str] | Sequence[list[str]], other: Sequence[str] | Sequence[list[str]]
) -> int:
    """Count the examples whose answers differ: texts, normalised as the score
    normalises them, or tags."""
    plain = [
        [
            qa.normalise_answer(answer) if isinstance(answer, str) else answer
            for answer in answers
        ]
        for answers in (one, other)
    ]
    return sum(a != b for a, b in zip(*plain, strict=True))


@dataclass(frozen=True)
class Evaluator:
    """Hold a split and its tokenised rows, and score the logits that a model gives for
    these rows."""

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
        return count_examples(self.task, self.split)

    def subsample(self, count: int) -> Evaluator:
        """Keep at most `count` rows of the split, evenly spaced; of a ranking, whole
        queries."""
        if self.task.kind == "ranking":
            count = max(1, count * len(self) // len(self.split))
        return self._select(self._evenly_spaced(count))[0]

    def leave_groups_out(
        self, logits: Array, groups: int, most: int
    ) -> list[tuple[Evaluator, Array]]:
        """Divide at most `most` examples, evenly spaced and shuffled the same way every
        time, into groups, and return for each group an evaluator of all other examples,
        with their logits."""
        chosen = np.random.default_rng(0).permutation(self._evenly_spaced(most))
        parts = []
        for group in range(groups):
            part, rows = self._select(
                np.sort(np.delete(chosen, np.arange(group, len(chosen), groups)))
            )
            mask = np.isin(np.arange(len(self.rows)), rows)
            parts.append(
                (
                    part,
                    logits[
                        np.repeat(mask, self._lengths) if self.task.tokenwise else mask
                    ],
                )
            )
        return parts

    def _evenly_spaced(self, count: int) -> Array:
        if self.task.kind == "embedding":
            return embedding.subsample(self.split, count)
        return np.unique(
            np.linspace(0, len(self) - 1, min(count, len(self)), dtype=int)
        )

    def _select(self, examples: Array) -> tuple[Evaluator, Array]:
        """Select examples, and return the numbers of their rows too."""
        if self.task.kind == "embedding":
            return Evaluator(
                self.task,
                embedding.select(self.split, examples),
                self.rows.select(examples),
            ), examples
        rows = examples
        if self.task.tokenwise or self.task.kind == "ranking":
            rows = np.flatnonzero(np.isin(self._examples, examples))
        split = self.split.select(rows if self.task.kind == "ranking" else examples)
        return Evaluator(self.task, split, self.rows.select(rows)), rows

    def scores(
        self, logits: Array, *, threshold: float | None = None
    ) -> dict[str, float]:
        """Compute every metric of the task's kind by name; `task.metric` is always one
        of them.

        classification, multilabel, regression    see `metrics.scores`
        tagging    f1, precision and recall of entities, accuracy of words; see
                   `metrics.entity_scores`
        embedding  see `embedding.scores`
        qa         f1, exact, and more if some questions have no answer; see
                   `qa.answer_scores`, `f1_of_spans`. No answer is given if it beats the
                   best span by more than `threshold`; None: the best threshold here
        ranking    the mean over queries of each of `ranking.MEASURES`

        Raises CompressError for logits that are not finite or do not match the rows.
        """
        match self.task.kind:
            case "embedding":
                return embedding.scores(self.split, logits)
            case "ranking":
                return {
                    name: float(values.mean())
                    for name, values in self._query_scores(logits).items()
                }
            case "tagging":
                return metrics.entity_scores(self.tags(logits), self._true_tags)
            case "qa":
                spans = self.spans(logits)
                contexts, answers = self.split["context"][:], self.split["answers"][:]
                values = qa.answer_scores(
                    self._texts(spans, threshold), answers, contexts
                )
                if (
                    self.task.unanswerable
                    and (always := qa.f1_of_spans(spans, contexts, answers)) is not None
                ):
                    values["f1_of_spans"] = always
                return values
            case _:
                return metrics.scores(self.task, logits, self._labels)

    def by_class(self, logits: Array) -> tuple[ClassScore, ...]:
        """Score each label, or each type of entity; () for tasks without labels."""
        if self.task.kind == "tagging":
            return metrics.scores_by_label(self.tags(logits), self._true_tags)
        return (
            metrics.scores_by_class(self.task, logits, self._labels)
            if self.task.labels
            else ()
        )

    def agreement(
        self,
        student: Array,
        teacher: Array,
        *,
        thresholds: tuple[float | None, float | None] = (None, None),
    ) -> float:
        """Measure how much the student predicts what the teacher predicts.

        For vectors see `embedding.similarity`; for tagging it is the share of words
        with the same tag; for qa the share of questions with the same answer, each
        model with its own threshold; for rankings the share of pairs of a query's
        passages in the same order; for other tasks see `metrics.agreement`.
        """
        match self.task.kind:
            case "embedding":
                return embedding.similarity(student, teacher)
            case "ranking":
                return self.candidates.pair_agreement(
                    *map(self._row_scores, (student, teacher))
                )
            case "tagging":
                return float((self._tag_ids(student) == self._tag_ids(teacher)).mean())
            case "qa":
                return (
                    len(self) - self._count_other_texts(student, teacher, thresholds)
                ) / len(self)
            case _:
                return metrics.agreement(self.task, student, teacher)

    def count_changed(
        self,
        student: Array,
        teacher: Array,
        *,
        thresholds: tuple[float | None, float | None] = (None, None),
    ) -> int | None:
        """Count the examples with different predictions: the class, any label, any
        word's tag, the answer, or the first passage. None for regression and vectors,
        where every prediction differs slightly."""
        match self.task.kind:
            case "regression" | "embedding":
                return None
            case "ranking":
                one, other = (
                    self.candidates.first(self._row_scores(logits))
                    for logits in (student, teacher)
                )
                return int((one != other).sum())
            case "qa":
                return self._count_other_texts(student, teacher, thresholds)
            case "tagging":
                return count_differing(self.tags(student), self.tags(teacher))
            case "multilabel":
                return int(((student > 0) != (teacher > 0)).any(axis=1).sum())
            case "classification":
                return int((student.argmax(axis=1) != teacher.argmax(axis=1)).sum())

    def _count_other_texts(
        self,
        student: Array,
        teacher: Array,
        thresholds: tuple[float | None, float | None],
    ) -> int:
        own, other = thresholds
        answers = zip(
            self.texts(student, threshold=own),
            self.texts(teacher, threshold=other),
            map(qa.is_unspaced, self.split["context"][:]),
            strict=True,
        )
        return sum(
            qa.normalise_answer(one, unspaced=unspaced)
            != qa.normalise_answer(another, unspaced=unspaced)
            for one, another, unspaced in answers
        )

    def distance(self, student: Array, teacher: Array) -> float:
        """Measure how far the student's logits are from the teacher's: see
        `metrics.distance`. For rankings, a constant added to all scores of a query does
        not count."""
        if self.task.kind == "ranking":
            difference = self.candidates.centre(
                student[:, 0].astype(np.float64) - teacher[:, 0]
            )
            return float(np.square(difference).mean())
        return metrics.distance(self.task, student, teacher)

    def example_scores(
        self, logits: Array, *, threshold: float | None = None
    ) -> Array | None:
        """Compute the value of each example if the task's metric is their mean; None
        for other metrics."""
        metric = self.task.metric
        if self.task.kind == "ranking":
            return self._query_scores(logits)[metric]
        if self.task.kind == "embedding":
            return embedding.example_values(self.split, logits).get(metric)
        if self.task.kind == "qa":
            answers, score = (
                map(qa.right_answers, self.split["answers"][:]),
                {"f1": qa.f1, "exact": qa.exact}[metric],
            )
            questions = zip(
                self.texts(logits, threshold=threshold),
                answers,
                self.split["context"][:],
                strict=True,
            )
            return np.array(
                [score(text, right, context) for text, right, context in questions]
            )
        if metric != "accuracy" or self.task.tokenwise:
            return None
        if self.task.kind == "multilabel":
            return ((logits > 0) == (self._labels > 0.5)).all(axis=1).astype(float)
        return (logits.argmax(axis=1) == self._labels).astype(float)

    def metric_of_examples(self, logits: Array) -> tuple[Callable[[Array], float], int]:
        """Return a function that computes the task's metric over the examples of these
        numbers, which may repeat, and the number of examples. It serves metrics that
        are not a mean over examples: see `example_scores`."""
        metric = self.task.metric
        if self.task.kind == "embedding":
            values = embedding.example_values(self.split, logits)
            return lambda drawn: embedding.mean(values, drawn)[metric], len(
                next(iter(values.values()))
            )
        if self.task.kind == "tagging":
            tags, true = self.tags(logits), self._true_tags

            def score(drawn: Array) -> float:
                return metrics.entity_scores(
                    [tags[n] for n in drawn], [true[n] for n in drawn]
                )[metric]

            return score, len(self)
        labels = self._labels
        return lambda drawn: metrics.scores(self.task, logits[drawn], labels[drawn])[
            metric
        ], len(self)

    def interval(
        self, logits: Array, *, threshold: float | None = None
    ) -> tuple[float, float]:
        """Compute the 95 % interval of the task's metric: Wilson's for a share of
        examples, else by resampling."""
        values = self.example_scores(logits, threshold=threshold)
        if values is None:
            return bootstrap_interval(
                *self.metric_of_examples(logits), resamples=RESAMPLES
            )
        if np.isin(values, (0.0, 1.0)).all():
            return wilson_interval(float(values.mean()), len(values))
        return bootstrap_interval(
            lambda drawn: float(values[drawn].mean()), len(values)
        )

    def threshold(self, logits: Array) -> float:
        """Choose the margin of no answer over the best span that gives the highest
        score; 0.0 for tasks other than qa.

        It is infinite if every question has an answer, so that one is always given.
        """
        return (
            self._best_threshold(self.spans(logits)) if self.task.kind == "qa" else 0.0
        )

    def _best_threshold(self, spans: Spans) -> float:
        if not self.task.unanswerable:
            return math.inf
        return qa.best_threshold(
            spans,
            self.split["context"][:],
            self.split["answers"][:],
            metric=self.task.metric,
        )

    def texts(self, logits: Array, *, threshold: float | None = None) -> list[str]:
        """Return the answers of a qa task."""
        return self._texts(self.spans(logits), threshold)

    def _texts(self, spans: Spans, threshold: float | None) -> list[str]:
        threshold = self._best_threshold(spans) if threshold is None else threshold
        return spans.texts(self.split["context"][:], threshold)

    def spans(self, logits: Array) -> Spans:
        """Find the best span of every question of a qa task."""
        return qa.best_spans(self._check_tokens(logits), self._windows)

    def tags(self, logits: Array) -> list[list[str]]:
        """Return a tag for every word of every sentence of a tagging task."""
        ends = np.cumsum([len(tags) for tags in self._true_tags])
        return [self._names(ids) for ids in np.split(self._tag_ids(logits), ends[:-1])]

    def _tag_ids(self, logits: Array) -> Array:
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
        begins = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        word_T = self._column("word")
        return np.where(
            word_T >= 0, begins[np.repeat(self._examples, self._lengths)] + word_T, -1
        ), int(sizes.sum())

    @cached_property
    def _true_tags(self) -> list[list[str]]:
        return [self._names(ids) for ids in self.split["tags"][:]]

    @cached_property
    def _labels(self) -> Array:
        return np.asarray(self.split["label"][:])

    def _names(self, ids: Sequence[int] | Array) -> list[str]:
        return [self.task.labels[n] for n in ids]

    def _check_tokens(self, logits: Array) -> Array:
        logits = np.asarray(logits, dtype=np.float64)
        metrics.check_finite(
            logits, (int(self._lengths.sum()), self.task.outputs), "tokens"
        )
        return logits

    @cached_property
    def candidates(self) -> Candidates:
        """Group the rows of a ranking by query."""
        return Candidates.from_split(self.split)

    def _query_scores(self, logits: Array) -> dict[str, Array]:
        return self.candidates.scores(self._row_scores(logits))

    def _row_scores(self, logits: Array) -> Array:
        return metrics.check_logits(self.task, logits, self.candidates.label_R)[0][:, 0]

    @cached_property
    def _lengths(self) -> Array:
        return np.asarray(self.rows["length"][:], dtype=np.int64)

    @cached_property
    def _examples(self) -> Array:
        """Return the example of each row, counted from 0 without gaps."""
        if self.task.kind == "ranking":
            return self.candidates.query_R
        return np.unique(self.rows["example"][:], return_inverse=True)[1]

    @cached_property
    def _windows(self) -> Windows:
        nulls_R = np.asarray(self.rows["null"][:])
        return Windows(
            self._column("starts"),
            self._column("ends"),
            self._lengths,
            nulls_R,
            self._examples,
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
    order_R: NDArray[np.int64]

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

        order_R = np.argsort(-np.asarray(evaluator.rows["length"][:]), kind="stable")
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

    def answers(self, logits: Sequence[Tensor]) -> NDArray[Any]:
        """Join the batches' logits in the order of the rows: (rows, outputs), or
        (tokens, outputs)."""
        parts: list[Array] = []
        for values, inputs in zip(logits, self.batches, strict=True):
            parts += metrics.split_rows(values.numpy(), inputs["attention_mask"])
        return np.concatenate([parts[n] for n in np.argsort(self.order_R)])

    def score(self, logits: Sequence[Tensor]) -> float:
        """Compute the task's metric. Raises CompressError for logits that are not
        finite."""
        return self.evaluator.scores(self.answers(logits))[self.evaluator.task.metric]
