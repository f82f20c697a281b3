"""Small random models of families without a slice plan, for the generic engine."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageClassification, AutoModelForSequenceClassification

from tests import tiny

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_TEXT = {"max_position_embeddings": 64, "vocab_size": 45, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_IMAGES = ("vit", "beit", "dinov2", "vit_msn")
_DISENTANGLED = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16}
_OWN: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "big_bird": {"attention_type": "original_full", "sep_token_id": 3},
        "convbert": {"embedding_size": 32},
        "deberta": _DISENTANGLED,
        "esm": {"mask_token_id": 4},
        "longformer": {"attention_window": 8},
        "luke": {"entity_vocab_size": 10, "entity_emb_size": 8},
        "rembert": {"input_embedding_size": 16, "output_embedding_size": 16},
        "roformer": {"embedding_size": 32},
        "squeezebert": {"embedding_size": 32},
        "xmod": {"languages": ["en"], "default_language": "en"},
    }
)
WORKING = (
    *("beit", "camembert", "data2vec-text", "flaubert", "layoutlm", "megatron-bert", "rembert"),
    *("roberta-prelayernorm", "roformer", "vit", "vit_msn", "xlm-roberta-xl", "xmod", "yoso"),
)
REFUSED = (
    *("deberta", "fnet", "ibert", "squeezebert", "convbert", "longformer", "big_bird", "canine"),
    *("dinov2", "esm", "luke", "mpnet", "mra", "nystromformer"),
)


def model(family: str, *, head: Any = None, **changes: Any) -> Any:
    torch.manual_seed(0)
    if family in _IMAGES:
        head, own = AutoModelForImageClassification, {"image_size": 16, "patch_size": 8}
    else:
        own = {**_TEXT, **_OWN.get(family, {})}
    config = CONFIG_MAPPING[family](**{**_SIZES, **own, "num_labels": 3, "initializer_range": 0.2, **changes})
    return (head or AutoModelForSequenceClassification).from_config(config).eval()


def batch(family: str) -> dict[str, Tensor]:
    if family in _IMAGES:
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))}
    return tiny.batch((6, 6))
