"""Load texts for learning vectors, and judgements of their similarity.

Rules. Each file is read by itself: the json of SQuAD as questions and the
paragraphs that answer them; a table with two texts and a number as pairs; a table with
columns `query` (or `anchor`), `positive` and optionally `negative`, or with `query`,
`passage` and `relevance`, or with only two texts, as queries and passages (with a
teacher's scores instead of the relevance, the passage of a query with the highest score
is the relevant one); any other table as texts alone, a txt file one per line. A BEIR
folder has queries, a corpus and judgements for each split. A folder or dump without a
file called train is a corpus, whose documents are cut into passages. A text that is
both a query and a passage is a row as each, since the two have different prompts. The
training split has all its rows, once each, except texts that other splits compare or
use as queries, which are left out as passages too; other passages may be shared, as an
index knows them beforehand. Its judgements, including
irrelevant passages, are kept for losses that read them (`data.query_groups`); other
splits keep only relevant passages. If there is no validation split, part of the
training split is held out. Texts alone are compared as the teacher compares them: see
`training.teacher_vectors`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from compress.data import dialects, retrieval, schema, sources, squad
from compress.data.corpus import Corpus, load_corpus
from compress.data.held_out import SHARE_HELD_OUT, held_out_share
from compress.data.ranking import PASSAGES, RELEVANCES, TEACHERS, find_passages
from compress.data.retrieval import Retrieval
from compress.data.sentences import split_sentences
from compress.data.sources import Role
from compress.data.table_files import is_table_file, open_table
from compress.data.tables import Table
from compress.data.task import Task, UnsavedTask
from compress.errors import DataError, did_you_mean
from compress.kinds import find

NumberPairs = dict[int, dict[int, float]]
"""Number of a text -> number of another -> a value of the two."""
QUERY_NAMES: Final = ("query", "anchor", "question")
FEWEST_PAIRS: Final = 50
MOST_HELD_OUT: Final = 1000
"""Texts alone to hold out: at least FEWEST_PAIRS, but not more than half, and at most
MOST_HELD_OUT."""
MOST_SCORED: Final[Mapping[Role, tuple[int, int]]] = {
    "validation": (1000, 4000),
    "test": (10_000, 50_000),
}
"""The most queries and passages to score, since every evaluation computes all their
vectors."""
PASSAGE: Final = 400
"""Characters up to which sentences of a document are joined into a passage."""
GROUP_SCHEMA: Final = pa.schema(
    {
        "text": pa.string(),
        "related": pa.list_(pa.int64()),
        "relevance": pa.list_(pa.float32()),
        "scores": pa.list_(pa.float32()),
        "passage": pa.bool_(),
    }
)


@dataclass
class EmbeddingTexts:
    """Hold the texts of a split, without duplicates; a text that is both a query and a
    passage has two numbers.

    judged    number of a text -> number of a text that it is judged with -> relevance
    scores    as `judged`, with a teacher's score; empty, or as long as `judged`
    passages  the texts that queries retrieve; empty if texts are compared in pairs, or
              not at all
    """

    texts: list[str] = field(default_factory=list)
    judged: NumberPairs = field(default_factory=dict)
    scores: NumberPairs = field(default_factory=dict)
    passages: set[int] = field(default_factory=set)
    empty: int = 0
    same: int = 0
    _numbers: dict[tuple[str, bool], int] = field(default_factory=dict)

    def add(self, text: str | None, *, passage: bool = False) -> int | None:
        """Return the number of a text for this purpose, added if it is new, or None for
        an empty text, which is left out."""
        plain = (text or "").strip()
        if not plain:
            self.empty += 1
            return None
        number = self._numbers.setdefault((plain, passage), len(self.texts))
        if number == len(self.texts):
            self.texts.append(plain)
        if passage:
            self.passages.add(number)
        return number

    def judge(
        self, one: int, other: int, relevance: float, score: float | None = None
    ) -> None:
        """Keep a judgement; the highest of two texts counts, and none of a text and
        itself."""
        known = self.judged.get(one, {}).get(other, relevance)
        if self.texts[one] == self.texts[other]:
            self.same += 1
        elif relevance >= known:
            self.judged.setdefault(one, {})[other] = relevance
            if score is not None:
                self.scores.setdefault(one, {})[other] = score

    def without(self, texts: Set[str]) -> EmbeddingTexts:
        """Return the texts that are not in `texts`, and the judgements among them."""
        kept = [number for number, text in enumerate(self.texts) if text not in texts]
        place = {old: new for new, old in enumerate(kept)}

        def move(
            judgements: Mapping[int, Mapping[int, float]],
        ) -> NumberPairs:
            moved = {
                place[one]: {
                    place[other]: value
                    for other, value in others.items()
                    if other in place
                }
                for one, others in judgements.items()
                if one in place
            }
            return {one: others for one, others in moved.items() if others}

        passages = {place[number] for number in self.passages & place.keys()}
        return EmbeddingTexts(
            [self.texts[n] for n in kept],
            move(self.judged),
            move(self.scores),
            passages,
        )

    def scorable(self) -> EmbeddingTexts:
        """Return these texts with what a metric needs: the relevant passages of
        queries, or all pairs."""
        relevant = {
            one: {
                other: value
                for other, value in others.items()
                if value > 0 or not self.passages
            }
            for one, others in self.judged.items()
        }
        return replace(
            self,
            judged={one: others for one, others in relevant.items() if others},
            scores={},
        )

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the metrics that can score this split."""
        kind = find("embedding")
        pairs = len(kind.pair_metrics)
        return tuple(kind.metrics[pairs:] if self.passages else kind.pair_metrics)

    def select(
        self, queries: Iterable[int], passages: int | None, rng: np.random.Generator
    ) -> EmbeddingTexts:
        """Keep these judged texts with the texts they are judged with, and add random
        passages up to `passages`."""
        queries = sorted(queries)
        part = EmbeddingTexts()

        def add(number: int) -> int:
            new = part.add(self.texts[number], passage=number in self.passages)
            assert new is not None, "texts are not empty"
            return new

        for query in queries:
            new = add(query)
            for other, relevance in self.judged[query].items():
                part.judge(new, add(other), relevance)
        rest = sorted(
            self.passages - {other for query in queries for other in self.judged[query]}
        )
        room = len(rest) if passages is None else max(0, passages - len(part.passages))
        for passage in rng.permutation(rest)[:room].tolist():
            add(passage)
        return part

    def batches(self) -> Iterator[pa.RecordBatch]:
        for start in range(0, len(self.texts), 10_000):
            rows = range(start, min(start + 10_000, len(self.texts)))
            judged = [self.judged.get(row, {}) for row in rows]
            columns = [
                [self.texts[row] for row in rows],
                [list(others) for others in judged],
                [list(others.values()) for others in judged],
                [list(self.scores.get(row, {}).values()) for row in rows],
                [row in self.passages for row in rows],
            ]
            yield pa.record_batch(
                [
                    pa.array(cells, kind.type)
                    for cells, kind in zip(columns, GROUP_SCHEMA, strict=True)
                ],
                schema=GROUP_SCHEMA,
            )


