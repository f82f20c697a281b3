"""Read retrieval sets (queries, passages and judgements): BEIR folders and the json of
SQuAD; and rank with BM25.

BEIR (Thakur et al. 2021, arXiv:2104.08663) lays a set out as a folder:

    corpus.jsonl          {"_id": "d1", "title": "may be absent or empty", "text":
                          "..."} on every line
    queries.jsonl         {"_id": "q1", "text": "..."} on every line
    qrels/train.tsv       columns query-id, corpus-id and score under a header; dev.tsv
                          and test.tsv likewise

Rules. A passage's title precedes its text, as BEIR's own models read it. In the
json of SQuAD the passages are the paragraphs, and a question's relevant passage is its
paragraph; questions without an answer are left out. Passages without text are left out
if no judgement needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from compress.arrays import Floats, Longs
from compress.data import squad
from compress.data.schema import number
from compress.data.sources import Role, by_role, is_beir, split_word
from compress.data.text_files import json_objects, lines
from compress.data.vector_index import INDEX_BLOCK, take_best
from compress.errors import DataError

K1: Final = 1.2
B: Final = 0.75
"""Lucene's parameters of BM25."""

Judgements = Mapping[str, Mapping[str, float]]
"""Query id -> passage id -> relevance: 0 is irrelevant, higher is more relevant."""


@dataclass(frozen=True)
class Retrieval:
    """Hold a retrieval set: texts by id, and the judgements of each split."""

    name: str
    queries: Mapping[str, str]
    corpus: Mapping[str, str]
    qrels: Mapping[Role, Judgements]
    notes: tuple[str, ...] = ()


def read_beir(folder: Path) -> Retrieval:
    """Read a folder of BEIR's layout. Raises DataError, for example for judgements of
    unknown ids."""
    folder = Path(folder)
    if not is_beir(folder):
        raise DataError(
            f"{folder}: expected a folder with corpus.jsonl, queries.jsonl and "
            "qrels/train.tsv, as BEIR lays them out."
        )
    queries = dict(_texts(folder / "queries.jsonl"))
    corpus = dict(_texts(folder / "corpus.jsonl"))
    notes: list[str] = []
    qrels: dict[Role, Judgements] = {}
    files = sorted((folder / "qrels").glob("*.tsv"))
    notes += [
        f"skipped qrels/{path.name}: its name is not that of a split"
        for path in files
        if split_word(path.stem) is None
    ]
    for role, paths in by_role((path.stem, path) for path in files).items():
        qrels[role] = _judgements(paths[0], queries, corpus)
        notes += [
            f"skipped qrels/{path.name}: qrels/{paths[0].name} is the {role} split"
            for path in paths[1:]
        ]
    if not qrels:
        raise DataError(
            f"{folder}/qrels: no judgements; expected train.tsv, and dev.tsv or "
            "test.tsv if there are any."
        )
    for file, texts, needed in (
        (
            "queries.jsonl",
            queries,
            {query for judged in qrels.values() for query in judged},
        ),
        (
            "corpus.jsonl",
            corpus,
            {
                name
                for judged in qrels.values()
                for known in judged.values()
                for name in known
            },
        ),
    ):
        empty = [name for name, text in texts.items() if not text]
        if missing := [name for name in empty if name in needed]:
            more = f" (and {len(missing) - 1:,} more)" if len(missing) > 1 else ""
            raise DataError(
                f"{folder / file}: {missing[0]!r}{more} has no text, but qrels refer "
                "to it. Add its text, or remove its judgements."
            )
        if empty:
            notes.append(
                f"{file}: left out {len(empty):,} of {len(texts):,} entries that have "
                "no text"
            )
    queries = {name: text for name, text in queries.items() if text}
    corpus = {name: text for name, text in corpus.items() if text}
    return Retrieval(folder.resolve().name, queries, corpus, qrels, tuple(notes))


def read_squad_retrieval(path: Path, split: Role = "test") -> Retrieval:
    """Read the questions of SQuAD's json as queries, for which their paragraph is
    relevant. Raises DataError."""
    path = Path(path)
    examples = squad.read(path)
    if examples is None:
        raise DataError(
            f"{path}: no question has an answer, so no paragraph is known to be "
            "relevant."
        )
    queries: dict[str, str] = {}
    passages: dict[str, str] = {}
    judged: dict[str, dict[str, float]] = {}
    rows = examples.table.select(["id", "question", "context", "answers"]).to_pylist()
    unique = len({row["id"] for row in rows}) == len(rows)
    for n, row in enumerate(rows):
        passage = passages.setdefault(row["context"].strip(), f"p{len(passages)}")
        if row["answers"] and row["question"].strip():
            query = row["id"] if unique else str(n)
            queries[query] = row["question"].strip()
            judged[query] = {passage: 1.0}
    notes = list(examples.notes)
    if left_out := len(rows) - len(queries):
        notes.append(
            f"{path.name}: left out {left_out:,} of {len(rows):,} questions that have "
            "no answer"
        )
    corpus = {passage: text for text, passage in passages.items()}
    return Retrieval(path.name, queries, corpus, {split: judged}, tuple(notes))


