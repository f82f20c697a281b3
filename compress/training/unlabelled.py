"""Add unlabelled texts to a task's rows, which the teacher labels during training."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from statistics import median
from typing import Any, Final

import numpy as np
import pyarrow as pa
from datasets import Dataset

from compress.config.recipe import Recipe
from compress.data import cache
from compress.data.constants import MISSING_TAG
from compress.data.corpus import Corpus
from compress.data.sentences import split_sentences
from compress.data.task import TaskData
from compress.data.windows import word_pattern
from compress.errors import DataError
from compress.training.augment import TEXT_COLUMNS, add_stages, missing_label

UNLABELLED_ENCODING: Final = "2"
"""Part of every cache key: raise it when the rows of the same texts change."""
MOST_TEXTS_ADDED: Final = 40_000
"""The most texts that are added: as many as eight variants of 5,000 rows."""
MOST_READ: Final = 2_000_000
"""The most texts of a corpus that are read and drawn from."""
TEXTS_COMPARED: Final = 1_000
"""Number of texts whose lengths are compared."""
UNITS: Final[tuple[Callable[[str], Iterable[str]], ...]] = (
    lambda text: [text],
    str.splitlines,
    split_sentences,
)
"""Ways to split a document into texts: not at all, into lines, into sentences."""


def takes_texts(data: TaskData, corpus: Corpus | None) -> bool:
    """Return True if there is a corpus whose texts can be rows of this task once a
    teacher labels them."""
    if corpus is None or corpus.parallel:
        return False
    return data.task.takes_texts and not data.task.pair


def add_texts(recipe: Recipe, data: TaskData, corpus: Corpus | None) -> Recipe:
    """Let stages with `augment: auto` read more rows than the task's own; see
    `augment.add_stages`. Raises DataError like `check_texts`."""
    names = data.train.column_names
    # a variant of a passage is not a candidate of the query
    texts = 0 if data.task.ranks else sum(name in TEXT_COLUMNS for name in names)
    reads = takes_texts(data, corpus)
    recipe = add_stages(recipe, len(data.train), corpus=reads, texts=texts)
    if any(stage.corpus for stage in recipe.training):
        check_texts(data, corpus)
    return recipe


def check_texts(data: TaskData, corpus: Corpus | None) -> Corpus:
    """Return the corpus. Raises DataError if its texts cannot be rows of this task."""
    if corpus is None:
        raise DataError(
            "`corpus: true` needs unlabelled text: pass --corpus, or leave it out of "
            "the recipe"
        )
    if not takes_texts(data, corpus):
        raise DataError(
            "`corpus: true` needs a task with labels for single texts and a corpus in "
            f"one language; {data.name} is a "
            f"{'pair ' if data.task.pair else ''}{data.task.kind} task. Leave it out "
            "of the recipe"
        )
    return corpus


def with_texts(
    rows: Dataset, data: TaskData, corpus: Corpus | None, *, seed: int
) -> Dataset:
    """Return these rows of a task, followed by up to MOST_TEXTS_ADDED texts drawn from
    the corpus.

    Their labels are missing (-100, or nan; MISSING_TAG for each word), and
    `Distillation` fills in the teacher's answers. Documents are split into lines, into
    sentences or not at all, whichever is nearest to the task's texts in length, and for
    tagging into words by `windows.word_pattern`; texts of any split and repeated texts
    are left out. The result is cached. Raises DataError like `check_texts`.
    """
    corpus = check_texts(data, corpus)
    splits = [
        split
        for split in (rows, data.train, data.validation, data.test)
        if split is not None
    ]
    key = cache.digest(
        "unlabelled",
        UNLABELLED_ENCODING,
        corpus.fingerprint,
        *(each._fingerprint for each in splits),
        str(seed),
    )
    schema = data.train.features.arrow_schema
    tagged = data.task.word_labels

    missing = None if tagged else missing_label(data.train[0]["label"])

    def read(split: Dataset) -> Iterator[str]:
        return map(" ".join, split["words"]) if tagged else iter(split["text"])

    def unlabelled(text: str) -> dict[str, Any]:
        if not tagged:
            return {"text": text, "label": missing}
        words = text.split(" ")
        return {"words": words, "tags": [MISSING_TAG] * len(words)}

    def batches() -> Iterator[pa.RecordBatch]:
        seen = {hash(text) for split in splits for text in read(split)}
        texts = cut(corpus, list(islice(read(data.train), TEXTS_COMPARED)))
        if tagged:
            texts = filter(
                None, (" ".join(word_pattern().findall(text)) for text in texts)
            )
        drawn = draw(texts, seen, np.random.default_rng(seed))
        for table in rows.with_format("arrow").iter(1000):
            yield from table.cast(schema).to_batches()
        for start in range(0, len(drawn), 1000):
            added = map(unlabelled, drawn[start : start + 1000])
            yield pa.RecordBatch.from_pylist(list(added), schema=schema)

    return cache.rows(
        "unlabelled", key, batches, empty="the training split has no rows."
    )


def cut(corpus: Corpus, like: list[str]) -> Iterator[str]:
    """Yield the texts of a corpus, split in the way that comes nearest to the lengths
    of `like` (ratio of medians)."""
    target = np.log(max(1.0, median(map(len, like))))
    first = list(islice(filter(str.strip, corpus.documents()), TEXTS_COMPARED))
    sizes = [
        median(len(part) for text in first for part in unit(text) if part.strip())
        for unit in UNITS
    ]
    unit = UNITS[int(np.argmin([abs(np.log(size) - target) for size in sizes]))]
    return (
        part.strip()
        for part in chain.from_iterable(map(unit, corpus.documents()))
        if part.strip()
    )


def draw(
    texts: Iterable[str],
    seen: set[int],
    rng: np.random.Generator,
    most: int = MOST_TEXTS_ADDED,
) -> list[str]:
    """Draw up to `most` different texts with equal probability; texts whose hash is in
    `seen` are left out."""
    drawn = list[str]()
    number = 0
    for text in islice(texts, MOST_READ):
        if hash(text) in seen:
            continue
        seen.add(hash(text))
        if number < most:
            drawn.append(text)
        elif (place := int(rng.integers(number + 1))) < most:
            drawn[place] = text
        number += 1
    return drawn
