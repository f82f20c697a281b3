"""Round the word embedding to a codebook before a student trains: its other weights
adapt to the rounded table, and its int8 file holds one byte for four numbers
(`exporters.codebook`). Fan et al. 2021 (arXiv:2004.07320) train with noise instead."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from compress.data.masking import count_tokens
from compress.models.codebook import round_table, saved_bytes


@contextmanager
def rounded_table(student: PreTrainedModel, rows: Dataset) -> Iterator[None]:
    """Round the student's word embedding to a codebook, and freeze it in this context.

    Rows of tokens that occur in `rows` are rounded the least. A table that a codebook
    would not make smaller is unchanged, and so is one that is also an output layer.
    """
    weight = student.get_input_embeddings().weight
    assert isinstance(weight, Tensor), "a table has rows"
    if student.get_output_embeddings() is not None:
        yield
        return
    exact_VD = weight.detach().float().cpu().numpy()
    if saved_bytes(*exact_VD.shape):
        counts_V = count_tokens(rows, len(exact_VD)).numpy()
        rounded = torch.from_numpy(round_table(exact_VD, counts_V))
        with torch.no_grad():
            weight.copy_(rounded)
    trained = weight.requires_grad
    weight.requires_grad_(False)
    try:
        yield
    finally:
        weight.requires_grad_(trained)