def load_embedding(
    source: str,
    *,
    text: Sequence[str] | None,
    label: str | None,
    metric: str | None,
    seed: int,
) -> UnsavedTask:
    """Read the texts of a source by the rules at the top of this file. Raises
    DataError."""
    name, parts, read_notes = _read(source, text, label)
    notes = [*read_notes]
    notes += [
        f"{role}: left out {part.empty:,} empty texts"
        for role, part in parts.items()
        if part.empty
    ]
    notes += [
        f"{role}: left out {part.same:,} judgements of a text and itself"
        for role, part in parts.items()
        if part.same
    ]
    rng = np.random.default_rng(seed)
    parts = {
        role: part if role == "train" else part.scorable()
        for role, part in parts.items()
    }
    if "validation" not in parts:
        parts["validation"], held_out = _hold_out(parts["train"], source, rng)
        notes.append(f"no validation split: held out {held_out} (seed {seed})")
    for role, (queries, passages) in MOST_SCORED.items():
        part = parts.get(role)
        if (
            part is not None
            and part.passages
            and (len(part.judged) > queries or len(part.passages) > passages)
        ):
            chosen = sorted(rng.permutation(sorted(part.judged))[:queries].tolist())
            parts[role] = part.select(chosen, passages, rng)
            notes.append(
                f"{role}: scores {len(chosen):,} of {len(part.judged):,} queries and "
                f"{len(parts[role].passages):,} of {len(part.passages):,} passages "
                f"(seed {seed})"
            )
    others = [part for role, part in parts.items() if role != "train"]
    evaluated = {
        text
        for part in others
        for n, text in enumerate(part.texts)
        if n not in part.passages
    }
    parts["train"] = parts["train"].without(evaluated)
    if len(parts["train"].texts) < 2:
        raise DataError(
            f"{source}: {len(parts['train'].texts)} training texts; expected two or "
            "more."
        )
    known = parts["validation"].metrics
    if metric is not None and metric not in known:
        raise DataError(
            f"metric {metric!r} does not score these "
            f"texts.{did_you_mean(metric, known)}"
        )
    if (test := parts.get("test")) is not None and test.metrics != known:
        raise DataError(
            f"{source}: the validation split is scored by {known[0]}, the test split "
            f"by {test.metrics[0]}: expected both to have pairs of texts with their "
            "similarity, or both to have queries with passages."
        )
    label = label or ("relevance" if parts["validation"].passages else "similarity")
    task = Task("embedding", ("text",), label, (), metric or known[0])
    return UnsavedTask(
        name, task, {role: part.batches() for role, part in parts.items()}, notes
    )


