"""Describe the vocabulary of a tokenizer and its special tokens, for building and
corrupting rows. V: token ids."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import BoolTensor, LongTensor

from compress.data.collate import require_pad_token
from compress.data.templates import Template
from compress.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

ROWS_PER_MASK: Final = 10_000

_UNUSED: Final = re.compile(r"[\[<]unused_?\d+[\]>]")
_INSIDE: Final = "##"
_BEGINS: Final = ("▁", "Ġ")


@dataclass(frozen=True, eq=False)
class Words:
    """Hold the vocabulary of a tokenizer as tensors.

    size        one more than the largest token id
    mask        the id of the mask token, if any
    pad         the id of the padding token
    special_V   the special tokens, including the unknown token, which are never
                predicted
    starts_V    tokens that begin a word: not `##...`, or marked `Ġ` or `▁`, or without
                a letter or digit; every token if the vocabulary marks neither
    counts_V    how often each token occurs in the rows of a stage; None if not counted
    unknown     the id of the unknown token, if any
    before, after   the special tokens around a text: [CLS] and [SEP]
    unused_V    reserved places of the vocabulary, such as [unused7]; None if not
                searched
    """

    size: int
    mask: int | None
    pad: int
    special_V: BoolTensor
    starts_V: BoolTensor
    counts_V: LongTensor | None = None
    unknown: int | None = None
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    unused_V: BoolTensor | None = None

    @classmethod
    def from_tokenizer(
        cls, tokenizer: PreTrainedTokenizerBase, counts: LongTensor | None = None
    ) -> Words:
        pad = require_pad_token(tokenizer)
        vocabulary = tokenizer.get_vocab()
        size = max(vocabulary.values()) + 1
        special_V = torch.zeros(size, dtype=torch.bool)
        special_V[tokenizer.all_special_ids] = True
        starts_V = torch.ones(size, dtype=torch.bool)
        starts_V[_continuations(vocabulary)] = False
        unused_V = torch.zeros(size, dtype=torch.bool)
        unused_V[
            [number for token, number in vocabulary.items() if _UNUSED.fullmatch(token)]
        ] = True
        before, after = map(tuple, Template.from_tokenizer(tokenizer, 1).ids)
        return cls(
            size,
            tokenizer.mask_token_id,
            pad,
            special_V,  # type: ignore[arg-type]  # torch types every tensor Tensor
            starts_V | special_V,  # type: ignore[arg-type]  # the same
            counts,
            tokenizer.unk_token_id,
            before,
            after,
            unused_V,  # type: ignore[arg-type]  # the same
        )

    def to(self, device: torch.device) -> Words:
        """Move the tensors to another device."""
        moved: dict[str, Any] = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **moved)

    def need_mask(self, what: str) -> int:
        """Return the id of the mask token, or raise DataError that `what` needs one."""
        if self.mask is None:
            raise DataError(
                f"{what} needs a mask token, but this tokenizer has none; use another "
                "corruption."
            )
        return self.mask


def _continuations(vocabulary: dict[str, int]) -> list[int]:
    """List the ids of the tokens that continue a word, by the most frequent mark of the
    vocabulary."""
    marked = {
        mark: sum(token.startswith(mark) for token in vocabulary)
        for mark in (_INSIDE, *_BEGINS)
    }
    mark = max(marked, key=marked.__getitem__)
    if not marked[mark]:
        return []
    if mark == _INSIDE:
        return [
            number
            for token, number in vocabulary.items()
            if token.startswith(_INSIDE) and token != _INSIDE
        ]
    return [
        number
        for token, number in vocabulary.items()
        if not token.startswith(mark) and any(letter.isalnum() for letter in token)
    ]


def count_tokens(rows: Dataset, vocabulary: int) -> LongTensor:
    """Count how often each token id below `vocabulary` occurs in the column
    `input_ids`: (V,)."""
    total = np.zeros(vocabulary, np.int64)
    for table in (
        rows.select_columns(["input_ids"]).with_format("arrow").iter(ROWS_PER_MASK)
    ):
        for chunk in table["input_ids"].chunks:
            counts = np.bincount(
                chunk.flatten().to_numpy(zero_copy_only=False), minlength=vocabulary
            )
            if len(counts) > vocabulary:
                raise DataError(
                    f"token {len(counts) - 1} is not in the vocabulary of "
                    f"{vocabulary}: these rows come from another tokenizer."
                )
            total += counts
    return torch.from_numpy(total)  # type: ignore[return-value]  # torch types every tensor Tensor


@dataclass(frozen=True)
class Frame:
    """Frame one text, or a pair, as a tokenizer does: `[CLS] a [SEP]` and `[CLS] a
    [SEP] b [SEP]` for BERT.

    `end` is the token that ends a text for a generative model, if any. `words` is the
    vocabulary, for rows that are corrupted when they are made.
    """

    alone: Template
    paired: Template
    end: int | None
    words: Words

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase) -> Frame:
        templates = (
            Template.from_tokenizer(tokenizer, 1),
            Template.from_tokenizer(tokenizer, 2),
        )
        return cls(*templates, tokenizer.eos_token_id, Words.from_tokenizer(tokenizer))

    def single(self, ids: Sequence[int]) -> dict[str, list[int]]:
        """Make a row of one text: {input_ids, token_type_ids (if the tokenizer makes
        them)}."""
        return self.alone.fill(ids)

    def pair(self, first: Sequence[int], second: Sequence[int]) -> dict[str, list[int]]:
        """Make a row of a pair of texts."""
        return self.paired.fill(first, second)

    def room(self, pair: bool = False) -> int:
        """Count the special tokens of a row."""
        return (self.paired if pair else self.alone).size
