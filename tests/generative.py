"""Tiny GPT-2, Llama and T5 with tokenizers over the words of tests/tiny.py."""

from typing import Any

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from compress.data.masking import Words

PIECES = [chr(code) for code in range(ord("a"), ord("z") + 1)] + list("0123456789.,!?:_")
GPT2_SPECIAL = ("<|endoftext|>",)
T5_SPECIAL = ("<pad>", "</s>", "<unk>", "<extra_id_3>", "<extra_id_2>", "<extra_id_1>", "<extra_id_0>")


def _characters(special: tuple[str, ...]) -> Any:
    """Byte-level BPE without merges: a token per character, `Ġ` for a space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {piece: index for index, piece in enumerate((*special, "Ġ", *PIECES))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def gpt2_tokenizer(*, pad: bool = True) -> PreTrainedTokenizerFast:
    """`<|endoftext|>` ends a document and, with `pad`, pads."""
    end = GPT2_SPECIAL[0]
    settings = {"pad_token": end} if pad else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=_characters(GPT2_SPECIAL), bos_token=end, eos_token=end, unk_token=end, **settings
    )


def t5_tokenizer() -> PreTrainedTokenizerFast:
    """Ends a text with </s>; the sentinels count down, as T5's do."""
    from tokenizers.processors import TemplateProcessing

    backend = _characters(T5_SPECIAL)
    backend.post_processor = TemplateProcessing(single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=list(T5_SPECIAL[3:]),
    )


def gpt2(*, layers: int = 2, hidden: int = 32, seed: int = 0, **config: Any) -> Any:
    """In eval mode, with wide weights: different texts get clearly different logits."""
    torch.manual_seed(seed)
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
    special = {"vocab_size": len(gpt2_tokenizer()), "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **special, **config})).eval()


def llama(*, layers: int = 2, hidden: int = 32, seed: int = 0, **config: Any) -> Any:
    """In eval mode, over GPT-2's tokenizer; two of its four heads share keys and values."""
    torch.manual_seed(seed)
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"intermediate_size": 2 * hidden, "max_position_embeddings": 64, "initializer_range": 0.2}
    special = {"vocab_size": len(gpt2_tokenizer()), "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **more, **special, **config})).eval()


def t5(*, layers: int = 2, hidden: int = 32, seed: int = 0, **config: Any) -> Any:
    """In eval mode."""
    torch.manual_seed(seed)
    sizes = {"num_layers": layers, "d_model": hidden, "d_kv": 8, "num_heads": 4, "d_ff": 2 * hidden}
    special = {"vocab_size": len(t5_tokenizer()), "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return T5ForConditionalGeneration(T5Config(**{**sizes, **special, **config})).eval()


def separated(model: Any) -> Any:
    """Give a model whose head is tied to its embedding a head of its own weights."""
    torch.manual_seed(1)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    return model


def words(tokenizer: PreTrainedTokenizerFast) -> Words:
    return Words.from_tokenizer(tokenizer)


def rows(*texts: str, left: bool = False) -> dict[str, Tensor]:
    """A batch of GPT-2's, padded on the right unless `left`."""
    tokenizer = gpt2_tokenizer()
    tokenizer.padding_side = "left" if left else "right"
    found = tokenizer(list(texts), padding=True, return_tensors="pt")
    return {name: found[name] for name in ("input_ids", "attention_mask")}
