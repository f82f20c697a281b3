"""Words with like vectors. P: words of a pool, W: words asked about, M: neighbours, D: width of a vector."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from compress.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WORDS_PER_BATCH: Final = 512
GLOVE_ROWS: Final = 100_000
"""Rows of a vector file that are read, the most frequent words: as the authors' code."""

PLAIN: Final = re.compile(r"[a-z]+")


def nearest(
    seen: Collection[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    most: int,
    file: str | None,
    every: bool = False,
) -> dict[str, list[str]]:
    """Of each seen word that is several tokens, or of `every` one: the `most` words with the largest cosine to it.

    Vectors come from a GloVe text file, or are the means of the tokens' input embeddings, over the seen words and the
    vocabulary's. Only words of letters a-z count; those without a vector are left out. Raises DataError.
    """
    words = {word for word in seen if PLAIN.fullmatch(word)}
    if file:
        pool, vectors_PD = _glove(Path(file))
    else:
        whole = {str(tokenizer.decode([each])).strip().lower() for each in range(len(tokenizer))}
        pool = sorted(words | {word for word in whole if PLAIN.fullmatch(word)})
        vectors_PD = _embedded(pool, model, tokenizer)
    place = {word: at for at, word in enumerate(pool)}
    known = sorted(words & place.keys())
    if known and not every:
        known = [word for word, ids in zip(known, _pieces(known, tokenizer), strict=True) if len(ids) > 1]
    vectors_PD = normalize(vectors_PD, dim=-1)
    near: dict[str, list[str]] = {}
    for start in range(0, len(known), WORDS_PER_BATCH):
        some = known[start : start + WORDS_PER_BATCH]
        cosine_WP = vectors_PD[[place[word] for word in some]] @ vectors_PD.T
        best_WM = cosine_WP.topk(min(most + 1, len(pool))).indices.tolist()
        for word, best in zip(some, best_WM, strict=True):
            near[word] = [pool[at] for at in best if pool[at] != word][:most]
    return near


def _pieces(words: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of words as they are inside a text: after a space."""
    ids: list[list[int]] = tokenizer([f" {word}" for word in words], add_special_tokens=False)["input_ids"]
    return ids


@torch.inference_mode()
def _embedded(words: Sequence[str], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """(P, D): of each word the mean of its tokens' input embeddings."""
    table: Any = model.get_input_embeddings()
    pieces = _pieces(words, tokenizer)
    flat = torch.tensor([each for ids in pieces for each in ids], device=table.weight.device)
    owner = torch.repeat_interleave(torch.arange(len(words)), torch.tensor([len(ids) for ids in pieces]))
    total_PD = torch.zeros(len(words), table.weight.shape[1])
    return total_PD.index_add_(0, owner, table.weight[flat].float().cpu())  # the mean's direction is the sum's


def _glove(path: Path) -> tuple[list[str], Tensor]:
    """The words and vectors of a text file with a word and its numbers a line. Raises DataError."""
    words, rows = [], []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(islice(file, GLOVE_ROWS), start=1):
                word, *numbers = line.rstrip("\n").split(" ")
                if PLAIN.fullmatch(word):
                    words.append(word)
                    rows.append(np.array(numbers, np.float32))
                    if len(rows[-1]) != len(rows[0]):
                        raise DataError(
                            f"{path}, line {number}: {len(rows[-1])} numbers where others have {len(rows[0])}"
                        )
    except OSError as error:
        raise DataError(f"{path}: word vectors cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path}, line {number}: expected a word and its numbers, separated by spaces") from error
    if not words:
        raise DataError(
            f"{path}: there is no word in it; expected a word and its numbers a line, as GloVe is given out"
        )
    return words, torch.from_numpy(np.stack(rows))
