"""Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers",
arXiv:1810.04805.

Sec. 3.1  masked_lm      cross entropy at the masked positions
Sec. 3.1  next_sentence  cross entropy of the two-class pooled output
Sec. 3.1  mask           15 % of the tokens are predicted; 80 % of these become [MASK],
                         10 % a random token, 10 % stay
Sec. 3.1  segment_pairs  two segments of a document, or, half of the time, the second
                         from another document
Sec. 4    labels         the fine-tuning loss of the task

Shapes: B examples, L tokens, V classes or vocabulary.

Deviations
- masked_lm: the authors' code divides by (count + 1e-5); we divide by the count, and
  return 0 where nothing is masked.
- mask: drawn anew for each batch (RoBERTa's dynamic masking); the authors fix it when
  they write their data, in ten copies (roberta.static_mask does that). [UNK] is never
  predicted; theirs spares [CLS] and [SEP] only.
- segment_pairs: the random segment comes from one of the `near` latest documents, not
  from the whole corpus, which is never in memory; always from another document, while
  theirs gives up after ten draws of the same one.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from pydantic import PositiveInt
from torch import Tensor
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    mse_loss,
)

from compress.data.constants import IGNORE_INDEX
from compress.data.corpus import Document
from compress.data.masking import Frame, Words
from compress.errors import DataError, ObjectiveError
from compress.tensors import TensorDict, Tensors
from compress.training.reads import Fraction, reads


@reads("logits", against="labels", per="label")
def masked_lm(student_BLV: Tensor, labels_BL: Tensor, mask_BL: Tensor | None) -> Tensor:
    """-log softmax(z)[label], mean over the positions whose label is not -100."""
    return mean_cross_entropy(student_BLV.flatten(0, -2), labels_BL.flatten())


def mean_cross_entropy(student_RV: Tensor, labels_R: Tensor) -> Tensor:
    """-log softmax(z)[label], mean over the rows whose label is not -100; 0 if there is
    none."""
    total = cross_entropy(student_RV.float(), labels_R, reduction="sum")
    return total / (labels_R != IGNORE_INDEX).sum().clamp_min(1)


@reads("pair", against="next_sentence", per="example")
def next_sentence(
    student_B2: Tensor, labels_B: Tensor, mask_BL: Tensor | None
) -> Tensor:
    """-log softmax(z)[label], mean over examples; 0: B follows A, 1: B is random."""
    return mean_cross_entropy(student_B2, labels_B)


@reads("logits", against="labels", per="example")
def labels(student_BV: Tensor, labels: Tensor, mask_BL: Tensor | None) -> Tensor:
    """Compute the task's own loss, mean over the examples that have a label, according
    to the type of the labels.

    class ids (B,), integer        cross entropy over V classes; none: -100
    numbers (B,) or (B, 1)         squared error of the one output; none: nan
    memberships (B, V), floating   binary cross entropy, mean over V; none: nan

    Raises ObjectiveError for class ids if there is one output.
    """
    one = student_BV.shape[-1] == 1
    if not labels.is_floating_point():
        if one:
            raise ObjectiveError(
                "bert.labels: the model has one output, and the labels are whole "
                "numbers: expected numbers as floats (labels.float()), or a model with "
                "an output for each class"
            )
        return mean_cross_entropy(student_BV, labels)
    error = mse_loss if one else binary_cross_entropy_with_logits
    wanted_BV = labels.float().view_as(student_BV)
    known_BV = ~wanted_BV.isnan()
    errors_BV = error(student_BV.float(), wanted_BV.nan_to_num(), reduction="none")
    return (errors_BV * known_BV).sum() / known_BV.sum().clamp_min(1)


def mask(
    batch: Tensors,
    words: Words,
    *,
    rate: Fraction = 0.15,
    max_predictions: PositiveInt | None = None,
    masked: Fraction = 0.8,
    random: Fraction = 0.1,
) -> TensorDict:
    """Mask `rate` of each row's tokens, at least one (Sec. 3.1); special tokens count
    but are never chosen. See `conceal` for `masked` and `random`.

    `max_predictions` limits their number (authors' code: 20 of 128 tokens, 76 or 77 of
    512).
    """
    open_BL = predictable(batch, words)
    wanted_B = (
        (rate * batch["attention_mask"].sum(-1)).round().clamp(1, max_predictions)
    )
    order_BL = (
        torch.rand(open_BL.shape, device=open_BL.device)
        .masked_fill(~open_BL, 2)
        .argsort(-1)
    )
    rank_BL = order_BL.argsort(-1)
    chosen_BL = open_BL & (rank_BL < wanted_B[:, None])
    return conceal(batch, chosen_BL, words, masked=masked, random=random)


def predictable(batch: Tensors, words: Words) -> Tensor:
    """Mark the real tokens that are not special, (B, L)."""
    return batch["attention_mask"].bool() & ~words.special_V[batch["input_ids"]]


def conceal(
    batch: Tensors,
    chosen_BL: Tensor,
    words: Words,
    *,
    masked: float = 0.8,
    random: float = 0.1,
) -> TensorDict:
    """Label the chosen positions, and turn `masked` of them into the mask token and
    `random` into a random token.

    The rest keep their tokens. Raises DataError for a tokenizer without a mask token.
    """
    ids_BL = batch["input_ids"]
    fate_BL = torch.rand(ids_BL.shape, device=ids_BL.device)
    any_BL = torch.randint_like(ids_BL, words.size)
    hidden_BL = ids_BL.where(
        ~(chosen_BL & (fate_BL < masked)), words.need_mask("masking")
    )
    hidden_BL = hidden_BL.where(
        ~(chosen_BL & (fate_BL >= masked) & (fate_BL < masked + random)), any_BL
    )
    return dict(batch) | {
        "input_ids": hidden_BL,
        "labels": ids_BL.where(chosen_BL, IGNORE_INDEX),
    }


def segment_pairs(
    documents: Iterable[Document],
    frame: Frame,
    *,
    max_length: int,
    rng: np.random.Generator,
    short: Fraction = 0.1,
    near: int = 200,
) -> Iterator[dict[str, Any]]:
    """Build rows of two segments (Sec. 3.1, A.2); `next_sentence`: 0 B follows A, 1 B
    is random. See `pairs`."""
    rows = pairs(
        documents,
        frame,
        max_length=max_length,
        rng=rng,
        short=short,
        near=near,
        other="random",
    )
    return (
        row | {"next_sentence": int(relation == "random")} for row, relation in rows
    )


def pairs(
    documents: Iterable[Document],
    frame: Frame,
    *,
    max_length: int,
    rng: np.random.Generator,
    short: float,
    near: int,
    other: Literal["random", "swapped"],
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (row with its first `document`, relation of its second segment: follows,
    swapped or random).

    As in the authors' code: each document has one target length, the room of a row or,
    for a share `short` of them, a random length from 2 to that. Sentences are collected
    into a chunk until it reaches the target. The chunk is cut after a random sentence
    into A and B, and half of the chunks are changed as `other` says. A chunk of one
    sentence always gets a random B: sentences of another document, starting at a random
    sentence, until they reach the target. The rest of a chunk that a random B replaces
    begins the next chunk. The longer segment loses tokens at a random end until both
    fit. Raises DataError if there is only one document.
    """
    room = pair_room(frame, max_length)
    for document, another in with_others(documents, near, rng):
        sentences = document.sentences
        target = int(rng.integers(2, room + 1)) if rng.random() < short else room
        start = 0
        while start < len(sentences):
            end = start
            length = 0
            while end < len(sentences) and length < target:
                length += len(sentences[end])
                end += 1
            cut = start + (1 if end - start == 1 else int(rng.integers(1, end - start)))
            first = _join(sentences[start:cut])
            relation = "random"
            if end - start > 1:
                relation = other if rng.random() < 0.5 else "follows"
            if relation == "random":
                second = _random_segment(another(), target - len(first), rng)
                end = cut
            else:
                second = _join(sentences[cut:end])
            first, second = (
                (second, first) if relation == "swapped" else (first, second)
            )
            first, second = shorten(first, second, room, rng)
            yield frame.pair(first, second) | {"document": document.number}, relation
            start = end


