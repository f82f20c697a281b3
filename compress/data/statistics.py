"""Describe the splits of a task: lengths, classes, repeated rows, and how a tokenizer reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from compress.data.audit import class_counts, label_column, row_keys
from compress.data.task import TaskData
from compress.records.inspection import Coverage, Overlap, SplitFacts, Spread

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

MOST_TEXTS: Final = 2000
"""Texts that a tokenizer is tried on: their share of unknown tokens is known to a tenth of a point or so."""


def describe_splits(data: TaskData) -> tuple[tuple[SplitFacts, ...], tuple[Overlap, ...]]:
    """Compute what is in each split, and how many rows they share."""
    splits = {"train": data.train, "validation": data.validation} | ({"test": data.test} if data.test else {})
    keys = {name: row_keys(split) for name, split in splits.items()}
    facts, overlaps = [], []
    for name, split in splits.items():
        labelled = bool(data.task.labels) and label_column(data.task) in split.column_names
        counts = class_counts(data.task, split) if labelled else np.zeros(0)
        of = counts.sum() if data.task.kind == "tagging" else len(split)
        shares = {label: round(float(count / of), 6) for label, count in zip(data.task.labels, counts, strict=False)}
        words = spread([sum(len(text.split()) for text in row) for row in texts(split)])
        several = _conflicting(keys[name], split) if labelled and data.task.kind == "classification" else 0
        facts.append(
            SplitFacts(name, len(split), len(split) - len(np.unique(keys[name])), several, words, shares)
        )  # fmt: skip
    for one, other in combinations(keys, 2):
        if count := int(np.isin(keys[other], keys[one]).sum()):
            overlaps.append(Overlap(one, other, count, round(count / len(keys[other]), 6)))
    return tuple(facts), tuple(overlaps)


def _conflicting(keys: NDArray[np.int64], split: Dataset) -> int:
    """Count the rows whose text has several labels."""
    labels = split.data.table["label"].to_numpy()
    pairs = np.unique(np.stack([keys, labels]), axis=1)
    found, labels_of = np.unique(pairs[0], return_counts=True)
    return int(np.isin(keys, found[labels_of > 1]).sum())


def texts(split: Dataset, rows: Sequence[int] | None = None) -> Iterator[tuple[str, ...]]:
    """Yield what a model reads of each row, or of these: one text or two; tagged words as one."""
    names = [name for name in ("text", "text_pair", "question", "context", "words") if name in split.column_names]
    table = split.data.table.select(names)
    if rows is not None:
        table = table.take(list(rows))
    for batch in table.to_batches(max_chunksize=10_000):
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            yield tuple(each if isinstance(each, str) else " ".join(each) for each in row)


def cover(data: TaskData, tokenizer: PreTrainedTokenizerBase, name: str) -> Coverage:
    """Compute how a tokenizer reads the training texts, MOST_TEXTS of them at most, evenly spaced."""
    chosen = np.linspace(0, len(data.train) - 1, min(MOST_TEXTS, len(data.train))).astype(int).tolist()
    rows = list(texts(data.train, chosen))
    limit = int(tokenizer.model_max_length) if tokenizer.model_max_length < 2**24 else None
    pieces = [tokenizer(list(row), add_special_tokens=False)["input_ids"] for row in rows]
    ids = [token for row in pieces for text in row for token in text]
    special = tokenizer.num_special_tokens_to_add(pair=len(rows[0]) > 1)
    lengths = [sum(map(len, row)) + special for row in pieces]
    unknown = sum(token == tokenizer.unk_token_id for token in ids) if tokenizer.unk_token_id is not None else 0
    return Coverage(
        tokenizer=name, texts=len(rows), unknown=round(unknown / max(len(ids), 1), 6),
        pieces=round(len(ids) / max(sum(len(text.split()) for row in rows for text in row), 1), 4),
        tokens=spread(lengths), limit=limit,
        cut=None if limit is None else round(sum(length > limit for length in lengths) / len(lengths), 6),
    )  # fmt: skip


def spread(lengths: Sequence[int]) -> Spread:
    """Compute the median, the 95th percentile (of lengths that occur) and the maximum."""
    values = np.asarray(lengths)
    return Spread(
        float(np.median(values)), float(np.percentile(values, 95, method="inverted_cdf")), int(values.max())
    )  # fmt: skip
