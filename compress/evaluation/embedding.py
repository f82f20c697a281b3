"""Score sentence vectors: how well their cosines rank pairs of texts, or retrieve the
passages relevant to a query.

Shapes: N texts, E width of the vectors, Q queries, P passages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from compress.arrays import Array, spaced
from compress.data.vector_index import VECTOR_TYPES, pack, unpack
from compress.errors import CompressError, DataError
from compress.evaluation.metrics import Scores, check_finite
from compress.evaluation.ranking import query_scores
from compress.records.run_report import VectorForm

if TYPE_CHECKING:
    from datasets import Dataset


DEPTH: Final = 100
"""Passages ranked for each query."""
SIMILARITY_BLOCK: Final = 256
"""Queries whose cosines with all passages are in memory at once."""


def unit(vectors_NE: Array) -> Array:
    """Scale each vector to length 1, in float32."""
    wide = np.asarray(vectors_NE, dtype=np.float32)
    return wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12)


def scores(
    split: Dataset, vectors_NE: Array, *, queries_NE: Array | None = None
) -> Scores:
    """Compute spearman and pearson for a split with pairs; ndcg@10, mrr@10, map,
    recall@10 and recall@100 for one with passages.

    queries_NE: the vectors of the queries, if another model computes them; passages
    keep those of `vectors_NE`. Raises CompressError for vectors that are not finite or
    do not match the texts.
    """
    values = example_values(split, vectors_NE, queries_NE=queries_NE)
    return mean(values, np.arange(len(next(iter(values.values())))))


def score_forms(
    split: Dataset, vectors_NE: Array, metric: str
) -> tuple[VectorForm, ...]:
    """Score the forms in which an index may store the vectors: see `data.vector_index`,
    whose queries are float32; and the first half, quarter and eighth of the numbers, of
    queries too."""
    width = vectors_NE.shape[1]
    found = list[VectorForm]()
    for form in VECTOR_TYPES:
        packed = pack(vectors_NE, form)
        score = scores(split, unpack(packed, width), queries_NE=vectors_NE)[metric]
        found.append(VectorForm(form, packed[0].nbytes, score))
    for first in (width // part for part in (2, 4, 8)):
        found.append(
            VectorForm(
                f"first {first} numbers",
                4 * first,
                scores(split, vectors_NE[:, :first])[metric],
            )
        )
    return tuple(found)


def example_values(
    split: Dataset, vectors_NE: Array, *, queries_NE: Array | None = None
) -> dict[str, Array]:
    """Return the `cosine` and `relevance` of each pair, or every metric of each query:
    what `mean` averages."""
    vectors_NE = _check_vectors(split, vectors_NE)
    queries_NE = vectors_NE if queries_NE is None else _check_vectors(split, queries_NE)
    asks, related, relevance = _list_judgements(split)
    passages_P = _find_passages(split)
    if not len(passages_P):
        return {
            "cosine": (queries_NE[asks] * vectors_NE[related]).sum(1),
            "relevance": relevance,
        }
    texts = np.array(split["text"][:], dtype=object)
    numbers_Q = np.unique(asks)
    ranked = list[dict[int, float]]()
    for start in range(0, len(numbers_Q), SIMILARITY_BLOCK):
        block = numbers_Q[start : start + SIMILARITY_BLOCK]
        cosines = queries_NE[block] @ vectors_NE[passages_P].T
        depth = min(DEPTH + 1, cosines.shape[1])
        nearest = np.argpartition(-cosines, depth - 1, axis=1)[:, :depth]
        ranked += [
            _find_others(texts, query, passages_P[places], row[places])
            for query, row, places in zip(block, cosines, nearest, strict=True)
        ]
    return dict(query_scores(ranked, _group_judgements(asks, related, relevance)))


def count_examples(split: Dataset) -> int:
    """Count what the metrics are computed over: the judged pairs of texts, or the
    queries of a split with passages."""
    judged = [len(others) for others in split["related"][:]]
    return sum(map(bool, judged)) if len(_find_passages(split)) else sum(judged)


def word_scores(split: Dataset) -> Scores:
    """Score words instead of vectors: BM25 of a split with passages, else the cosine of
    TF-IDF weights.

    Raises DataError for texts without words.
    """
    from compress.data.retrieval import WordIndex

    asks, related, relevance = _list_judgements(split)
    passages_P = _find_passages(split)
    texts = np.array(split["text"][:], dtype=object)
    if len(passages_P):
        queries_Q = np.unique(asks)
        nearest, values = WordIndex.from_texts(texts[passages_P].tolist()).search(
            texts[queries_Q].tolist(), min(DEPTH + 1, len(passages_P))
        )
        ranked = [
            _find_others(texts, query, passages_P[places], row)
            for query, places, row in zip(queries_Q, nearest, values, strict=True)
        ]
        return mean(
            dict(query_scores(ranked, _group_judgements(asks, related, relevance))),
            np.arange(len(queries_Q)),
        )
    from sklearn.feature_extraction.text import TfidfVectorizer

    try:
        words = TfidfVectorizer(sublinear_tf=True, token_pattern=r"\w+").fit_transform(
            texts
        )
    except ValueError as error:
        raise DataError(
            f"these texts have no words ({error}); check the text columns."
        ) from error
    cosine = np.asarray(words[asks].multiply(words[related]).sum(axis=1)).ravel()
    return mean({"cosine": cosine, "relevance": relevance}, np.arange(len(asks)))


def mean(values: dict[str, Array], drawn: Array) -> Scores:
    """Compute the metrics of the drawn examples, which may repeat."""
    if "cosine" not in values:
        return {name: float(column[drawn].mean()) for name, column in values.items()}
    from scipy.stats import rankdata

    cosine = values["cosine"][drawn].astype(np.float64)
    relevance = values["relevance"][drawn].astype(np.float64)
    if min(np.ptp(cosine), np.ptp(relevance)) < 1e-9:
        return {"spearman": 0.0, "pearson": 0.0}
    spearman = float(np.corrcoef(rankdata(cosine), rankdata(relevance))[0, 1])
    return {
        "spearman": spearman,
        "pearson": float(np.corrcoef(cosine, relevance)[0, 1]),
    }


def similarity(one_NE: Array, other_NE: Array) -> float:
    """Compute the mean cosine between two models' vectors of the same texts; for
    different widths, Spearman's rho between the cosines of neighbouring texts."""
    one_NE = unit(one_NE)
    other_NE = unit(other_NE)
    if one_NE.shape == other_NE.shape:
        return float((one_NE * other_NE).sum(1).mean())
    from scipy.stats import spearmanr

    cosines = [(vectors[:-1] * vectors[1:]).sum(1) for vectors in (one_NE, other_NE)]
    return float(spearmanr(*cosines).statistic)


