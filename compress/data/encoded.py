"""What a tokenizer makes of a split: rows of tokens, with the labels where they belong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from compress.data import windows
from compress.errors import DataError
from compress.papers.bert import IGNORED

if TYPE_CHECKING:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

ROWS_PER_CALL = 1000

_TYPES: Final[Mapping[str, pa.DataType]] = {
    "input_ids": pa.list_(pa.int32()),
    "attention_mask": pa.list_(pa.int8()),
    "token_type_ids": pa.list_(pa.int8()),
    "labels": pa.list_(pa.int32()),
    "length": pa.int32(),
    "index": pa.int64(),
    "example": pa.int64(),
    "starts": pa.list_(pa.int32()),
    "ends": pa.list_(pa.int32()),
    "null": pa.int32(),
    "word": pa.list_(pa.int32()),
}

Row = dict[str, Any]


def encoded(split: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Iterator[pa.RecordBatch]:
    """The rows of a split of any kind, see `batches.encode`, many at a time."""
    if "question" in split.column_names:
        yield from _batches(_questions(split, backend(tokenizer, "questions"), max_length), tokenizer)
    elif "words" in split.column_names:
        yield from _batches(_sentences(split, backend(tokenizer, "words"), max_length), tokenizer)
    else:
        yield from _texts(split, tokenizer, max_length)


def backend(tokenizer: PreTrainedTokenizerBase, what: str) -> Tokenizer:
    """The fast tokenizer inside, which tells where its tokens come from."""
    if not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} does not tell which characters its tokens come from, and {what} cannot do "
            "without; expected a fast tokenizer, as AutoTokenizer gives for all common models."
        )
    return windows.plain(tokenizer.backend_tokenizer)


def _texts(split: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Iterator[pa.RecordBatch]:
    start = 0
    for table in split.with_format("arrow").iter(ROWS_PER_CALL):
        texts = [table[name].to_pylist() for name in ("text", "text_pair") if name in table.column_names]
        tokens = tokenizer(*texts, truncation=True, max_length=max_length, padding=False, return_attention_mask=True)
        names = ("input_ids", "attention_mask", "token_type_ids")
        columns = {name: pa.array(tokens[name], _TYPES[name]) for name in names if name in tokens}
        if "label" in table.column_names:
            columns["labels"] = table["label"].combine_chunks()
        columns["length"] = pa.array(map(len, tokens["input_ids"]), _TYPES["length"])
        columns["index"] = pa.array(range(start, start + len(table)), _TYPES["index"])
        yield pa.record_batch(columns)
        start += len(table)


def _questions(split: Dataset, tokenizer: Tokenizer, max_length: int) -> Iterator[Row]:
    """The first of a question's answers is the one to be learned."""
    example = 0
    for part in split.iter(ROWS_PER_CALL):
        columns = (part["context"], part["answers"], part["starts"])
        asked = windows.asked(tokenizer, part["question"], part["context"], max_length)
        for found, context, answers, starts in zip(asked, *columns, strict=True):
            for window in found:
                labels = [window.null, window.null]
                if answers:
                    assert context.startswith(answers[0], starts[0])
                    labels = window.span(starts[0], starts[0] + len(answers[0]))
                spots = {"starts": window.starts, "ends": window.ends, "null": window.null}
                yield {**_tokens(window.row), "labels": labels, "example": example, **spots}
            example += 1


def _sentences(split: Dataset, tokenizer: Tokenizer, max_length: int) -> Iterator[Row]:
    example = 0
    for part in split.iter(ROWS_PER_CALL):
        for found, tags in zip(windows.read(tokenizer, part["words"], max_length), part["tags"], strict=True):
            for window in found:
                labels = [IGNORED if word < 0 else tags[word] for word in window.word]
                yield {**_tokens(window.row), "labels": labels, "example": example, "word": window.word}
            example += 1


def _tokens(row: windows.Window) -> Row:
    ids = row.ids
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "token_type_ids": row.types, "length": len(ids)}


def _batches(rows: Iterator[Row], tokenizer: PreTrainedTokenizerBase) -> Iterator[pa.RecordBatch]:
    held: list[Row] = []
    start = 0

    def batch() -> pa.RecordBatch:
        left_out = set() if "token_type_ids" in tokenizer.model_input_names else {"token_type_ids"}
        columns = {name: [row[name] for row in held] for name in held[0] if name not in left_out}
        columns["index"] = list(range(start, start + len(held)))
        return pa.record_batch({name: pa.array(cells, _TYPES[name]) for name, cells in columns.items()})

    for row in rows:
        held.append(row)
        if len(held) == ROWS_PER_CALL:
            yield batch()
            start += len(held)
            held = []
    if held:
        yield batch()
