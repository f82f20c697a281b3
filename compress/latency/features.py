"""Count the terms of a shape's latency from its config.

The counts are those of the exported graph (`exporters.onnx.to_onnx`), not of the model.
In a classifier that reads the first token, the last layer computes keys and values of
all tokens but everything else of one; except in ModernBERT, every head carries the mask
as an extra feature. For `counted` families the counts match the exported graph, product
by product; other families count as plain layers of their shape, all of them complete. A
fit within one family absorbs proportional errors.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress import families
from compress.kinds import Kind, find
from compress.records.latency import Setting
from compress.slicing.shape import Shape

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
        if not families.find(config.model_type).layered:
            return _static(config, setting)
        return _count(config, setting, kind)


def _count(config: Any, setting: Setting, kind: Kind | None) -> Terms:
    family = families.find(config.model_type)
    shape = Shape.from_config(config)
    rows = setting.batch
    tokens = rows * setting.seq
    embedded = family.embedding_work(config, shape)
    head = _head(config, kind)
    heads = rows if _reads_one(kind) else tokens
    activation = next(
        (found for name in ACTIVATIONS if (found := getattr(config, name, None))),
        "none",
    )
    norm = getattr(config, "normalization_type", "layer_norm")
    cut = (
        _reads_one(kind)
        and family.counted
        and getattr(config, "classifier_pooling", "cls") == "cls"
    )
    layer = family.layer_work(config, shape)
    # a feature of queries, or keys, in every head, computed from all their inputs
    mask = layer.mask * layer.heads
    weights = layer.context + layer.answer + layer.feed_forward
    counts = defaultdict[str, float](float, fixed=1.0, layers=shape.layers)
    counts["projections"] = tokens * embedded + heads * head
    counts["weights"] = embedded + head
    flops = tokens * embedded + heads * head
    for number in range(1, shape.layers + 1):
        answers = rows if cut and number == shape.layers else tokens
        counts["projections"] += tokens * (layer.context + mask) + answers * (
            layer.answer + mask
        )
        counts["feed_forward"] += answers * layer.feed_forward
        counts["attention"] += (
            answers * setting.seq * (2 * layer.width + (layer.heads if mask else 0))
        )
        counts["softmax"] += answers * setting.seq * layer.heads
        counts["weights"] += weights
        counts[f"activation {activation}"] += answers * layer.activated
        counts[f"norm {norm}"] += answers * layer.normed
        flops += tokens * (weights + 2 * setting.seq * layer.width)
    return Terms({name: float(amount) for name, amount in counts.items()}, 2.0 * flops)


def _static(config: Any, setting: Setting) -> Terms:
    rows = setting.batch
    hidden = config.hidden_size
    head = hidden * config.num_labels
    return Terms(
        {
            "fixed": 1.0,
            "lookup": rows * setting.seq * hidden,
            "projections": rows * head,
        },
        2.0 * rows * head,
    )


def _reads_one(kind: Kind | None) -> bool:
    """Check whether the head reads only the first token, unless it pools by a mean."""
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
    pooled = pooled or families.find(config.model_type).always_pools
    return shape.hidden * (shape.hidden * bool(pooled) + shape.classes)
