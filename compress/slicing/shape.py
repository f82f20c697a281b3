"""Read the sizes of a transformer that losses, students and slices depend on, from its config without its weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NAMES = {
    "layers": ("num_hidden_layers", "n_layers", "n_layer", "num_layers"),
    "decoder_layers": ("num_decoder_layers", "decoder_layers"),
    "hidden": ("hidden_size", "dim", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_heads", "n_head", "num_heads"),
    "ffn": ("intermediate_size", "hidden_dim", "n_inner", "d_ff", "d_inner"),
    "embedding": ("embedding_size",),
    "head_size": ("attention_head_size", "head_dim", "d_kv"),
}

WITHOUT_LAYERS = ("static-embedding",)
"""Families that look tokens up and have no layers."""


@dataclass(frozen=True)
class Shape:
    """layers N, hidden D, heads H, head_size K, ffn, embedding E (= D where not factorised), vocabulary V, classes.

    decoder_layers is None but for an encoder-decoder, whose encoder has `layers`.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    head_size: int
    ffn: int
    embedding: int
    vocabulary: int
    classes: int
    decoder_layers: int | None = None

    def stack(self, signal: str) -> int:
        """Count the layers of a signal: `layers` of an encoder-decoder are the decoder's."""
        return self.layers if self.decoder_layers is None or signal == "encoder_layers" else self.decoder_layers

    @staticmethod
    def from_config(config: Any) -> "Shape":
        """Read a transformers config; every family spells these names its own way."""
        if config.model_type in WITHOUT_LAYERS:
            hidden = _find(config, "hidden")
            sizes: dict[str, Any] = {
                "layers": 0,
                "hidden": hidden,
                "heads": 1,
                "head_size": hidden,
                "ffn": 0,
                "embedding": hidden,
            }
            return Shape(config.model_type, vocabulary=config.vocab_size, classes=config.num_labels, **sizes)
        hidden, heads = _find(config, "hidden"), _find(config, "heads")
        return Shape(
            family=config.model_type,
            layers=_find(config, "layers"),
            hidden=hidden,
            heads=heads,
            head_size=_find(config, "head_size", getattr(config, "true_hidden_size", hidden) // heads),
            ffn=_find(config, "ffn", 4 * hidden),
            embedding=_find(config, "embedding", hidden),
            vocabulary=config.vocab_size,
            classes=config.num_labels,
            decoder_layers=_find(config, "decoder_layers") if config.is_encoder_decoder else None,
        )


def positions(model: Any) -> int | None:
    """Return the most tokens that a model has positions for; None where positions are relative, or computed."""
    for name, module in model.named_modules():
        if name.endswith(("position_embeddings", "wpe")) and hasattr(module, "num_embeddings"):
            # RoBERTa and its kin count positions from behind the padding index
            return int(module.num_embeddings) - (0 if module.padding_idx is None else int(module.padding_idx) + 1)
    return None


def setting_name(config: Any, size: str) -> str:
    """Name this family's config setting for `size`, such as DistilBERT's `dim`. Raises KeyError where it has none."""
    for name in _NAMES[size]:
        if getattr(config, name, None) is not None:
            return name
    raise KeyError(size)


def _find(config: Any, size: str, default: int | None = None) -> int:
    try:
        return int(getattr(config, setting_name(config, size)))
    except KeyError:
        if default is None:
            raise
        return default


def sizes_of(config: Mapping[str, Any]) -> dict[str, int]:
    """Read the sizes that a config.json names, by our names for them; what it leaves to its family is left out."""
    names = {**_NAMES, "vocabulary": ("vocab_size",), "positions": ("max_position_embeddings", "n_positions")}
    found = ((size, next((config[name] for name in own if config.get(name)), None)) for size, own in names.items())
    return {size: value for size, value in found if isinstance(value, int)}
