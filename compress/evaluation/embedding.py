"""Score sentence vectors: how well their cosines order pairs of texts, or find the texts that answer others.

Shapes: N texts, E width of the vectors, Q texts that ask, P passages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from compress.data.retrieval import bm25
from compress.errors import CompressError, DataError
from compress.evaluation.metrics import not_finite
from compress.evaluation.ranking import query_scores

if TYPE_CHECKING:
    from datasets import Dataset

Array = NDArray[Any]

DEPTH: Final = 100
"""Passages of a query that are ranked."""
BLOCK: Final = 256
"""Queries whose cosines with all passages are held at once."""


def unit(vectors_NE: Array) -> Array:
    """Divide each vector by its length, float32."""
    wide = np.asarray(vectors_NE, dtype=np.float32)
    return wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12)


def scores(split: Dataset, vectors_NE: Array, *, asking_NE: Array | None = None) -> dict[str, float]:
    """Compute spearman and pearson of a split with pairs; ndcg@10, mrr@10, map, recall@10 and recall@100 of one with
    passages.

    asking_NE: the vectors of the texts that ask, where another model computes them; those of the first are indexed.
    Raises CompressError for vectors that are not finite or are not of these texts.
    """
    found = examples(split, vectors_NE, asking_NE=asking_NE)
    return mean(found, np.arange(len(next(iter(found.values())))))


def compact_scores(split: Dataset, vectors_NE: Array, metric: str) -> dict[str, float]:
    """Score forms of the vectors that take less room in an index: cut to half, a quarter and an eighth of their
    numbers, with numbers in 8 bits (each dimension from its least to its most), and in one bit (their signs)."""
    width = vectors_NE.shape[1]
    forms: dict[str, Array] = {f"{width // part} numbers": vectors_NE[:, : width // part] for part in (2, 4, 8)}
    least, most = vectors_NE.min(0), vectors_NE.max(0)
    step = np.maximum(most - least, 1e-12) / 255
    forms["8 bits"] = least + step * np.round((vectors_NE - least) / step)
    forms["1 bit"] = np.where(vectors_NE > 0, 1.0, -1.0)
    return {name: scores(split, form)[metric] for name, form in forms.items()}


def examples(split: Dataset, vectors_NE: Array, *, asking_NE: Array | None = None) -> dict[str, Array]:
    """Return what each example adds: of a pair its `cosine` and `relevance`, of a query each of its metrics."""
    vectors_NE = _check_vectors(split, vectors_NE)
    asking_NE = vectors_NE if asking_NE is None else _check_vectors(split, asking_NE)
    asks, related, relevance = _list_judgements(split)
    passages_P = _find_passages(split)
    if not len(passages_P):
        return {"cosine": (asking_NE[asks] * vectors_NE[related]).sum(1), "relevance": relevance}
    queries_Q, found = np.unique(asks), list[dict[int, float]]()
    for start in range(0, len(queries_Q), BLOCK):
        some = queries_Q[start : start + BLOCK]
        cosines = asking_NE[some] @ vectors_NE[passages_P].T
        depth = min(DEPTH + 1, cosines.shape[1])
        nearest = np.argpartition(-cosines, depth - 1, axis=1)[:, :depth]
        found += [
            {int(passages_P[p]): float(row[p]) for p in places if passages_P[p] != query}  # a text does not find itself
            for query, row, places in zip(some, cosines, nearest, strict=True)
        ]
    return dict(query_scores(found, _group_judgements(asks, related, relevance)))


def word_scores(split: Dataset) -> dict[str, float]:
    """Score the texts' words instead of vectors: BM25 where passages are found, else the cosine of TF-IDF weights.

    Raises DataError for texts without words.
    """
    asks, related, relevance = _list_judgements(split)
    passages_P, texts = _find_passages(split), np.array(split["text"][:], dtype=object)
    if len(passages_P):
        queries_Q = np.unique(asks)
        nearest, values = bm25(texts[passages_P].tolist(), texts[queries_Q].tolist(), DEPTH)
        found = [
            dict(zip(passages_P[places].tolist(), row.tolist(), strict=True))
            for places, row in zip(nearest, values, strict=True)
        ]
        scored: dict[str, Array] = dict(query_scores(found, _group_judgements(asks, related, relevance)))
        return mean(scored, np.arange(len(queries_Q)))
    from sklearn.feature_extraction.text import TfidfVectorizer

    try:
        words = TfidfVectorizer(sublinear_tf=True, token_pattern=r"\w+").fit_transform(texts)
    except ValueError as error:
        raise DataError(f"these texts hold no words ({error}); look at the text columns.") from error
    cosine = np.asarray(words[asks].multiply(words[related]).sum(axis=1)).ravel()
    return mean({"cosine": cosine, "relevance": relevance}, np.arange(len(asks)))


def mean(found: dict[str, Array], drawn: Array) -> dict[str, float]:
    """Compute the metrics of these examples, repeats among them."""
    if "cosine" not in found:
        return {name: float(values[drawn].mean()) for name, values in found.items()}
    from scipy.stats import rankdata

    cosine, relevance = found["cosine"][drawn].astype(np.float64), found["relevance"][drawn].astype(np.float64)
    if min(np.ptp(cosine), np.ptp(relevance)) < 1e-9:
        return {"spearman": 0.0, "pearson": 0.0}
    spearman = float(np.corrcoef(rankdata(cosine), rankdata(relevance))[0, 1])
    return {"spearman": spearman, "pearson": float(np.corrcoef(cosine, relevance)[0, 1])}


def score_of(split: Dataset, vectors_NE: Array, metric: str) -> tuple[Callable[[Array], float], int]:
    """Return the function from numbers of examples (pairs, or queries) to their metric, and how many there are."""
    found = examples(split, vectors_NE)
    return lambda drawn: mean(found, drawn)[metric], len(next(iter(found.values())))


def similarity(one_NE: Array, other_NE: Array) -> float:
    """Return the mean cosine between two models' vectors of the same texts; of other widths, Spearman's rho of the
    cosines of neighbouring texts."""
    one_NE, other_NE = unit(one_NE), unit(other_NE)
    if one_NE.shape == other_NE.shape:
        return float((one_NE * other_NE).sum(1).mean())
    from scipy.stats import spearmanr

    apart = [(each[:-1] * each[1:]).sum(1) for each in (one_NE, other_NE)]
    return float(spearmanr(*apart).statistic)


def keep(split: Dataset, chosen: Array) -> Dataset:
    """Keep these texts, and the judgements among them, by their new numbers."""
    from datasets import Dataset

    place = np.full(len(split), -1)
    place[chosen] = np.arange(len(chosen))
    rows = split.select(chosen)
    related, relevance = [], []
    for others, gains in zip(rows["related"][:], rows["relevance"][:], strict=True):
        kept = [(int(place[other]), gain) for other, gain in zip(others, gains, strict=True) if place[other] >= 0]
        related.append([other for other, _ in kept])
        relevance.append([gain for _, gain in kept])
    columns = {"text": rows["text"][:], "related": related, "relevance": relevance, "passage": rows["passage"][:]}
    return Dataset.from_dict(columns, features=split.features)


def spread(split: Dataset, count: int) -> Array:
    """Choose about `count` texts: judged ones, evenly spread, with what they were compared with, then others."""
    if count >= len(split):
        return np.arange(len(split))
    related = split["related"][:]
    asking = np.flatnonzero([len(each) > 0 for each in related])
    chosen: set[int] = set()
    for one in asking[_evenly(len(asking), count)]:
        group = {int(one), *related[one]}
        if len(chosen | group) > count and chosen:
            break
        chosen |= group
    rest = np.setdiff1d(np.arange(len(split)), sorted(chosen))
    return np.sort(np.array([*chosen, *rest[_evenly(len(rest), count - len(chosen))]], dtype=np.int64))


def _evenly(of: int, count: int) -> Array:
    return np.unique(np.linspace(0, of - 1, min(count, of), dtype=int)) if of and count > 0 else np.arange(0)


def _find_passages(split: Dataset) -> Array:
    return np.flatnonzero(np.asarray(split["passage"][:]))


def _list_judgements(split: Dataset) -> tuple[Array, Array, Array]:
    """Return for every judgement the text that asks, in their order, the other one, and how near it is.

    Raises CompressError where there is none.
    """
    related, relevance = split["related"][:], split["relevance"][:]
    asks = np.repeat(np.arange(len(split)), [len(each) for each in related])
    if not len(asks):
        raise CompressError(
            "scores: none of these texts was compared with another, so nothing says how near they are; give pairs of "
            "texts with a number, or texts that ask with texts to be found"
        )
    flat = [np.array([one for each in cells for one in each]) for cells in (related, relevance)]
    return asks, flat[0].astype(np.int64), flat[1].astype(np.float32)


def _group_judgements(asks: Array, related: Array, relevance: Array) -> list[dict[int, float]]:
    """Return the judgements of each text that asks."""
    cuts = np.flatnonzero(np.diff(asks)) + 1
    return [
        dict(zip(others.tolist(), gains.tolist(), strict=True))
        for others, gains in zip(np.split(related, cuts), np.split(relevance, cuts), strict=True)
    ]


def _check_vectors(split: Dataset, vectors_NE: Array) -> Array:
    if len(vectors_NE) != len(split) or np.ndim(vectors_NE) != 2:
        raise CompressError(f"scores: vectors of shape {np.shape(vectors_NE)} are not those of {len(split)} texts")
    if broken := int((~np.isfinite(vectors_NE)).any(axis=1).sum()):
        raise not_finite(broken, len(vectors_NE), "texts")
    return unit(vectors_NE)
