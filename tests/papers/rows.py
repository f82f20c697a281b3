"""Documents of made-up tokens and a frame to look at rows with."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.data.corpus import Document
from compress.data.masking import Frame, Words
from compress.data.templates import Template

PAD, UNK, CLS, SEP, MASK = range(5)
FIRST = 5
"""The first token that is not special."""
SIZE = 1000


def words(*, inside: Iterable[int] = (), counts: Tensor | None = None) -> Words:
    """A vocabulary of SIZE tokens, PAD to MASK special; those in `inside` continue a word."""
    special_V, starts_V = torch.zeros(SIZE, dtype=torch.bool), torch.ones(SIZE, dtype=torch.bool)
    special_V[:FIRST] = True
    starts_V[list(inside)] = False
    return Words(SIZE, MASK, PAD, special_V, starts_V, counts)  # type: ignore[arg-type]


def frame() -> Frame:
    """BERT's: [CLS] a [SEP], [CLS] a [SEP] b [SEP]."""
    alone = Template(([CLS], [SEP]), ([0], [0]), (0,))
    paired = Template(([CLS], [SEP], [SEP]), ([0], [0], [1]), (0, 1))
    return Frame(alone, paired, SEP, words())


def document(number: int, *lengths: int, parallel: bool = False) -> Document:
    """Sentences of these lengths; the tokens count up from 100 (number + 1), so each tells where it is from."""
    start, sentences = 100 * (number + 1), []
    for length in lengths:
        sentences.append(list(range(start, start + length)))
        start += length
    assert length and start <= 100 * (number + 2), "tokens of a document are its own"
    return Document(number, sentences, parallel)


def owner(token: int) -> int:
    """The number of the document that a token is from."""
    return token // 100 - 1


def segments(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The two texts of a row of a pair; checks the frame around them."""
    ids, types = row["input_ids"], row["token_type_ids"]
    cut = ids.index(SEP)
    assert (ids[0], ids[-1], ids.count(SEP)) == (CLS, SEP, 2)
    assert types == [0] * (cut + 1) + [1] * (len(ids) - cut - 1)
    return ids[1:cut], ids[cut + 1 : -1]


def consecutive(ids: Sequence[int]) -> bool:
    """Whether they are one stretch of a document."""
    return list(ids) == list(range(ids[0], ids[0] + len(ids))) and owner(ids[0]) == owner(ids[-1])


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def batch(*rows: Sequence[int]) -> dict[str, Tensor]:
    """Padded to the longest."""
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[*row, *[PAD] * (width - len(row))] for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
    }


class Watched:
    """A stream of documents that knows how many were asked for."""

    def __init__(self, count: int, *lengths: int) -> None:
        self.count, self.lengths, self.read = count, lengths, 0

    def __iter__(self) -> Iterator[Document]:
        for number in range(self.count):
            self.read += 1
            yield document(number % 8, *self.lengths)
