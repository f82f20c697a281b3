"""Give a passage a number for a query, by which the passages of the query rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from compress.arrays import spaced
from compress.data.task import Task, TaskData, Thresholds, UnsavedTask
from compress.evaluation import metrics
from compress.evaluation.metrics import Scores
from compress.evaluation.ranking import Candidates

if TYPE_CHECKING:
    from datasets import Dataset

    from compress.arrays import Array
    from compress.data.load import DataRequest
    from compress.evaluation.evaluator import Evaluator


class Ranking(Task):
    """Give a number, which is the logit; the highest ranks first.

    The mean over queries of each of `evaluation.ranking.MEASURES`
    """

    kind = "ranking"
    metrics = ("ndcg@10", "mrr@10", "map")
    numeric = True
    problem = "regression"
    own_loss = "lce.relevance"
    shows = False
    ranks = True
    takes_texts = False
    hub_tag = "text-ranking"
    example = '"a query", "a passage"'
    shell = "'a query' --pair 'a passage'"
    samples = (
        ("how to reset a password", "Open the settings and choose a new password."),
        ("how to reset a password", "The parcel arrives on Monday."),
    )
    headline = "The model in this page says how well a passage answers a query."
    unit = ("query", "queries")
    naive = "a random order"

    @classmethod
    def read_files(cls, request: DataRequest) -> UnsavedTask | None:
        """Read queries with passages: see `data.ranking`."""
        from compress.data import load, ranking

        if request.kind is None and not (
            request.detects and ranking.is_ranking(request.source)
        ):
            return None
        metric = cls.choose_metric(request.metric)
        found = ranking.read(request.source, request.text, request.label)
        notes = list(found.notes)
        for examples in found.splits.values():
            notes += examples.notes
        tables = load.with_validation(
            found.splits,
            request.source,
            "queries",
            notes,
            request.seed,
            useful=ranking.are_scorable,
        )
        for role, table in tables.items():
            scorable, more = ranking.keep_scorable(table, f"{found.name} [{role}]")
            if role != "train":
                tables[role] = scorable
                notes += more
        task = cls(cls.kind, found.text, found.label, (), metric)
        return load.unsaved(found.name, task, tables, notes)

    def describe(self, threshold: float | None) -> str:
        query, passage = self.text
        return (
            f"It reads a query ({query}) and a passage ({passage}), and answers with "
            "one number: the higher it is, the better the passage answers the query. "
            "Numbers of different queries are not comparable."
        )

    def configure(self, config: Any, max_length: int) -> None:
        """Keep sentence-transformers from putting the score through a sigmoid."""
        config.sentence_transformers = {
            "activation_fn": "torch.nn.modules.linear.Identity"
        }

    @classmethod
    def scored_unit(cls, metric: str) -> str:
        return "queries"

    def count_rows(self, split: Dataset) -> int:
        return len(set(split["query"][:]))

    def count_examples(self, split: Dataset) -> int:
        return len(Candidates.from_split(split))

    def thin(self, split: Dataset, count: int) -> Dataset:
        """Keep whole queries of about `count` rows, evenly spaced."""
        query_R = np.asarray(split["query"][:])
        queries = np.unique(query_R)
        few = max(1, count * len(queries) // len(split))
        kept = queries[spaced(len(queries), few)]
        return split.select(np.flatnonzero(np.isin(query_R, kept)))

    def subsample(self, exam: Evaluator, count: int) -> Array:
        """Choose whole queries."""
        queries = max(1, count * len(exam) // len(exam.split))
        return self.choose_examples(exam, queries)

    def select(self, exam: Evaluator, examples: Array) -> tuple[Dataset, Array]:
        rows = exam.rows_of(examples)
        return exam.split.select(rows), rows

    def scores(self, exam: Evaluator, logits: Array, threshold: float | None) -> Scores:
        values = self._query_scores(exam, logits)
        return {name: float(column.mean()) for name, column in values.items()}

    def _query_scores(self, exam: Evaluator, logits: Array) -> dict[str, Array]:
        return exam.candidates.scores(self._row_scores(exam, logits))

    def _row_scores(self, exam: Evaluator, logits: Array) -> Array:
        labels = exam.candidates.label_R
        logits = metrics.check_logits(logits, (len(labels), self.outputs))
        metrics.check_numbers(labels)
        return np.asarray(logits[:, 0])

    def agreement(
        self, exam: Evaluator, student: Array, teacher: Array, thresholds: Thresholds
    ) -> float:
        """Measure the share of pairs of a query's passages in the same order."""
        scores = (self._row_scores(exam, logits) for logits in (student, teacher))
        return exam.candidates.pair_agreement(*scores)

    def decide(self, exam: Evaluator, logits: Array, threshold: float | None) -> Array:
        """Return the first passage of each query."""
        return exam.candidates.first(self._row_scores(exam, logits))

    def distance(self, exam: Evaluator, student: Array, teacher: Array) -> float:
        """Measure the mean squared difference; a constant added to all scores of a
        query does not count."""
        difference = exam.candidates.centre(student[:, 0] - teacher[:, 0])
        return float(np.square(difference).mean())

    def example_scores(
        self, exam: Evaluator, logits: Array, threshold: float | None
    ) -> Array:
        return self._query_scores(exam, logits)[self.metric]

    def baselines(self, data: TaskData, split: Dataset) -> dict[str, Scores]:
        from compress.evaluation.baselines import best_matches

        return {
            "random order": self.majority(data, split),
            "BM25": _score(split, best_matches(split)),
        }

    def majority(self, data: TaskData, split: Dataset) -> Scores:
        """Score passages in random order."""
        return _score(split, np.zeros(len(split)))  # ties are broken at random


def _score(split: Dataset, score_R: Array) -> Scores:
    values = Candidates.from_split(split).scores(score_R)
    return {name: float(column.mean()) for name, column in values.items()}
