"""The axes along which the weights of each family lie, for pruning, supernets and the
initialisation of students.

An axis is a set of units that belong together wherever they appear:

    hidden      the residual stream; embedding: the width of a factorised embedding;
                vocabulary: the tokens
    query       rows of queries and keys, H heads of K rows each; value: rows of values,
                columns of the output product
    heads       weights of a head as a whole: T5's relative biases. In the families of
                GROUPED a head of keys and values together with the heads of queries
                that read it, with all its rows: rotary positions pair them
    ffn         neurons of a feed-forward block
    bottleneck, shared    MobileBERT's narrow stream within a block, and the input of
                          its queries and keys

`.` is a dimension that is never cut (classes, positions); a+b are axes that lie one
after another in one matrix, as GPT-2's queries, keys and values, or the halves of
ModernBERT's gated feed-forward block. A bias lies along its weight's output.
"""

import re
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

_LAYER = r"(?:.*\.)?layer\.(?P<layer>\d+)"
_ATTENTION = rf"{_LAYER}\.attention"
_BERT: tuple[tuple[str, str, str], ...] = (
    # BERT, RoBERTa, ELECTRA, ERNIE, XLM-R; DeBERTa; DistilBERT
    (r"(?:.*\.)?embeddings\.word_embeddings", "words", "vocabulary embedding"),
    (r"(?:.*\.)?embeddings\.position_embeddings", "positions", ". embedding"),
    (r"(?:.*\.)?embeddings\.token_type_embeddings", "types", ". embedding"),
    (r"(?:.*\.)?embeddings\.task_type_embeddings", "tasks", ". embedding"),
    (r"(?:.*\.)?embeddings\.LayerNorm", "embedding_norm", "embedding"),
    (
        r"(?:.*\.)?embeddings_project|(?:.*\.)?embeddings\.embed_proj",
        "embedding_up",
        "hidden embedding",
    ),
    (r"(?:.*\.)?encoder\.rel_embeddings", "relative", ". hidden"),
    (r"(?:.*\.)?encoder\.LayerNorm", "relative_norm", "hidden"),
    (r"(?:.*\.)?encoder\.conv\.conv", "convolution", "hidden hidden ."),
    (r"(?:.*\.)?encoder\.conv\.LayerNorm", "convolution_norm", "hidden"),
    (rf"{_ATTENTION}\.(?:self\.query(?:_proj)?|q_lin)", "query", "query hidden"),
    (rf"{_ATTENTION}\.(?:self\.key(?:_proj)?|k_lin)", "key", "query hidden"),
    (rf"{_ATTENTION}\.(?:self\.value(?:_proj)?|v_lin)", "value", "value hidden"),
    (rf"{_ATTENTION}\.self\.pos_query_proj", "position_query", "query hidden"),
    (rf"{_ATTENTION}\.self\.pos_key_proj", "position_key", "query hidden"),
    (rf"{_ATTENTION}\.(?:output\.dense|out_lin)", "attention_out", "hidden value"),
    (
        rf"{_LAYER}\.(?:attention\.output\.LayerNorm|sa_layer_norm)",
        "attention_norm",
        "hidden",
    ),
    (rf"{_LAYER}\.(?:intermediate\.dense|ffn\.lin1)", "ffn_in", "ffn hidden"),
    (rf"{_LAYER}\.(?:output\.dense|ffn\.lin2)", "ffn_out", "hidden ffn"),
    (rf"{_LAYER}\.(?:output\.LayerNorm|output_layer_norm)", "ffn_norm", "hidden"),
    (r"(?:.*\.)?pooler\.dense", "pooler", "hidden hidden"),
    (r"pre_classifier|classifier\.dense", "pooler", "hidden hidden"),
    (r"classifier(?:\.out_proj)?|qa_outputs", "classifier", ". hidden"),
    (r"cls\.seq_relationship", "pair", ". hidden"),
    (r"discriminator_predictions\.dense", "detector", "hidden hidden"),
    (r"discriminator_predictions\.dense_prediction", "detector_out", ". hidden"),
    (
        r"cls\.predictions\.transform\.dense|lm_head\.dense|vocab_transform",
        "lm",
        "hidden hidden",
    ),
    (
        r"cls\.predictions\.transform\.LayerNorm|lm_head\.layer_norm|vocab_layer_norm",
        "lm_norm",
        "hidden",
    ),
    (r"generator_predictions\.dense", "lm", "embedding hidden"),
    (r"generator_predictions\.LayerNorm", "lm_norm", "embedding"),
    (
        r"cls\.predictions\.decoder|lm_head\.decoder|vocab_projector|generator_lm_head",
        "lm_out",
        "vocabulary embedding",
    ),
    (r"cls\.predictions|lm_head", "lm_bias", "vocabulary"),
)
_GROUP = r"(?:.*\.)?albert_layer_groups\.(?P<block>\d+\.albert_layers\.\d+)"
_ALBERT: tuple[tuple[str, str, str], ...] = (
    *(
        rule
        for rule in _BERT
        if rule[1] in ("words", "positions", "types", "embedding_norm", "classifier")
    ),
    (
        r"(?:.*\.)?encoder\.embedding_hidden_mapping_in",
        "embedding_up",
        "hidden embedding",
    ),
    (rf"{_GROUP}\.attention\.query", "query", "query hidden"),
    (rf"{_GROUP}\.attention\.key", "key", "query hidden"),
    (rf"{_GROUP}\.attention\.value", "value", "value hidden"),
    (rf"{_GROUP}\.attention\.dense", "attention_out", "hidden value"),
    (rf"{_GROUP}\.attention\.LayerNorm", "attention_norm", "hidden"),
    (rf"{_GROUP}\.ffn", "ffn_in", "ffn hidden"),
    (rf"{_GROUP}\.ffn_output", "ffn_out", "hidden ffn"),
    (rf"{_GROUP}\.full_layer_layer_norm", "ffn_norm", "hidden"),
    (r"(?:.*\.)?pooler", "pooler", "hidden hidden"),
    (r"sop_classifier\.classifier", "pair", ". hidden"),
    (r"predictions\.dense", "lm", "embedding hidden"),
    (r"predictions\.LayerNorm", "lm_norm", "embedding"),
    (r"predictions\.decoder", "lm_out", "vocabulary embedding"),
    (r"predictions", "lm_bias", "vocabulary"),
)
_MOBILE = r"(?:.*\.)?layer\.(?P<block>(?P<layer>\d+)(?:\.ffn\.\d+)?)"
_MOBILEBERT: tuple[tuple[str, str, str], ...] = (
    (r"(?:.*\.)?embeddings\.word_embeddings", "words", "vocabulary embedding"),
    (
        r"(?:.*\.)?embeddings\.embedding_transformation",
        "embedding_up",
        "hidden embedding+embedding+embedding",
    ),
    (r"(?:.*\.)?embeddings\.position_embeddings", "positions", ". hidden"),
    (r"(?:.*\.)?embeddings\.token_type_embeddings", "types", ". hidden"),
    (r"(?:.*\.)?embeddings\.LayerNorm", "embedding_norm", "hidden"),
    (rf"{_LAYER}\.bottleneck\.input\.dense", "narrow", "bottleneck hidden"),
    (rf"{_LAYER}\.bottleneck\.input\.LayerNorm", "narrow_norm", "bottleneck"),
    (rf"{_LAYER}\.bottleneck\.attention\.dense", "narrow_attention", "shared hidden"),
    (rf"{_LAYER}\.bottleneck\.attention\.LayerNorm", "narrow_attention_norm", "shared"),
    (rf"{_ATTENTION}\.self\.query", "query", "query shared"),
    (rf"{_ATTENTION}\.self\.key", "key", "query shared"),
    (rf"{_ATTENTION}\.self\.value", "value", "value hidden"),
    (rf"{_ATTENTION}\.output\.dense", "attention_out", "bottleneck value"),
    (rf"{_ATTENTION}\.output\.LayerNorm", "attention_norm", "bottleneck"),
    (rf"{_MOBILE}\.intermediate\.dense", "ffn_in", "ffn bottleneck"),
    (rf"{_MOBILE}\.output\.dense", "ffn_out", "bottleneck ffn"),
    (rf"{_MOBILE}\.output\.LayerNorm", "ffn_norm", "bottleneck"),
    (rf"{_LAYER}\.output\.bottleneck\.dense", "widen", "hidden bottleneck"),
    (rf"{_LAYER}\.output\.bottleneck\.LayerNorm", "widen_norm", "hidden"),
    (r"(?:.*\.)?pooler\.dense", "pooler", "hidden hidden"),
    (r"classifier|qa_outputs", "classifier", ". hidden"),
)
_BLOCK = r"(?:.*\.)?block\.(?P<layer>\d+)\.layer"
_T5: tuple[tuple[str, str, str], ...] = (
    (r"(?:.*\.)?(?:shared|encoder\.embed_tokens)", "words", "vocabulary hidden"),
    (
        r"(?:.*\.)?block\.0\.layer\.0\.SelfAttention\.relative_attention_bias",
        "relative",
        ". heads",
    ),
    (rf"{_BLOCK}\.0\.SelfAttention\.q", "query", "query hidden"),
    (rf"{_BLOCK}\.0\.SelfAttention\.k", "key", "query hidden"),
    (rf"{_BLOCK}\.0\.SelfAttention\.v", "value", "value hidden"),
    (rf"{_BLOCK}\.0\.SelfAttention\.o", "attention_out", "hidden value"),
    (rf"{_BLOCK}\.0\.layer_norm", "attention_norm", "hidden"),
    (rf"{_BLOCK}\.1\.DenseReluDense\.wi(?:_0|_1)?", "ffn_in", "ffn hidden"),
    (rf"{_BLOCK}\.1\.DenseReluDense\.wo", "ffn_out", "hidden ffn"),
    (rf"{_BLOCK}\.1\.layer_norm", "ffn_norm", "hidden"),
    (r"(?:.*\.)?encoder\.final_layer_norm", "final_norm", "hidden"),
    (r"classifier", "classifier", ". hidden"),
)
_H = r"(?:.*\.)?h\.(?P<layer>\d+)"
_GPT2: tuple[tuple[str, str, str], ...] = (
    (r"(?:.*\.)?wte|lm_head", "words", "vocabulary hidden"),
    (r"(?:.*\.)?wpe", "positions", ". hidden"),
    (rf"{_H}\.ln_1", "attention_norm", "hidden"),
    # a convolution: inputs first
    (rf"{_H}\.attn\.c_attn", "qkv", "hidden query+query+value"),
    (rf"{_H}\.attn\.c_proj", "attention_out", "value hidden"),
    (rf"{_H}\.ln_2", "ffn_norm", "hidden"),
    (rf"{_H}\.mlp\.c_fc", "ffn_in", "hidden ffn"),
    (rf"{_H}\.mlp\.c_proj", "ffn_out", "ffn hidden"),
    (r"(?:.*\.)?ln_f", "final_norm", "hidden"),
    (r"score|classifier|qa_outputs", "classifier", ". hidden"),
)
_MODERN = r"(?:.*\.)?layers\.(?P<layer>\d+)"
_MODERNBERT: tuple[tuple[str, str, str], ...] = (
    (r"(?:.*\.)?embeddings\.tok_embeddings", "words", "vocabulary hidden"),
    (r"(?:.*\.)?embeddings\.norm", "embedding_norm", "hidden"),
    (rf"{_MODERN}\.attn_norm", "attention_norm", "hidden"),  # the first layer has none
    (rf"{_MODERN}\.attn\.Wqkv", "qkv", "query+query+value hidden"),
    (rf"{_MODERN}\.attn\.Wo", "attention_out", "hidden value"),
    (rf"{_MODERN}\.mlp_norm", "ffn_norm", "hidden"),
    # what is activated, then its gates
    (rf"{_MODERN}\.mlp\.Wi", "ffn_in", "ffn+ffn hidden"),
    (rf"{_MODERN}\.mlp\.Wo", "ffn_out", "hidden ffn"),
    (r"(?:.*\.)?final_norm", "final_norm", "hidden"),
    # the same before a classifier and before the table
    (r"head\.dense", "lm", "hidden hidden"),
    (r"head\.norm", "lm_norm", "hidden"),
    (r"classifier", "classifier", ". hidden"),
    (r"decoder", "lm_out", "vocabulary hidden"),
)
GROUPED = ("llama", "mistral", "qwen2", "qwen3")
"""Families of Llama's shape: rotary positions, keys and values shared by groups of
heads, gated neurons, RMS norms."""
_LAYERS = r"(?:.*\.)?layers\.(?P<layer>\d+)"
_LLAMA: tuple[tuple[str, str, str], ...] = (
    (r"(?:.*\.)?embed_tokens|lm_head", "words", "vocabulary hidden"),
    (rf"{_LAYERS}\.input_layernorm", "attention_norm", "hidden"),
    (rf"{_LAYERS}\.self_attn\.q_proj", "query", "heads hidden"),
    (rf"{_LAYERS}\.self_attn\.k_proj", "key", "heads hidden"),
    (rf"{_LAYERS}\.self_attn\.v_proj", "value", "heads hidden"),
    (rf"{_LAYERS}\.self_attn\.[qk]_norm", "head_gain", "."),  # Qwen3: one for all heads
    (rf"{_LAYERS}\.self_attn\.o_proj", "attention_out", "hidden heads"),
    (rf"{_LAYERS}\.post_attention_layernorm", "ffn_norm", "hidden"),
    (rf"{_LAYERS}\.mlp\.(?:gate|up)_proj", "ffn_in", "ffn hidden"),
    (rf"{_LAYERS}\.mlp\.down_proj", "ffn_out", "hidden ffn"),
    (r"(?:.*\.)?norm", "final_norm", "hidden"),
    (r"score|classifier|qa_outputs", "classifier", ". hidden"),
)
SENTENCE: tuple[tuple[str, str, str], ...] = (
    (r"sentence_modules\.\d+_projection\.linear", "projection", ". hidden"),
    *(
        (
            rf"sentence_modules\.\d+_projection_of_{times}\.linear",
            "projection",
            f". {'+'.join(['hidden'] * times)}",
        )
        for times in range(2, 7)
    ),
    (r"sentence_modules\.\d+_\w+\.(?:linear|residual)", r"\g<0>", ". ."),
    (r"sentence_modules\.\d+_\w+\.norm", r"\g<0>", "."),
)
"""The modules of a sentence encoder of any family. The width of its vectors stays: only
the map that reads the pooled tokens, of one way of pooling or of several ones joined,
is cut. Every other module is a role of its own."""
_FAMILIES = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "bert",
                "roberta",
                "xlm-roberta",
                "distilbert",
                "electra",
                "ernie",
                "deberta-v2",
            ),
            _BERT,
        ),
        "albert": _ALBERT,
        "mobilebert": _MOBILEBERT,
        "t5": _T5,
        "gpt2": _GPT2,
        "modernbert": _MODERNBERT,
        **dict.fromkeys(GROUPED, _LLAMA),
    }
)
FAMILIES = tuple(_FAMILIES)
"""The families with a slice plan."""

