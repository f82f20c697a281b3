"""Tokenise splits into rows, once, in the cache, memory-mapped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from compress import io
from compress.data import cache
from compress.data.constants import IGNORE_INDEX
from compress.data.encoder import Encoder, encoder_of
from compress.data.fast_tokens import TokenArrays
from compress.data.text_preparation import (
    AS_IT_IS,
    TextPreparation,
    count_prompt_tokens,
    prompts_of_rows,
)
from compress.data.windows import cover
from compress.errors import DataError
from compress.progress import Progress

if TYPE_CHECKING:
    from datasets import Dataset
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from compress.arrays import Array, Longs
    from compress.data.task import Task

ROWS_ENCODING: Final = "3"
"""Part of every cache key; raise it when `encode` writes something else."""
SEQ2SEQ_ENCODING: Final = "1"
"""Part of the cache keys of `encode_task`, like ROWS_ENCODING."""

ROWS_PER_WRITE: Final = 1000

_BYTES: Final = ("attention_mask", "token_type_ids")
"""Columns of small numbers: int8; other columns with one number per token are int32."""

RowMapping = Mapping[str, Any]

Builder = Callable[..., Iterator[dict[str, Any]]]
"""(split, task, tokenizer, *, max_length, options) -> rows of input_ids and labels, the
target's token ids."""


def encode(
    split: Dataset,
    tokenizer: PreTrainedTokenizerBase | Encoder,
    max_length: int,
    *,
    preparation: TextPreparation = AS_IT_IS,
) -> Dataset:
    """Tokenise a split: input_ids, attention_mask, token_type_ids (if the tokenizer
    makes them), labels and query (if the split has any), length (in tokens), index (row
    number). No padding.

    Texts are `text` and, for pairs, `text_pair`, encoded as `Encoder.encode` says.
    Texts for sentence vectors get the prompts of `preparation` (see
    `text_preparation.prompts_of_rows`), and a column prompt_length, in tokens, if there
    are any. Words and questions take several rows if they are too long for one (see
    `windows`), with more columns: example (their number in the split), and

    words       labels: the tag at the first token of each word, -100 elsewhere; word:
                the number of the word there, -1
    questions   labels: [first, last] token of the answer, both `null` if the row does
                not contain it; null: the token that stands for no answer; starts, ends:
                the characters of the context that each token covers, -1

    Written to the cache once, keyed by the fingerprints of split and tokenizer, and
    memory-mapped."""
    encoder = encoder_of(tokenizer)
    more = preparation.by_purpose if preparation.changes_texts else ()
    key = cache.digest(
        ROWS_ENCODING, split._fingerprint, encoder.fingerprint(), str(max_length), *more
    )

    def batches() -> Iterator[pa.RecordBatch]:
        if "question" in split.column_names:
            return row_batches(_questions(split, encoder, max_length))
        if "words" in split.column_names:
            return row_batches(_sentences(split, encoder, max_length))
        return _texts(split, encoder, max_length, preparation)

    return cache.rows(
        "encoded", key, batches, empty="the split has no rows to tokenise."
    )


def encode_task(
    split: Dataset,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    builder: Builder,
    options: Mapping[str, Any],
    *,
    max_length: int,
) -> Dataset:
    """Write the rows that `builder` makes from a split, in its order: input_ids,
    attention_mask, labels, length, index.

    length counts source and target. Written to the cache once, keyed by everything that
    determines the rows, and memory-mapped. DataError for no rows, and for a row without
    a source or a target.
    """
    about = json.dumps(
        [
            builder.__qualname__,
            dict(options),
            max_length,
            task.kind,
            task.text,
            task.labels,
        ]
    )
    key = cache.digest(
        "seq2seq",
        SEQ2SEQ_ENCODING,
        about,
        split._fingerprint,
        fingerprint(tokenizer),
        *io.source_files(builder),
    )

    def rows() -> Iterator[RowMapping]:
        for number, row in enumerate(
            builder(split, task, tokenizer, max_length=max_length, **options)
        ):
            if not row.get("input_ids") or not row.get("labels"):
                raise DataError(
                    f"row {number} has {dict(row)}; expected input_ids and labels, "
                    "neither of them empty."
                )
            source = row["input_ids"]
            target = row["labels"]
            yield {
                "input_ids": source,
                "labels": target,
                "length": len(source) + len(target),
            }

    empty = (
        f"{builder.__qualname__} makes no rows from the split, which needs at least "
        "one example."
    )
    return cache.rows("encoded", key, lambda: row_batches(rows()), empty=empty)


