"""A small random model of each family that has a slice plan, and every way each can be cut."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    GPT2Config,
    T5Config,
    T5ForTokenClassification,
)

from compress import families
from tests import tiny

FAMILIES = [family.name for family in families.known() if family.rules]
DISTINCT = ("bert", "electra", "deberta-v2", "albert", "mobilebert", "t5", "gpt2", "modernbert", "llama", "qwen3")
"""Families with rules, or an attention, of their own; the others have those of one of them, under other names."""
AXES: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "layers": {"layers": 2},
        "ffn": {"ffn": 0.5},
        "hidden": {"hidden": 0.75},
        "heads": {"heads": 2},
        "heads and hidden": {"heads": 3, "hidden": 24},
        "smaller heads": {"heads": 4, "hidden": 24},
        "embedding": {"embedding": 0.5},
        "bottleneck": {"heads": 2, "bottleneck": 0.5},
        "everything": {"layers": 2, "hidden": 24, "heads": 2, "ffn": 40},
    }
)
ROTARY: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {"smaller heads": {"heads": 4, "hidden": 16}, "everything": {"layers": 2, "hidden": 12, "heads": 3, "ffn": 40}}
)
"""Heads that turn by the tokens' places get smaller by whole factors."""
KINDS = ("full_attention", "full_attention", "sliding_attention")
FACTORISED = ("electra", "albert", "mobilebert")


def ways() -> list[tuple[str, str]]:
    """Every distinct family with every axis that it has, and the others along all axes at once."""
    return [
        (family, axis)
        for family in FAMILIES
        for axis in AXES
        if (family in DISTINCT or axis in ("everything", "smaller heads"))
        and (axis != "embedding" or family in FACTORISED)
        and (axis != "bottleneck" or family == "mobilebert")
        # MobileBERT's heads fill its bottleneck
        and (axis != "heads and hidden" or family not in ("mobilebert", *tiny.LIKE_LLAMA))
    ]


def axes(family: str) -> Mapping[str, Mapping[str, float]]:
    """The sizes of each axis for this family."""
    return {**AXES, **ROTARY} if family == "modernbert" else AXES


def model(family: str, *, layers: int = 3, seed: int = 0, head: Any = None, labels: int = 3) -> Any:
    """Random, in eval mode; biases and gains too, so that none of them could be left out unseen."""
    torch.manual_seed(seed)
    head = head or AutoModelForSequenceClassification
    if family == "t5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": layers, "num_heads": 4}
        built = T5ForTokenClassification(T5Config(vocab_size=45, num_labels=labels, initializer_factor=1.0, **sizes))
    elif family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 64}
        tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        built = head.from_config(
            GPT2Config(vocab_size=45, num_labels=labels, initializer_range=0.2, use_cache=False, **sizes, **tokens)
        )
    elif family in tiny.LIKE_LLAMA:
        own = {**tiny.LIKE_LLAMA[family], "use_cache": False}
        built = tiny.model(family, layers=layers, seed=seed, head=head, labels=labels, **own)
    else:
        # windows of two tokens to either side; the second and the third layer are of different kinds
        local = {"local_attention": 4, "layer_types": [*KINDS[:layers]]} if family == "modernbert" else {}
        built = tiny.model(family, layers=layers, seed=seed, head=head, labels=labels, **local)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return built.eval()


@torch.no_grad()
def logits(model: Any, batch: Mapping[str, Tensor] | None = None) -> Tensor:
    """Of real tokens only, where there is one answer per token."""
    batch = batch or tiny.batch()
    found: Tensor = model(**batch).logits
    return found[batch["attention_mask"].bool()] if found.dim() == 3 else found
