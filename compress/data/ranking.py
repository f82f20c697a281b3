"""Read rankings: queries, each with passages to rank for it.

Rules. A table has a row for each pair, in columns query (or question), passage
(or document, text, paragraph, context) and relevance (or label, score, grade): a
number, higher is better, and above 0 is relevant. Or it has a row for each query, or
some of its passages, in columns query, positive and negative (negative_1, negative_2,
and so on; a cell may hold a list): relevance 1 and 0. Rows of the same query belong
together, wherever they are; of duplicate pairs the one of the highest relevance counts.

A table with a row for each pair may have the scores of a teacher in a column
teacher_score (or teacher_scores, score_teacher, teacher_logit; prediction, as `compress
predict` writes it), with relevance or instead of it. Every row of every split then
needs one. Without relevance, the passage of a query that the teacher scores highest is
the relevant one.

If no irrelevant passages are given, as in BEIR folders, the json of SQuAD, and tables
of query and positive alone, NEGATIVES are added to each query: the passages without a
judgement that BM25 ranks highest among all of them. Some of these may be relevant
nevertheless. The query's own text is not added. Judged passages are always kept.

Unless the kind is requested, only a BEIR folder, or a table with the columns query and
positive, or a query, a passage and its relevance (by this name) or a teacher's score,
is read as a ranking. Evaluation splits leave out queries whose passages no order could
rank wrongly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from compress.arrays import Flags
from compress.data import schema, sources, squad
from compress.data.labels import LARGEST_FLOAT
from compress.data.retrieval import (
    Retrieval,
    WordIndex,
    read_beir,
    read_squad_retrieval,
)
from compress.data.schema import number, plain
from compress.data.sources import Role
from compress.data.table_files import is_table_file, open_table
from compress.data.tables import Table
from compress.data.task import Examples, join_examples
from compress.errors import DataError

NEGATIVES: Final = 8
"""Passages added to each query if no irrelevant ones are given."""
RANKING_QUERY_NAMES: Final = ("query", "question")
PASSAGES: Final = (
    "passage",
    "document",
    "text",
    "paragraph",
    "context",
    "passagetext",
    "doc",
)
TEXT_WORDS: Final = "|".join((*PASSAGES, "sentence"))
"""What may follow `positive` and `negative` in a column's name, with a number; other
columns, such as `positive_score`, are not read."""
RELEVANCES: Final = ("relevance", "label", "score", "grade", "relevant")
TEACHERS: Final = (
    "teacherscore",
    "teacherscores",
    "scoreteacher",
    "teacherlogit",
    "prediction",
)

_RANKING_SCHEMA: Final = pa.schema(
    {
        "text": pa.string(),
        "text_pair": pa.string(),
        "label": pa.float32(),
        "query": pa.int64(),
        "teacher": pa.float32(),
    }
)


class Pair(NamedTuple):
    """Hold a query, a passage, its relevance, and optionally a teacher's score."""

    query: str
    passage: str
    relevance: float
    teacher: float | None = None


class Rankings(NamedTuple):
    """Hold the splits of a source by role, the names of its text and relevance columns,
    and notes."""

    name: str
    splits: dict[Role, Examples]
    text: tuple[str, str]
    label: str
    notes: tuple[str, ...]


class _Columns(NamedTuple):
    """Name the columns of a table; `label` is None if passages are positive or negative
    by their column, or have only the score of a teacher."""

    query: str
    passages: tuple[str, ...]
    label: str | None
    negatives: tuple[str, ...] = ()
    teacher: str | None = None

    @property
    def numbers(self) -> tuple[str, ...]:
        return tuple(name for name in (self.label, self.teacher) if name is not None)


def is_ranking(source: str) -> bool:
    """Check whether a source can only be a ranking: a BEIR folder, or a table of
    queries with positives or scores."""
    if (found := sources.local_files(source)) is None:
        return False
    return sources.is_beir(sources.local(source)) or any(
        map(_is_table, found[1].get("train", [])[:1])
    )


