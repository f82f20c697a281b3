"""Read rankings: queries, each with passages that are to be put in order for it.

Stated rules. A table has a row for each pair, in columns query (or question), passage (or document, text, paragraph,
context) and relevance (or label, score, grade): a number, the more the better, and relevant above 0. Or it has a row
for each query, or part of its passages, in columns query, positive and negative (negative_1, negative_2, and so on; a
cell may hold a list): relevance 1 and 0. Rows of the same query belong together, wherever they stand; of a pair that
comes twice the higher relevance counts.

Where there are no irrelevant passages, as in BEIR's folders, the json of SQuAD, and tables of query and positive alone,
NEGATIVES of each query are drawn: the passages that BM25 ranks highest, among all that there are, and nobody has
judged. Some of these may be relevant all the same. Judged passages are always kept.

Without being asked for by its kind, only a folder of BEIR's and a table with the columns query and positive is a
ranking. Where a model is scored, queries are left out that no order of their passages could be wrong for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from compress.data import schema, sources, squad
from compress.data.readers import RawSplit
from compress.data.retrieval import Retrieval, WordIndex, read_beir, read_squad_retrieval
from compress.data.schema import number, plain
from compress.data.sources import Role
from compress.data.task import Examples
from compress.data.text_files import head
from compress.errors import DataError

NEGATIVES: Final = 8
"""Passages that are drawn for each query where none is given as irrelevant."""
QUERIES: Final = ("query", "question")
PASSAGES: Final = ("passage", "document", "text", "paragraph", "context", "passagetext", "doc")
RELEVANCES: Final = ("relevance", "label", "score", "grade", "relevant")

_SCHEMA: Final = pa.schema({"text": pa.string(), "text_pair": pa.string(), "label": pa.float32(), "query": pa.int64()})
Pair = tuple[str, str, float]
"""A query, a passage, and how relevant it is."""


class Rankings(NamedTuple):
    """Hold the splits of a source, by role, the names of its columns of text and of relevance, and notes."""

    name: str
    splits: dict[Role, Examples]
    text: tuple[str, str]
    label: str
    notes: tuple[str, ...]


class _Columns(NamedTuple):
    """Name the columns of a table: a query, then passages; `label` is None where a column's name says its relevance."""

    query: str
    passages: tuple[str, ...]
    label: str | None
    negatives: tuple[str, ...] = ()


def is_ranking(source: str) -> bool:
    """Tell whether a source can be nothing but a ranking: a folder of BEIR's, or a table of queries and positives."""
    if (found := sources.local_files(source)) is None:
        return False
    path = sources.local(source)
    return sources.is_beir(path) or any(_names_positives(file) for file in found[1].get("train", [])[:1])


def read(source: str, text: Sequence[str] | None, label: str | None, *, negatives: int = NEGATIVES) -> Rankings:
    """Read every split of a source as pairs of a query and a passage. Raises DataError.

    text, label  the columns of query and passage, and of relevance, where they are not to be found by their names
    """
    found = sources.local_files(source)
    named = text is not None or label is not None
    if found is not None and not named:
        name, files = found
        if sources.is_beir(path := sources.local(source)):
            return _from_retrieval([read_beir(path)], name, negatives)
        if any(map(squad.is_squad, files.get("train", []))):
            chosen = {role: next(filter(squad.is_squad, paths), None) for role, paths in files.items()}
            read_files = [read_squad_retrieval(file, role) for role, file in chosen.items() if file is not None]
            return _from_retrieval(read_files, name, negatives)
    opened = sources.find(source, [*(text or ()), *([label] if label else [])])
    columns = _choose(opened.train, text, label)
    notes, splits = list(opened.notes), dict[Role, Examples]()
    every: list[tuple[Role, RawSplit]] = [("train", opened.train)]
    every += [("validation", each) for each in opened.validation] + [("test", each) for each in opened.test]
    for role, split in every:
        if role in splits or (role != "train" and columns.label and columns.label not in split.columns):
            notes.append(
                f"{split.name} is passed over: it " + ("is a second split" if role in splits else "has no labels")
            )
            continue
        notes += split.notes
        rows = list(_rows(split, columns))
        if not columns.label and not columns.negatives:
            rows = _with_negatives(rows, negatives)
            notes.append(
                f"{split.name}: the {negatives} passages that BM25 finds are the irrelevant ones of each query"
            )
        splits[role] = _examples(rows, split.place)
    return Rankings(
        opened.name, splits, (columns.query, columns.passages[0]), columns.label or "relevance", tuple(notes)
    )


