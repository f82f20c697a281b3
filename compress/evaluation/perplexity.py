"""Measure the negative log-likelihood and the perplexity of a language model on
held-out text.

Shapes: B examples, L tokens, R predicted positions in row order, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compress.arrays import Doubles, Longs, spaced, whole_numbers
from compress.data.collate import Batching
from compress.data.constants import IGNORE_INDEX
from compress.errors import DataError
from compress.models.memory import input_device
from compress.models.signals import evaluating, has_lm_head, read
from compress.tensors import TensorDict, Tensors

if TYPE_CHECKING:
    from datasets import Dataset

Prepare = Callable[[TensorDict], TensorDict]
"""A batch -> the batch that the model reads, with its labels."""

SEED = 0
"""The seed of the masks, so that every model predicts the same positions."""

ONLY_LOGITS = frozenset({"logits"})


def logits_at(model: nn.Module, batch: Tensors, at_BL: Tensor) -> Tensor:
    """Compute the logits (R, V) at the positions that are True, in row order, and no
    others if the head allows it.

    A model that is not read through its own head, such as DeBERTa's mask decoder, has a
    method of this name.
    """
    decode = getattr(model, "logits_at", None)
    if decode is not None:
        decoded_RV: Tensor = decode(batch, at_BL)
        return decoded_RV
    selects = has_lm_head(model)
    logits = read(model, batch, ONLY_LOGITS, at_BL=at_BL if selects else None).logits
    assert logits is not None, "LOGITS requests them"
    return logits if selects else logits[at_BL]


def measure_perplexity(
    model: nn.Module,
    rows: "Dataset",
    collate: Batching,
    prepare: Prepare,
    *,
    batch: int = 32,
    bf16: bool = False,
    limit: int = 2000,
) -> dict[str, float]:
    """Return {"nll": mean -log p(label) in nats over the labelled positions,
    "perplexity": its exponential}.

    `model` is a language model (masked, causal or encoder-decoder), or a step whose
    `student` is one. `rows` are encoded, with a column `length`; `collate` makes a
    batch of them; `prepare` adds `labels` (-100: not predicted), as the stage's
    corruption does. At most `limit` rows count, evenly spaced. Masks drawn from torch's
    global generator are the same in every call with the same `rows`, `batch` and
    `limit`; the generator's state is restored. Runs in eval mode without gradients,
    with `bf16` under autocast. Raises DataError if no position is predicted.
    """
    lengths = whole_numbers(rows, "length")
    chosen = spaced(len(rows), limit)
    # little padding, and the widest batch first
    chosen = chosen[np.argsort(-lengths[chosen], kind="stable")]
    sums, counts = score_rows(
        model, rows, chosen, collate, prepare, batch=batch, bf16=bf16
    )
    nll = float(sums.sum() / counts.sum())
    return {"nll": nll, "perplexity": math.exp(nll) if nll < 700 else math.inf}


def score_rows(
    model: nn.Module,
    rows: "Dataset",
    chosen: Longs,
    collate: Batching,
    prepare: Prepare,
    *,
    batch: int = 32,
    bf16: bool = False,
) -> tuple[Doubles, Longs]:
    """Return the sum of -log p(label), in nats, of each chosen row, and its number of
    labelled positions.

    The arguments are those of `measure_perplexity`; rows are batched in the order of
    `chosen`. Raises DataError if no position is predicted.
    """
    language_model: nn.Module = getattr(model, "student", model)
    device = input_device(language_model)
    sums = np.zeros(len(chosen))
    counts = np.zeros(len(chosen), np.int64)
    devices = [device] if device.type == "cuda" else []
    with evaluating(language_model), torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(SEED)
        for start in range(0, len(chosen), batch):
            collated = collate(list(rows.select(chosen[start : start + batch])))
            inputs = prepare(
                {name: tensor.to(device) for name, tensor in collated.items()}
            )
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                predicted_BL = inputs["labels"] != IGNORE_INDEX
                labels_R = inputs["labels"][predicted_BL]
                if len(labels_R):
                    logits_RV = logits_at(language_model, inputs, predicted_BL)
                    losses_R = cross_entropy(
                        logits_RV.float(), labels_R, reduction="none"
                    )
                    rows_R = start + predicted_BL.nonzero()[:, 0].cpu().numpy()
                    np.add.at(sums, rows_R, losses_R.double().cpu().numpy())
            here = predicted_BL.sum(1).cpu().numpy()
            counts[start : start + len(here)] = here
    if not counts.any():
        raise DataError(
            "perplexity: the held-out rows have no position to predict; provide more "
            "or longer text"
        )
    return sums, counts