def read(source: str, text: Sequence[str] | None, label: str | None) -> Rankings:
    """Read every split of a source as pairs of a query and a passage. Raises DataError.

    text, label  the columns of query and passage, and of relevance, if they do not have
                 a usual name
    """
    found = sources.local_files(source)
    if found is not None and text is None and label is None:
        name, files = found
        if sources.is_beir(path := sources.local(source)):
            return _from_retrieval([read_beir(path)], name)
        annotated = {
            role: list(filter(squad.is_squad, paths)) for role, paths in files.items()
        }
        if annotated.get("train"):
            usable = {role: paths for role, paths in annotated.items() if paths}
            chosen, skipped = sources.choose_files(name, usable)
            retrieval = [
                read_squad_retrieval(file, role)
                for role, paths in chosen.items()
                for file in paths
            ]
            return _from_retrieval(retrieval, name, skipped)
    opened = sources.find(source, schema.list_requested(text, label))
    columns = _choose(opened.train, text, label)
    notes = list(opened.notes)
    splits = dict[Role, Examples]()
    for role, split in opened.tables():
        if role in splits or (
            role != "train" and columns.label and columns.label not in split.columns
        ):
            notes.append(
                f"skipped {split.name}: "
                + ("a second split" if role in splits else "it has no labels")
            )
            continue
        if columns.teacher and columns.teacher not in split.columns:
            raise DataError(
                f"{split.place}: has no column {columns.teacher!r}, but the training "
                "split has: every split needs the teacher's scores. Add them here, or "
                "remove the column there."
            )
        notes += split.notes
        rows = list(_rows(split, columns))
        if not columns.label and columns.teacher:
            rows = _judge_by_teacher(rows)
            notes.append(
                f"{split.name}: the passage with the highest {columns.teacher!r} is "
                "the query's relevant one"
            )
        elif not columns.label and not columns.negatives:
            rows = _with_negatives(rows)
            notes.append(
                f"{split.name}: the {NEGATIVES} passages that BM25 ranks highest are "
                "each query's negatives"
            )
        splits[role] = _examples(rows, split.place)
    text_columns = (columns.query, columns.passages[0])
    return Rankings(
        opened.name,
        splits,
        text_columns,
        columns.label or columns.teacher or "relevance",
        tuple(notes),
    )


def keep_scorable(table: pa.Table, place: str) -> tuple[pa.Table, tuple[str, ...]]:
    """Keep the queries with a relevant passage and a less relevant one, and note how
    many are left out.

    Raises DataError if there are none.
    """
    scorable = are_scorable(table)
    if not scorable.any():
        raise DataError(
            f"{place}: no query has both a relevant passage and a less relevant one, "
            "so no order can be learned or scored. Give each query several passages "
            "with their relevance, or classify the pairs: --kind classification."
        )
    if scorable.all():
        return table, ()
    queries = table["query"].to_numpy()
    note = (
        f"{place}: left out {len(set(queries[~scorable])):,} of {len(set(queries)):,} "
        "queries: none of their passages is more relevant than another"
    )
    return table.filter(pa.array(scorable)), (note,)


def are_scorable(table: pa.Table) -> Flags:
    """Mask the rows whose query has a relevant passage and a less relevant one."""
    labels = table["label"].to_numpy()
    queries, places = np.unique(table["query"].to_numpy(), return_inverse=True)
    highest = np.full(len(queries), -np.inf)
    lowest = np.full(len(queries), np.inf)
    np.maximum.at(highest, places, labels)
    np.minimum.at(lowest, places, labels)
    return ((highest > 0) & (highest > lowest))[places]


def _is_table(path: Path) -> bool:
    """Check the columns of a table: query and positive, and no label; or a query, a
    passage and its relevance or a teacher's score."""
    if not is_table_file(path) or path.suffix.lower() == ".json" or path.is_dir():
        return False
    try:
        known = {plain(name) for name in open_table(path).columns}
    except DataError:  # reading the file explains it
        return False
    if all(
        known & set(names)
        for names in (RANKING_QUERY_NAMES, PASSAGES, (RELEVANCES[0], *TEACHERS))
    ):
        return True
    return {"query", "positive"} <= known and not known & set(schema.LABELS)


