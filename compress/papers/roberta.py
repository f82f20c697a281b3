"""Liu et al. 2019, "RoBERTa: A Robustly Optimized BERT Pretraining Approach",
arXiv:1907.11692.

Sec. 4.1  bert.mask       dynamic masking: a batch is masked anew each time it is seen
          static_mask     ten fixed maskings of every row, for comparison
Sec. 4.2  segment_pairs   two segments of several sentences (BERT's), with next-sentence
                          prediction
          sentence_pairs  two natural sentences, with next-sentence prediction
          full_sentences  sentences in a row until the room is full, across documents;
                          no next-sentence prediction
          doc_sentences   the same, but never across documents: rows at their ends are
                          shorter

Pairs of sentences and the ends of documents make short rows; Sec. 4.2 then takes more
of them, so that a batch keeps its number of tokens: data.collate.TokenBudget.

Deviations
- sentences are split by rule (data.corpus); a sentence longer than a row is cut into
  several.
- full_sentences ends a document with the token that ends a row ([SEP] for BERT).
- sentence_pairs: the paper does not say how a document is traversed. Here a sentence
  with a random partner, from the `near` latest documents (bert.py), is followed by a
  pair that begins with the next sentence; a pair of consecutive sentences by one that
  begins after both.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import torch
from pydantic import PositiveInt

from compress.data.corpus import Document
from compress.data.masking import Frame
from compress.errors import DataError
from compress.papers.bert import mask, pair_room, segment_pairs, shorten, with_others
from compress.training.reads import Fraction

Packing = Literal["segment_pairs", "sentence_pairs", "full_sentences", "doc_sentences"]


def sentence_pairs(
    documents: Iterable[Document],
    frame: Frame,
    *,
    max_length: int,
    rng: np.random.Generator,
    near: int = 200,
) -> Iterator[dict[str, Any]]:
    """Build SENTENCE-PAIR+NSP rows; `next_sentence` 0: B is the sentence after A; 1:
    one of another document.

    Half are random, and the last sentence of a document always is. Raises DataError if
    there is only one document.
    """
    room = pair_room(frame, max_length)
    for document, another in with_others(documents, near, rng):
        at = 0
        while at < len(document.sentences):
            random = at == len(document.sentences) - 1 or rng.random() < 0.5
            other = another().sentences if random else document.sentences
            second = other[int(rng.integers(len(other)))] if random else other[at + 1]
            first, second = shorten(document.sentences[at], second, room, rng)
            yield frame.pair(first, second) | {
                "document": document.number,
                "next_sentence": int(random),
            }
            at += 1 if random else 2


def full_sentences(
    documents: Iterable[Document],
    frame: Frame,
    *,
    max_length: int,
    rng: np.random.Generator,
) -> Iterator[dict[str, Any]]:
    """Build FULL-SENTENCES rows: whole sentences of one or more documents, a separator
    where a document ends."""
    separator = frame.alone.ids[-1][:1]
    if not separator:
        raise DataError(
            "roberta.full_sentences: this tokenizer ends a text without a special "
            "token, which would separate documents."
        )
    return (
        frame.single(ids)
        for ids in _pack(documents, _room(frame, max_length), separator)
    )


def doc_sentences(
    documents: Iterable[Document],
    frame: Frame,
    *,
    max_length: int,
    rng: np.random.Generator,
) -> Iterator[dict[str, Any]]:
    """Build DOC-SENTENCES rows: whole sentences of one document."""
    room = _room(frame, max_length)
    for document in documents:
        for ids in _pack([document], room, []):
            yield frame.single(ids) | {"document": document.number}


def static_mask(
    documents: Iterable[Document],
    frame: Frame,
    *,
    max_length: int,
    rng: np.random.Generator,
    rows: Packing = "full_sentences",
    copies: PositiveInt = 10,
    rate: Fraction = 0.15,
) -> Iterator[dict[str, Any]]:
    """Build rows of one of the four formats, each repeated with `copies` fixed maskings
    (Sec. 4.1).

    They have `labels` (-100 where nothing is predicted), so that the stage needs no
    `corrupt`.
    """
    plain = FORMATS[rows](documents, frame, max_length=max_length, rng=rng)
    # leaves the random generator of training unchanged
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(2**62)))
        state = torch.get_rng_state()
    for row in plain:
        ids_BL = torch.tensor([row["input_ids"]] * copies)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            masked = mask(
                {"input_ids": ids_BL, "attention_mask": torch.ones_like(ids_BL)},
                frame.words,
                rate=rate,
            )
            state = torch.get_rng_state()
        for input_ids, labels in zip(
            masked["input_ids"].tolist(), masked["labels"].tolist(), strict=True
        ):
            yield row | {"input_ids": input_ids, "labels": labels}


def _room(frame: Frame, max_length: int) -> int:
    room = max_length - frame.room()
    if room < 1:
        raise DataError(
            f"max_length {max_length}: a row needs {max_length - room} special tokens "
            "and room for text."
        )
    return room


def _pack(
    documents: Iterable[Document], room: int, separator: list[int]
) -> Iterator[list[int]]:
    """Join as many sentences as fit into each row, with `separator` between documents
    but not at the ends of rows."""
    row = list[int]()
    for document in documents:
        between = separator
        for ids in _pieces(document, room):
            if row and len(row) + len(between) + len(ids) > room:
                yield row
                row = []
            row = row + (between if row else []) + ids
            between = []
    if row:
        yield row


def _pieces(document: Document, room: int) -> Iterator[list[int]]:
    for sentence in document.sentences:
        yield from (
            sentence[start : start + room] for start in range(0, len(sentence), room)
        )


FORMATS: Final[Mapping[Packing, Any]] = MappingProxyType(
    {
        "segment_pairs": segment_pairs,
        "sentence_pairs": sentence_pairs,
        "full_sentences": full_sentences,
        "doc_sentences": doc_sentences,
    }
)