def keep_scored(table: pa.Table, place: str) -> tuple[pa.Table, tuple[str, ...]]:
    """Keep the queries of a split that an order of their passages can be wrong for; with a note of the others.

    These have a relevant passage, and one that is less relevant. DataError where there is no such query.
    """
    judged = _judged(table)
    if judged.all():
        return table, ()
    queries, places = np.unique(table["query"].to_numpy(), return_inverse=True)
    left = len(queries) - len(np.unique(places[judged]))
    if left == len(queries):
        raise DataError(
            f"{place}: no query has both a relevant passage and one that is less so: no order can be scored. Give each "
            "query several passages, with their relevance"
        )
    why = "none of their passages is more relevant than another"
    return table.filter(pa.array(judged)), (f"{place}: {left:,} of {len(queries):,} queries are left out: {why}",)


def check_learnable(table: pa.Table, place: str) -> None:
    """Raise DataError where no query has passages of which one is to come first."""
    if not _judged(table).any():
        raise DataError(
            f"{place}: no query has both a relevant passage and one that is less so: there is nothing to learn. Give "
            "each query several passages, with their relevance"
        )


def _judged(table: pa.Table) -> NDArray[np.bool_]:
    """Mark the rows of queries with a relevant passage, and one that is less relevant."""
    labels = table["label"].to_numpy()
    _, places = np.unique(table["query"].to_numpy(), return_inverse=True)
    highest, lowest = np.full(places.max() + 1, -np.inf), np.full(places.max() + 1, np.inf)
    np.maximum.at(highest, places, labels)
    np.minimum.at(lowest, places, labels)
    return np.asarray(((highest > 0) & (highest > lowest))[places])


