"""Pack the tokens of sentences into blocks, and write these as Arrow files."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from compress.data.fast_tokens import Surroundings, TokenArrays
from compress.data.sentences import SentenceTokens
from compress.progress import Progress

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

_SMALL_IDS: Final = 1 << 16
"""Number of token ids that two bytes hold."""


def id_type(tokenizer: PreTrainedTokenizerBase) -> type[np.unsignedinteger[Any]]:
    """Return the smallest integer type that holds all token ids: 2 or 4 bytes."""
    small = len(tokenizer) <= _SMALL_IDS
    if small and max(tokenizer.get_vocab().values()) < _SMALL_IDS:
        return np.uint16
    return np.uint32


def pack(
    sentences: Iterable[SentenceTokens],
    room: int,
) -> Iterator[tuple[TokenArrays, list[int]]]:
    """Yield blocks of at most `room` tokens, and the number of the document of each.

    Whole sentences are packed greedily, and a longer one is cut. No block crosses
    documents.
    """
    rest: NDArray[np.uint32] = np.empty(0, np.uint32)
    owner = -1
    for batch in sentences:
        ids = np.concatenate([rest, batch.tokens.ids])
        at = used = len(rest)
        cuts = [0]
        owners = []
        lengths = batch.tokens.lengths.tolist()
        for number, left in zip(batch.documents.tolist(), lengths, strict=True):
            length = left
            if used and (number != owner or used + length > room):
                cuts.append(at)
                owners.append(owner)
                used = 0
            owner = number
            while length > room:
                at += room
                length -= room
                cuts.append(at)
                owners.append(owner)
            at += length
            used += length
        yield TokenArrays(ids[: cuts[-1]], np.array(cuts)), owners
        rest = ids[cuts[-1] :]
    if len(rest):
        yield TokenArrays(rest, np.array([0, len(rest)])), [owner]


def to_batch(
    tokens: TokenArrays,
    owners: list[int],
    around: Surroundings,
    kind: type,
) -> pa.RecordBatch:
    """Make rows of blocks, with special tokens: input_ids (of type `kind`),
    token_type_ids unless all are 0, document, length."""
    rows = around.add(tokens)
    bounds = pa.array(rows.bounds.astype(np.int32))
    columns = {"input_ids": pa.ListArray.from_arrays(bounds, rows.ids.astype(kind))}
    if not around.has_zero_types:
        columns["token_type_ids"] = pa.ListArray.from_arrays(bounds, rows.types)
    columns["document"] = pa.array(owners, pa.int32())
    columns["length"] = pa.array(rows.lengths.astype(np.int32))
    return pa.record_batch(columns)


def limit_batches(
    batches: Iterable[pa.RecordBatch],
    limit_tokens: int | None,
    what: str,
    *,
    skip: int,
    rows: int,
    tokens: int,
) -> Generator[pa.RecordBatch, None, None]:
    """Yield the batches, with a progress bar, up to the row that reaches the limit, and
    number their rows in a column `index`.

    skip           the number of rows to leave out first
    rows, tokens   how many were written before
    """
    with Progress(what, limit_tokens, "tokens", done=tokens) as bar:
        for whole in batches:
            if limit_tokens is not None and tokens >= limit_tokens:
                return
            batch = whole.slice(skip)
            skip -= len(whole) - len(batch)
            lengths = batch["length"].to_numpy()
            if limit_tokens is not None:
                reached = np.searchsorted(tokens + np.cumsum(lengths), limit_tokens)
                batch = batch.slice(0, int(reached) + 1)
            index = np.arange(rows, rows + len(batch), dtype=np.int32)
            yield batch.append_column("index", pa.array(index))
            added = int(lengths[: len(batch)].sum())
            rows += len(batch)
            tokens += added
            bar.advance(added)


def divide_evenly(
    batches: Iterable[pa.RecordBatch],
    rows: int,
) -> Iterator[pa.RecordBatch]:
    """Regroup batches into batches of `rows` rows; the last may be smaller."""
    parts: list[pa.RecordBatch] = []
    held = 0
    for whole in batches:
        batch = whole
        while held + len(batch) >= rows:
            end = rows - held
            yield pa.concat_batches([*parts, batch.slice(0, end)])
            batch = batch.slice(end)
            parts = []
            held = 0
        if len(batch):
            parts.append(batch)
            held += len(batch)
    if parts:
        yield pa.concat_batches(parts)
