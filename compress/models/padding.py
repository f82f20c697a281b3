"""Choose how the rows of a batch are padded, so that a row in a batch has the same
result as alone.

Rows are padded on the right, whatever the tokenizer says: a mask hides the padding,
positions count from the first token, and a causal model does not look ahead. Two kinds
of classifiers do not read the mask. XLNet, XLM and FlauBERT may summarise a text by its
last position, padding or not: their rows are padded on the left, with position ids.
Decoders such as GPT-2 read the last token that is not the padding token of their
config, so it must also be the tokenizer's. MobileBERT embeds a token with its
neighbours, and no mask hides the padding after the last token: the padding embedding is
set to zero, as if the row ended there.

Shapes: B batch, L tokens, D hidden.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import ExportError, TeacherError


def reads_last_place(model: nn.Module) -> bool:
    """Check whether a model answers at the last position of a row, padding or not."""
    # no model passes an index, so it is the last position
    return _summary_of(model) in ("last", "cls_index")


def pads_left(model: nn.Module) -> bool:
    """Check whether the batches of a model must be padded on the left. Raises
    TeacherError for a model that averages over the padding too."""
    if _summary_of(model) == "mean":
        raise TeacherError(
            f"{type(model).__name__}: summary_type in its config.json is mean, an "
            "average over a batch's padding too; expected first or last, whose rows "
            "can be trained in batches"
        )
    return reads_last_place(model)


def _summary_of(model: nn.Module) -> str:
    return getattr(getattr(model, "sequence_summary", None), "summary_type", "first")


def reads_last_token(model_type: str) -> bool:
    """Check whether a family's classifiers read their answer off the last token:
    decoders, and XLNet."""
    from transformers.models.auto import modeling_auto as auto

    return (
        model_type
        in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
        - auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys()
    )


def refuse_last_token(name: str, family: str) -> None:
    """Raise ExportError for a model of such a family (see `reads_last_token`), whose
    answer would move in a file of a fixed length."""
    if reads_last_token(family):
        raise ExportError(
            f"{name}: {family} reads its answer off the last token, which padding to a "
            "fixed length moves; --for onnx and --for ort take every family"
        )


def align_padding(tokenizer: Any, config: Any) -> None:
    """Give a tokenizer a padding token if it has none, and a decoder that reads it the
    same one as its tokenizer.

    The model's own padding token takes precedence, since it decides which token is
    read. A decoder without one reads the last token: it gets a token that no text ends
    with. Both are changed in place.
    """
    reads_padding = reads_last_token(config.model_type)
    own = getattr(config, "pad_token_id", None)
    own = own if own in tokenizer.get_vocab().values() else None
    if own is not None and (reads_padding or tokenizer.pad_token is None):
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(own)
    elif own is None and reads_padding:
        tokenizer.pad_token = next(_inner_tokens(tokenizer), tokenizer.pad_token)
    elif tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if own is None:
        config.pad_token_id = tokenizer.pad_token_id


def _inner_tokens(tokenizer: Any) -> Iterator[str]:
    """Yield the special tokens that a text does not end with, the padding token
    first."""
    end = tokenizer("a")["input_ids"][-1:]
    for token in (
        tokenizer.pad_token,
        tokenizer.eos_token,
        tokenizer.unk_token,
        tokenizer.bos_token,
    ):
        if token is not None and tokenizer.convert_tokens_to_ids(token) not in end:
            yield token


def hide_padding(model: Any) -> None:
    """Set the embedding of the padding token to zero, in place, in models that embed a
    token with its neighbours."""
    config = model.config
    if getattr(config, "trigram_input", False) and config.pad_token_id is not None:
        with torch.no_grad():
            model.get_input_embeddings().weight[config.pad_token_id] = 0


def first_token(states_BLD: Tensor, mask_BL: Tensor | None) -> Tensor:
    """Return the states of each row's first token that is not padding, (B, D)."""
    if mask_BL is None or torch.jit.is_tracing():  # type: ignore[attr-defined]  # exported files read rows that are padded on the right
        return states_BLD[:, 0]
    first_B11 = mask_BL.long().argmax(1)[:, None, None]
    return states_BLD.take_along_dim(first_B11, 1)[:, 0]
