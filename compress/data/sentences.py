"""Documents as sentences of token ids, and how a tokenizer frames them as model input."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from compress.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from compress.data.corpus import Corpus
    from compress.data.masking import Words

SENTENCES_PER_CALL: Final = 2000

LONGEST_SENTENCE: Final = 10_000
"""Characters; text without an end of sentence for so long is cut at a space, or anywhere where there is none."""

_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]”’]))\s+(?![a-z])|(?<=[。！？])")


@dataclass(frozen=True)
class Document:
    """One document of a corpus: its number there, and the token ids of each sentence, without special tokens.

    There is at least one sentence, and no sentence is empty. A `parallel` document has two: a text and its translation.
    """

    number: int
    sentences: list[list[int]]
    parallel: bool = False


def documents(corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> Iterator[Document]:
    """Yield the documents that have tokens, in order, one at a time; the call before the last is all that is held.

    A sentence that follows another is tokenised with the space between them, as in running text: it matters to
    tokenizers that keep spaces (GPT-2, RoBERTa) and to no other.
    """
    for number, group in groupby(tokenised(corpus, tokenizer, spaced=True), key=itemgetter(0)):
        sentences = [ids for _, ids in group if ids]
        if len(sentences) > corpus.parallel:  # of a parallel document, both
            yield Document(number, sentences, corpus.parallel)


def tokenised(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, *, spaced: bool = False, start: int = 0
) -> Iterator[tuple[int, list[int]]]:
    """Yield (document number, token ids) of each sentence of a corpus, tokenised many at a time; ids may be empty.

    `spaced`: whether a sentence is tokenised with the space between it and the one before; `start`: the first document.
    """
    before = " " if spaced and not corpus.parallel else ""
    sentences = (
        (number, text if at == 0 else before + text)
        for number, document in islice(enumerate(corpus.documents()), start, None)
        for at, text in enumerate(document.split("\n") if corpus.parallel else split_sentences(document))
    )
    no = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    while batch := list(islice(sentences, SENTENCES_PER_CALL)):
        tokens = tokenizer([text for _, text in batch], **no)["input_ids"]
        for (number, _), ids in zip(batch, tokens, strict=True):
            yield number, ids


def split_sentences(document: str) -> Iterator[str]:
    """Yield the sentences of a document; none goes over a line end."""
    for line in document.splitlines():
        for sentence in _SENTENCE_END.split(line):
            rest = sentence.strip()
            while len(rest) > LONGEST_SENTENCE:
                cut = rest.rfind(" ", 1, LONGEST_SENTENCE)
                cut = cut if cut > 0 else LONGEST_SENTENCE
                yield rest[:cut]
                rest = rest[cut:].lstrip()
            if rest:
                yield rest


@dataclass(frozen=True)
class Template:
    """The special tokens before, between and after `len(ids) - 1` texts; the token types of these and of the texts.

    `types` and `text_types` are None where the tokenizer makes no token types.
    """

    ids: tuple[list[int], ...]
    types: tuple[list[int], ...] | None
    text_types: tuple[int, ...] | None

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase, texts: int) -> Template:
        """Read off what the tokenizer makes of one word, given once or as a pair. Raises DataError."""
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = tokenizer(*["a"] * texts)
        ids, types = whole["input_ids"], whole.get("token_type_ids")
        cuts, kinds, end = [], [], 0
        for _ in range(texts):
            start = next((at for at in range(end, len(ids)) if ids[at : at + len(bare)] == bare), None)
            if start is None or not bare:
                raise DataError(
                    f"{type(tokenizer).__name__}: cannot see how it frames {texts} text(s): 'a' is {bare} alone "
                    f"and {ids} framed. Choose a tokenizer that knows the letter a."
                )
            cuts.append((end, start))
            kinds.append(start)
            end = start + len(bare)
        cuts.append((end, len(ids)))
        if types is None:
            return cls(tuple(ids[i:j] for i, j in cuts), None, None)
        return cls(
            tuple(ids[i:j] for i, j in cuts), tuple(types[i:j] for i, j in cuts), tuple(types[at] for at in kinds)
        )

    def fill(self, *texts: Sequence[int]) -> dict[str, list[int]]:
        """Make a row of texts: {input_ids, token_type_ids (where the tokenizer makes them)}."""
        row = {"input_ids": _woven(self.ids, texts)}
        if self.types is not None and self.text_types is not None:
            kinds = [[kind] * len(text) for kind, text in zip(self.text_types, texts, strict=True)]
            row["token_type_ids"] = _woven(self.types, kinds)
        return row

    @property
    def size(self) -> int:
        """How many special tokens it has."""
        return sum(map(len, self.ids))


def _woven(around: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> list[int]:
    parts = chain.from_iterable(zip(around[:-1], texts, strict=True))
    return list(chain(chain.from_iterable(parts), around[-1]))


@dataclass(frozen=True)
class Frame:
    """How a tokenizer frames one text and a pair of texts: `[CLS] a [SEP]` and `[CLS] a [SEP] b [SEP]` for BERT.

    `end` is the token that ends a text for a generative model; None where the tokenizer has none. `words` is the
    vocabulary, for rows that are corrupted once and for all.
    """

    alone: Template
    paired: Template
    end: int | None
    words: Words

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase) -> Frame:
        from compress.data.masking import Words  # torch

        templates = Template.from_tokenizer(tokenizer, 1), Template.from_tokenizer(tokenizer, 2)
        return cls(*templates, tokenizer.eos_token_id, Words.from_tokenizer(tokenizer))

    def single(self, ids: Sequence[int]) -> dict[str, list[int]]:
        """Make a row of one text: {input_ids, token_type_ids (where the tokenizer makes them)}."""
        return self.alone.fill(ids)

    def pair(self, first: Sequence[int], second: Sequence[int]) -> dict[str, list[int]]:
        """Make a row of a pair of texts."""
        return self.paired.fill(first, second)

    def room(self, pair: bool = False) -> int:
        """Count the special tokens that a row needs besides its text."""
        return (self.paired if pair else self.alone).size
