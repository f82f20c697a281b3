"""Score rankings: how high the relevant passages of each query rank.

The measures are trec_eval's (ndcg_cut_10, recip_rank of the first ten, map, recall_10
and recall_100), whose values the tests reproduce. They are computed with numpy because
trec_eval's bindings have no wheels for Linux on ARM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from compress.arrays import Array, Doubles, Longs

if TYPE_CHECKING:
    from datasets import Dataset


RANK_CUT: Final = 10
MOST_CANDIDATES: Final = 1 << 24
"""Maximum candidates of a query, so that each has a unique number."""
MEASURES: Final = ("ndcg@10", "mrr@10", "map", "recall@10", "recall@100")


def query_scores(
    ranked: Sequence[Mapping[int, float]], judged: Sequence[Mapping[int, float]]
) -> dict[str, Doubles]:
    """Compute MEASURES for every query: (queries,) each.

    ranked  candidate -> score; the highest ranks first
    judged  candidate -> relevance; relevant if above 0, and the gain of ndcg@10; 0 for
            others

    Relevant candidates that are not ranked count as missed. Ties are broken by a hash
    of the candidates' numbers, so that a model that cannot tell candidates apart gains
    nothing from their order in a file. A query without relevant candidates scores 0.0.
    """
    values = np.zeros((len(ranked), len(MEASURES)))
    for n, (scores, relevance) in enumerate(zip(ranked, judged, strict=True)):
        ideal = np.sort([gain for gain in relevance.values() if gain > 0])[::-1]
        if not len(ideal):
            continue
        gains = np.array(
            [
                max(relevance.get(candidate, 0.0), 0.0)
                for candidate in rank_candidates(scores)
            ]
        )
        hits = gains > 0
        places = np.flatnonzero(hits)
        precisions = np.cumsum(hits)[places] / (places + 1)
        values[n] = (
            _discounted_gain(gains) / _discounted_gain(ideal),
            1.0 / (places[0] + 1) if len(places) and places[0] < RANK_CUT else 0.0,
            float(precisions.sum()) / len(ideal),
            *(float(hits[:cut].sum()) / len(ideal) for cut in (10, 100)),
        )
    return dict(zip(MEASURES, values.T, strict=True))


@dataclass(frozen=True)
class Candidates:
    """Hold the rows of a split as the candidates of their queries.

    query_R   the query of each row, counted from 0 without gaps
    label_R   its relevance
    key_R     the candidate's number, which does not depend on the other queries of the
              split: see `query_scores`
    """

    query_R: Longs
    label_R: Doubles
    key_R: Longs

    @staticmethod
    def from_split(split: Dataset) -> Candidates:
        """Read the columns query and label of a split."""
        named_R = np.asarray(split["query"][:], dtype=np.int64)
        query_R = np.unique(named_R, return_inverse=True)[1]
        order_R = np.argsort(query_R, kind="stable")
        sizes_Q = np.bincount(query_R)
        begins_Q = np.cumsum(sizes_Q) - sizes_Q
        place_R = np.empty_like(query_R)
        place_R[order_R] = np.arange(len(query_R)) - begins_Q[query_R[order_R]]
        labels = np.asarray(split["label"][:], dtype=np.float64)
        return Candidates(query_R, labels, named_R * MOST_CANDIDATES + place_R)

    def __len__(self) -> int:
        """Count the queries."""
        return int(self.query_R.max(initial=-1)) + 1

    def group(self, values_R: Array) -> list[dict[int, float]]:
        """Group a value of each row by query: candidate -> value."""
        groups: list[dict[int, float]] = [{} for _ in range(len(self))]
        for query, key, value in zip(
            self.query_R.tolist(), self.key_R.tolist(), values_R.tolist(), strict=True
        ):
            groups[query][key] = value
        return groups

    def scores(self, score_R: Array) -> dict[str, Doubles]:
        """Compute MEASURES of every query from the score of each row."""
        return query_scores(self.group(score_R), self.group(self.label_R))

    def first(self, score_R: Array) -> Longs:
        """Return the candidate of each query that ranks first: (queries,)."""
        return np.array(
            [rank_candidates(scores)[0] for scores in self.group(score_R)],
            dtype=np.int64,
        )

    def pair_agreement(self, one_R: Array, other_R: Array) -> float:
        """Compute the share of pairs of a query's candidates that both scores rank
        alike, averaged over queries.

        It equals (1 + Kendall's tau) / 2 without ties; ties are broken as in
        `query_scores`. Queries with one candidate are left out; 1.0 if no query has
        two.
        """
        shares = []
        for one, other in zip(self.group(one_R), self.group(other_R), strict=True):
            if len(one) > 1:
                place = {key: n for n, key in enumerate(rank_candidates(other))}
                order = np.array([place[key] for key in rank_candidates(one)])
                later = np.triu_indices(len(order), 1)
                shares.append(float((order[later[0]] < order[later[1]]).mean()))
        return float(np.mean(shares)) if shares else 1.0

    def centre(self, score_R: Array) -> Array:
        """Subtract the mean score of its query from each score."""
        means_Q = np.bincount(self.query_R, score_R) / np.bincount(self.query_R)
        return np.asarray(score_R - means_Q[self.query_R])


def rank_candidates(scores: Mapping[int, float]) -> list[int]:
    """Return the candidates from the highest score to the lowest; see `query_scores`
    for ties."""
    numbers = np.fromiter(scores, np.int64, len(scores))
    # SplitMix64's finaliser (Steele et al. 2014) as the hash that breaks ties
    mixed = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    order = np.lexsort((mixed, -np.fromiter(scores.values(), np.float64, len(scores))))
    return [int(number) for number in numbers[order]]


def _discounted_gain(gains: Array) -> float:
    """Compute DCG@10 (Järvelin & Kekäläinen 2002), with the relevance itself as the
    gain."""
    first = gains[:RANK_CUT]
    return float((first / np.log2(np.arange(len(first)) + 2)).sum())
