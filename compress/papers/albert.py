"""Lan et al. 2020, "ALBERT: A Lite BERT for Self-supervised Learning of Language
Representations", arXiv:1909.11942.

Sec. 3.1  sentence_order             rows of two consecutive segments, half of them
                                     swapped
Sec. 3.1  sentence_order_prediction  cross entropy of the two-class pooled output
Sec. 4.1  mask                       n-gram masking: p(n) ~ 1/n, n <= 3
not in it from_bert                  a student's weights from a trained BERT
                                     (compress/models/to_albert.py)

Shapes: B examples, L tokens.

Deviations
- sentence_order: a chunk of a single sentence cannot be swapped. As in the authors'
  code, its second segment comes from another document and counts as swapped; the paper
  does not say. That document is one of the `near` latest (bert.py).
- mask: drawn anew for each batch; theirs is fixed when the data are written. An n-gram
  does not cross a special token; theirs may join the end of the first segment and the
  start of the second. Words begin where `Words` says; theirs also splits words at
  letters outside of a-z.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from pydantic import PositiveInt
from torch import Tensor

from compress.data.corpus import Document
from compress.data.masking import Frame, Words
from compress.models.to_albert import from_bert  # noqa: F401 recipes call it albert.from_bert
from compress.papers import bert
from compress.tensors import TensorDict, Tensors
from compress.training.reads import Fraction, reads


@reads("pair", against="sentence_order", per="example")
def sentence_order_prediction(
    student_B2: Tensor, labels_B: Tensor, mask_BL: Tensor | None
) -> Tensor:
    """-log softmax(z)[label], mean over examples; 0: in order, 1: swapped."""
    return bert.mean_cross_entropy(student_B2, labels_B)


def sentence_order(
    documents: Iterable[Document],
    frame: Frame,
    *,
    max_length: int,
    rng: np.random.Generator,
    short: Fraction = 0.1,
    near: int = 200,
) -> Iterator[dict[str, Any]]:
    """Build rows of two segments (Sec. 3.1); `sentence_order`: 0 in order, 1 swapped or
    random, see bert.pairs."""
    rows = bert.pairs(
        documents,
        frame,
        max_length=max_length,
        rng=rng,
        short=short,
        near=near,
        other="swapped",
    )
    return (
        row | {"sentence_order": int(relation != "follows")} for row, relation in rows
    )


def mask(
    batch: Tensors,
    words: Words,
    *,
    rate: Fraction = 0.15,
    longest: PositiveInt = 3,
    max_predictions: PositiveInt | None = None,
) -> TensorDict:
    """Mask n-grams of whole words (Sec. 4.1), p(n) = (1/n) / sum_k (1/k), until `rate`
    of each row's tokens are chosen.

    Each token then becomes the mask, becomes a random token or is unchanged, 80/10/10.

    Words begin n-grams in random order. An n-gram that overlaps a chosen word is
    skipped; one that would exceed the rate loses its last words. The rate counts
    special tokens, as in bert.mask. At least one token may be chosen; a row without a
    word that short is unchanged.
    """
    open_BL = bert.predictable(batch, words)
    inside_BL = open_BL & ~words.starts_V[batch["input_ids"]]
    wanted_B = (
        (rate * batch["attention_mask"].sum(-1)).round().clamp(1, max_predictions)
    )
    # moved to the device once, not a row at a time
    chosen_BL = torch.zeros(open_BL.shape, dtype=torch.bool)
    rows = zip(open_BL.tolist(), inside_BL.tolist(), wanted_B.tolist(), strict=True)
    for row, (open_L, inside_L, wanted) in enumerate(rows):
        chosen_BL[row, _ngrams(_words(open_L, inside_L), int(wanted), longest)] = True
    return bert.conceal(batch, chosen_BL.to(open_BL.device), words)


def _words(open_L: list[bool], inside_L: list[bool]) -> list[list[list[int]]]:
    """Split a row into runs of words between special tokens; a word is a list of its
    positions."""
    runs: list[list[list[int]]] = [[]]
    for position, (opened, inside) in enumerate(zip(open_L, inside_L, strict=True)):
        if not opened:
            runs.append([])
        elif inside and runs[-1]:
            runs[-1][-1].append(position)
        else:
            runs[-1].append([position])
    return runs


def _ngrams(runs: list[list[list[int]]], wanted: int, longest: int) -> list[int]:
    places = [(run, at) for run in runs for at in range(len(run))]
    up_to_N = list(accumulate(1 / n for n in range(1, longest + 1)))
    order = torch.randperm(len(places)).tolist()
    sizes = torch.rand(len(places)).tolist()
    chosen = set[int]()
    for number in order:
        if len(chosen) >= wanted:
            break
        run, at = places[number]
        most = min(longest, len(run) - at)
        n = min(bisect_right(up_to_N, sizes[number] * up_to_N[most - 1]) + 1, most)
        while n > 0 and len(chosen) + sum(map(len, run[at : at + n])) > wanted:
            n -= 1
        gram = {position for word in run[at : at + n] for position in word}
        if not gram & chosen:
            chosen |= gram
    return sorted(chosen)
