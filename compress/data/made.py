"""What else is made of a task's examples: more of them, and a corpus of their texts."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from compress.call import Call
from compress.data import cache
from compress.data.batches import fingerprint
from compress.data.corpora import Corpus
from compress.errors import ObjectiveError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from compress.data.task import TaskData

ENCODING: Final = "1"
"""Part of every cache key: raise it when what is written of the same rows changes."""

ROWS_PER_WRITE: Final = 1000
TEXTS: Final = ("text", "text_pair", "question", "context")


def asks_language_model(call: Call) -> bool:
    """Whether this augmentation works with a language model, as its second parameter, `lm`, says; else any encoder."""
    try:
        return "lm" in inspect.signature(call.function).parameters
    except ObjectiveError:  # no such function: told where recipes are checked
        return True


def augmented(
    split: Dataset, call: Call, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, lm_digest: str, seed: int
) -> Dataset:
    """The rows that `call` (split, language model, tokenizer, rng) makes of a split, in the split's columns.

    Streamed once to the cache, by the fingerprints of split and tokenizer, the model's digest, the options and seed.
    """
    key = _key("augmented", split, tokenizer, call, lm_digest, str(seed))

    def batches() -> Iterator[pa.RecordBatch]:
        rows = call.function(split, lm, tokenizer, rng=np.random.default_rng(seed), **call.options)
        return _batches(rows, split.features.arrow_schema)

    return cache.rows("augmented", key, batches, empty=f"{call.by} makes no row of this split.")


def task_text(data: TaskData, split: Dataset) -> Corpus:
    """The texts of a task's split as a corpus: one document for each example."""
    names = [name for name in TEXTS if name in split.column_names]

    def documents() -> Iterator[str]:
        for batch in split.select_columns(names or ["words"]).iter(ROWS_PER_WRITE):
            columns = [batch[name] for name in names] or [[" ".join(words) for words in batch["words"]]]
            for texts in zip(*columns, strict=True):
                yield "\n".join(texts)

    return Corpus(f"{data.name}, its texts", cache.digest("texts of", split._fingerprint), documents)


def _key(what: str, split: Dataset, tokenizer: PreTrainedTokenizerBase, call: Call, *more: str) -> str:
    options = json.dumps(dict(call.options), sort_keys=True)
    return cache.digest(
        what, ENCODING, split._fingerprint, fingerprint(tokenizer), call.by, options, *call.written_in, *more
    )


def _batches(rows: Iterator[dict[str, Any]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    while batch := list(islice(rows, ROWS_PER_WRITE)):
        yield pa.RecordBatch.from_pylist(batch, schema=schema)
