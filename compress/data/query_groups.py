"""Group the texts of an embedding task for losses that compare queries with passages.

A group is a query, one of its relevant passages, and up to MOST_IRRELEVANT others that
are judged irrelevant, or all that a teacher has scored; a query has as many groups as
relevant passages, which share out the irrelevant ones. A text may be in several groups.
Queries without a relevant passage are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from compress.data import cache

if TYPE_CHECKING:
    from datasets import Dataset

GROUPS_ENCODING: Final = "1"
"""Part of every cache key: raise it when groups are made differently."""
MOST_IRRELEVANT: Final = 7
"""The most irrelevant passages of a group, which then has 9 texts."""
GROUPS_PER_WRITE: Final = 1000


class _Member(NamedTuple):
    """A text in a group. text, asker: the rows of this text and of the group's query in
    the split."""

    query: int
    text: int
    asker: int
    relevance: float
    scores: float


_TYPES: Final = {
    **dict.fromkeys(("query", "text", "asker"), pa.int64()),
    **dict.fromkeys(("relevance", "scores"), pa.float32()),
}


def group_rows(split: Dataset, rows: Dataset) -> Dataset:
    """Return the encoded `rows` of a split in groups, in the cache: their columns, and
    for each

    query      the number of its group
    text       the number of its text, which is the first row of the split with this
               text, as a query or as a passage; asker: that of its group's query
    relevance  the relevance of a passage; 0 for a query
    scores     a teacher's score of the passage, if the split has scores; 0 for a query
    index      its own number

    Raises DataError if no text of the split has a relevant passage.
    """
    key = cache.digest("groups", GROUPS_ENCODING, split._fingerprint, rows._fingerprint)
    scored = any(map(len, split["scores"][:]))
    first: dict[str, int] = {}
    numbers = [first.setdefault(text, row) for row, text in enumerate(split["text"][:])]

    def batches() -> Iterator[pa.RecordBatch]:
        members = _members(split)
        indices = count()
        while some := list(islice(members, GROUPS_PER_WRITE)):
            table: pa.Table = rows.with_format("arrow")[
                [member.text for member in some]
            ].drop_columns("index")
            columns: dict[str, Sequence[Any]] = dict(
                zip(_Member._fields, zip(*some, strict=True), strict=True)
            )
            for name in ("text", "asker"):
                columns[name] = [numbers[row] for row in columns[name]]
            if not scored:
                del columns["scores"]
            for name, cells in columns.items():
                table = table.append_column(name, pa.array(cells, _TYPES[name]))
            table = table.append_column(
                "index", pa.array(list(islice(indices, len(some))))
            )
            yield from table.combine_chunks().to_batches()

    return cache.rows(
        "encoded",
        key,
        batches,
        empty="this objective compares queries with relevant passages, but the "
        "training split has none; expected a table with the columns query and "
        "positive, or query, passage and relevance (or teacher_score).",
    )


def _members(split: Dataset) -> Iterator[_Member]:
    groups = count()
    if not any(split["passage"][:]):  # texts alone, or pairs of them
        return
    columns = (split[name][:] for name in ("related", "relevance", "scores"))
    for asker, (related, relevance, scores) in enumerate(zip(*columns, strict=True)):
        judged = list(
            zip(related, relevance, scores or [0.0] * len(related), strict=True)
        )
        relevant, others = (
            [each for each in judged if (each[1] > 0) == wanted]
            for wanted in (True, False)
        )
        for number, found in enumerate(relevant):
            group = next(groups)
            yield _Member(group, asker, asker, 0.0, 0.0)
            for other in (found, *others[number :: len(relevant)][:MOST_IRRELEVANT]):
                yield _Member(group, other[0], asker, other[1], other[2])
