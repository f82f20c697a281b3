"""Define tasks and their data sets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from compress import records
from compress.arguments import check_arguments
from compress.data.text_preparation import AS_IT_IS, TextPreparation
from compress.errors import DataError, did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

Kind = records.Kind

METRICS: Final[Mapping[Kind, tuple[str, ...]]] = MappingProxyType(
    {
        "classification": ("accuracy", "f1", "matthews"),
        "multilabel": ("f1", "f1_macro", "accuracy"),
        "regression": ("pearson", "spearman"),
        "tagging": ("f1", "precision", "recall", "accuracy"),
        "qa": ("f1", "exact"),
        "embedding": (
            "spearman",
            "pearson",
            "ndcg@10",
            "mrr@10",
            "map",
            "recall@10",
            "recall@100",
        ),
        "ranking": ("ndcg@10", "mrr@10", "map"),
    }
)
"""The metrics that can choose a checkpoint, by kind; the first is the default."""


def check_metric(kind: Kind, metric: str | None) -> str:
    """Return the metric, or the default of the kind if it is None. Raises DataError for
    an unknown kind or metric."""
    if kind not in METRICS:
        raise DataError(f"no kind of task {kind!r}.{did_you_mean(kind, METRICS)}")
    if metric is not None and metric not in METRICS[kind]:
        raise DataError(
            f"metric {metric!r} does not score a {kind} "
            f"task.{did_you_mean(metric, METRICS[kind])}"
        )
    return metric or METRICS[kind][0]


@check_arguments
@dataclass(frozen=True)
class Task:
    """Describe a prediction task over a text, a pair of texts, the words of a sentence,
    or a question and its context.

    kind    classification (one of `labels`), multilabel (any of `labels`), regression
            (a number), tagging (one of `labels` for every word), qa (a span of the
            context that answers the question), embedding (a vector, near those of texts
            with a similar meaning), ranking (a number for a query and a passage;
            passages of a query rank by it, highest first)
    text    the names of the one or two text columns in the source
    label   the name of the label column in the source; several 0/1 columns are joined
            by commas
    labels  the class names in the order of the logits, for tagging IOB2 tags; empty for
            other kinds
    metric  the score that chooses the best checkpoint, higher is better: one of
            METRICS[kind]
    unanswerable    qa: some questions have no answer in their context, and the model
                    may give none
    width   embedding: the size of a vector, as the teacher's; 0 until the teacher is
            known
    preparation    embedding: the prompts of the teacher, which its texts and those of
                   its students get
    """

    kind: Kind
    text: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    metric: str
    unanswerable: bool = False
    width: int = 0
    preparation: TextPreparation = AS_IT_IS

    @property
    def outputs(self) -> int:
        """Count the logits per row, or per token if the task is `tokenwise`; for
        embeddings the size of the vector."""
        return 2 if self.kind == "qa" else self.width or len(self.labels) or 1

    @property
    def pair(self) -> bool:
        return len(self.text) == 2

    @property
    def numeric(self) -> bool:
        """Check whether the model predicts a number."""
        return self.kind in ("regression", "ranking")

    @property
    def tokenwise(self) -> bool:
        """Check whether the model predicts for every token instead of once for the
        row."""
        return self.kind in ("tagging", "qa")


@check_arguments
@dataclass(frozen=True)
class TaskData:
    """Hold a task with its splits.

    Every split has these columns, whatever the source calls them:

    text, text_pair (pairs only), label    the label is an int class id, a float, or a
                                           list of 0.0/1.0 floats (one per class),
                                           depending on `task.kind`
    words, tags                            tagging: lists of strings and of int class
                                           ids
    query                                  ranking: an int, the same for all passages of
                                           a query
    teacher                                ranking: a teacher's score of the passage, a
                                           float, if the source has them
    id, question, context, answers, starts qa: the correct answers, and where each
    begins in the context, in
                                           characters; empty lists if the context has no
                                           answer
    text, related, relevance, scores,      embedding: a text; the numbers of the rows
                                           that it is judged with, their
    passage                                relevance, and a teacher's scores of them, if
                                           there are any; whether it is a passage that
                                           queries retrieve (if no row is, texts are
                                           compared in pairs). See `data.embedding`

    `test` is None if the source has no labelled test split. `fingerprint` changes when
    any row or class name does. `notes` tell the user which splits were made or skipped,
    and what was guessed.
    """

    name: str
    task: Task
    train: Dataset
    validation: Dataset
    test: Dataset | None
    fingerprint: str
    notes: tuple[str, ...] = ()

    @property
    def label_scale(self) -> tuple[float, float]:
        """Return the mean and the standard deviation of a regression's labels; 1 if
        they are all the same."""
        known = self.train if "label" in self.train.column_names else self.validation
        labels = known["label"][:]
        mean = fmean(labels)
        return mean, sqrt(fmean((label - mean) ** 2 for label in labels)) or 1.0


class UnsavedTask(NamedTuple):
    """Hold a task before its splits are written to the cache."""

    name: str
    task: Task
    batches: Mapping[Any, Iterable[pa.RecordBatch]]
    notes: Sequence[str]


class Examples(NamedTuple):
    """Hold the examples of a file: a table of the kind's columns in TaskData (with tags
    by name), the group of each row (a group is held out as a whole), and notes for the
    user."""

    table: pa.Table
    groups: list[int]
    notes: tuple[str, ...] = ()