def is_embedding(source: str) -> bool:
    """Check whether a source has texts alone: a txt file of lines without columns."""
    found = sources.local_files(source)
    return (
        found is not None
        and set(found[1]) == {"train"}
        and all(map(_has_lines, found[1]["train"]))
    )


def _has_lines(path: Path) -> bool:
    """Check whether a file is a txt file with one text per line, and no columns."""
    if path.suffix.lower() != ".txt":
        return False
    first = dialects.first_lines(path)
    return bool(first) and not dialects.detect_txt(first)


def _read(
    source: str, text: Sequence[str] | None, label: str | None
) -> tuple[str, dict[Role, EmbeddingTexts], Sequence[str]]:
    """Return the name of a source, every split, and notes."""
    found = sources.local_files(source)
    if found is None:
        hub = sources.find(source, [])
        tables: dict[Role, Table] = {}
        notes = list(hub.notes)
        for role, table in hub.tables():
            if tables.setdefault(role, table) is not table:
                notes.append(
                    f"skipped {table.name}: {tables[role].name} is the {role} split"
                )
        return (
            source,
            {role: _read_table(table, text, label) for role, table in tables.items()},
            notes,
        )
    name, files = found
    folder = sources.local(source) if "=" not in source.partition(",")[0] else None
    if folder is not None and folder.is_dir():
        if sources.is_beir(folder):
            return name, _read_beir(retrieval.read_beir(folder), source), ()
        if not any(map(is_table_file, files.get("train", ()))):
            return name, {"train": _read_corpus(load_corpus(source))}, ()
        files = {
            role: [path for path in paths if is_table_file(path)]
            for role, paths in files.items()
        }
    chosen, notes = sources.choose_files(name, files)
    return (
        name,
        {role: _read_files(paths, text, label) for role, paths in chosen.items()},
        notes,
    )


def _read_files(
    paths: Sequence[Path], text: Sequence[str] | None, label: str | None
) -> EmbeddingTexts:
    """Read the shards of a split."""
    first = paths[0]
    if not is_table_file(first):
        return _join(_read_corpus(load_corpus(str(path))) for path in paths)
    if first.suffix.lower() == ".json" and squad.is_squad(first):
        return _join(map(_read_squad, paths))
    if _has_lines(first):
        text = label = None
    named = schema.list_requested(text, label)
    (table,) = sources.join_shards(
        {path: open_table(path, named).check() for path in paths}
    )
    return _read_table(table, text, label)


