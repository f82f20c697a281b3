"""One name and one set of axes for the same weight in every family, so that weights can be carried between them.

Axes: hidden D, embedding E, heads (H heads of K rows each), ffn F; `None` is copied whole.
"""

import re
from dataclasses import dataclass

Axis = str | None

_RULES: tuple[tuple[str, str], ...] = (
    # BERT, RoBERTa, ELECTRA, ERNIE, XLM-R; DeBERTa; DistilBERT
    (r"(?:.*\.)?embeddings\.word_embeddings", "words"),
    (r"(?:.*\.)?embeddings\.position_embeddings", "positions"),
    (r"(?:.*\.)?embeddings\.token_type_embeddings", "types"),
    (r"(?:.*\.)?embeddings\.LayerNorm", "embedding_norm"),
    (r"(?:.*\.)?embeddings_project", "embedding_up"),
    (r"(?:.*\.)?encoder\.rel_embeddings", "relative"),
    (r"(?:.*\.)?encoder\.LayerNorm", "relative_norm"),
    (r"(?:.*\.)?layer\.(\d+)\.attention\.self\.(query|key|value)(?:_proj)?", r"\1.\2"),
    (r"(?:.*\.)?layer\.(\d+)\.attention\.(q|k|v)_lin", r"\1.\2"),
    (r"(?:.*\.)?layer\.(\d+)\.attention\.(?:output\.dense|out_lin)", r"\1.attention_out"),
    (r"(?:.*\.)?layer\.(\d+)\.(?:attention\.output\.LayerNorm|sa_layer_norm)", r"\1.attention_norm"),
    (r"(?:.*\.)?layer\.(\d+)\.(?:intermediate\.dense|ffn\.lin1)", r"\1.ffn_in"),
    (r"(?:.*\.)?layer\.(\d+)\.(?:output\.dense|ffn\.lin2)", r"\1.ffn_out"),
    (r"(?:.*\.)?layer\.(\d+)\.(?:output\.LayerNorm|output_layer_norm)", r"\1.ffn_norm"),
    (r"(?:.*\.)?pooler\.dense", "pooler"),
    (r"pre_classifier|classifier\.dense", "pooler"),
    (r"classifier(?:\.out_proj)?", "classifier"),
    (r"discriminator_predictions\.dense", "detector"),
    (r"discriminator_predictions\.dense_prediction", "detector_out"),
)
_SHORT = {"q": "query", "k": "key", "v": "value"}

_AXES: dict[str, tuple[Axis, ...]] = {
    "words": (None, "embedding"),
    "positions": (None, "embedding"),
    "types": (None, "embedding"),
    "embedding_norm": ("embedding",),
    "embedding_up": ("hidden", "embedding"),
    "relative": (None, "hidden"),
    "relative_norm": ("hidden",),
    "query": ("query_heads", "hidden"),
    "key": ("query_heads", "hidden"),
    "value": ("value_heads", "hidden"),
    "attention_out": ("hidden", "value_heads"),
    "attention_norm": ("hidden",),
    "ffn_in": ("ffn", "hidden"),
    "ffn_out": ("hidden", "ffn"),
    "ffn_norm": ("hidden",),
    "pooler": ("hidden", "hidden"),
    "classifier": (None, "hidden"),
    "detector": ("hidden", "hidden"),
    "detector_out": (None, "hidden"),
}
KNOWN = ("bert", "distilbert", "roberta", "xlm-roberta", "electra", "ernie", "deberta-v2")


@dataclass(frozen=True)
class Weight:
    """layer is None outside the encoder layers; part is `weight` or `bias`."""

    role: str
    layer: int | None
    part: str

    @property
    def axes(self) -> tuple[Axis, ...]:
        axes = _AXES[self.role]
        return axes if self.part == "weight" else axes[:1]


def weight_of(name: str) -> Weight | None:
    """`bert.encoder.layer.3.attention.self.query.weight` -> Weight("query", 3, "weight"); None when not known."""
    module, _, part = name.rpartition(".")
    for pattern, role in _RULES:
        match = re.fullmatch(pattern, module)
        if match:
            layer, _, short = match.expand(role).rpartition(".")
            return Weight(_SHORT.get(short, short), int(layer) if layer else None, part)
    return None
