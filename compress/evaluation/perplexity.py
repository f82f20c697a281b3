"""Measure the negative log-likelihood and perplexity of a language model on text that it has not seen.

Shapes: B examples, L tokens, R predicted positions in row order, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compress.data.constants import IGNORE_INDEX
from compress.errors import DataError
from compress.models.signals import evaluating, has_lm_head, read

if TYPE_CHECKING:
    from datasets import Dataset

SEED = 0
"""The seed of the masks, so that every model predicts the same positions."""

LOGITS = frozenset({"logits"})


def logits_at(model: nn.Module, batch: Mapping[str, Tensor], at_BL: Tensor) -> Tensor:
    """Compute the logits (R, V) at the true positions, in row order; a head that can computes no others."""
    only = has_lm_head(model)
    logits = read(model, batch, LOGITS, at_BL=at_BL if only else None).logits
    assert logits is not None, "they are asked for"
    return logits if only else logits[at_BL]


def measure_perplexity(
    model: nn.Module,
    rows: "Dataset",
    collate: Callable[[Sequence[Mapping[str, Any]]], dict[str, Tensor]],
    prepare: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    *,
    batch: int = 32,
    bf16: bool = False,
    limit: int = 2000,
) -> dict[str, float]:
    """Return {"nll": mean -log p(label) in nats over the labelled positions, "perplexity": its exponential}.

    `model` is a language model (masked, causal, encoder-decoder), or a step with one as `student`. `rows` are encoded,
    with a column `length`; `collate` makes a batch of them; `prepare` adds `labels` (-100: not predicted), as the
    corruption of the stage does. At most `limit` rows count, evenly spaced. Masks drawn from torch's global generator
    are the same in every call with the same `rows`, `batch` and `limit`; the generator is left as it was. Runs in eval
    mode without gradients, bf16: under autocast. Raises DataError where there is nothing to predict.
    """
    asked: nn.Module = getattr(model, "student", model)
    device = next(asked.parameters()).device
    lengths = np.asarray(rows["length"][:])
    chosen = np.unique(np.linspace(0, max(len(rows) - 1, 0), min(limit, len(rows))).astype(np.int64))
    chosen = chosen[np.argsort(-lengths[chosen], kind="stable")]  # little padding, and the widest batch first
    total, count = 0.0, 0
    devices = [device] if device.type == "cuda" else []
    with evaluating(asked), torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(SEED)
        for start in range(0, len(chosen), batch):
            taken = rows.select(chosen[start : start + batch])
            ready = prepare({name: each.to(device) for name, each in collate(list(taken)).items()})
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                predicted_BL = ready["labels"] != IGNORE_INDEX
                labels_R = ready["labels"][predicted_BL]
                if len(labels_R):
                    logits_RV = logits_at(asked, ready, predicted_BL)
                    total += cross_entropy(logits_RV.float(), labels_R, reduction="sum").item()
            count += len(labels_R)
    if not count:
        raise DataError("perplexity: the held-out rows have no position to predict; give more, or longer, text")
    nll = total / count
    return {"nll": nll, "perplexity": math.exp(nll) if nll < 700 else math.inf}