def _join(parts: Iterable[EmbeddingTexts]) -> EmbeddingTexts:
    """Join the texts and judgements of shards."""
    joined = EmbeddingTexts()
    for part in parts:
        added = (
            joined.add(text, passage=number in part.passages)
            for number, text in enumerate(part.texts)
        )
        places = [number for number in added if number is not None]
        joined.empty += part.empty
        joined.same += part.same
        for one, others in part.judged.items():
            for other, relevance in others.items():
                joined.judge(places[one], places[other], relevance)
    return joined


def _read_squad(path: Path) -> EmbeddingTexts:
    found = retrieval.read_squad_retrieval(path)
    return _read_judged(found, found.qrels["test"], path)


def _read_texts(texts: Iterable[str | None]) -> EmbeddingTexts:
    part = EmbeddingTexts()
    for text in texts:
        part.add(text)
    return part


def _read_corpus(corpus: Corpus) -> EmbeddingTexts:
    """Cut documents into passages: the sentences of a line, joined up to PASSAGE
    characters."""

    def passages() -> Iterator[str]:
        for document in corpus.documents():
            for line in document.splitlines():
                joined = ""
                for sentence in split_sentences(line):
                    if joined and len(joined) + len(sentence) > PASSAGE:
                        yield joined
                        joined = ""
                    joined = f"{joined} {sentence}".strip()
                yield joined

    return _read_texts(filter(None, passages()))


def _read_table(
    split: Table, text: Sequence[str] | None, label: str | None
) -> EmbeddingTexts:
    plain = {schema.plain(name): name for name in split.columns}
    query = next((plain[name] for name in QUERY_NAMES if name in plain), None)
    positives = find_passages(plain, "positive")
    negatives = find_passages(plain, "negative")
    if text is None and query is not None and positives:
        return _read_queries(split, query, positives, negatives)
    passage = next((plain[name] for name in PASSAGES if name in plain), None)
    relevance = plain.get(RELEVANCES[0])
    scores = next((plain[name] for name in TEACHERS if name in plain), None)
    judgement = relevance or scores
    if text is None and query and passage and judgement:
        text = [query, passage]
    if label:
        schema.refuse_unknown(split, [label])
    known = [plain[name] for name in schema.LABELS if name in plain]
    usual = (
        [judgement]
        if judgement
        else [name for name in known if _is_numeric(split, name)]
    )
    numbers = [label] if label else usual
    columns, _ = schema.choose_text(split, text, numbers[:1])
    if len(columns) == 1:
        return _read_texts(cell for _, (cell,) in split.cells(columns))
    if not numbers and text is None and known:
        raise DataError(
            f"{split.place}: the label {known[0]!r} is not a number; expected the "
            "similarity of the two texts, or --text twice to take every row for a "
            "relevant pair, whatever its label says."
        )
    if not numbers:
        return _read_queries(split, columns[0], [columns[1]], [])
    if numbers[0] != judgement:
        return _read_pairs(split, columns[0], columns[1], numbers[0])
    return _read_judgements(split, columns[0], columns[1], relevance, scores)


def _read_pairs(split: Table, one: str, other: str, number: str) -> EmbeddingTexts:
    """Read rows of two texts and their similarity."""
    part = EmbeddingTexts()
    for place, (*texts, cell) in split.cells([one, other, number]):
        value = _number(cell, place, number, "similarity of the two texts")
        first, second = map(part.add, texts)
        if first is not None and second is not None:
            part.judge(first, second, value)
    return part