def select_rows(rows: Dataset, chosen: Longs) -> Dataset:
    """Select encoded rows, and number them again: a teacher's cached outputs are looked
    up by the `index` of a row."""
    from datasets import Dataset

    table = rows.select(chosen).with_format("arrow")[:]
    at = table.schema.get_field_index("index")
    if at >= 0:
        table = table.set_column(at, "index", pa.array(np.arange(len(table))))
    return Dataset(
        table, fingerprint=io.hash_value([rows._fingerprint, chosen.tolist()])[:16]
    )


def limit_rows(rows: Dataset, count: int | None) -> Dataset:
    """Draw about `count` encoded rows, as whole queries if rows have one; all rows if
    there are no more, or if `count` is None. Every call draws the same rows."""
    if count is None or len(rows) <= count:
        return rows
    query_R = np.asarray(
        rows["query"][:] if "query" in rows.column_names else range(len(rows))
    )
    queries = np.unique(query_R)
    share = count / len(rows)
    drawn = np.random.default_rng(0).permutation(queries)
    chosen = drawn[: max(1, round(share * len(queries)))]
    return select_rows(rows, np.flatnonzero(np.isin(query_R, chosen)))


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash everything that determines the tokens of a text."""
    return encoder_of(tokenizer).fingerprint()


def row_batches(
    rows: Iterable[RowMapping],
    *,
    kind: type = np.int32,
    masked: bool = True,
) -> Iterator[pa.RecordBatch]:
    """Write rows with the same columns as Arrow batches, and add length (in tokens) and
    index, and attention_mask if they are `masked`.

    Lists of ints become int32 (_BYTES: int8, input_ids: `kind`), ints int64. Rows may
    have a `length` already.
    """
    rows = iter(rows)
    first = 0
    while batch := list(islice(rows, ROWS_PER_WRITE)):
        made = _record_batch(batch, first, kind)
        yield made if masked else made.drop_columns(["attention_mask"])
        first += len(batch)


def _record_batch(rows: Sequence[RowMapping], first: int, kind: type) -> pa.RecordBatch:
    sizes = np.fromiter((len(row["input_ids"]) for row in rows), np.int32, len(rows))
    arrays: dict[str, pa.Array] = {}
    for name, cell in rows[0].items():
        if name == "attention_mask":  # all ones: there is no padding yet
            continue
        if isinstance(cell, list):
            lengths = np.fromiter((len(row[name]) for row in rows), np.int32, len(rows))
            flat = chain.from_iterable(row[name] for row in rows)
            types = dict.fromkeys(_BYTES, np.int8) | {"input_ids": kind}
            values: Array = np.fromiter(flat, types.get(name, np.int32), lengths.sum())
            arrays[name] = _lists(lengths, values)
        else:
            arrays[name] = pa.array([int(row[name]) for row in rows], pa.int64())
    return _complete(arrays, sizes, first)


def _array_batch(tokens: TokenArrays, first: int) -> pa.RecordBatch:
    sizes = tokens.lengths.astype(np.int32)
    arrays = {"input_ids": _lists(sizes, tokens.ids.astype(np.int32))}
    if tokens.types is not None:
        arrays["token_type_ids"] = _lists(sizes, tokens.types)
    return _complete(arrays, sizes, first)


def _complete(
    arrays: dict[str, pa.Array], sizes: NDArray[np.int32], first: int
) -> pa.RecordBatch:
    """Add attention_mask, length and index to the columns of rows with these sizes."""
    arrays["attention_mask"] = _lists(sizes, np.ones(sizes.sum(), np.int8))
    arrays["length"] = (
        arrays["length"].cast(pa.int32()) if "length" in arrays else pa.array(sizes)
    )
    arrays["index"] = pa.array(np.arange(first, first + len(sizes)))
    return pa.record_batch(arrays)


def _lists(lengths: np.ndarray, values: np.ndarray) -> pa.ListArray:
    return pa.ListArray.from_arrays(
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), values
    )


def _texts(
    split: Dataset,
    encoder: Encoder,
    max_length: int,
    preparation: TextPreparation,
) -> Iterator[pa.RecordBatch]:
    first = 0
    prompts: list[str] = []
    if preparation.changes_texts:
        judged = [len(others) > 0 for others in split["related"][:]]
        prompts = prompts_of_rows(preparation, split["passage"][:], judged)
    prompt_lengths = _count_prompts(prompts, encoder, max_length)
    with Progress("encoding texts", len(split), "rows") as bar:
        for table in split.with_format("arrow").iter(ROWS_PER_WRITE):
            texts = table["text"].to_pylist()
            chosen = prompts[first : first + len(table)]
            if chosen:
                texts = [
                    prompt + text for prompt, text in zip(chosen, texts, strict=True)
                ]
            if "text_pair" in table.column_names:
                texts = list(zip(texts, table["text_pair"].to_pylist(), strict=True))
            batch = _array_batch(encoder.arrays(texts, max_length), first)
            if chosen:
                counts = pa.array(
                    [prompt_lengths[prompt] for prompt in chosen], pa.int64()
                )
                batch = batch.append_column("prompt_length", counts)
            for name, column in (("labels", "label"), ("query", "query")):
                if column in table.column_names:
                    batch = batch.append_column(name, table[column].combine_chunks())
            yield batch
            first += len(batch)
            bar.advance(len(batch))


def _count_prompts(
    prompts: Iterable[str],
    encoder: Encoder,
    max_length: int,
) -> dict[str, int]:
    """Count the tokens that each prompt takes at the beginning of a row."""
    special = encoder.settings.special_ids
    counts = {"": 0}
    for prompt in set(prompts) - {""}:
        (row,) = encoder.encode([prompt], max_length)
        counts[prompt] = count_prompt_tokens(row["input_ids"], special)
    return counts


def _questions(
    split: Dataset,
    encoder: Encoder,
    max_length: int,
) -> Iterator[RowMapping]:
    """Yield the rows of questions, labelled with the first answer."""
    example = 0
    for part in split.iter(ROWS_PER_WRITE):
        all_windows = encoder.questions(part["question"], part["context"], max_length)
        for of_question, answers, starts in zip(
            all_windows, part["answers"], part["starts"], strict=True
        ):
            answer = (0, 0)  # no characters, which no token covers
            if answers:
                end = starts[0] + len(answers[0])
                answer = cover(of_question, starts[0], end)
            for window in of_question:
                yield encoder.row(window.row) | {
                    "labels": window.span(*answer),
                    "example": example,
                    "starts": window.starts,
                    "ends": window.ends,
                    "null": window.null,
                }
            example += 1


def _sentences(
    split: Dataset,
    encoder: Encoder,
    max_length: int,
) -> Iterator[RowMapping]:
    """Yield the rows of sentences, labelled with the tag of each word."""
    example = 0
    for part in split.iter(ROWS_PER_WRITE):
        all_windows = encoder.words(part["words"], max_length)
        for of_sentence, tags in zip(all_windows, part["tags"], strict=True):
            for window in of_sentence:
                labels = [
                    IGNORE_INDEX if word < 0 else tags[word] for word in window.word
                ]
                yield encoder.row(window.row) | {
                    "labels": labels,
                    "example": example,
                    "word": window.word,
                }
            example += 1