def _choose(split: Table, text: Sequence[str] | None, label: str | None) -> _Columns:
    """Choose the requested columns of a table, or the columns with usual names. Raises
    DataError if that fails."""
    found = {plain(name): name for name in reversed(split.columns)}
    schema.refuse_unknown(split, schema.list_requested(text, label))
    if text is not None and len(text) != 2:
        raise DataError(
            f"{split.place}: a ranking has two text columns, of queries and of "
            "passages; name both."
        )
    if text and tuple(map(plain, text)) in set(product(PASSAGES, RANKING_QUERY_NAMES)):
        raise DataError(
            f"{split.place}: {text[0]!r} is named as the queries of a ranking, and "
            f"{text[1]!r} as the passages; expected the queries first: --text "
            f"{text[1]} --text {text[0]}"
        )
    query, passage = text or (
        next((found[name] for name in RANKING_QUERY_NAMES if name in found), None),
        None,
    )
    teacher = next(
        (found[name] for name in TEACHERS if name in found and found[name] != label),
        None,
    )
    if text is None and query and "positive" in found and label is None:
        if teacher is not None:
            raise DataError(
                f"{split.place}: {teacher!r} cannot score both passages of a row; "
                f"expected a row for each passage: query, passage and {teacher!r}, "
                "optionally relevance."
            )
        negatives = tuple(find_passages(found, "negative"))
        return _Columns(query, (found["positive"], *negatives), None, negatives)
    if passage is None:
        passage = next(
            (
                found[name]
                for name in PASSAGES
                if name in found and found[name] != query
            ),
            None,
        )
    if label is None:
        others = (found[name] for name in RELEVANCES if name in found)
        label = next((name for name in others if name not in (query, passage)), None)
    if query is None or passage is None or (label is None and teacher is None):
        missing = "the relevance"
        if query is None:
            missing = "the query"
        elif passage is None:
            missing = "the passage"
        raise DataError(
            f"{split.place}: cannot tell which column is {missing} of a ranking; "
            "expected query, passage and relevance (or teacher_score), or query, "
            "positive and negative. Name them with --text (twice) and --label. Its "
            f"columns, with an example each:\n{split.examples()}"
        )
    return _Columns(query, (passage,), label, teacher=teacher)


def find_passages(columns: Mapping[str, str], word: str) -> list[str]:
    """Find the columns of a query's passages: `word` is positive or negative."""
    pattern = re.compile(rf"{word}({TEXT_WORDS})?s?\d*")
    return [name for key, name in columns.items() if pattern.fullmatch(key)]


def _rows(split: Table, columns: _Columns) -> Iterator[Pair]:
    """Yield the pairs of a table. DataError for an empty text, and for a relevance or
    score that is not a number."""
    names = (columns.query, *columns.passages, *columns.numbers)
    schema.refuse_unknown(split, names)
    for place, (query, *passages) in split.cells(names):
        numbers = dict[str, float]()
        for name in reversed(columns.numbers):
            cell = passages.pop()
            value = number(cell) if isinstance(cell, str) else None
            if value is None or not abs(value) <= LARGEST_FLOAT:
                expected = "the relevance of the passage, a number, 0 if irrelevant"
                if name == columns.teacher:
                    expected = "the teacher's score of the passage, a number"
                raise DataError(
                    f"{place}: {name!r} is {cell!r}; expected {expected}. Correct "
                    "or remove the row."
                )
            numbers[name] = value
        relevance = 1.0 if columns.label is None else numbers[columns.label]
        score = None if columns.teacher is None else numbers[columns.teacher]
        if not isinstance(query, str) or not query.strip():
            raise DataError(
                f"{place}: the query {columns.query!r} is empty. Remove the row."
            )
        for name, cell in zip(columns.passages, passages, strict=True):
            cells = [
                text.strip()
                for text in (cell if isinstance(cell, list) else [cell])
                if text
            ]
            if name not in columns.negatives and not any(cells):
                raise DataError(
                    f"{place}: the passage {name!r} is empty. Remove the row."
                )
            for passage in filter(None, cells):
                yield Pair(
                    query.strip(),
                    passage,
                    0.0 if name in columns.negatives else relevance,
                    score,
                )


