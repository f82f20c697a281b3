"""A corpus as the rows that a paper's builder makes of it, written to the cache as they come."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import pyarrow as pa

from compress.data import cache
from compress.data.collate import fingerprint
from compress.data.corpus import Corpus
from compress.data.sentences import Document, Frame, documents
from compress.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

ENCODING: Final = "1"
"""Part of every cache key: raise it when what `built` writes of the same rows changes."""

ROWS_PER_WRITE: Final = 1000

_TYPES: Final = {"token_type_ids": np.int8}
"""Of columns with one number per token; the others are int32."""

Row = Mapping[str, Any]


class Builder(Protocol):
    """Documents -> rows: input_ids, what else the frame makes, and columns of one int per row or per token."""

    def __call__(
        self,
        documents: Iterable[Document],
        frame: Frame,
        /,
        *,
        max_length: int,
        rng: np.random.Generator,
        **options: Any,
    ) -> Iterator[dict[str, Any]]: ...


def built(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    builder: Builder,
    name: str,
    options: Mapping[str, Any],
    *,
    max_length: int,
    seed: int,
    limit_tokens: int | None = None,
) -> Dataset:
    """The rows that `builder`, called `name`, makes of a corpus, with attention_mask, length (tokens) and index added.

    Lists are int32 (attention_mask and token_type_ids int8), single numbers int64, length int32. With `limit_tokens`
    the row that reaches it is the last. Streamed once to the cache, by all that decides the rows: corpus, tokenizer,
    the file of the builder, its options, length, seed and limit; then memory-mapped. DataError when nothing comes, or
    something that is no row.
    """
    settings = json.dumps([dict(options), max_length, seed, limit_tokens], sort_keys=True)
    read = (corpus.fingerprint, fingerprint(tokenizer))
    key = cache.digest("built", ENCODING, name, settings, *read, *_source(builder))

    def batches() -> Iterator[pa.RecordBatch]:
        frame, rng = Frame.of(tokenizer), np.random.default_rng(seed)
        rows = builder(documents(corpus, tokenizer), frame, max_length=max_length, rng=rng, **options)
        return _batches(rows, f"{name} of {corpus.name}", max_length, limit_tokens)

    empty = f"{corpus.name}: {name} makes no row of it. It needs more text, or a larger max_length."
    return cache.rows("corpora", key, batches, empty=empty)


def _source(builder: Builder) -> list[Path]:
    """The file that the builder is written in, where there is one: rows made by an older version are not those."""
    source = inspect.getsourcefile(inspect.unwrap(builder))
    return [Path(source)] if source and Path(source).is_file() else []


def _batches(
    rows: Iterator[dict[str, Any]], what: str, max_length: int, limit_tokens: int | None
) -> Iterator[pa.RecordBatch]:
    from datasets.utils import tqdm

    index = tokens = 0
    columns: Mapping[str, bool] | None = None
    with tqdm(desc=f"Rows: {what}", unit=" tokens", unit_scale=True) as progress:
        while batch := list(islice(rows, ROWS_PER_WRITE)):
            columns = columns or {name: isinstance(cell, list) for name, cell in batch[0].items()}
            for number, row in enumerate(batch, start=index):
                _check(row, columns, max_length, f"{what}, row {number}")
            ends = tokens + np.cumsum([len(row["input_ids"]) for row in batch])
            if limit_tokens is not None:
                batch = batch[: int(np.searchsorted(ends, limit_tokens)) + 1]
            yield _record_batch(batch, columns, index)
            index += len(batch)
            progress.update(int(ends[len(batch) - 1]) - tokens)
            tokens = int(ends[len(batch) - 1])
            if limit_tokens is not None and tokens >= limit_tokens:
                return


def _check(row: Row, columns: Mapping[str, bool], max_length: int, where: str) -> None:
    if row.keys() != columns.keys() or "input_ids" not in row:
        raise DataError(f"{where}: has {', '.join(row)}; expected input_ids and the columns of the first row.")
    length = len(row["input_ids"])
    if not 0 < length <= max_length:
        raise DataError(f"{where}: {length} tokens; expected 1 to max_length = {max_length}.")
    for name, several in columns.items():
        if isinstance(row[name], list) != several or (several and len(row[name]) != length):
            raise DataError(f"{where}: {name} must be a list of {length} numbers, one a token, or one number.")


def _record_batch(rows: Sequence[Row], columns: Mapping[str, bool], index: int) -> pa.RecordBatch:
    lengths = np.array([len(row["input_ids"]) for row in rows], np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    arrays: dict[str, Any] = {}
    for name, several in columns.items():
        if several:
            flat = chain.from_iterable(row[name] for row in rows)
            values = np.fromiter(flat, _TYPES.get(name, np.int32), offsets[-1])
            arrays[name] = pa.ListArray.from_arrays(offsets, values)
        else:
            arrays[name] = pa.array([int(row[name]) for row in rows], pa.int64())
    arrays["attention_mask"] = pa.ListArray.from_arrays(offsets, np.ones(offsets[-1], np.int8))
    arrays["length"] = pa.array(lengths)
    arrays["index"] = pa.array(range(index, index + len(rows)), pa.int64())
    return pa.record_batch(arrays)
