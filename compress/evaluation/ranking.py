"""Score rankings: how high the relevant passages of each query stand.

The measures are those of trec_eval (ndcg_cut_10, recip_rank of the first ten, map, recall_10 and recall_100), whose
values the tests reproduce. trec_eval's own bindings have no wheels for Linux on ARM, so numpy computes them here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

CUT: Final = 10
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
            gains = np.array([max(relevance.get(each, 0.0), 0.0) for each in ranked(scores)])
            values[n] = _measures(gains, ideal)
    return dict(zip(MEASURES, values.T, strict=True))


def ranked(scores: Mapping[int, float]) -> list[int]:
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
        _discounted(gains) / _discounted(ideal),
        1.0 / (places[0] + 1) if len(places) and places[0] < CUT else 0.0,
        float(precisions.sum()) / len(ideal),
        *(float(hits[:most].sum()) / len(ideal) for most in (10, 100)),
    )


def _discounted(gains: Array) -> float:
    """Compute DCG@10 (Järvelin & Kekäläinen 2002) with the relevance itself as the gain."""
    first = gains[:CUT]
    return float((first / np.log2(np.arange(len(first)) + 2)).sum())
