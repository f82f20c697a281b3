"""Train only the rows of the word embedding that occur in the training data.

A step over 400 tokens computes a dense gradient of the whole table (30,522 rows for
BERT), in which only a few hundred rows are not zero; writing, clipping and applying it
costs as much as the student's own layers. Tokens that never occur have no gradient and
no momentum, so leaving them out only exempts them from weight decay.

Shapes: B batch, L tokens, D width of the embedding, V vocabulary, U tokens in use.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from compress.arrays import Longs
from compress.data.masking import count_tokens

WORTH_IT = 0.7
"""Share of the vocabulary in use above which training only these rows gains nothing."""


class _InUse(nn.Module):
    """An embedding whose parameter has only the (U, D) rows in use; in eval mode it
    embeds every token."""

    def __init__(self, whole: nn.Embedding, used: Longs) -> None:
        super().__init__()
        self._whole = [whole]  # in a list, so that it is neither trained nor saved
        self.used: Tensor
        self.place: Tensor
        self.register_buffer(
            "used", torch.from_numpy(used).to(whole.weight.device), persistent=False
        )
        place_V = torch.zeros(
            whole.num_embeddings, dtype=torch.long, device=whole.weight.device
        )
        place_V[self.used] = torch.arange(len(used), device=whole.weight.device)
        self.register_buffer("place", place_V, persistent=False)
        self.weight = nn.Parameter(whole.weight.detach()[self.used].clone())
        pad = whole.padding_idx
        self.padding_idx = (
            int(place_V[pad])
            if pad is not None and bool((self.used == pad).any())
            else None
        )

    @property
    def whole(self) -> nn.Embedding:
        return self._whole[0]

    def forward(self, ids_BL: Tensor) -> Tensor:
        if not self.training:
            self.write_back()
            whole: Tensor = self.whole(ids_BL)
            return whole
        return embedding(self.place[ids_BL], self.weight, self.padding_idx)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "_InUse":
        """Apply `.to(device)` to the whole table too."""
        super()._apply(fn, recurse)
        self.whole._apply(fn)
        return self

    @torch.no_grad()
    def write_back(self) -> None:
        self.whole.weight[self.used] = self.weight


@contextmanager
def only_tokens_in_use(student: PreTrainedModel, rows: Dataset) -> Iterator[None]:
    """Train only the embedding rows of tokens in `rows` in this context; afterwards the
    student has its full table.

    Does nothing if most tokens occur, if the table is frozen, or if it is shared with
    an output layer, whose softmax gives every row a gradient.
    """
    whole = student.get_input_embeddings()
    if (
        isinstance(whole, nn.Embedding)
        and whole.weight.requires_grad
        and student.get_output_embeddings() is None
    ):
        used = np.flatnonzero(count_tokens(rows, whole.num_embeddings))
        if len(used) <= WORTH_IT * whole.num_embeddings:
            in_use = _InUse(whole, used)
            student.set_input_embeddings(in_use)
            try:
                yield
            finally:
                in_use.write_back()
                student.set_input_embeddings(whole)
            return
    yield


@contextmanager
def whole_vocabulary(student: PreTrainedModel) -> Iterator[None]:
    """Give a student under `only_tokens_in_use` its full table in this context."""
    in_use = student.get_input_embeddings()
    if not isinstance(in_use, _InUse):
        yield
        return
    in_use.write_back()
    student.set_input_embeddings(in_use.whole)
    try:
        yield
    finally:
        student.set_input_embeddings(in_use)