def pair_room(frame: Frame, max_length: int) -> int:
    """Count the tokens of both texts of a pair that fit. Raises DataError if there is
    no room for two."""
    room = max_length - frame.room(pair=True)
    if room < 2:
        raise DataError(
            f"max_length {max_length}: a pair needs {max_length - room} special tokens "
            "and room for two."
        )
    return room


def _join(sentences: list[list[int]]) -> list[int]:
    return [token for sentence in sentences for token in sentence]


def _random_segment(
    document: Document, target: int, rng: np.random.Generator
) -> list[int]:
    segment = list[int]()
    for sentence in document.sentences[int(rng.integers(len(document.sentences))) :]:
        segment += sentence
        if len(segment) >= target:
            break
    return segment


def shorten(
    first: list[int], second: list[int], room: int, rng: np.random.Generator
) -> tuple[list[int], list[int]]:
    """Shorten both to `room` tokens in all, one token at a time from either end of the
    longer one."""
    a = [0, len(first)]
    b = [0, len(second)]
    for back in rng.random(max(0, a[1] + b[1] - room)) < 0.5:
        longer = a if a[1] - a[0] > b[1] - b[0] else b
        longer[int(back)] += -1 if back else 1
    return first[slice(*a)], second[slice(*b)]


def with_others(
    documents: Iterable[Document], near: int, rng: np.random.Generator
) -> Iterator[tuple[Document, Callable[[], Document]]]:
    """Pair each document with a function that draws another one from the `near` latest
    documents.

    The first documents draw from the first `near`. Only these, at least two, are held
    in memory. Raises DataError if there is only one document.
    """
    stream = iter(documents)
    held = list(islice(stream, max(near, 2)))
    if len(held) == 1:
        raise DataError(
            "this corpus is one document, so no random segment can come from another "
            "one. Separate its documents by blank lines, or add more text."
        )

    def draw(place: int) -> Document:
        other = int(rng.integers(len(held) - 1))
        return held[other + (other >= place)]

    for place, document in enumerate(held):
        yield document, partial(draw, place)
    for number, document in enumerate(stream):
        place = number % len(held)
        held[place] = document
        yield document, partial(draw, place)
