"""Read queries, passages and which answer which: BEIR's folders, the json of SQuAD; and find passages by their words.

BEIR (Thakur et al. 2021, arXiv:2104.08663) lays a set out as a folder:

    corpus.jsonl          {"_id": "d1", "title": "may be absent or empty", "text": "..."} on every line
    queries.jsonl         {"_id": "q1", "text": "..."} on every line
    qrels/train.tsv       columns query-id, corpus-id and score under a header; dev.tsv and test.tsv likewise

Stated rules. A passage's title stands before its text, as BEIR's own models read it. In the json of SQuAD the passages
are the paragraphs, and a question's answer is the paragraph that it was asked of; questions without an answer are left
out. Passages without a text are left out where no query needs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compress.data import squad
from compress.data.schema import number
from compress.data.sources import WORDS, Role, is_beir, split_word
from compress.data.text_files import json_objects, lines
from compress.errors import DataError

BLOCK: Final = 2**24
"""Numbers of the table of queries and passages that is in memory at once."""

Judgements = Mapping[str, Mapping[str, float]]
"""Query id -> passage id -> relevance: 0 is irrelevant, more is more relevant."""


@dataclass(frozen=True)
class Retrieval:
    """Hold a retrieval set: texts by id, and the judgements of each split that there is."""

    name: str
    queries: Mapping[str, str]
    corpus: Mapping[str, str]
    qrels: Mapping[Role, Judgements]
    notes: tuple[str, ...] = ()


def read_beir(folder: Path) -> Retrieval:
    """Read a folder of BEIR's layout. Raises DataError, for judgements of ids that are not there among others."""
    folder = Path(folder)
    if not is_beir(folder):
        raise DataError(
            f"{folder}: expected a folder with corpus.jsonl, queries.jsonl and qrels/train.tsv, as BEIR lays them out."
        )
    queries, corpus = (dict(_texts(folder / name)) for name in ("queries.jsonl", "corpus.jsonl"))
    notes: list[str] = []
    qrels: dict[Role, Judgements] = {}
    used: set[str] = set()
    for path in sorted((folder / "qrels").glob("*.tsv"), key=_preference):
        word = split_word(path.stem)
        if word is None or WORDS[word] in qrels:
            notes.append(
                f"qrels/{path.name} is passed over: {'another file is' if word else 'its name says not'} its split"
            )
            continue
        qrels[WORDS[word]] = found = _judgements(path, queries, corpus)
        used |= {passage for judged in found.values() for passage in judged}
    if not qrels:
        raise DataError(f"{folder}/qrels: no judgements; expected train.tsv, and dev.tsv and test.tsv where there are.")
    for file, texts, needed in (
        ("queries.jsonl", queries, {query for found in qrels.values() for query in found}),
        ("corpus.jsonl", corpus, used),
    ):
        empty = [each for each, text in texts.items() if not text]
        if wanted := [each for each in empty if each in needed]:
            raise DataError(
                f"{folder / file}: {wanted[0]!r}{_more(wanted)} has no text, but qrels name it. Give it one, or take "
                "its judgements out."
            )
        if empty:
            notes.append(f"{file}: {len(empty):,} of {len(texts):,} entries have no text: left out")
    queries, corpus = ({each: text for each, text in texts.items() if text} for texts in (queries, corpus))
    return Retrieval(folder.resolve().name, queries, corpus, qrels, tuple(notes))


def read_squad_retrieval(path: Path, split: Role = "test") -> Retrieval:
    """Read the questions of SQuAD's json as queries, each answered by its paragraph. Raises DataError."""
    path = Path(path)
    examples = squad.read(path)
    if examples is None:
        raise DataError(f"{path}: no question has an answer, so none says which paragraph answers it.")
    queries: dict[str, str] = {}
    numbers: dict[str, str] = {}
    judged: dict[str, dict[str, float]] = {}
    rows = examples.table.select(["id", "question", "context", "answers"]).to_pylist()
    unique = len({row["id"] for row in rows}) == len(rows)
    for n, row in enumerate(rows):
        passage = numbers.setdefault(row["context"].strip(), f"p{len(numbers)}")
        if row["answers"] and row["question"].strip():
            query = row["id"] if unique else str(n)
            queries[query] = row["question"].strip()
            judged[query] = {passage: 1.0}
    notes = list(examples.notes)
    if left := len(rows) - len(queries):
        notes.append(f"{path.name}: {left:,} of {len(rows):,} questions have no answer, so no paragraph: left out")
    corpus = {passage: text for text, passage in numbers.items()}
    return Retrieval(path.name, queries, corpus, {split: judged}, tuple(notes))