ROTARY = frozenset({"modernbert"})
"""Families with rotary positions: they rotate row i of a head of K rows with row i + K
/ 2, at a speed set by i / K."""

FIRST_IS_OWN = frozenset({"modernbert"})
"""Families whose first layer differs from the others: it has no norm before its
attention."""

PER_BLOCK = frozenset({"query", "value", "heads", "ffn", "bottleneck", "shared"})
"""Axes along which every block has units of its own; along the others all blocks share
them."""


class Place(NamedTuple):
    """The role of a weight, the block and layer it is in, and the axes of each of its
    dimensions.

    block is "" outside the layers; layer is None there, and in families whose layers
    share weights (ALBERT). span is the position of the layer's number in the weight's
    name.
    """

    role: str
    block: str
    layer: int | None
    span: tuple[int, int]
    axes: tuple[tuple[str, ...], ...]


def place(family: str, name: str) -> Place | None:
    """Find the place of a weight, as
    `bert.encoder.layer.3.attention.self.query.weight`; None if no rule matches."""
    module, _, part = name.rpartition(".")
    for pattern, role, axes in _compile(family):
        match = pattern.fullmatch(module)
        if match is None:
            continue
        named = match.groupdict()
        layer = named.get("layer")
        span = match.span("layer") if layer is not None else (-1, -1)
        dims = tuple(tuple(each.split("+")) for each in axes.split())
        # along the outputs, which the convolutions in GPT-2's layers have last
        if part == "bias":
            dims = (dims[-1],) if family == "gpt2" and layer is not None else dims[:1]
        return Place(
            match.expand(role),
            named.get("block") or layer or "",
            None if layer is None else int(layer),
            span,
            dims,
        )
    return None


@cache
def _compile(family: str) -> tuple[tuple[re.Pattern[str], str, str], ...]:
    return tuple(
        (re.compile(pattern), role, axes)
        for pattern, role, axes in (*_FAMILIES[family], *SENTENCE)
    )


QUERIES: Mapping[str, int] = MappingProxyType(
    {"query": 0, "position_query": 0, "qkv": 0}
)
"""Roles with rows of queries, and the part of the dimension that holds them: queries
carry the scale of the scores."""
