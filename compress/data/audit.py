"""Faults that no single row shows: splits that share rows, classes spelled twice, rows that cannot tell anything.

Texts count as the same where only case and spaces differ. What makes scores worthless is refused or begins WARNING.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from compress.data.table import BATCH_ROWS
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


def audited(data: TaskData) -> TaskData:
    """Add notes on the faults of its splits to a task. DataError where the test split is the training split."""
    splits = {"train": data.train, "validation": data.validation} | ({"test": data.test} if data.test else {})
    keys = {role: _keys(split) for role, split in splits.items()}
    _refuse_same(data.name, keys)
    notes = [*_shared(keys), *_few(keys)]
    if not data.task.tokenwise:
        _refuse_one_text(data.name, keys["train"])
    if data.task.labels:
        counts = {role: found for role, split in splits.items() if (found := _counts(data.task, split)) is not None}
        notes += [*_spelled_twice(data.task, counts), *_absent(data.task, counts)]
    notes += _label_in_text(data, keys["train"])
    return replace(data, notes=tuple(dict.fromkeys((*data.notes, *notes))))


def _keys(split: Dataset) -> Keys:
    """A number for each row that is equal for equal texts, and as good as never for others."""
    names = [name for name in ("text", "text_pair", "question", "context", "words") if name in split.column_names]
    keys = np.empty(len(split), np.int64)
    start = 0
    for batch in _table(split).select(names).to_batches(BATCH_ROWS):
        rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
        keys[start : start + len(batch)] = [_key(texts) for texts in rows]
        start += len(batch)
    return keys


def _table(split: Dataset) -> pa.Table:
    """The rows as they lie on disk: what `datasets` formats takes longer than the audit."""
    return split.data.table


def _key(texts: Iterable[str | Sequence[str]]) -> int:
    return hash(tuple(_plain(text if isinstance(text, str) else " ".join(text)) for text in texts))


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _refuse_same(name: str, keys: Mapping[str, Keys]) -> None:
    """Refuse a test split that is the training split, also where validation was held out of that."""
    if "test" not in keys:
        return
    test = np.sort(keys["test"])
    for trained in (keys["train"], np.concatenate([keys["train"], keys["validation"]])):
        if np.array_equal(test, np.sort(trained)):
            raise DataError(
                f"{name}: the test split is the training split ({len(test):,} rows): its score would only tell how "
                "well the answers are remembered. Give other rows for the test, or none."
            )


def _shared(keys: Mapping[str, Keys]) -> list[str]:
    notes = []
    for one, other in combinations(keys, 2):
        count = int(np.isin(keys[other], keys[one]).sum())
        if not count:
            continue
        share = count / len(keys[other])
        notes.append(
            f"{_loud(share)}{count:,} of {len(keys[other]):,} rows of {other} ({share:.1%}) are in {one} too: "
            f"{_CONSEQUENCES[one, other]}. Take them out of {one}"
        )
    return notes


def _few(keys: Mapping[str, Keys]) -> list[str]:
    sizes = {role: len(found) for role, found in keys.items() if role != "train" and len(found) < FEW_ROWS}
    return [
        f"{role} has {size} row{'s' if size > 1 else ''}: each is {100 / size:.0f} points of a score, which is "
        f"uncertain by up to {98 / size**0.5:.0f} points (95%)"
        for role, size in sizes.items()
    ]


def _refuse_one_text(name: str, train: Keys) -> None:
    if len(train) > 1 and (train == train[0]).all():
        raise DataError(
            f"{name}: all {len(train):,} training rows have the same text. Name another column with --text."
        )


def _counts(task: Task, split: Dataset) -> NDArray[np.int64] | None:
    """How many rows, or words, of a split have each class; None where it has no labels."""
    column = "tags" if task.kind == "tagging" else "label"
    if column not in split.column_names:
        return None
    labels = _table(split)[column]
    if task.kind == "multilabel":
        flags = pc.list_flatten(labels).to_numpy().reshape(len(split), len(task.labels))
        return np.asarray(flags.sum(axis=0, dtype=np.float64), np.int64)
    flat = pc.list_flatten(labels) if task.kind == "tagging" else labels
    return np.bincount(flat.to_numpy(), minlength=len(task.labels))


def _spelled_twice(task: Task, counts: Mapping[str, NDArray[np.int64]]) -> list[str]:
    """Classes whose names differ in case, spaces or the form of their letters alone."""
    alike: dict[str, list[int]] = {}
    for number, label in enumerate(task.labels):
        alike.setdefault(_plain(unicodedata.normalize("NFKC", label)), []).append(number)
    total = np.sum(list(counts.values()), axis=0)
    pairs = [numbers for numbers in alike.values() if len(numbers) > 1]
    shown = [" and ".join(f"{task.labels[n]!r} ({total[n]:,} rows)" for n in numbers) for numbers in pairs]
    return [
        f"WARNING: the classes {each} differ only in case or spaces, and are learned and scored as different ones. "
        "Spell them one way if they are one"
        for each in shown
    ]


def _absent(task: Task, counts: Mapping[str, NDArray[np.int64]]) -> list[str]:
    """Classes that a split has no example of."""
    notes = []
    for role, found in counts.items():
        absent = [task.labels[n] for n in np.flatnonzero(found == 0) if not task.labels[n].startswith("I-")]
        if not absent:
            continue
        which = f"{len(absent)} of {len(task.labels)} classes ({', '.join(absent[:5])}{', ...' if absent[5:] else ''})"
        if role == "train":
            notes.append(f"WARNING: train has no example of {which}: they cannot be learned. Add some, or drop them")
        else:
            notes.append(f"{role} has no example of {which}: its score says nothing about them")
    return notes


def _label_in_text(data: TaskData, train: Keys) -> list[str]:
    """Whether training texts are nothing but the name of their class."""
    if data.task.kind != "classification" or data.task.pair or "label" not in data.train.column_names:
        return []
    names = np.array([_key((label,)) for label in data.task.labels], np.int64)
    count = int((names[_table(data.train)["label"].to_numpy()] == train).sum())
    if count / len(train) < LOUD:
        return []
    return [
        f"WARNING: {count:,} of {len(train):,} training texts are the name of their class: is --text the right column?"
    ]


def _loud(share: float) -> str:
    return "WARNING: " if share >= LOUD else ""