def select(split: Dataset, chosen: Array) -> Dataset:
    """Select texts by number, and renumber the judgements among them."""
    from datasets import Dataset, Features

    place = np.full(len(split), -1)
    place[chosen] = np.arange(len(chosen))
    rows = split.select(chosen)
    related = []
    relevance = []
    for others, gains in zip(rows["related"][:], rows["relevance"][:], strict=True):
        remaining = [
            (int(place[other]), gain)
            for other, gain in zip(others, gains, strict=True)
            if place[other] >= 0
        ]
        related.append([other for other, _ in remaining])
        relevance.append([gain for _, gain in remaining])
    columns = {
        "text": rows["text"][:],
        "related": related,
        "relevance": relevance,
        "passage": rows["passage"][:],
    }
    return Dataset.from_dict(
        columns, features=Features({name: split.features[name] for name in columns})
    )


def subsample(split: Dataset, count: int) -> Array:
    """Choose about `count` texts: evenly spaced queries with the texts they are judged
    with, then other texts."""
    if count >= len(split):
        return np.arange(len(split))
    related = split["related"][:]
    queries = np.flatnonzero([len(others) > 0 for others in related])
    chosen = set[int]()
    for query in queries[spaced(len(queries), count)]:
        group = {int(query), *related[query]}
        if len(chosen | group) > count and chosen:
            break
        chosen |= group
    rest = np.setdiff1d(np.arange(len(split)), sorted(chosen))
    return np.sort(
        np.array(
            [*chosen, *rest[spaced(len(rest), count - len(chosen))]],
            dtype=np.int64,
        )
    )


def _find_passages(split: Dataset) -> Array:
    return np.flatnonzero(np.asarray(split["passage"][:]))


def _find_others(
    texts: Array, query: int, passages: Array, found: Array
) -> dict[int, float]:
    """Return passage -> score without the query's own text, which never finds
    itself."""
    return {
        passage: score
        for passage, score in zip(passages.tolist(), found.tolist(), strict=True)
        if texts[passage] != texts[query]
    }


def _list_judgements(split: Dataset) -> tuple[Array, Array, Array]:
    """Return the query, in ascending order, the other text and the relevance of every
    judgement.

    Raises CompressError for a split without judgements.
    """
    related = split["related"][:]
    relevance = split["relevance"][:]
    asks = np.repeat(np.arange(len(split)), [len(others) for others in related])
    if not len(asks):
        raise CompressError(
            "scores: the split has no judgements, so vectors cannot be scored; give "
            "pairs of texts with a similarity, or queries with their passages"
        )
    flat_related, flat_relevance = (
        np.array([cell for row in rows for cell in row])
        for rows in (related, relevance)
    )
    return asks, flat_related.astype(np.int64), flat_relevance.astype(np.float32)


def _group_judgements(
    asks: Array, related: Array, relevance: Array
) -> list[dict[int, float]]:
    """Return the judgements of each query: text -> relevance."""
    cuts = np.flatnonzero(np.diff(asks)) + 1
    return [
        dict(zip(others.tolist(), gains.tolist(), strict=True))
        for others, gains in zip(
            np.split(related, cuts), np.split(relevance, cuts), strict=True
        )
    ]


def _check_vectors(split: Dataset, vectors_NE: Array) -> Array:
    vectors_NE = np.asarray(vectors_NE)
    check_finite(vectors_NE, (len(split), vectors_NE.shape[-1]), "texts")
    return unit(vectors_NE)