@dataclass(frozen=True)
class WordIndex:
    """Index passages for BM25 as Lucene computes it (Robertson & Zaragoza 2009, The
    Probabilistic Relevance Framework).

    Words are runs of letters and digits in lower case. weights: (passages, words),
    sparse; words: scikit-learn's CountVectorizer.
    """

    words: Any
    weights: Any

    @staticmethod
    def from_texts(texts: Sequence[str]) -> WordIndex:
        """Weigh the words of passages. Raises DataError if none of them has a word."""
        from scipy.sparse import csr_matrix, diags
        from sklearn.feature_extraction.text import CountVectorizer

        words = CountVectorizer(token_pattern=r"\w+", dtype=np.float32)
        try:
            counts = words.fit_transform(texts)
        except ValueError as error:
            raise DataError(
                f"BM25: the passages have no words ({error}); check their texts."
            ) from error
        passages = counts.shape[0]
        lengths = np.asarray(counts.sum(axis=1)).ravel()
        containing = np.bincount(counts.indices, minlength=counts.shape[1])
        rarity = np.log1p((passages - containing + 0.5) / (containing + 0.5))
        saturation = K1 * (1 - B + B * lengths / lengths.mean())
        counts.data /= counts.data + np.repeat(
            saturation, np.diff(counts.indptr)
        ).astype(np.float32)
        return WordIndex(words, csr_matrix(counts @ diags(rarity.astype(np.float32))))

    def search(self, queries: Sequence[str], k: int) -> tuple[Longs, Floats]:
        """Find the k best passages of each query.

        Returns the numbers of passages (Q, k), best first and ties in the order of the
        corpus, and their scores (Q, k); k is at most the number of passages.
        """
        passages = self.weights.shape[0]
        k = min(k, passages)
        step = max(1, INDEX_BLOCK // passages)
        words = self.words.transform(queries)
        weights = self.weights.T.tocsr()
        best = np.zeros((len(queries), k), np.int64)
        scores = np.zeros((len(queries), k), np.float32)
        for start in range(0, len(queries), step):
            for n, row in enumerate(
                (words[start : start + step] @ weights).toarray(), start=start
            ):
                best[n] = take_best(row, k)
                scores[n] = row[best[n]]
        return best, scores

    def score(self, queries: Sequence[str], passages: Longs) -> Floats:
        """Score each query with one passage, given by its number: (Q,)."""
        return np.asarray(
            self.words.transform(queries).multiply(self.weights[passages]).sum(axis=1)
        ).ravel()


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the id and the text of every line of a BEIR jsonl file."""
    seen: set[str] = set()
    for place, row in json_objects(lines(path), str(path)):
        name = row.get("_id")
        text = row.get("text")
        title = row.get("title")
        if (
            not isinstance(name, str | int)
            or not isinstance(text, str)
            or not isinstance(title, str | None)
        ):
            raise DataError(
                f'{place}: expected {{"_id": "...", "text": "..."}}, found '
                f"{str(row)[:80]}"
            )
        if str(name) in seen:
            raise DataError(
                f"{place}: an earlier line has the id {name!r} too. Give every text a "
                "unique id."
            )
        seen.add(str(name))
        yield str(name), f"{title or ''} {text}".strip()


def _judgements(
    path: Path, queries: Mapping[str, Any], corpus: Mapping[str, Any]
) -> Judgements:
    """Read the judgements of a split, the highest of a query and a passage. DataError
    for an invalid line, and for unknown ids."""
    judged: dict[str, dict[str, float]] = {}
    for n, line in enumerate(lines(path), start=1):
        cells = line.rstrip("\r\n").split("\t")
        score = number(cells[-1])
        if not line.strip() or (n == 1 and score is None):
            continue
        if len(cells) != 3 or score is None or not np.isfinite(score):
            raise DataError(
                f"{path}, line {n}: expected query-id, corpus-id and score between "
                f"tabs, found {line[:80]!r}"
            )
        for name, known, file in (
            (cells[0], queries, "queries.jsonl"),
            (cells[1], corpus, "corpus.jsonl"),
        ):
            if name not in known:
                raise DataError(
                    f"{path}, line {n}: {file} has no id {name!r}. Add it there, or "
                    "remove this line."
                )
        known = judged.setdefault(cells[0], {})
        known[cells[1]] = max(score, known.get(cells[1], score))
    if not judged:
        raise DataError(
            f"{path}: has no judgement; expected query-id, corpus-id and score between "
            "tabs."
        )
    return judged