@dataclass(frozen=True)
class WordIndex:
    """Hold passages as weights of their words, by BM25 as Lucene computes it: see `bm25`.

    weights  (passages, words), sparse; words: scikit-learn's counter of words
    """

    words: Any
    weights: Any

    @staticmethod
    def from_texts(texts: Sequence[str], *, k1: float = 1.2, b: float = 0.75) -> WordIndex:
        """Weigh the words of passages. Raises DataError where none of them has a word."""
        from scipy.sparse import csr_matrix, diags
        from sklearn.feature_extraction.text import CountVectorizer

        words = CountVectorizer(token_pattern=r"\w+", dtype=np.float32)
        try:
            counts = words.fit_transform(texts)
        except ValueError as error:
            raise DataError(f"BM25: the passages hold no words ({error}); look at their texts.") from error
        passages, lengths = counts.shape[0], np.asarray(counts.sum(axis=1)).ravel()
        containing = np.bincount(counts.indices, minlength=counts.shape[1])
        rarity = np.log1p((passages - containing + 0.5) / (containing + 0.5))
        saturation = k1 * (1 - b + b * lengths / lengths.mean())
        counts.data /= counts.data + np.repeat(saturation, np.diff(counts.indptr)).astype(np.float32)
        return WordIndex(words, csr_matrix(counts @ diags(rarity.astype(np.float32))))

    def search(self, queries: Sequence[str], k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Find the k best passages of each query: see `bm25`."""
        passages = self.weights.shape[0]
        k, step = min(k, passages), max(1, BLOCK // passages)
        asked, weights = self.words.transform(queries), self.weights.T.tocsr()
        found, scores = np.zeros((len(queries), k), np.int64), np.zeros((len(queries), k), np.float32)
        for start in range(0, len(queries), step):
            for n, row in enumerate((asked[start : start + step] @ weights).toarray(), start=start):
                least = np.partition(row, passages - k)[passages - k]
                likely = np.flatnonzero(row >= least)
                found[n] = likely[np.argsort(-row[likely], kind="stable")][:k]
                scores[n] = row[found[n]]
        return found, scores

    def score(self, queries: Sequence[str], passages: NDArray[np.int64]) -> NDArray[np.float32]:
        """Score each query with one passage of the index, by its number: (Q,)."""
        return np.asarray(self.words.transform(queries).multiply(self.weights[passages]).sum(axis=1)).ravel()


def bm25(
    corpus_texts: Sequence[str], query_texts: Sequence[str], k: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Find the k passages of each query that share most of its words, by BM25 as Lucene computes it.

    Returns numbers of passages (Q, k), the best first, the first in the corpus among equals, and their scores (Q, k);
    k is at most the size of the corpus. Words are runs of letters and digits in lower case; k1 1.2 and b 0.75 are
    Lucene's (Robertson & Zaragoza 2009, The Probabilistic Relevance Framework). Raises DataError for a corpus without
    words.
    """
    return WordIndex.from_texts(corpus_texts).search(query_texts, k)


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the id and the text of every line of a jsonl file of BEIR's."""
    seen: set[str] = set()
    for place, row in json_objects(lines(path), str(path)):
        name, text, title = (row.get(key) for key in ("_id", "text", "title"))
        if not isinstance(name, str | int) or not isinstance(text, str) or not isinstance(title, str | None):
            raise DataError(f'{place}: expected {{"_id": "...", "text": "..."}}, found {str(row)[:80]}')
        if str(name) in seen:
            raise DataError(f"{place}: the id {name!r} is that of an earlier line. Give every text an id of its own.")
        seen.add(str(name))
        yield str(name), f"{title or ''} {text}".strip()


def _judgements(path: Path, queries: Mapping[str, Any], corpus: Mapping[str, Any]) -> Judgements:
    """Read the judgements of a split. DataError for a line that is none, or names what is not there."""
    found: dict[str, dict[str, float]] = {}
    for n, line in enumerate(lines(path), start=1):
        cells = line.rstrip("\r\n").split("\t")
        if not line.strip() or (n == 1 and number(cells[-1]) is None):
            continue
        score = number(cells[-1])
        if len(cells) != 3 or score is None or not np.isfinite(score):
            raise DataError(
                f"{path}, line {n}: expected query-id, corpus-id and score between tabs, found {line[:80]!r}"
            )
        for name, known, file in ((cells[0], queries, "queries.jsonl"), (cells[1], corpus, "corpus.jsonl")):
            if name not in known:
                raise DataError(f"{path}, line {n}: {name!r} is no id of {file}. Add it there, or take the line out.")
        found.setdefault(cells[0], {})[cells[1]] = score
    if not found:
        raise DataError(f"{path}: no judgement in it; expected query-id, corpus-id and score between tabs.")
    return found


def _preference(path: Path) -> tuple[int, str]:
    word = split_word(path.stem)
    return (list(WORDS).index(word) if word else len(WORDS), path.name)


def _more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1:,} more)" if len(names) > 1 else ""
