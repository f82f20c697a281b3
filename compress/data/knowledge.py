"""Read facts about named things from a table of triples, find the names in texts, and
write the facts as sentences.

Rules. The table has the columns head, relation and tail, or three columns
without a header; any other column is refused, as is a row that lacks one of the three.
An underscore stands for a space, as in `New_York`. A name is found where its words are
whole words of the text, written as in the table; of names that begin at the same word,
the longest. A triple is the sentence `head relation tail.`, which stands once for each
text. First come the most specific sentences, whose relation and tail the fewest heads
share; then those of the name that comes first in the text; then those that come first
in the table.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import regex

from compress.data import cache
from compress.data.table_files import open_table
from compress.data.tables import Table
from compress.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

    from compress.data.encoder import Encoder

FACTS_ENCODING: Final = "2"
"""Part of every cache key: raise it when the facts of the same texts change."""
TRIPLE_COLUMNS: Final = ("head", "relation", "tail")

EntityName = tuple[str, ...]
"""The words of a name."""


class Fact(NamedTuple):
    """Hold a triple as a sentence, and the number of heads that share its relation and
    tail."""

    sentence: str
    heads: int


@dataclass(frozen=True)
class Knowledge:
    """Hold the facts of a table.

    name     the name of its file; digest: of its content
    facts    the facts of each head
    longest  the most words of a name, by the word it begins with
    """

    name: str
    digest: str
    facts: Mapping[EntityName, Sequence[Fact]]
    longest: Mapping[str, int]

    def find_names(self, text: str) -> list[EntityName]:
        """Return the names in a text, in their order there."""
        words = split_words(text)
        found = list[EntityName]()
        at = 0
        while at < len(words):
            most = self.longest.get(words[at], 0)
            name = self._find_longest(words[at : at + most])
            if name:
                found.append(name)
            at += len(name) or 1
        return found

    def _find_longest(self, words: EntityName) -> EntityName:
        """Return the longest name that these words begin with, or () if there is
        none."""
        while words and words not in self.facts:
            words = words[:-1]
        return words

    def list_facts(self, *texts: str) -> list[str]:
        """Return the sentences about the names in these texts of a row, the most
        specific first."""
        names = chain.from_iterable(map(self.find_names, texts))
        found = list[Fact]()
        for name in dict.fromkeys(names):
            found += self.facts[name]
        found.sort(key=lambda fact: fact.heads)
        return [fact.sentence for fact in found]


def split_words(text: str) -> EntityName:
    """Split a text into words and punctuation marks."""
    return tuple(regex.findall(r"[\w\p{M}]+|[^\w\s]", text.replace("_", " ")))


def load_knowledge(path: Path) -> Knowledge:
    """Load a table of triples. Raises DataError."""
    table = open_table(path, TRIPLE_COLUMNS)
    heads = Counter[tuple[str, str]]()
    known = defaultdict[EntityName, dict[tuple[str, str], str]](dict)
    for place, cells in table.cells(_choose_columns(table)):
        head, relation, tail = map(_read_words, cells)
        if not (head and relation and tail):
            raise DataError(
                f"{place}: expected texts as head, relation and tail, found "
                f"{', '.join(map(repr, cells))}. Complete the row, or leave it out."
            )
        facts = known[split_words(head)]
        if (relation, tail) not in facts:
            facts[relation, tail] = f"{head} {relation} {tail}."
            heads[relation, tail] += 1
    longest = defaultdict[str, int](int)
    counted = defaultdict[EntityName, list[Fact]](list)
    for name, facts in known.items():
        longest[name[0]] = max(longest[name[0]], len(name))
        for pair, sentence in facts.items():
            counted[name].append(Fact(sentence, heads[pair]))
    return Knowledge(path.name, cache.digest(path), counted, longest)


def _choose_columns(table: Table) -> Sequence[str]:
    """Return the names that a table has for head, relation and tail. Raises DataError
    for other columns, and for a table without rows."""
    if table.refusal:
        raise DataError(table.refusal)
    columns = [*table.columns, *table.nested]
    if table.headerless and len(columns) == len(TRIPLE_COLUMNS):
        return columns
    if sorted(columns) == sorted(TRIPLE_COLUMNS):
        return TRIPLE_COLUMNS
    raise DataError(
        f"{table.place}: its columns are {', '.join(columns)}; expected a table of "
        f"triples, with the columns {', '.join(TRIPLE_COLUMNS)} and no other."
    )


def _read_words(cell: Any) -> str:
    """Return the words of a cell, or '' if it is not text."""
    if not isinstance(cell, str):
        return ""
    return " ".join(cell.replace("_", " ").split())


def add_facts(
    split: Dataset, knowledge: Knowledge, encoder: Encoder, max_length: int
) -> Dataset:
    """Write the facts of each text of a split as its second text, or after the second
    text of a pair.

    A row has those facts that leave it within `max_length` tokens, and in a new column
    `facts` their number. The result is cached.
    """
    key = cache.digest(
        "facts",
        FACTS_ENCODING,
        knowledge.digest,
        split._fingerprint,
        encoder.fingerprint(),
        str(max_length),
    )
    (empty,) = encoder.encode([("", "")])
    room = max_length - len(empty["input_ids"])

    def batches() -> Iterator[pa.RecordBatch]:
        for table in split.with_format("arrow").iter(1000):
            columns = {name: table[name] for name in table.schema.names}
            first = columns["text"].to_pylist()
            second = [""] * len(first)
            if "text_pair" in columns:
                second = columns["text_pair"].to_pylist()
            rows = list(zip(first, second, strict=True))
            chosen = _choose_facts(rows, knowledge, encoder, room)
            written = list[str]()
            for text, facts in zip(second, chosen, strict=True):
                written.append(" ".join([text, *facts]).strip())
            columns["text_pair"] = pa.array(written)
            columns["facts"] = pa.array(map(len, chosen), pa.int64())
            yield from pa.table(columns).to_batches()

    return cache.rows("facts", key, batches, empty="the split has no rows.")


def _choose_facts(
    rows: Sequence[Sequence[str]], knowledge: Knowledge, encoder: Encoder, room: int
) -> list[list[str]]:
    """Return the facts that fit next to the texts of each row, in tokens."""
    found = [knowledge.list_facts(*texts) for texts in rows]
    distinct = list(set(chain.from_iterable(found)))
    pieces = dict(zip(distinct, encoder.pieces(distinct), strict=True))
    texts = encoder.pieces(list(map(" ".join, rows)))
    chosen = list[list[str]]()
    for text, facts in zip(texts, found, strict=True):
        left = room - len(text)
        kept = list[str]()
        for fact in facts:
            size = len(pieces[fact])
            if size <= left:
                kept.append(fact)
                left -= size
        chosen.append(kept)
    return chosen