def _names_positives(path: Path) -> bool:
    """Tell from the beginning of a table whether it has the columns query and positive, and none of a label's name."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        try:
            names = pq.read_schema(path).names
        except (OSError, pa.ArrowInvalid):  # told where it is read
            return False
    elif suffix in (".jsonl", ".ndjson"):
        names = re.findall(r'"([\w -]+)"\s*:', head(path).partition("\n")[0])
    elif suffix in sources.DELIMITED:
        names = [name.strip(' "') for name in re.split(r"[\t,]", head(path).partition("\n")[0].strip())]
    else:
        return False
    known = {plain(name) for name in names}
    return {"query", "positive"} <= known and not known & set(schema.LABELS)


def _choose(split: RawSplit, text: Sequence[str] | None, label: str | None) -> _Columns:
    """Choose the columns of a table, as asked or by their names. DataError where that cannot be told."""
    found = {plain(name): name for name in reversed(split.columns)}
    schema.refuse_unknown(split, [*(text or ()), *([label] if label else [])])
    if text is not None and len(text) != 2:
        raise DataError(f"{split.place}: a ranking has two columns of text, the query's and the passage's: name both.")
    query = text[0] if text else next((found[name] for name in QUERIES if name in found), None)
    if text is None and query and "positive" in found and label is None:
        negatives = tuple(name for name in split.columns if re.fullmatch(r"negative\d*", plain(name)))
        return _Columns(query, (found["positive"], *negatives), None, negatives)
    passage = (
        text[1] if text else next((found[name] for name in PASSAGES if name in found and found[name] != query), None)
    )
    label = label or next(
        (found[name] for name in RELEVANCES if name in found and found[name] not in (query, passage)), None
    )
    if query is None or passage is None or label is None:
        lacking = "the query" if query is None else "the passage" if passage is None else "the relevance"
        raise DataError(
            f"{split.place}: cannot tell which column is {lacking} of a ranking; expected query, passage and "
            "relevance, or query, positive and negative. Name them with --text (twice) and --label. Its columns, with "
            f"an example each:\n{split.examples()}"
        )
    return _Columns(query, (passage,), label)


def _rows(split: RawSplit, columns: _Columns) -> Iterator[Pair]:
    """Yield the pairs of a table. DataError for an empty text, and for a relevance that is no number."""
    names = (columns.query, *columns.passages, *([columns.label] if columns.label else []))
    schema.refuse_unknown(split, names)
    row = split.first - 1
    for batch in split.read(names):
        for query, *passages in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            row += 1
            relevance = 1.0
            if columns.label:
                relevance = _number(passages.pop(), f"{split.place}, row {row}", columns.label)
            if not isinstance(query, str) or not query.strip():
                raise DataError(f"{split.place}, row {row}: the query {columns.query!r} is empty. Take the row out.")
            for name, cell in zip(columns.passages, passages, strict=True):
                given = cell if isinstance(cell, list) else [cell] if cell is not None else []
                if not (name in columns.negatives or any(each and each.strip() for each in given)):
                    raise DataError(f"{split.place}, row {row}: the passage {name!r} is empty. Take the row out.")
                for each in given:
                    if each and each.strip():
                        yield query.strip(), each.strip(), 0.0 if name in columns.negatives else relevance


def _number(cell: object, place: str, name: str) -> float:
    found = number(cell) if isinstance(cell, str) else None
    if found is None or not abs(found) <= schema.LARGEST:
        raise DataError(
            f"{place}: {name!r} is {cell!r}; expected a number: the relevance of the passage, 0 where it is "
            "irrelevant. Mend the row, or take it out."
        )
    return found


def _examples(pairs: Iterable[Pair], place: str) -> Examples:
    """Gather the rows of each query, numbered as they come, each passage once."""
    found: dict[str, dict[str, float]] = {}
    twice = 0
    for query, passage, relevance in pairs:
        passages = found.setdefault(query, {})
        twice += passage in passages and passages[passage] != relevance
        passages[passage] = max(relevance, passages.get(passage, relevance))
    if not found:
        raise DataError(f"{place}: there is no query in it; expected rows of a query, a passage and its relevance.")
    rows = [
        (query, passage, relevance, n)
        for n, (query, passages) in enumerate(found.items())
        for passage, relevance in passages.items()
    ]
    table = pa.table([pa.array(column) for column in zip(*rows, strict=True)], names=_SCHEMA.names).cast(_SCHEMA)
    notes = (
        (f"{Path(place).name}: {twice:,} pairs come with different relevances: the highest counts",) if twice else ()
    )
    return Examples(table, table["query"].to_pylist(), notes)


def _from_retrieval(found: Sequence[Retrieval], name: str, negatives: int) -> Rankings:
    """Make rankings of what is judged of each query, and of what BM25 finds for it; the held-out share in groups of
    the queries that one passage answers."""
    splits: dict[Role, Examples] = {}
    notes = [note for each in found for note in each.notes]
    for each in found:
        for role, judged in each.qrels.items():
            corpus = list(each.corpus)
            numbers = {passage: n for n, passage in enumerate(corpus)}
            rows = [
                (each.queries[q], each.corpus[p], score) for q, known in judged.items() for p, score in known.items()
            ]
            drawn = _with_negatives(rows, negatives, list(each.corpus.values()))
            examples = _examples(drawn, f"{each.name} [{role}]")
            first = {each.queries[q]: numbers[max(known, key=known.__getitem__)] for q, known in judged.items()}
            splits[role] = examples._replace(groups=[first[text] for text in examples.table["text"].to_pylist()])
    if "train" not in splits:
        given = ", ".join(sorted(splits))
        raise DataError(f"{name}: judgements of {given} but no training split; expected qrels/train.tsv.")
    notes.append(f"besides what is judged, each query has the {negatives} passages that BM25 finds, as irrelevant ones")
    return Rankings(name, splits, ("query", "passage"), "relevance", tuple(notes))


def _with_negatives(rows: Sequence[Pair], count: int, corpus: Sequence[str] | None = None) -> list[Pair]:
    """Add for each query the `count` passages that BM25 ranks highest of those that it is not judged with."""
    judged: dict[str, dict[str, float]] = {}
    for query, passage, relevance in rows:
        judged.setdefault(query, {})[passage] = relevance
    if not count or not judged:
        return list(rows)
    texts = list(dict.fromkeys(corpus if corpus is not None else (passage for _, passage, _ in rows)))
    most = max(map(len, judged.values()))
    found, _ = WordIndex.from_texts(texts).search(list(judged), count + most)
    drawn: list[Pair] = []
    for (query, known), places in zip(judged.items(), found, strict=True):
        drawn += [(query, passage, relevance) for passage, relevance in known.items()]
        others = [texts[n] for n in places if texts[n] not in known]
        drawn += [(query, passage, 0.0) for passage in others[:count]]
    return drawn
