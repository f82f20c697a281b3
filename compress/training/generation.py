"""Sample continuations of prompts, which on-policy distillation learns from.

Shapes: B examples, L tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

from compress.data.constants import IGNORE_INDEX
from compress.errors import CompressError
from compress.tensors import TensorDict, Tensors


@torch.no_grad()
def sample_continuations(
    model: PreTrainedModel,
    batch: Tensors,
    *,
    prompt: int,
    new_tokens: int,
    pad: int,
    temperature: float = 1.0,
    processors: Callable[[Tensor], Sequence[LogitsProcessor]] = lambda _: (),
) -> TensorDict:
    """Replace the text after the prompts of `batch` by text that `model` samples.

    A causal model continues the prompt of each row: the tokens up to its first label if
    the row begins with unlabelled tokens (an instruction), else its first `prompt` real
    tokens. Rows are returned padded on the right: input_ids, attention_mask and labels
    (B, L), where labels[t] is the token at t + 1 if the model sampled it, else -100.
    For an encoder-decoder, input_ids and attention_mask are unchanged, and labels and
    decoder_input_ids are added.

    At most `new_tokens` are sampled, up to and including the model's end token, from
    the whole vocabulary: the checkpoint's own rules of generation, such as a penalty
    for repetition, are not applied. `processors` makes logits processors for the
    attention mask of the prompts. Draws from torch's global generator. Raises
    CompressError if the model has too few positions.
    """
    own = model.generation_config
    known = None if own is None else own.eos_token_id
    ends = [
        end
        for end in ([known] if isinstance(known, int) else known or [])
        if end < model.config.vocab_size
    ]
    encoder_decoder = model.config.is_encoder_decoder
    inputs = (
        {name: batch[name] for name in ("input_ids", "attention_mask")}
        if encoder_decoder
        else prompts(batch, prompt, pad)
    )
    start = inputs["input_ids"].shape[1]
    room = getattr(model.config, "max_position_embeddings", None)
    if not encoder_decoder and room is not None and start + new_tokens > room:
        raise CompressError(
            f"{model.config.model_type}: a prompt of {start} tokens and {new_tokens} "
            f"new ones need more than the model's {room} positions; lower the step's "
            "`prompt` or `new_tokens`, or the stage's max_length"
        )
    # generate adds what the checkpoint's own settings say of anything left out
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new_tokens,
        pad_token_id=pad,
        eos_token_id=ends or None,
        decoder_start_token_id=getattr(model.config, "decoder_start_token_id", None),
    )
    generate: Any = model.generate
    try:
        tokens_BL = generate(
            **inputs,
            generation_config=model.generation_config,
            logits_processor=LogitsProcessorList(processors(inputs["attention_mask"])),
        )
    finally:
        model.generation_config = own
    if encoder_decoder:
        labels_BL = tokens_BL[:, 1:].where(
            until_end(tokens_BL[:, 1:], ends), IGNORE_INDEX
        )
        return inputs | {"labels": labels_BL, "decoder_input_ids": tokens_BL[:, :-1]}
    sampled_BL = until_end(tokens_BL[:, start:], ends)
    prompt_BL = inputs["attention_mask"]
    keep_BL = torch.cat([prompt_BL.bool(), sampled_BL], 1)
    new_BL = torch.cat([torch.zeros_like(prompt_BL), sampled_BL.long()], 1)
    ids_BL, mask_BL = pack(tokens_BL, keep_BL, pad, left=False)
    new_BL, _ = pack(new_BL, keep_BL, 0, left=False)
    labels_BL = torch.full_like(ids_BL, IGNORE_INDEX)
    labels_BL[:, :-1] = ids_BL[:, 1:].where(new_BL[:, 1:].bool(), IGNORE_INDEX)
    return {"input_ids": ids_BL, "attention_mask": mask_BL, "labels": labels_BL}


def prompts(batch: Tensors, prompt: int, pad: int) -> TensorDict:
    """Return input_ids and attention_mask of the prompts, padded on the left for
    generation."""
    real_BL = batch["attention_mask"].bool()
    position_BL = real_BL.long().cumsum(1) - 1
    length_B1 = torch.full_like(position_BL[:, :1], prompt)
    labels_BL = batch.get("labels")
    if labels_BL is not None:
        unlabelled_BL = (labels_BL == IGNORE_INDEX) | ~real_BL
        before_B1 = (unlabelled_BL.long().cumprod(1) * real_BL).sum(1, keepdim=True)
        length_B1 = length_B1.where(before_B1 == 0, before_B1 + 1)
    ids_BL, mask_BL = pack(
        batch["input_ids"], real_BL & (position_BL < length_B1), pad, left=True
    )
    return {"input_ids": ids_BL, "attention_mask": mask_BL}


def pack(
    tokens_BL: Tensor, keep_BL: Tensor, pad: int, *, left: bool
) -> tuple[Tensor, Tensor]:
    """Return (tokens, mask) of the tokens to keep, in order, padded on the left or on
    the right."""
    kept_BL = keep_BL.long()
    order_BL = kept_BL.argsort(dim=1, descending=not left, stable=True)
    longest = int(kept_BL.sum(1).max())
    cut = slice(kept_BL.shape[1] - longest, None) if left else slice(longest)
    mask_BL = kept_BL.gather(1, order_BL)[:, cut]
    return tokens_BL.gather(1, order_BL)[:, cut].where(mask_BL.bool(), pad), mask_BL


def until_end(tokens_BL: Tensor, ends: Sequence[int]) -> Tensor:
    """Mark the tokens up to and including the first end token of each row."""
    ended_BL = torch.isin(
        tokens_BL, torch.tensor(ends, dtype=tokens_BL.dtype, device=tokens_BL.device)
    )
    return (ended_BL.long().cumsum(1) - ended_BL.long()) == 0