def _judge_by_teacher(rows: Sequence[Pair]) -> list[Pair]:
    """Give relevance 1 to the passage of each query that the teacher scores highest,
    and 0 to the others."""
    highest: dict[str, float] = {}
    for row in rows:
        assert row.teacher is not None, "every row has a score"
        highest[row.query] = max(row.teacher, highest.get(row.query, row.teacher))
    return [
        row._replace(relevance=float(row.teacher == highest[row.query])) for row in rows
    ]


def _examples(pairs: Iterable[Pair], place: str) -> Examples:
    """Gather the passages of each query, without duplicates; queries are numbered in
    their order."""
    judged: dict[str, dict[str, Pair]] = {}
    contradictions = 0
    for pair in pairs:
        passages = judged.setdefault(pair.query, {})
        known = passages.setdefault(pair.passage, pair)
        contradictions += known != pair
        if pair.relevance > known.relevance:
            passages[pair.passage] = pair
    if not judged:
        raise DataError(
            f"{place}: has no query; expected rows of a query, a passage and its "
            "relevance."
        )
    rows = [
        (pair.query, pair.passage, pair.relevance, n, pair.teacher)
        for n, passages in enumerate(judged.values())
        for pair in passages.values()
    ]
    table = pa.table(
        [pa.array(column) for column in zip(*rows, strict=True)],
        names=_RANKING_SCHEMA.names,
    ).cast(_RANKING_SCHEMA)
    if table["teacher"].null_count:
        table = table.drop_columns("teacher")
    notes: tuple[str, ...] = ()
    if contradictions:
        notes = (
            f"{Path(place).name}: {contradictions:,} pairs occur with different "
            "numbers: the row of the highest relevance counts, or else the first",
        )
    return Examples(table, table["query"].to_pylist(), notes)


def _from_retrieval(
    sets: Sequence[Retrieval], name: str, notes: Sequence[str] = ()
) -> Rankings:
    """Rank the judged passages of each query, and the passages that BM25 finds for it;
    queries with the same best passage are held out together."""
    splits: dict[Role, Examples] = {}
    notes = [*notes, *(note for found in sets for note in found.notes)]
    for found in sets:
        numbers = {passage: n for n, passage in enumerate(found.corpus)}
        for role, judged in found.qrels.items():
            rows = [
                Pair(found.queries[q], found.corpus[p], score)
                for q, known in judged.items()
                for p, score in known.items()
            ]
            ranked = _with_negatives(rows, list(found.corpus.values()))
            examples = _examples(ranked, f"{found.name} [{role}]")
            best = {
                found.queries[q]: numbers[max(known, key=known.__getitem__)]
                for q, known in judged.items()
            }
            groups = [best[text] for text in examples.table["text"].to_pylist()]
            part = examples._replace(groups=groups)
            splits[role] = join_examples(
                [splits[role], part] if role in splits else [part]
            )
    if "train" not in splits:
        given = ", ".join(sorted(splits))
        raise DataError(
            f"{name}: judgements of {given} but no training split; expected "
            "qrels/train.tsv."
        )
    notes.append(
        f"added to each query {NEGATIVES} passages without a judgement, found by BM25, "
        "as irrelevant ones"
    )
    return Rankings(name, splits, ("query", "passage"), "relevance", tuple(notes))


def _with_negatives(
    rows: Sequence[Pair], corpus: Sequence[str] | None = None
) -> list[Pair]:
    """Add to each query the NEGATIVES passages that BM25 ranks highest among those
    without a judgement."""
    judged: dict[str, dict[str, float]] = {}
    for row in rows:
        judged.setdefault(row.query, {})[row.passage] = row.relevance
    if not judged:
        return []
    texts = list(
        dict.fromkeys(corpus if corpus is not None else (row.passage for row in rows))
    )
    most = max(map(len, judged.values()))
    found, _ = WordIndex.from_texts(texts).search(list(judged), NEGATIVES + most + 1)
    pairs: list[Pair] = []
    for (query, known), places in zip(judged.items(), found, strict=True):
        pairs += [
            Pair(query, passage, relevance) for passage, relevance in known.items()
        ]
        left_out = {*known, query}
        others = [texts[n] for n in places if texts[n] not in left_out]
        pairs += [Pair(query, passage, 0.0) for passage in others[:NEGATIVES]]
    return pairs
