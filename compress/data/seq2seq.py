"""Rows and batches of encoder-decoders: a source and a target, each with a length of its own."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import torch

from compress.data import cache
from compress.data.batches import Collate, fingerprint
from compress.errors import DataError
from compress.papers.bert import IGNORED

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from compress.data.task import Task

ENCODING: Final = "1"
"""Part of every cache key: raise it when what `encode_task` writes of the same rows changes."""

ROWS_PER_WRITE: Final = 1000

Builder = Callable[..., Iterator[dict[str, Any]]]
"""(split, task, tokenizer, *, max_length, options) -> rows of input_ids and labels, the target's token ids."""


def encode_task(
    split: Dataset,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    builder: Builder,
    options: Mapping[str, Any],
    *,
    max_length: int,
) -> Dataset:
    """The rows that `builder` makes of a split, in its order: input_ids, attention_mask, labels, length, index.

    length counts source and target. Written once to the cache, by all that decides the rows, and memory-mapped.
    DataError when nothing comes, or a row without a source or a target.
    """
    about = json.dumps([builder.__qualname__, dict(options), max_length, task.kind, task.text, task.labels])
    source = inspect.getsourcefile(inspect.unwrap(builder))
    files = [Path(source)] if source and Path(source).is_file() else []
    key = cache.digest("seq2seq", ENCODING, about, split._fingerprint, fingerprint(tokenizer), *files)

    def batches() -> Iterator[pa.RecordBatch]:
        return _batches(builder(split, task, tokenizer, max_length=max_length, **options))

    empty = f"{builder.__qualname__} makes no row of the split; it needs at least one example."
    return cache.rows("encoded", key, batches, empty=empty)


def _batches(rows: Iterator[Mapping[str, Any]]) -> Iterator[pa.RecordBatch]:
    index = 0
    while batch := list(islice(rows, ROWS_PER_WRITE)):
        for number, row in enumerate(batch, start=index):
            if not row.get("input_ids") or not row.get("labels"):
                raise DataError(f"row {number} has {dict(row)}; expected input_ids and labels, neither of them empty.")
        sources, targets = ([row[name] for row in batch] for name in ("input_ids", "labels"))
        lengths = [len(source) + len(target) for source, target in zip(sources, targets, strict=True)]
        columns = {
            "input_ids": pa.array(sources, pa.list_(pa.int32())),
            "attention_mask": pa.array([[1] * len(source) for source in sources], pa.list_(pa.int8())),
            "labels": pa.array(targets, pa.list_(pa.int32())),
            "length": pa.array(lengths, pa.int32()),
            "index": pa.array(range(index, index + len(batch)), pa.int64()),
        }
        yield pa.record_batch(columns)
        index += len(batch)


class Seq2SeqCollate:
    """Rows with a target as one batch: what `Collate` makes of the source, and

    labels             int64 (B, M): the targets, padded with -100 to the longest of them
    decoder_input_ids  int64 (B, M): the targets moved one to the right, as `model` begins them

    Rows without `labels` get none. `model` is an encoder-decoder.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
        self.source = Collate(tokenizer)
        self.begin: Any = model.prepare_decoder_input_ids_from_labels

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        batch = self.source([{name: cell for name, cell in row.items() if name != "labels"} for row in rows])
        if "labels" not in rows[0]:
            return batch
        targets = [row["labels"] for row in rows]
        lengths = np.array([len(target) for target in targets])
        labels = np.full((len(rows), lengths.max()), IGNORED, np.int64)
        labels[np.arange(lengths.max()) < lengths[:, None]] = np.concatenate(targets)
        batch["labels"] = torch.from_numpy(labels)
        return batch | {"decoder_input_ids": self.begin(labels=batch["labels"])}
