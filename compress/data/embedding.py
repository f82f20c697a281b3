"""Load texts whose vectors are to be learned, and what says how near they are to each other.

Stated rules. Each file is read by itself: the json of SQuAD as questions and the paragraphs that answer them; a table
with a number beside two texts as pairs; one with columns `query` (or `anchor`) and `positive`, perhaps `negative`, or
with two texts alone, as texts that ask and texts to be found; any other as texts alone, a txt file a line each. BEIR's
folder holds queries, a corpus and judgements for each split. A folder or dump without a file called train is a corpus,
its documents cut into passages. All texts of the training split are learned from, once each, whatever stands beside
them, but those of other splits that are compared or ask: passages may be known beforehand, as an index knows them.
Where no validation split is there, some of it is held out. Texts alone are compared as the teacher compares them: see
`training.embedding`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from compress.data import cache, readers, retrieval, schema, sources, squad, text_files
from compress.data.corpus import Corpus, load_corpus, split_sentences
from compress.data.readers import RawSplit
from compress.data.retrieval import Retrieval
from compress.data.sources import Role
from compress.data.task import METRICS, Task, TaskData
from compress.errors import DataError, did_you_mean

ASKING: Final = ("query", "anchor", "question")
SIMILAR: Final = ("spearman", "pearson")
"""Metrics of pairs; the others are those of texts that are found."""
HELD_OUT: Final = 0.1
FEWEST: Final = 50
MOST: Final = 1000
"""Texts alone that are held out: at least, where there are twice as many, and at most."""
LARGEST: Final[Mapping[Role, tuple[int, int]]] = {"validation": (1000, 4000), "test": (10_000, 50_000)}
"""Queries and passages that are scored at most, as every evaluation computes the vectors of all."""
PASSAGE: Final = 400
"""Characters up to which sentences of a document are joined to a passage."""
SCHEMA: Final = pa.schema(
    {
        "text": pa.string(),
        "related": pa.list_(pa.int64()),
        "relevance": pa.list_(pa.float32()),
        "passage": pa.bool_(),
    }
)


@dataclass
class Part:
    """Hold the texts of a split, each once.

    judged    number of a text -> the others that it was compared with, and how near they are
    passages  numbers of those that are found by others; empty where texts are compared in pairs, or not at all
    """

    texts: list[str] = field(default_factory=list)
    judged: dict[int, dict[int, float]] = field(default_factory=dict)
    passages: set[int] = field(default_factory=set)
    empty: int = 0
    _numbers: dict[str, int] = field(default_factory=dict)

    def add(self, text: str | None) -> int | None:
        """Return the number of a text, a new one where it is new; None for an empty one, which is left out."""
        plain = (text or "").strip()
        if not plain:
            self.empty += 1
            return None
        if plain not in self._numbers:
            self._numbers[plain] = len(self.texts)
            self.texts.append(plain)
        return self._numbers[plain]

    def judge(self, one: int, other: int, relevance: float) -> None:
        if one != other:
            self.judged.setdefault(one, {})[other] = relevance

    def asking(self) -> Iterator[str]:
        """Yield the texts that are not there to be found."""
        return (text for number, text in enumerate(self.texts) if number not in self.passages)

    def without(self, texts: Set[str]) -> Part:
        """Return the other texts, and which of them are found by others; nothing is compared."""
        part = Part()
        for number, text in enumerate(self.texts):
            if text not in texts and (kept := part.add(text)) is not None and number in self.passages:
                part.passages.add(kept)
        return part

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the metrics that this split can be scored by."""
        return tuple(name for name in METRICS["embedding"] if (name not in SIMILAR) == bool(self.passages))

    def only(self, asking: Iterable[int], passages: int | None, rng: np.random.Generator) -> Part:
        """Keep these judged texts, what they were compared with, and so many passages in all, the rest at random."""
        kept, part = sorted(asking), Part()
        for one in kept:
            here = part.add(self.texts[one])
            assert here is not None
            for other, relevance in self.judged[one].items():
                there = part.add(self.texts[other])
                assert there is not None
                part.judge(here, there, relevance)
                if other in self.passages:
                    part.passages.add(there)
        rest = sorted(self.passages - {other for one in kept for other in self.judged[one]})
        room = len(rest) if passages is None else max(0, passages - len(part.passages))
        for other in rng.permutation(rest)[:room].tolist():
            there = part.add(self.texts[other])
            assert there is not None
            part.passages.add(there)
        return part

    def batches(self) -> Iterator[pa.RecordBatch]:
        for start in range(0, len(self.texts), 10_000):
            rows = range(start, min(start + 10_000, len(self.texts)))
            judged = [self.judged.get(row, {}) for row in rows]
            columns = [
                [self.texts[row] for row in rows],
                [list(each) for each in judged],
                [list(each.values()) for each in judged],
                [row in self.passages for row in rows],
            ]
            yield pa.record_batch(
                [pa.array(cells, kind.type) for cells, kind in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
            )


def load_embedding(
    source: str, *, text: Sequence[str] | None, label: str | None, metric: str | None, seed: int
) -> TaskData:
    """Load the texts of a source, with its splits on disk; see the top of this file. Raises DataError."""
    name, parts = _read(source, text, label)
    notes = [f"{role}: {part.empty:,} empty texts are left out" for role, part in parts.items() if part.empty]
    rng = np.random.default_rng(seed)
    if "validation" not in parts:
        parts["validation"], note = _hold_out(parts["train"], source, rng)
        notes.append(f"no validation split: {note} (seed {seed})")
    for role, (queries, passages) in LARGEST.items():
        part = parts.get(role)
        if part is not None and part.passages and (len(part.judged) > queries or len(part.passages) > passages):
            few = sorted(rng.permutation(sorted(part.judged))[:queries].tolist())
            parts[role] = part.only(few, passages, rng)
            notes.append(
                f"{role}: {len(few):,} of {len(part.judged):,} queries and {len(parts[role].passages):,} of "
                f"{len(part.passages):,} passages are scored (seed {seed})"
            )
    asked = {text for role in parts if role != "train" for text in parts[role].asking()}
    parts["train"] = parts["train"].without(asked)
    if len(parts["train"].texts) < 2:
        raise DataError(f"{source}: {len(parts['train'].texts)} text to learn from; expected two or more.")
    known = parts["validation"].metrics
    if metric is not None and metric not in known:
        raise DataError(f"metric {metric!r} does not score these texts.{did_you_mean(metric, known)}")
    if (test := parts.get("test")) is not None and test.metrics != known:
        raise DataError(
            f"{source}: the validation split is scored by {known[0]}, the test split by {test.metrics[0]}: expected "
            "both with pairs of texts and how near they are, or both with texts that ask and texts to be found."
        )
    label = label or ("relevance" if parts["validation"].passages else "similarity")
    with cache.scratch(cache.home() / "data") as folder:
        batches = {role: part.batches() for role, part in parts.items()}
        datasets, fingerprint = cache.keep_splits(folder, batches, "embedding")
    task = Task("embedding", ("text",), label, (), metric or known[0])
    return TaskData(
        name, task, datasets["train"], datasets["validation"], datasets.get("test"), fingerprint, tuple(notes)
    )


def is_embedding(source: str) -> bool:
    """Tell whether a source is clearly of texts alone: a txt file of lines without columns."""
    found = sources.local_files(source)
    return found is not None and set(found[1]) == {"train"} and all(map(_is_lines, found[1]["train"]))


def _is_lines(path: Path) -> bool:
    """Tell whether a txt file holds a text a line, and no columns."""
    if path.suffix.lower() != ".txt":
        return False
    first = list(islice(text_files.lines(path), readers.SHOWN_LINES))
    return bool(first) and not readers.delimiter_of(first)


def _read(source: str, text: Sequence[str] | None, label: str | None) -> tuple[str, dict[Role, Part]]:
    """Read every split of a source."""
    found = sources.local_files(source)
    if found is None:
        hub, _ = sources.load_hub_splits(source)
        every = {role: splits[0] for role, splits in sources.by_role(hub.items()).items()}
        if "train" not in every:
            raise DataError(f"{source}: no training split; it has {', '.join(hub)}.")
        return source, {role: _read_table(split, text, label) for role, split in every.items()}
    name, files = found
    folder = sources.local(source) if "=" not in source.partition(",")[0] else None
    if folder is not None and folder.is_dir():
        if sources.is_beir(folder):
            return name, _read_beir(retrieval.read_beir(folder), source)
        if not any(path.suffix.lower() in sources.SUFFIXES for path in files.get("train", ())):
            return name, {"train": _read_corpus(load_corpus(source))}
    return name, {role: _read_file(paths[0], text, label) for role, paths in files.items()}


def _read_file(path: Path, text: Sequence[str] | None, label: str | None) -> Part:
    if path.suffix.lower() not in sources.SUFFIXES:
        return _read_corpus(load_corpus(str(path)))
    if path.suffix.lower() == ".json" and squad.is_squad(path):
        return _read_retrieval(retrieval.read_squad_retrieval(path), path)
    if _is_lines(path):
        return _read_texts(text_files.lines(path))
    delimited = path.suffix.lower() in sources.DELIMITED
    named = [*(text or ()), *([label] if label else [])]
    return _read_table(readers.open_texts([path], named)[path] if delimited else readers.open_file(path), text, label)


def _read_texts(texts: Iterable[str]) -> Part:
    part = Part()
    for each in texts:
        part.add(each)
    return part


def _read_corpus(corpus: Corpus) -> Part:
    """Cut documents into passages: sentences of a line, joined up to PASSAGE characters."""

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


def _read_table(split: RawSplit, text: Sequence[str] | None, label: str | None) -> Part:
    plain = {schema.plain(name): name for name in split.columns}
    asking = next((plain[name] for name in ASKING if name in plain), None)
    positives = [name for key, name in plain.items() if key.startswith("positive")]
    negatives = [name for key, name in plain.items() if key.startswith("negative")]
    if text is None and asking is not None and positives:
        return _read_answers(split, asking, positives, negatives)
    if label:
        schema.refuse_unknown(split, [label])
    named = [plain[name] for name in schema.LABELS if name in plain]
    numbers = [label] if label else [name for name in named if _is_number(split, name)]
    columns, _ = schema.choose_text(split, text, numbers[:1])
    if len(columns) == 1:
        return _read_texts(cell for batch in split.read(columns) for cell in batch[columns[0]].to_pylist())
    if not numbers:
        return _read_answers(split, columns[0], [columns[1]], [])
    part, first = Part(), split.first
    for batch in split.read([*columns, numbers[0]]):
        for one, other, told in zip(*(batch[name].to_pylist() for name in (*columns, numbers[0])), strict=True):
            number = schema.number(told or "")
            if number is None or not math.isfinite(number):
                raise DataError(
                    f"{split.place}, row {first}: {told!r} in {numbers[0]!r} is no number; expected how near the two "
                    "texts are. Mend the row, or take it out."
                )
            places = part.add(one), part.add(other)
            if places[0] is not None and places[1] is not None:
                part.judge(places[0], places[1], number)
            first += 1
    return part


def _is_number(split: RawSplit, name: str) -> bool:
    cells = [cell for cell in split.sample[name] if cell]
    return bool(cells) and all(isinstance(cell, str) and schema.number(cell) is not None for cell in cells)


def _read_answers(split: RawSplit, asking: str, positives: Sequence[str], negatives: Sequence[str]) -> Part:
    """Read rows of a text that asks, texts that answer it, and texts that do not."""
    part, columns = Part(), [asking, *positives, *negatives]
    for batch in split.read(columns):
        for asks, *others in zip(*(batch[name].to_pylist() for name in columns), strict=True):
            query = part.add(asks)
            for at, cell in enumerate(others):
                for each in cell if isinstance(cell, list) else [cell]:
                    found = part.add(each)
                    if found is None or query is None:
                        continue
                    part.passages.add(found)
                    if at < len(positives):
                        part.judge(query, found, 1.0)
    return part


def _read_retrieval(found: Retrieval, path: Path) -> Part:
    """Read questions and the texts that answer them of a file that has one split."""
    (judged,) = found.qrels.values()
    return _read_judged(found, judged, path)


def _read_beir(found: Retrieval, source: str) -> dict[Role, Part]:
    """Read BEIR's folder: all texts are learned from but the queries of the other splits."""
    parts: dict[Role, Part] = {role: _read_judged(found, judged, source) for role, judged in found.qrels.items()}
    if "train" not in parts:
        parts["train"] = _read_texts(found.corpus.values())
        if "validation" not in parts and "test" not in parts:
            raise DataError(f"{source}: no judgements; expected qrels/dev.tsv, qrels/test.tsv or both.")
        if "validation" not in parts:
            parts["validation"] = parts.pop("test")
    return parts


def _read_judged(found: Retrieval, judged: Mapping[str, Mapping[str, float]], where: str | Path) -> Part:
    part, places = Part(), dict[str, int]()
    for name, passage in found.corpus.items():
        if (number := part.add(passage)) is not None:
            places[name] = number
            part.passages.add(number)
    for query, relevant in judged.items():
        asks = part.add(found.queries[query])
        for name, relevance in relevant.items():
            if asks is not None and name in places and relevance > 0:
                part.judge(asks, places[name], relevance)
    if not part.judged:
        raise DataError(f"{where}: no query has a passage that answers it.")
    return part


def _hold_out(part: Part, source: str, rng: np.random.Generator) -> tuple[Part, str]:
    """Choose a share of the judged texts, or of the texts, for a validation split, and say how many."""
    if part.judged:
        asking = rng.permutation(sorted(part.judged))
        count = max(1, round(HELD_OUT * len(asking)))
        if len(asking) < 2:
            raise DataError(f"{source}: one text that was compared with others: add a validation split.")
        held = part.only(asking[:count].tolist(), None, rng)
        what = f"{count:,} of {len(asking):,} texts that were compared with others"
    else:
        count = min(MOST, max(FEWEST, round(HELD_OUT * len(part.texts))), len(part.texts) // 2)
        held = _read_texts(part.texts[number] for number in sorted(rng.permutation(len(part.texts))[:count].tolist()))
        what = f"{count:,} of {len(part.texts):,} texts"
    if len(held.texts) < 2:
        raise DataError(f"{source}: {len(part.texts)} texts are too few to hold some out: add a validation split.")
    return held, f"{what} are held out for it"
