"""Define tasks and data sets: what is to be predicted, and the examples it is learned from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from compress.records import run_report

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

Kind = run_report.Kind

METRICS: Final[Mapping[Kind, tuple[str, ...]]] = MappingProxyType(
    {
        "classification": ("accuracy", "f1", "matthews"),
        "multilabel": ("f1", "f1_macro", "accuracy"),
        "regression": ("pearson", "spearman"),
        "tagging": ("f1", "precision", "recall", "accuracy"),
        "qa": ("f1", "exact"),
        "embedding": ("spearman", "pearson", "ndcg@10", "mrr@10", "map", "recall@10", "recall@100"),
        "ranking": ("ndcg@10", "mrr@10", "map"),
    }
)
"""The metrics that can choose a checkpoint, by kind; the first is the default."""


@dataclass(frozen=True)
class Task:
    """Describe a prediction task over a sentence, a pair of sentences, the words of one, or a question and its text.

    kind    classification (one of `labels`), multilabel (any of `labels`), regression (one number),
            tagging (one of `labels` for every word), qa (a span of the text that answers the question), embedding (a
            vector of the text, near those of texts of like meaning), ranking (one number for a query and a passage: the
            higher, the earlier the passage stands among those of its query)
    text    the source's own names of the one or two text columns
    label   the source's own name of the label column; several 0/1 columns are joined by commas
    labels  the class names in the order of the logits, in tagging IOB2 tags; empty where the answer is a number, a span
            or a vector
    metric  the score that chooses the best checkpoint, higher is better: one of METRICS[kind]
    unanswerable    qa: some questions have no answer in their text, and to say so is an answer
    width   embedding: numbers of a vector, as the teacher has them; 0 before the teacher is known
    prompts embedding: what the teacher reads before a text that asks, and before one that is to be found
    """

    kind: Kind
    text: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    metric: str
    unanswerable: bool = False
    width: int = 0
    prompts: tuple[str, str] = ("", "")

    @property
    def outputs(self) -> int:
        """Count the logits per example, or per token where it is `tokenwise`: in qa of being the first and last; of an
        embedding the numbers of the vector."""
        return 2 if self.kind == "qa" else self.width or len(self.labels) or 1

    @property
    def pair(self) -> bool:
        return len(self.text) == 2

    @property
    def numeric(self) -> bool:
        """Return True if the answer is one number, without a class."""
        return self.kind in ("regression", "ranking")

    @property
    def tokenwise(self) -> bool:
        """Return True if a model answers for every token instead of once for the row."""
        return self.kind in ("tagging", "qa")


@dataclass(frozen=True)
class TaskData:
    """Hold a task with its splits.

    Whatever the source called them, every split has the columns

    text, text_pair (pairs only), label    the label an int class id, a float, or a list of 0.0/1.0 floats (one per
                                           class), as `task.kind` says
    words, tags                            tagging: lists of strings and of int class ids
    query                                  ranking: an int, the same for all passages of a query
    id, question, context, answers, starts qa: the answers that count as right, and at which character of the context
                                           each begins; none where the context holds no answer
    text, related, relevance, passage      embedding: a text each; the numbers of the rows that it was compared with,
                                           and how near they are said to be; whether it is one of those to be found by
                                           the texts that ask (none: texts are compared in pairs). See
                                           `data.embedding`

    `test` is None where the source has none, or one without labels. `fingerprint` changes when any row or name does.
    """

    name: str
    task: Task
    train: Dataset
    validation: Dataset
    test: Dataset | None
    fingerprint: str
    notes: tuple[str, ...] = ()
    """Notes for the reader: splits made or passed over, guesses that were taken."""


class Examples(NamedTuple):
    """Hold a file's examples: a table of the columns that TaskData promises for the kind (tags still by name), the
    group of each row, which is never split when some are held out, and what the reader should know."""

    table: pa.Table
    groups: list[int]
    notes: tuple[str, ...] = ()