def _read_judgements(
    split: Table, query: str, passage: str, relevance: str | None, scores: str | None
) -> EmbeddingTexts:
    """Read rows of a query, a passage, and its relevance, a teacher's score, or
    both."""
    part = EmbeddingTexts()
    names = [name for name in (relevance, scores) if name]
    about = {
        relevance: "relevance of the passage, 0 if it is irrelevant",
        scores: "teacher's score of the passage",
    }
    for place, (asked, found, *cells) in split.cells([query, passage, *names]):
        values = [
            _number(cell, place, name, about[name])
            for name, cell in zip(names, cells, strict=True)
        ]
        one = part.add(asked)
        other = part.add(found, passage=True)
        if one is not None and other is not None:
            part.judge(
                one,
                other,
                values[0] if relevance else 0.0,
                values[-1] if scores else None,
            )
    if not relevance:
        for one, others in part.scores.items():
            part.judged[one][max(others, key=others.__getitem__)] = 1.0
    return part


def _number(cell: str | None, place: str, name: str, expected: str) -> float:
    value = schema.number(cell or "")
    if value is None or not math.isfinite(value):
        raise DataError(
            f"{place}: {cell!r} in {name!r} is not a number; expected the {expected}. "
            "Correct or remove the row."
        )
    return value


def _is_numeric(split: Table, name: str) -> bool:
    cells = [cell for cell in split.sample[name] if cell]
    return bool(cells) and all(
        isinstance(cell, str) and schema.number(cell) is not None for cell in cells
    )


def _read_queries(
    split: Table, query: str, positives: Sequence[str], negatives: Sequence[str]
) -> EmbeddingTexts:
    """Read rows of a query, relevant passages and irrelevant ones."""
    part = EmbeddingTexts()
    for _, (first, *others) in split.cells([query, *positives, *negatives]):
        one = part.add(first)
        for at, cell in enumerate(others):
            for text in cell if isinstance(cell, list) else [cell]:
                passage = part.add(text, passage=True)
                if passage is not None and one is not None:
                    part.judge(one, passage, float(at < len(positives)))
    return part


def _read_beir(found: Retrieval, source: str) -> dict[Role, EmbeddingTexts]:
    parts: dict[Role, EmbeddingTexts] = {
        role: _read_judged(found, judged, source)
        for role, judged in found.qrels.items()
    }
    if "train" not in parts:
        parts["train"] = _read_texts(found.corpus.values())
        if "validation" not in parts:
            parts["validation"] = parts.pop("test")
    return parts


def _read_judged(
    found: Retrieval, judged: Mapping[str, Mapping[str, float]], place: str | Path
) -> EmbeddingTexts:
    part = EmbeddingTexts()
    numbers = dict[str, int]()
    for name, passage in found.corpus.items():
        if (number := part.add(passage, passage=True)) is not None:
            numbers[name] = number
    for query, relevant in judged.items():
        one = part.add(found.queries[query])
        for name, relevance in relevant.items():
            if one is not None and name in numbers:
                part.judge(one, numbers[name], max(relevance, 0.0))
    if not part.scorable().judged:
        raise DataError(f"{place}: no query has a relevant passage.")
    return part


def _hold_out(
    part: EmbeddingTexts, source: str, rng: np.random.Generator
) -> tuple[EmbeddingTexts, str]:
    """Choose a share of the judged texts, or of the texts, for a validation split; and
    return how many, in words."""
    if judged := part.scorable().judged:
        queries = rng.permutation(sorted(judged))
        count = max(1, round(held_out_share(len(queries)) * len(queries)))
        if len(queries) < 2:
            raise DataError(
                f"{source}: a single judged text cannot be held out; add a validation "
                "split."
            )
        held_out = part.scorable().select(queries[:count].tolist(), None, rng)
        description = f"{count:,} of {len(queries):,} judged texts"
    else:
        count = min(
            MOST_HELD_OUT,
            max(FEWEST_PAIRS, round(SHARE_HELD_OUT * len(part.texts))),
            len(part.texts) // 2,
        )
        chosen = sorted(rng.permutation(len(part.texts))[:count].tolist())
        held_out = _read_texts(part.texts[number] for number in chosen)
        description = f"{count:,} of {len(part.texts):,} texts"
    if len(held_out.texts) < 2:
        raise DataError(
            f"{source}: {len(part.texts)} texts are too few to hold some out; add a "
            "validation split."
        )
    return held_out, description
