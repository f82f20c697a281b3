"""Score rankings: how high the relevant passages of each query stand.

The measures are those of trec_eval (ndcg_cut_10, recip_rank of the first ten, map, recall_10 and recall_100), whose
values the tests reproduce. trec_eval's own bindings have no wheels for Linux on ARM, so numpy computes them here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from datasets import Dataset

Array = NDArray[Any]

CUT: Final = 10
MOST_CANDIDATES: Final = 1 << 24
"""Candidates of a query at most, so that each has a number of its own."""
MEASURES: Final = ("ndcg@10", "mrr@10", "map", "recall@10", "recall@100")


def query_scores(
    found: Sequence[Mapping[int, float]], judged: Sequence[Mapping[int, float]]
) -> dict[str, NDArray[np.float64]]:
    """Compute MEASURES for every query: (queries,) each.

    found   the score of each candidate, by its number; the highest comes first
    judged  the relevance of judged candidates: above 0 is relevant, and is the gain of ndcg@10; of others it is 0

    Relevant candidates that were not found count as missed. Equal scores are put in an order that depends on nothing
    but the candidates' numbers, and not on which of them is the greater: a model that cannot tell candidates apart
    gains nothing by the order in which a file lists them. A query without relevant candidates has 0.0.
    """
    values = np.zeros((len(found), len(MEASURES)))
    for n, (scores, relevance) in enumerate(zip(found, judged, strict=True)):
        ideal = np.sort([gain for gain in relevance.values() if gain > 0])[::-1]
        if len(ideal):
            gains = np.array([max(relevance.get(each, 0.0), 0.0) for each in rank_candidates(scores)])
            values[n] = _measures(gains, ideal)
    return dict(zip(MEASURES, values.T, strict=True))


@dataclass(frozen=True)
class Candidates:
    """Hold which rows of a split are the candidates of one query.

    query_R   the number of each row's query, from 0 without gaps
    place_R   the number of each row among those of its query
    label_R   its relevance
    key_R     a number that is the row's own, whatever other queries are in the split: see `query_scores`
    """

    query_R: NDArray[np.int64]
    place_R: NDArray[np.int64]
    label_R: NDArray[np.float64]
    key_R: NDArray[np.int64]

    @staticmethod
    def from_split(split: Dataset) -> Candidates:
        """Read the columns query and label of a split."""
        named_R = np.asarray(split["query"][:], dtype=np.int64)
        query_R = np.unique(named_R, return_inverse=True)[1]
        order_R = np.argsort(query_R, kind="stable")
        begins_Q = np.concatenate([[0], np.cumsum(np.bincount(query_R))[:-1]])
        place_R = np.empty_like(query_R)
        place_R[order_R] = np.arange(len(query_R)) - begins_Q[query_R[order_R]]
        labels = np.asarray(split["label"][:], dtype=np.float64)
        return Candidates(query_R, place_R, labels, named_R * MOST_CANDIDATES + place_R)

    def __len__(self) -> int:
        """Count the queries."""
        return int(self.query_R.max(initial=-1)) + 1

    def of_each(self, values_R: Array) -> list[dict[int, float]]:
        """Gather a value of each row by query: the row's own number -> its value."""
        found: list[dict[int, float]] = [{} for _ in range(len(self))]
        for query, key, value in zip(self.query_R.tolist(), self.key_R.tolist(), values_R.tolist(), strict=True):
            found[query][key] = value
        return found

    def scores(self, score_R: Array) -> dict[str, NDArray[np.float64]]:
        """Compute MEASURES of every query from the score of each row."""
        return query_scores(self.of_each(score_R), self.of_each(self.label_R))

    def first(self, score_R: Array) -> NDArray[np.int64]:
        """Return the candidate of each query that stands first, by its own number: (queries,)."""
        return np.array([rank_candidates(scores)[0] for scores in self.of_each(score_R)], dtype=np.int64)

    def alike(self, one_R: Array, other_R: Array) -> float:
        """Compute the share of pairs of a query's candidates that both scores put in the same order, mean over queries.

        It is (1 + Kendall's tau) / 2 where no scores are equal; equal ones have the order of `query_scores`. Queries
        with one candidate are passed over; 1.0 where no query has two.
        """
        shares = []
        for one, other in zip(self.of_each(one_R), self.of_each(other_R), strict=True):
            if len(one) > 1:
                place = {key: n for n, key in enumerate(rank_candidates(other))}
                order = np.array([place[key] for key in rank_candidates(one)])
                later = np.triu_indices(len(order), 1)
                shares.append(float((order[later[0]] < order[later[1]]).mean()))
        return float(np.mean(shares)) if shares else 1.0

    def centred(self, score_R: Array) -> Array:
        """Subtract from each score the mean of its query's: what all candidates share puts none before another."""
        means_Q = np.bincount(self.query_R, score_R) / np.bincount(self.query_R)
        return np.asarray(score_R - means_Q[self.query_R])


def rank_candidates(scores: Mapping[int, float]) -> list[int]:
    """Return the candidates from the highest score to the lowest; see `query_scores` for equal ones."""
    names = np.fromiter(scores, np.int64, len(scores))
    order = np.lexsort((mix(names), -np.fromiter(scores.values(), np.float64, len(scores))))
    return [int(name) for name in names[order]]


def mix(names: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Scatter whole numbers, different ones differently: SplitMix64's last step (Steele et al. 2014)."""
    mixed = names.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


def _measures(gains: Array, ideal: Array) -> tuple[float, ...]:
    """Compute MEASURES of one query from the gains in the order found, and all that there are, in the best order."""
    hits = gains > 0
    places = np.flatnonzero(hits)
    precisions = np.cumsum(hits)[places] / (places + 1)
    return (
        _sum_discounted(gains) / _sum_discounted(ideal),
        1.0 / (places[0] + 1) if len(places) and places[0] < CUT else 0.0,
        float(precisions.sum()) / len(ideal),
        *(float(hits[:most].sum()) / len(ideal) for most in (10, 100)),
    )


def _sum_discounted(gains: Array) -> float:
    """Compute DCG@10 (Järvelin & Kekäläinen 2002) with the relevance itself as the gain."""
    first = gains[:CUT]
    return float((first / np.log2(np.arange(len(first)) + 2)).sum())
