"""The vocabulary of a tokenizer as corruptions of text need it. V: token ids."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import BoolTensor, LongTensor

from compress.data.sentences import Template
from compress.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

ROWS_PER_CALL: Final = 10_000

_INSIDE: Final = "##"
_BEGINS: Final = ("▁", "Ġ")


@dataclass(frozen=True, eq=False)
class Words:
    """The vocabulary of a tokenizer as tensors.

    size        one more than the largest token id
    mask        the id of the mask token; None where there is none
    pad         the id of the padding token
    special_V   the tokenizer's special tokens, the unknown token among them: never predicted
    starts_V    this token begins a word: not `##...`, or marked `Ġ` or `▁`, or without a letter or digit; every token
                of a vocabulary that marks neither
    counts_V    how often each token occurs in the rows of a stage; None where nobody counted
    unknown     the id of the unknown token; None where there is none
    before, after   what the tokenizer puts around the tokens of a text: [CLS] and [SEP]
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

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase, counts: LongTensor | None = None) -> Words:
        if tokenizer.pad_token_id is None:
            raise DataError(
                f"{type(tokenizer).__name__} has no padding token. "
                "Set one, for example: tokenizer.pad_token = tokenizer.eos_token"
            )
        vocabulary = tokenizer.get_vocab()
        size = max(vocabulary.values()) + 1
        special_V = torch.zeros(size, dtype=torch.bool)
        special_V[tokenizer.all_special_ids] = True
        starts_V = torch.ones(size, dtype=torch.bool)
        starts_V[_inside(vocabulary)] = False
        return cls(
            size,
            tokenizer.mask_token_id,
            tokenizer.pad_token_id,
            special_V,  # type: ignore[arg-type]
            starts_V | special_V,  # type: ignore[arg-type]
            counts,
            tokenizer.unk_token_id,
            *map(tuple, Template.from_tokenizer(tokenizer, 1).ids),
        )

    def to(self, device: torch.device) -> Words:
        """Move the tensors to another device."""
        moved: dict[str, Any] = {
            each.name: value.to(device)
            for each in fields(self)
            if isinstance(value := getattr(self, each.name), torch.Tensor)
        }
        return replace(self, **moved)

    def need_mask(self, what: str) -> int:
        """Return the mask token. DataError, saying that `what` needs it, where the tokenizer has none."""
        if self.mask is None:
            raise DataError(f"{what} needs a mask token, and this tokenizer has none: use another corruption")
        return self.mask


def _inside(vocabulary: dict[str, int]) -> list[int]:
    """List the ids of the tokens that continue a word, by the mark that most tokens have."""
    marked = {mark: sum(token.startswith(mark) for token in vocabulary) for mark in (_INSIDE, *_BEGINS)}
    mark = max(marked, key=lambda each: marked[each])
    if not marked[mark]:
        return []
    if mark == _INSIDE:
        return [number for token, number in vocabulary.items() if token.startswith(_INSIDE) and token != _INSIDE]
    return [
        number
        for token, number in vocabulary.items()
        if not token.startswith(mark) and any(letter.isalnum() for letter in token)
    ]


def counts(rows: Dataset, vocabulary: int) -> LongTensor:
    """Count how often each token id below `vocabulary` occurs in the column `input_ids`: (V,); streamed."""
    total = np.zeros(vocabulary, np.int64)
    for table in rows.select_columns(["input_ids"]).with_format("arrow").iter(ROWS_PER_CALL):
        for chunk in table["input_ids"].chunks:
            found = np.bincount(chunk.flatten().to_numpy(zero_copy_only=False), minlength=vocabulary)
            if len(found) > vocabulary:
                raise DataError(
                    f"token {len(found) - 1} does not exist: the vocabulary has {vocabulary}. "
                    "These rows were made by another tokenizer."
                )
            total += found
    return torch.from_numpy(total)  # type: ignore[return-value]
