"""Evaluate a model on a split: encode it, and score logits, whatever the kind of task.

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
from compress.errors import CompressError
from compress.evaluation import embedding, metrics, qa
from compress.evaluation.metrics import not_finite
from compress.evaluation.qa import Spans, Windows
from compress.evaluation.ranking import Candidates
from compress.evaluation.statistics import bootstrap_interval, wilson_interval
from compress.records.class_scores import ClassScore

if TYPE_CHECKING:
    import torch
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from compress.data.task import Task

Array = NDArray[Any]
RESAMPLES = 200
"""Draws that the interval of a model's F1 or correlation is of: each takes some milliseconds."""


def count_differing(one: Sequence[str] | Sequence[list[str]], other: Sequence[str] | Sequence[list[str]]) -> int:
    """Count the examples whose answers differ: texts, compared as the score compares them, or the tags of sentences."""
    plain = [[qa.normalise_answer(each) if isinstance(each, str) else each for each in every] for every in (one, other)]
    return sum(a != b for a, b in zip(*plain, strict=True))


@dataclass(frozen=True)
class Evaluator:
    """Hold a split as a tokenizer encodes it, and what a model's logits for these rows are worth."""

    task: Task
    split: Dataset
    rows: Dataset

    @staticmethod
    def from_split(task: Task, split: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Evaluator:
        return Evaluator(task, split, encode(split, tokenizer, max_length, prompts=task.prompts))

    def __len__(self) -> int:
        """Count the examples: texts, sentences, questions, or queries with their passages."""
        return len(self.candidates) if self.task.kind == "ranking" else len(self.split)

    def spread(self, count: int) -> Evaluator:
        """Keep at most `count` rows of the split, evenly spread over it; of a ranking, whole queries."""
        if self.task.kind == "ranking":
            count = max(1, count * len(self) // len(self.split))
        return self._of_rows(self._spread(count))[0]

    def parts(self, logits: Array, count: int, most: int) -> list[tuple[Evaluator, Array]]:
        """Split at most `most` examples, spread evenly and then shuffled the same way every time, into `count` groups,
        and leave one group out at a time: exams with the logits that are of them."""
        chosen = np.random.default_rng(0).permutation(self._spread(most))
        kept = [np.sort(np.delete(chosen, np.arange(at, len(chosen), count))) for at in range(count)]
        found = []
        for examples in kept:
            exam, rows = self._of_rows(examples)
            of_row = np.isin(np.arange(len(self.rows)), rows)
            found.append((exam, logits[np.repeat(of_row, self._lengths) if self.task.tokenwise else of_row]))
        return found

    def _spread(self, count: int) -> Array:
        if self.task.kind == "embedding":
            return embedding.spread(self.split, count)
        return np.unique(np.linspace(0, len(self) - 1, min(count, len(self)), dtype=int))

    def _of_rows(self, chosen: Array) -> tuple[Evaluator, Array]:
        """Keep these examples; and the places of their rows."""
        rows = chosen
        if self.task.tokenwise or self.task.kind == "ranking":
            rows = np.flatnonzero(np.isin(self._examples, chosen))
        if self.task.kind == "ranking":
            chosen = rows
        if self.task.kind == "embedding":
            return Evaluator(self.task, embedding.keep(self.split, chosen), self.rows.select(rows)), rows
        return Evaluator(self.task, self.split.select(chosen), self.rows.select(rows)), rows

    def scores(self, logits: Array, *, threshold: float | None = None) -> dict[str, float]:
        """Compute every metric of the task's kind by name; `task.metric` is always one of them.

        classification, multilabel, regression    see `metrics.scores`
        tagging    f1, precision and recall of entities, accuracy of words; see `metrics.entity_scores`
        embedding  of pairs, or of texts that find others: see `embedding.scores`
        qa         f1, exact, and more where some questions have no answer; see `qa.answer_scores`, `f1_of_spans`.
                   `threshold`: how much better no answer must be than the best span to be given; None: the one that
                   scores best here
        ranking    the mean over queries of each of `ranking.MEASURES`

        Raises CompressError for logits that are not finite or are not of these rows.
        """
        if self.task.kind == "embedding":
            return embedding.scores(self.split, logits)
        if self.task.kind == "ranking":
            return {name: float(values.mean()) for name, values in self._query_scores(logits).items()}
        if not self.task.tokenwise:
            return metrics.scores(self.task, logits, np.asarray(self.split["label"][:]))
        if self.task.kind == "tagging":
            return metrics.entity_scores(self.tags(logits), [self._names(ids) for ids in self.split["tags"][:]])
        found = self.spans(logits)
        given = self.best_threshold(found) if threshold is None else threshold
        contexts, golds = self.split["context"][:], self.split["answers"][:]
        values = qa.answer_scores(found.texts(contexts, given), golds)
        if self.task.unanswerable and (always := qa.f1_of_spans(found, contexts, golds)) is not None:
            values["f1_of_spans"] = always
        return values

    def by_class(self, logits: Array) -> tuple[ClassScore, ...]:
        """Score each label apart, or each type of entity; () where there are none."""
        if self.task.kind == "tagging":
            return metrics.scores_by_label(self.tags(logits), [self._names(ids) for ids in self.split["tags"][:]])
        if self.task.tokenwise or self.task.numeric or self.task.kind == "embedding":
            return ()
        return metrics.scores_by_class(self.task, logits, np.asarray(self.split["label"][:]))

    def agreement(
        self, student: Array, teacher: Array, *, thresholds: tuple[float | None, float | None] = (None, None)
    ) -> float:
        """Measure how much the student answers as the teacher does.

        Of texts see `metrics.agreement`; of vectors `embedding.similarity`; the share of words with the same tag; the
        share of questions with the same answer, each model with its own threshold; the share of pairs of a query's
        passages in the same order.
        """
        if self.task.kind == "embedding":
            return embedding.similarity(student, teacher)
        if self.task.kind == "ranking":
            return self.candidates.alike(*map(self._ranking_scores, (student, teacher)))
        if self.task.kind == "tagging":
            return float((self._tag_ids(student) == self._tag_ids(teacher)).mean())
        if self.task.kind == "qa":
            given = zip((student, teacher), thresholds, strict=True)
            one, other = (self.texts(logits, threshold=threshold) for logits, threshold in given)
            return float(
                np.mean([qa.normalise_answer(a) == qa.normalise_answer(b) for a, b in zip(one, other, strict=True)])
            )
        return metrics.agreement(self.task, student, teacher)

    def changed(
        self, student: Array, teacher: Array, *, thresholds: tuple[float | None, float | None] = (None, None)
    ) -> int | None:
        """Count the examples that the two answer differently: by class, any label, any word's tag, text, or the passage
        that comes first. None for a regression and for vectors, where every answer differs by a little."""
        if self.task.kind == "ranking":
            one, other = (self.candidates.first(self._ranking_scores(logits)) for logits in (student, teacher))
            return int((one != other).sum())
        if self.task.kind in ("regression", "embedding"):
            return None
        if self.task.kind == "qa":
            pairs = zip((student, teacher), thresholds, strict=True)
            return count_differing(*(self.texts(logits, threshold=threshold) for logits, threshold in pairs))
        if self.task.kind == "tagging":
            return count_differing(self.tags(student), self.tags(teacher))
        if self.task.kind == "multilabel":
            return int(((student > 0) != (teacher > 0)).any(axis=1).sum())
        return int((student.argmax(axis=1) != teacher.argmax(axis=1)).sum())

    def distance(self, student: Array, teacher: Array) -> float:
        """Measure how far the student's logits are from the teacher's: see `metrics.distance`; of a ranking apart from
        what all passages of a query share."""
        if self.task.kind == "ranking":
            apart = self.candidates.centred(student[:, 0].astype(np.float64) - teacher[:, 0])
            return float(np.square(apart).mean())
        return metrics.distance(self.task, student, teacher)

    def example_scores(self, logits: Array, *, threshold: float | None = None) -> Array | None:
        """Compute what each example adds to the task's metric, where that is a mean over examples; None elsewhere."""
        metric = self.task.metric
        if self.task.kind == "ranking":
            return self._query_scores(logits)[metric]
        if self.task.kind == "qa":
            golds, score = map(qa.right_answers, self.split["answers"][:]), {"f1": qa.f1, "exact": qa.exact}[metric]
            given = zip(self.texts(logits, threshold=threshold), golds, strict=True)
            return np.array([score(text, right) for text, right in given])
        if self.task.kind == "embedding":
            return embedding.examples(self.split, logits).get(metric)
        if metric != "accuracy" or self.task.tokenwise:
            return None
        labels = np.asarray(self.split["label"][:])
        if self.task.kind == "multilabel":
            return ((logits > 0) == (labels > 0.5)).all(axis=1).astype(float)
        return (logits.argmax(axis=1) == labels).astype(float)

    def score_of(self, logits: Array) -> tuple[Callable[[Array], float], int]:
        """Return the function from numbers of examples, repeats among them, to the task's metric of these alone; and
        how many there are.

        Of texts and of tagged sentences, of vectors the pairs; a metric of questions or queries is a mean: see
        `example_scores`.
        """
        metric = self.task.metric
        if self.task.kind == "embedding":
            return embedding.score_of(self.split, logits, metric)
        if self.task.kind == "tagging":
            tags, golds = self.tags(logits), [self._names(ids) for ids in self.split["tags"][:]]

            def score(drawn: Array) -> float:
                return metrics.entity_scores([tags[n] for n in drawn], [golds[n] for n in drawn])[metric]

            return score, len(self)
        labels = np.asarray(self.split["label"][:])
        return lambda drawn: metrics.scores(self.task, logits[drawn], labels[drawn])[metric], len(self)

    def interval(self, logits: Array, *, threshold: float | None = None) -> tuple[float, float]:
        """Compute the 95 % interval of the task's metric: of a share of examples Wilson's, of others by resampling."""
        values = self.example_scores(logits, threshold=threshold)
        if values is None:
            return bootstrap_interval(*self.score_of(logits), resamples=RESAMPLES)
        if np.isin(values, (0.0, 1.0)).all():
            return wilson_interval(float(values.mean()), len(values))
        return bootstrap_interval(lambda drawn: float(values[drawn].mean()), len(values))

    def threshold(self, logits: Array) -> float:
        """Choose by how much no answer must be better than the best span, for the highest score; 0.0 but for qa."""
        return self.best_threshold(self.spans(logits)) if self.task.kind == "qa" else 0.0

    def best_threshold(self, found: Spans) -> float:
        """Choose the threshold; infinite, so that something is always answered, where every question has an answer."""
        if not self.task.unanswerable:
            return math.inf
        return qa.best_threshold(found, self.split["context"][:], self.split["answers"][:], metric=self.task.metric)

    def texts(self, logits: Array, *, threshold: float | None = None) -> list[str]:
        """Return the answers of a qa task."""
        found = self.spans(logits)
        given = self.best_threshold(found) if threshold is None else threshold
        return found.texts(self.split["context"][:], given)

    def spans(self, logits: Array) -> Spans:
        """Find the best span of every question of a qa task."""
        return qa.best_spans(self._check(logits), self._windows)

    def tags(self, logits: Array) -> list[list[str]]:
        """Return a tag for every word of every sentence of a tagging task."""
        ends = np.cumsum([len(words) for words in self.split["words"][:]])
        return [self._names(ids) for ids in np.split(self._tag_ids(logits), ends[:-1])]

    def _tag_ids(self, logits: Array) -> Array:
        """Return the tag of every word of all sentences; a word that has no token, and so no logits, is outside."""
        chosen_T = self._check(logits).argmax(axis=1)
        sizes = np.array([len(words) for words in self.split["words"][:]], dtype=np.int64)
        begins = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        example_T, word_T = np.repeat(self._examples, self._lengths), self._column("word")
        outside = self.task.labels.index(OUTSIDE) if OUTSIDE in self.task.labels else 0
        said = np.full(int(sizes.sum()), outside)
        judged = word_T >= 0
        said[begins[example_T[judged]] + word_T[judged]] = chosen_T[judged]
        return said

    def _names(self, ids: Sequence[int] | Array) -> list[str]:
        return [self.task.labels[n] for n in ids]

    def _check(self, logits: Array) -> Array:
        logits = np.asarray(logits, dtype=np.float64)
        expected = (int(self._lengths.sum()), self.task.outputs)
        if logits.shape != expected or not len(logits):
            raise CompressError(
                f"scores: logits of shape {logits.shape} do not answer these rows, {expected} expected; check that the "
                "model's head is the task's."
            )
        if broken := int((~np.isfinite(logits)).any(axis=1).sum()):
            raise not_finite(broken, len(logits), "tokens")
        return logits

    @cached_property
    def candidates(self) -> Candidates:
        """Tell which rows of a ranking are of the same query."""
        return Candidates.from_split(self.split)

    def _query_scores(self, logits: Array) -> dict[str, Array]:
        return self.candidates.scores(self._ranking_scores(logits))

    def _ranking_scores(self, logits: Array) -> Array:
        """Return the score of each row. CompressError for logits that are not finite, or not of these rows."""
        return metrics.check_logits(self.task, logits, self.candidates.label_R)[0][:, 0]

    @cached_property
    def _lengths(self) -> Array:
        return np.asarray(self.rows["length"][:], dtype=np.int64)

    @cached_property
    def _examples(self) -> Array:
        """Return the example of each row, from 0 without gaps."""
        if self.task.kind == "ranking":
            return self.candidates.query_R
        return np.unique(self.rows["example"][:], return_inverse=True)[1]

    @cached_property
    def _windows(self) -> Windows:
        nulls_R = np.asarray(self.rows["null"][:])
        return Windows(self._column("starts"), self._column("ends"), self._lengths, nulls_R, self._examples)

    def _column(self, name: str) -> Array:
        """Flatten a column of one number per token."""
        whole = self.rows.select_columns(name).with_format("arrow")[:]
        return whole[name].combine_chunks().flatten().to_numpy()


@dataclass(frozen=True, eq=False)
class EvaluationBatches:
    """Hold an evaluator's rows as padded batches on a device, made once, longest first; for models asked over and over.

    tokens_U: the token ids that occur; order_R: the rows' numbers in the order of the batches. For a quick first look
    take fewer examples: `EvaluationBatches.from_evaluator(evaluator.spread(100), collate)`.
    """

    evaluator: Evaluator
    batches: tuple[dict[str, Tensor], ...]
    tokens_U: Tensor
    order_R: NDArray[np.int64]

    @staticmethod
    def from_evaluator(
        evaluator: Evaluator, collate: Batching, *, batch: int = 64, device: torch.device | str = "cpu"
    ) -> EvaluationBatches:
        """Put rows of like lengths into one batch, so that little is padded."""
        import torch

        order_R = np.argsort(-np.asarray(evaluator.rows["length"][:]), kind="stable")
        rows = evaluator.rows.remove_columns("length")
        batches = []
        for start in range(0, len(order_R), batch):
            inputs = collate([rows[int(n)] for n in order_R[start : start + batch]])
            batches.append(
                {name: tensor.to(device) for name, tensor in inputs.items() if name not in ("labels", "index", "query")}
            )
        tokens_U = torch.cat([inputs["input_ids"].flatten() for inputs in batches]).unique()
        return EvaluationBatches(evaluator, tuple(batches), tokens_U, order_R)

    def answers(self, logits: Sequence[Tensor]) -> NDArray[Any]:
        """Join the batches' logits in the order of the rows: (rows, outputs), or (tokens, outputs)."""
        parts: list[NDArray[Any]] = []
        for values, inputs in zip(logits, self.batches, strict=True):
            if values.dim() == 3:
                real_BL = inputs["attention_mask"].bool().cpu()
                parts += [row[real].numpy() for row, real in zip(values, real_BL, strict=True)]
            else:
                parts += list(values[:, None].numpy())
        return np.concatenate([parts[n] for n in np.argsort(self.order_R)])

    def score(self, logits: Sequence[Tensor]) -> float:
        """Compute the task's own metric. Raises CompressError where the logits are not finite."""
        return self.evaluator.scores(self.answers(logits))[self.evaluator.task.metric]
