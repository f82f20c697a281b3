"""Find faults that no single row shows: splits that share rows, classes spelled twice, rows that cannot tell anything.

Texts count as the same where only case and spaces differ. What makes scores worthless is refused or begins WARNING.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from compress.data.task import Task, TaskData
from compress.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

LOUD: Final = 0.1
"""The share of a split from which on a fault is a warning: so much moves a score by points."""
FEW_ROWS: Final = 30
"""A split with fewer tells little: at 30 rows an accuracy of 0.5 is uncertain by 0.18."""

Keys = NDArray[np.int64]

_CONSEQUENCES: Final[Mapping[tuple[str, str], str]] = {
    ("train", "validation"): "checkpoints are chosen, and int8 is judged, by rows that were learned",
    ("train", "test"): "the score on test is too high, because these answers were learned",
    ("validation", "test"): "the score on test is too high, because checkpoints were chosen by these rows",
}


def audit(data: TaskData) -> TaskData:
    """Add notes on the faults of its splits to a task. DataError where the test split is the training split."""
    splits = {"train": data.train, "validation": data.validation} | ({"test": data.test} if data.test else {})
    keys = {role: row_keys(split) for role, split in splits.items()}
    train, task = keys["train"], data.task
    trained = (np.sort(train), np.sort(np.concatenate([train, keys["validation"]])))
    if "test" in keys and any(np.array_equal(np.sort(keys["test"]), rows) for rows in trained):
        raise DataError(
            f"{data.name}: the test split is the training split ({len(keys['test']):,} rows): its score would only "
            "tell how well the answers are remembered. Give other rows for the test, or none."
        )
    if not task.tokenwise and len(train) > 1 and (train == train[0]).all():
        raise DataError(
            f"{data.name}: all {len(train):,} training rows have the same text. Name another column with --text."
        )
    notes = [*data.notes, *(_find_shared(keys) if task.kind != "embedding" else ())]  # passages are no answers
    sizes = {role: len(found) for role, found in keys.items()}
    unit, units = "row", "rows"
    if task.kind == "ranking":
        sizes = {role: len(set(split["query"][:])) for role, split in splits.items() if role != "train"}
        unit, units = "query", "queries"
    for role, size in sizes.items():
        if role != "train" and size < FEW_ROWS:
            notes.append(
                f"{role} has {size} {units if size > 1 else unit}: each is {100 / size:.0f} points of a score, which "
                f"is uncertain by up to {98 / size**0.5:.0f} points (95%)"
            )
    if task.labels:
        counts = {
            role: class_counts(task, split)
            for role, split in splits.items()
            if label_column(task) in split.column_names
        }
        notes += [*_find_spelled_twice(task, counts), *_absent(task, counts)]
    if task.kind == "classification" and not task.pair and "label" in data.train.column_names:
        names = np.array([_key((label,)) for label in task.labels], np.int64)
        count = int((names[data.train.data.table["label"].to_numpy()] == train).sum())
        if count / len(train) >= LOUD:
            notes.append(
                f"WARNING: {count:,} of {len(train):,} training texts are the name of their class: is --text the right "
                "column?"
            )
    return replace(data, notes=tuple(dict.fromkeys(notes)))


def row_keys(split: Dataset) -> Keys:
    """Compute a number for each row: the same for equal texts, and hardly ever for different ones."""
    names = [name for name in ("text", "text_pair", "question", "context", "words") if name in split.column_names]
    keys = np.empty(len(split), np.int64)
    start = 0
    # as the rows lie on disk: what `datasets` formats takes longer than the audit
    for batch in split.data.table.select(names).to_batches(max_chunksize=10_000):
        rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
        keys[start : start + len(batch)] = [_key(texts) for texts in rows]
        start += len(batch)
    return keys


def _key(texts: Iterable[str | Sequence[str]]) -> int:
    return hash(tuple(_plain(text if isinstance(text, str) else " ".join(text)) for text in texts))


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _find_shared(keys: Mapping[str, Keys]) -> Iterator[str]:
    for one, other in combinations(keys, 2):
        count = int(np.isin(keys[other], keys[one]).sum())
        if count:
            share = count / len(keys[other])
            yield (
                f"{'WARNING: ' if share >= LOUD else ''}{count:,} of {len(keys[other]):,} rows of {other} "
                f"({share:.1%}) are in {one} too: {_CONSEQUENCES[one, other]}. Take them out of {one}"
            )


def label_column(task: Task) -> str:
    return "tags" if task.kind == "tagging" else "label"


def class_counts(task: Task, split: Dataset) -> NDArray[np.int64]:
    """Count the rows, or words, of a split that have each class."""
    labels = split.data.table[label_column(task)]
    if task.kind == "multilabel":
        flags = pc.list_flatten(labels).to_numpy().reshape(len(split), len(task.labels))
        return np.asarray(flags.sum(axis=0, dtype=np.float64), np.int64)
    flat = pc.list_flatten(labels) if task.kind == "tagging" else labels
    return np.bincount(flat.to_numpy(), minlength=len(task.labels))


def _find_spelled_twice(task: Task, counts: Mapping[str, NDArray[np.int64]]) -> Iterator[str]:
    """Name classes whose names differ in case, spaces or the form of their letters alone."""
    alike: dict[str, list[int]] = {}
    for number, label in enumerate(task.labels):
        alike.setdefault(_plain(unicodedata.normalize("NFKC", label)), []).append(number)
    total = np.sum(list(counts.values()), axis=0)
    for numbers in alike.values():
        if len(numbers) > 1:
            shown = " and ".join(f"{task.labels[n]!r} ({total[n]:,} rows)" for n in numbers)
            yield (
                f"WARNING: the classes {shown} differ only in case or spaces, and are learned and scored as different "
                "ones. Spell them one way if they are one"
            )


def _absent(task: Task, counts: Mapping[str, NDArray[np.int64]]) -> Iterator[str]:
    """Name classes that a split has no example of."""
    for role, found in counts.items():
        absent = [task.labels[n] for n in np.flatnonzero(found == 0) if not task.labels[n].startswith("I-")]
        if not absent:
            continue
        which = f"{len(absent)} of {len(task.labels)} classes ({', '.join(absent[:5])}{', ...' if absent[5:] else ''})"
        if role == "train":
            yield f"WARNING: train has no example of {which}: they cannot be learned. Add some, or drop them"
        else:
            yield f"{role} has no example of {which}: its score says nothing about them"
