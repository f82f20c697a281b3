"""Describe the splits of a task, and find faults that no single row shows: splits that
share rows, classes spelled in two ways, texts that cannot be told apart.

Texts count as the same if only case and spaces differ. Faults that make scores
worthless are refused or noted as a WARNING.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from compress.arrays import Longs, spaced
from compress.data.encoder import encoder_of
from compress.data.task import Task, TaskData
from compress.errors import DataError
from compress.machine import count_cores
from compress.progress import show_progress
from compress.records.inspection import Coverage, Overlap, SplitFacts, Spread

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

LOUD: Final = 0.1
"""The share of a split at which a fault becomes a WARNING: it then changes a score by
whole points."""
FEW_ROWS_TO_SCORE: Final = 30
"""Rows below which a split gets a note: with 30, an accuracy of 0.5 is uncertain by
0.18."""
MOST_TEXTS_AUDITED: Final = 2000
"""Texts on which a tokenizer is measured: enough for its share of unknown tokens to be
right to about a tenth of a point."""

COLUMNS_OF_TEXTS: Final = ("text", "text_pair", "question", "context", "words")
"""The text columns of a split, over all kinds of task."""
_ODD_SPACES: Final = (
    r"[\t-\r\x1c-\x1f\x85\xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}"
    r"\x{205f}\x{3000}]"
)
"""White space other than a space, as a regular expression."""

Keys = Longs

_CONSEQUENCES: Final[Mapping[tuple[str, str], str]] = {
    (
        "train",
        "validation",
    ): "checkpoints are chosen, and int8 is judged, on rows that were trained on",
    (
        "train",
        "test",
    ): "the test score is too high, because these rows were trained on",
    (
        "validation",
        "test",
    ): "the test score is too high, because checkpoints were chosen on these rows",
}


def audit(data: TaskData) -> TaskData:
    """Add notes on the faults of its splits to a task. DataError if the test split is
    the training split."""
    splits = _splits(data)
    task = data.task
    keys = {role: row_keys(split) for role, split in splits.items()}
    train = keys["train"]
    trained = (train, np.concatenate([train, keys["validation"]]))
    if "test" in keys and any(_are_same_rows(keys["test"], rows) for rows in trained):
        raise DataError(
            f"{data.name}: the test split is the training split ({len(keys['test']):,} "
            "rows), so its score would only measure how well the answers are "
            "remembered. Provide other rows for the test split, or none."
        )
    if not task.tokenwise and len(train) > 1 and (train == train[0]).all():
        raise DataError(
            f"{data.name}: all {len(train):,} training rows have the same text. Name "
            "another column with --text."
        )
    notes = list(data.notes)
    if not task.shares_texts:
        for one, other, count, share in _shared_rows(keys):
            notes.append(
                f"{'WARNING: ' if share >= LOUD else ''}{count:,} of "
                f"{len(keys[other]):,} rows of {other} ({share:.1%}) are in {one} too: "
                f"{_CONSEQUENCES[one, other]}. Remove them from {one}"
            )
    unit, units = task.unit
    for role, split in splits.items():
        if role != "train" and (size := task.count_rows(split)) < FEW_ROWS_TO_SCORE:
            notes.append(
                f"{role} has {size} {units if size > 1 else unit}: each is "
                f"{100 / size:.0f} points of a score, which is uncertain by up to "
                f"{98 / size**0.5:.0f} points (95%)"
            )
    if task.labels:
        counts = {
            role: task.count_classes(split)
            for role, split in splits.items()
            if _is_labelled(task, split)
        }
        notes += [
            *_find_spelled_twice(task, counts),
            *_find_missing_classes(task, counts),
        ]
    if task.one_label and not task.pair and "label" in data.train.column_names:
        names = _keys([pa.array(task.labels, pa.string())])
        count = int((names[data.train.data.table["label"].to_numpy()] == train).sum())
        if count / len(train) >= LOUD:
            notes.append(
                f"WARNING: {count:,} of {len(train):,} training texts are the name of "
                "their class: is --text the right column?"
            )
    return replace(data, notes=tuple(dict.fromkeys(notes)))


def _splits(data: TaskData) -> dict[str, Dataset]:
    return {"train": data.train, "validation": data.validation} | (
        {"test": data.test} if data.test else {}
    )


def row_keys(split: Dataset) -> Keys:
    """Compute a number for each row, the same for equal texts and almost never for
    different ones."""
    return compare_rows([batch.columns for batch in _batches(split)])


def compare_rows(columns: Sequence[Sequence[pa.Array]]) -> Keys:
    """Compute the `row_keys` of batches, each given by its columns of texts."""
    with ThreadPoolExecutor(count_cores()) as pool:
        keys = show_progress(
            pool.map(_keys, columns), "comparing rows", len(columns), "batches"
        )
        return np.concatenate([np.empty(0, np.int64), *keys])


def _keys(columns: Sequence[pa.Array]) -> Keys:
    """Compute the keys of rows by their columns."""
    rows = pc.binary_join_element_wise(*map(_plain_column, columns), "\0")
    return np.fromiter(map(hash, rows.to_pylist()), np.int64, len(rows))


def _plain_column(column: pa.Array) -> pa.Array:
    """Apply `_plain` to a column of texts or of words."""
    if pa.types.is_list(column.type):
        column = pc.binary_join(column, " ")
    texts = pc.utf8_lower(pc.fill_null(column, ""))
    odd = pc.match_substring_regex(texts, f"{_ODD_SPACES}|  ")
    spaced = pc.replace_substring_regex(texts.filter(odd), f"({_ODD_SPACES}| )+", " ")
    return pc.utf8_trim_whitespace(pc.replace_with_mask(texts, odd, spaced))


def _are_same_rows(one: Keys, other: Keys) -> bool:
    return len(one) == len(other) and bool((np.sort(one) == np.sort(other)).all())


def texts(
    split: Dataset, rows: Sequence[int] | None = None
) -> Iterator[tuple[str, ...]]:
    """Yield the one or two texts of each row, or of the given rows; the words of a
    sentence are joined into one text."""
    for batch in _batches(split, rows):
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            yield tuple(
                cell if isinstance(cell, str) else " ".join(cell) for cell in row
            )


def _batches(split: Dataset, rows: Sequence[int] | None = None) -> list[pa.RecordBatch]:
    """Return the columns of texts of a split, or of some of its rows, as stored:
    formatting by `datasets` takes longer than the audit."""
    names = [name for name in COLUMNS_OF_TEXTS if name in split.column_names]
    table = split.data.table.select(names)
    if rows is not None:
        table = table.take(list(rows))
    return table.to_batches(max_chunksize=10_000)


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _shared_rows(keys: Mapping[str, Keys]) -> Iterator[tuple[str, str, int, float]]:
    """Yield each two splits that share rows, and how many rows, and what share, of the
    second are in the first."""
    ordered = {role: np.sort(rows) for role, rows in keys.items()}
    for one, other in combinations(keys, 2):
        if count := _count_among(keys[other], ordered[one]):
            yield one, other, count, count / len(keys[other])


def _count_among(keys: Keys, ordered: Keys) -> int:
    """Count the keys that are also in `ordered`, which is sorted."""
    places = np.searchsorted(ordered, keys)
    nearest = ordered[np.minimum(places, len(ordered) - 1)]
    return int((nearest == keys).sum())


def _is_labelled(task: Task, split: Dataset) -> bool:
    return bool(task.labels) and task.label_column in split.column_names


def _find_spelled_twice(task: Task, counts: Mapping[str, Longs]) -> Iterator[str]:
    """Note classes whose names differ only in case, spaces or Unicode form."""
    alike: dict[str, list[int]] = {}
    for number, label in enumerate(task.labels):
        alike.setdefault(_plain(unicodedata.normalize("NFKC", label)), []).append(
            number
        )
    total = np.sum(list(counts.values()), axis=0)
    for numbers in alike.values():
        if len(numbers) > 1:
            shown = " and ".join(
                f"{task.labels[n]!r} ({total[n]:,} rows)" for n in numbers
            )
            yield (
                f"WARNING: the classes {shown} differ only in case or spaces, but are "
                "learned and scored as different classes. If they are the same class, "
                "spell them the same way"
            )


def _find_missing_classes(task: Task, counts: Mapping[str, Longs]) -> Iterator[str]:
    """Note classes without an example in a split."""
    for role, of_class in counts.items():
        absent = [
            task.labels[n]
            for n in np.flatnonzero(of_class == 0)
            if not task.labels[n].startswith("I-")
        ]
        if not absent:
            continue
        which = (
            f"{len(absent)} of {len(task.labels)} classes "
            f"({', '.join(absent[:5])}{', ...' if absent[5:] else ''})"
        )
        if role == "train":
            yield (
                f"WARNING: train has no example of {which}: they cannot be learned. "
                "Add some, or remove the classes"
            )
        else:
            yield f"{role} has no example of {which}: its score says nothing about them"


def describe_splits(
    data: TaskData,
) -> tuple[tuple[SplitFacts, ...], tuple[Overlap, ...]]:
    """Describe each split (lengths, classes, repeated rows), and count the rows that
    splits share."""
    splits = _splits(data)
    task = data.task
    keys = {name: row_keys(split) for name, split in splits.items()}
    facts = []
    for name, split in splits.items():
        shares = {}
        conflicting = 0
        if _is_labelled(task, split):
            counts = task.count_classes(split)
            total = counts.sum() if task.word_labels else len(split)
            shares = {
                label: round(float(n / total), 6)
                for label, n in zip(task.labels, counts, strict=True)
            }
            if task.one_label:
                pairs = np.unique(
                    np.stack([keys[name], split.data.table["label"].to_numpy()]), axis=1
                )
                distinct, labels = np.unique(pairs[0], return_counts=True)
                conflicting = int(np.isin(keys[name], distinct[labels > 1]).sum())
        words = _spread(
            [sum(len(text.split()) for text in row) for row in texts(split)]
        )
        repeated = len(split) - len(np.unique(keys[name]))
        facts.append(SplitFacts(name, len(split), repeated, conflicting, words, shares))
    return tuple(facts), tuple(
        Overlap(one, other, n, round(share, 6))
        for one, other, n, share in _shared_rows(keys)
    )


def measure_coverage(
    data: TaskData, tokenizer: PreTrainedTokenizerBase, name: str
) -> Coverage:
    """Measure how a tokenizer encodes the training texts, on at most MOST_TEXTS_AUDITED
    of them, evenly spaced."""
    chosen = spaced(len(data.train), MOST_TEXTS_AUDITED)
    rows = list(texts(data.train, chosen.tolist()))
    encoder = encoder_of(tokenizer)
    limit = encoder.settings.model_max_length
    pieces = [encoder.pieces(row) for row in rows]
    ids = [token for row in pieces for text in row for token in text]
    special = tokenizer.num_special_tokens_to_add(pair=len(rows[0]) > 1)
    lengths = [sum(map(len, row)) + special for row in pieces]
    unknown = (
        sum(token == tokenizer.unk_token_id for token in ids)
        if tokenizer.unk_token_id is not None
        else 0
    )
    return Coverage(
        tokenizer=name,
        texts=len(rows),
        unknown=round(unknown / max(len(ids), 1), 6),
        pieces=round(
            len(ids) / max(sum(len(text.split()) for row in rows for text in row), 1), 4
        ),
        tokens=_spread(lengths),
        limit=limit,
        cut=None
        if limit is None
        else round(sum(length > limit for length in lengths) / len(lengths), 6),
    )


def _spread(lengths: Sequence[int]) -> Spread:
    """Compute the median, the 95th percentile (a length that occurs) and the
    maximum."""
    values = np.asarray(lengths)
    p95 = np.percentile(values, 95, method="inverted_cdf")
    return Spread(float(np.median(values)), float(p95), int(values.max()))
