"""Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2).

Sec. 2    next_tokens  each token is predicted from those before it; the loss is
                       `bert.masked_lm` on these labels
(code)    blocks       documents one after the other, unchanged and with an end-of-text
                       token between them, cut into equal blocks

labels[t] is the token at t + 1, so a model's logits at t are compared with labels[t]
and nothing is shifted in a loss. The last real token of a row and the padding have no
label.

Shapes: B examples, L tokens.

Deviations:
- the authors published no training code; blocks are cut as their samples and data
  release suggest. The last block may be shorter.
- tokens that a tokenizer puts before a text, such as the BOS token of Llama, begin each
  document, as in run_clm.py of transformers: every prompt begins with them. GPT-2's
  tokenizer has none."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from compress.data.constants import IGNORE_INDEX
from compress.data.corpus import Document
from compress.data.masking import Frame, Words
from compress.errors import DataError
from compress.tensors import TensorDict, Tensors


def next_tokens(batch: Tensors, words: Words) -> TensorDict:
    """Return the batch with `labels` (B, L): labels[t] = input_ids[t + 1], -100 where
    the next token is not a real one.

    If the rows have a column `prompt` (B,), it is the number of their first real tokens
    that are not predicted.
    """
    ids_BL = batch["input_ids"]
    real_BL = batch["attention_mask"].bool()
    predicted_BL = real_BL[:, :-1] & real_BL[:, 1:]
    if "prompt" in batch:
        position_BL = real_BL.long().cumsum(1) - 1
        predicted_BL = predicted_BL & (position_BL[:, 1:] >= batch["prompt"][:, None])
    labels_BL = ids_BL.new_full(ids_BL.shape, IGNORE_INDEX)
    labels_BL[:, :-1] = ids_BL[:, 1:].where(predicted_BL, IGNORE_INDEX)
    return {**batch, "labels": labels_BL}


def blocks(
    documents: Iterable[Document],
    frame: Frame,
    *,
    max_length: int,
    rng: np.random.Generator,
) -> Iterator[dict[str, Any]]:
    """Cut documents, one after the other, into blocks of `max_length` tokens: each
    begins with the tokens that the tokenizer puts before a text, and ends with the end
    token. If both are the same token, there is only one between documents.

    Raises DataError for a tokenizer without an end token.
    """
    if frame.end is None:
        raise DataError(
            "gpt2.blocks: this tokenizer has no end-of-text token (eos_token) to put "
            "between documents"
        )
    end = [frame.end]
    begin = frame.alone.ids[0]
    block = list[int]()
    for document in documents:
        for tokens in [begin, *document.sentences, end]:
            block += tokens
            while len(block) >= max_length:
                yield {"input_ids": block[:max_length]}
                block = block[max_length:]
        if begin == end:
            begin = []
    if len(block) > 1:
        yield {"input_ids": block}
