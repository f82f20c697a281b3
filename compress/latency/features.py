"""Count the terms of a shape's latency from its config.

The counts are those of the exported graph (`exporters.onnx.to_onnx`), not of the model.
In a classifier that reads the first token, the last layer computes keys and values of
all tokens but everything else of one; except in ModernBERT, every head carries the mask
as an extra feature. For EXACT families the counts match the exported graph, product by
product; other families count as plain layers of their shape, all of them complete. A
fit within one family absorbs proportional errors.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compress.kinds import Kind, find
from compress.records.latency import Setting
from compress.slicing.rules import GROUPED
from compress.slicing.shape import Shape

PLAIN = ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "ernie", "albert")
BOTTLENECKED = ("mobilebert", "ib-bert")
MODERN = ("modernbert",)
EXACT = (*PLAIN, *BOTTLENECKED, *MODERN, "static-embedding")
"""Families whose counts match the exported graph product by product."""

ACTIVATIONS = (
    "hidden_act",
    "activation",
    "activation_function",
    "dense_act_fn",
    "hidden_activation",
)
"""The families' names of the setting for the activation function of the feed-forward
network."""


@dataclass(frozen=True)
class Terms:
    """Amounts of work in one forward, by name; missing ones are 0.

    fixed                1 for every shape
    layers               layers computed, for the calls of operators
    projections          multiply-adds of queries, keys, values, outputs, bottlenecks
                         and embedding projections
    feed_forward         multiply-adds of feed-forward networks
    attention            multiply-adds of queries x keys and probabilities x values
    softmax              probabilities
    weights              numbers read from memory for the products
    activation NAME      inputs of this activation
    norm NAME            inputs of this norm and of the sums beside it
    """

    counts: Mapping[str, float]
    flops: float
    """FLOPs of the model in torch, a multiply-add being two, with a complete last
    layer."""

    @staticmethod
    def from_config(
        config: Any, setting: Setting, kind: Kind | None = "classification"
    ) -> "Terms":
        """Count for a transformers config at this setting. kind None: an encoder, which
        outputs all tokens."""
        if config.model_type == "static-embedding":
            return _static(config, setting)
        cut = _reads_one(kind) and config.model_type in (
            *PLAIN,
            *BOTTLENECKED,
            *MODERN,
        )
        cut = cut and getattr(config, "classifier_pooling", "cls") == "cls"
        return _count(config, _blocks(config), setting, kind, cut=cut)


@dataclass(frozen=True)
class _Block:
    """A layer's work per token: multiply-adds with weights, features of attention,
    elementwise operations.

    context    multiply-adds of keys and values, needed of all tokens in every layer
    answer     multiply-adds of queries, output and bottlenecks, needed of the tokens
               that are read
    width      features of the queries, and of the values, over all heads
    """

    context: int
    answer: int
    feed_forward: int
    heads: int
    width: int
    activated: int
    normed: int


def _blocks(config: Any) -> list[_Block]:
    """Describe each layer."""
    shape = Shape.from_config(config)
    if config.model_type in BOTTLENECKED:
        return [_bottleneck_block(config)] * shape.layers
    width, grouped = shape.heads * shape.head_size, config.model_type in GROUPED
    products = 3 if grouped or config.model_type in MODERN else 2  # with gates
    plain = _Block(
        context=2
        * shape.hidden
        * (config.num_key_value_heads * shape.head_size if grouped else width),
        answer=2 * shape.hidden * width,
        feed_forward=products * shape.hidden * shape.ffn,
        heads=shape.heads,
        width=width,
        activated=shape.ffn,
        normed=2 * shape.hidden,
    )
    return [plain] * shape.layers


def _bottleneck_block(config: Any) -> _Block:
    """Describe a layer of MobileBERT, which narrows to `inner` features, or of IB-BERT,
    which widens to them."""
    stream, inner, ffn = (
        config.hidden_size,
        config.true_hidden_size,
        config.intermediate_size,
    )
    if config.model_type == "ib-bert":
        return _Block(
            context=2 * stream * inner,
            answer=stream * inner + inner * inner + 2 * stream * inner,
            feed_forward=2 * inner * ffn,
            heads=config.num_attention_heads,
            width=inner,
            activated=ffn,
            normed=3 * inner + stream,
        )
    networks, bottleneck = config.num_feedforward_networks, config.use_bottleneck
    narrowed = stream * inner if bottleneck else 0
    shared = bottleneck and config.use_bottleneck_attention
    values = inner if shared or not bottleneck else stream
    return _Block(
        context=narrowed + inner * inner + values * inner,
        answer=2 * inner * inner + narrowed + (0 if shared else narrowed),
        feed_forward=2 * networks * inner * ffn,
        heads=config.num_attention_heads,
        width=inner,
        activated=networks * ffn,
        normed=(1 + networks) * inner
        + (stream + (1 if shared else 2) * inner if bottleneck else 0),
    )


def _count(
    config: Any,
    blocks: Sequence[_Block],
    setting: Setting,
    kind: Kind | None,
    *,
    cut: bool,
) -> Terms:
    rows, tokens = setting.batch, setting.batch * setting.seq
    embedded, head, heads = (
        _embedding(config),
        _head(config, kind),
        rows if _reads_one(kind) else tokens,
    )
    activation = next(
        (found for name in ACTIVATIONS if (found := getattr(config, name, None))),
        "none",
    )
    norm = getattr(config, "normalization_type", "layer_norm")
    # The mask is an extra feature of queries, or keys, in every head, computed from all
    # their inputs.
    reads = (
        config.true_hidden_size
        if config.model_type == "mobilebert"
        else Shape.from_config(config).hidden
    )
    mask = int(reads) if config.model_type in (*PLAIN, *BOTTLENECKED) else 0
    counts = defaultdict[str, float](float, fixed=1.0, layers=len(blocks))
    counts["projections"] = tokens * embedded + heads * head
    counts["weights"] = embedded + head
    flops = tokens * embedded + heads * head
    for number, block in enumerate(blocks, start=1):
        answers = rows if cut and number == len(blocks) else tokens
        weights = block.context + block.answer + block.feed_forward
        counts["projections"] += tokens * (
            block.context + mask * block.heads
        ) + answers * (block.answer + mask * block.heads)
        counts["feed_forward"] += answers * block.feed_forward
        counts["attention"] += (
            answers * setting.seq * (2 * block.width + (block.heads if mask else 0))
        )
        counts["softmax"] += answers * setting.seq * block.heads
        counts["weights"] += weights
        counts[f"activation {activation}"] += answers * block.activated
        counts[f"norm {norm}"] += answers * block.normed
        flops += tokens * (weights + 2 * setting.seq * block.width)
    return Terms({name: float(amount) for name, amount in counts.items()}, 2.0 * flops)


def _static(config: Any, setting: Setting) -> Terms:
    rows, hidden = setting.batch, config.hidden_size
    head = hidden * config.num_labels
    return Terms(
        {
            "fixed": 1.0,
            "lookup": rows * setting.seq * hidden,
            "projections": rows * head,
        },
        2.0 * rows * head,
    )


def _embedding(config: Any) -> int:
    """Count the multiply-adds per token between the tables and the first layer."""
    shape = Shape.from_config(config)
    if config.model_type in BOTTLENECKED:
        width = shape.embedding * (3 if config.trigram_input else 1)
        return (
            width * shape.hidden if config.trigram_input or width != shape.hidden else 0
        )
    factorised = shape.embedding != shape.hidden or config.model_type == "albert"
    return shape.embedding * shape.hidden if factorised else 0


def _reads_one(kind: Kind | None) -> bool:
    """Check whether the head reads only the first token, in PLAIN and BOTTLENECKED
    families, and in MODERN ones unless they pool by a mean."""
    if kind is None:
        return False
    task = find(kind)
    return not (task.tokenwise or task.vectors)


def _head(config: Any, kind: Kind | None) -> int:
    """Count the multiply-adds of one application of the head: of its pooler, if any,
    and its classifier."""
    # a linear map of one vector per text is negligible
    if kind is None or find(kind).vectors:
        return 0
    shape = Shape.from_config(config)
    pooled = _reads_one(kind) and getattr(config, "classifier_activation", True)
    pooled = pooled or config.model_type in MODERN  # whichever tokens it reads
    return shape.hidden * (shape.hidden * bool(pooled) + shape.classes)
