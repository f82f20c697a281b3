"""Define the facts of a family: how its weights are cut, what its layers compute, and
what its code needs.

An axis is a set of units that belong together wherever they appear:

    hidden      the residual stream; embedding: the width of a factorised embedding;
                vocabulary: the tokens
    query       rows of queries and keys, H heads of K rows each; value: rows of values,
                columns of the output product
    heads       weights of a head as a whole: T5's relative biases. In a `grouped`
                family a head of keys and values together with the heads of queries that
                read it, with all its rows: rotary positions pair them
    ffn         neurons of a feed-forward block
    bottleneck, shared    MobileBERT's narrow stream within a block, and the input of
                          its queries and keys

`.` is a dimension that is never cut (classes, positions); a+b are axes that lie one
after another in one matrix, as GPT-2's queries, keys and values, or the halves of
ModernBERT's gated feed-forward block. A bias lies along its weight's output."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple

EMBEDDING_ROLES: Final = frozenset(
    {
        "words",
        "positions",
        "types",
        "tasks",
        "embedding_norm",
        "embedding_up",
        "relative",
        "relative_norm",
    }
)
"""The roles of weights that the first layer reads, or all layers share."""


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

    @property
    def depth(self) -> int | None:
        """Return 0 for the embeddings, n + 1 for layer n; None for a head, and for a
        layer without a number."""
        if self.layer is not None:
            return self.layer + 1
        return 0 if self.role in EMBEDDING_ROLES else None


SENTENCE_MODULES: Final[Mapping[str, str]] = {
    r"sentence_modules\.\d+_projection\.linear": "projection: . hidden",
    **{
        rf"sentence_modules\.\d+_projection_of_{times}\.linear": f"projection: . {'+'.join(['hidden'] * times)}"
        for times in range(2, 7)
    },
    r"sentence_modules\.\d+_\w+\.(?:linear|residual)": r"\g<0>: . .",
    r"sentence_modules\.\d+_\w+\.norm": r"\g<0>: .",
}
"""The modules of a sentence encoder of any family. The width of its vectors is never
cut: only the map that reads the pooled tokens, from one pooling or several joined ones,
is cut. Every other module has its own role."""


@dataclass(frozen=True)
class LayerWork:
    """A layer's work per token: multiply-adds with weights, features of attention,
    elementwise operations.

    context    multiply-adds of keys and values, for all tokens in every layer
    answer     multiply-adds of queries, output and bottlenecks, for the tokens that are
               read
    width      features of the queries, and of the values, over all heads
    mask       inputs of the feature that carries the mask in every head of the exported
               graph; 0 if there is none
    """

    context: int
    answer: int
    feed_forward: int
    heads: int
    width: int
    activated: int
    normed: int
    mask: int


@dataclass(frozen=True)
class Family:
    """Hold the facts of a family; the defaults are the facts of a family without a
    file.

    Weights
    rules                  a pattern of modules' names -> the role of their weight and
                           the axes of its dimensions, such as `ffn_in: ffn hidden`;
                           none: the family is not sliced
    inputs_first           matrices in layers have their inputs first: GPT-2's
                           convolutions
    own_first_layer        the first layer has no norm before its attention, unlike all
                           others, so it stays the first
    factorised             has a projection behind its embedding, also between equal
                           widths
    projects_if_different  has a projection behind its embedding only between different
                           widths

    Attention
    own_width              attention can have another width than the residual stream;
                           otherwise H K = D
    rotary                 row i of a head of K rows turns with row i + K / 2, at a
                           speed set by i / K, so that the size of heads only changes by
                           whole factors (in `grouped` families it stays)
    grouped                keys and values are shared by groups of heads; layers have
                           Llama's shape
    shared_heads           heads belong together over all layers: T5's biases are those
                           of one layer
    bottleneck             blocks work in a narrower stream, `true_hidden_size` wide
    disentangled           scores add products with relative positions, and the code
                           reads its mask without asking

    Students
    kin                    families of one kin have the same blocks under different
                           names: a student of one can be cut out of a teacher of
                           another. "": students only take whole layers of a teacher
    copied_by_name         weights of a student have the same names as its teacher's, so
                           they are copied by name, not by role
    bert_embedding         embeds as BERT does: the norm of the sum of words, positions
                           and types
    pair_labels            the head for pairs of segments has as many outputs as the
                           config has labels, not two
    undeclared             settings that its code reads although its config class does
                           not declare them
    sharing                how layers share weights by the family's own config, for a
                           message
    successor              the family of later models of this kind, for a message

    Texts
    first_row              the row of the first token's position, if the table does not
                           show it
    after_padding          ... counted from the padding token's id
    length_setting         the setting that limits positions, if their table is not a
                           module
    summary                the token at which a classifier reads a text, unless
                           `summary_type` says so
    segments_uncounted     reads token types without a `type_vocab_size` in its config
    shortest_text          the fewest tokens from which torch traces the same graph for
                           all lengths

    Computing
    own_class              a class of compress, which transformers alone, optimum and
                           transformers.js do not know
    layered                has layers; else it only looks up tokens
    float32_only           its code fails under bfloat16 autocast
    reads_values           its code reads values, so it does not run on the meta device
    gates                  units can be gated in training (`pruning.l0`)
    prepared_mask          takes the mask that is added to the scores; other families
                           take a mask (batch, tokens)
    looks_back             attention is causal, so that a prepared mask is causal too
    all_windowed           all layers attend within `sliding_window`, if it is set
    generates              how a language model is exported: "decoder",
                           "encoder-decoder"; "": it is not

    Work in the exported graph
    counted                counts of work match the graph, and a classifier's last layer
                           computes only the token that is read; other families are
                           counted as plain, complete layers of their shape
    masked_by_feature      in every head, queries and keys carry the mask as one more
                           feature
    gated_neurons          each neuron has a gate, with a separate matrix product
    always_pools           a head has a dense layer, whatever tokens it reads
    """

    name: str
    rules: Mapping[str, str] = field(default_factory=dict)
    inputs_first: bool = False
    own_first_layer: bool = False
    factorised: bool = False
    projects_if_different: bool = False
    own_width: bool = False
    rotary: bool = False
    grouped: bool = False
    shared_heads: bool = False
    bottleneck: bool = False
    disentangled: bool = False
    kin: str = ""
    copied_by_name: bool = False
    bert_embedding: bool = False
    pair_labels: bool = False
    undeclared: tuple[str, ...] = ()
    sharing: str = ""
    successor: str = ""
    first_row: int = 0
    after_padding: bool = False
    length_setting: str = ""
    summary: str = "first"
    segments_uncounted: bool = False
    shortest_text: int = 2
    own_class: bool = False
    layered: bool = True
    float32_only: bool = False
    reads_values: bool = False
    gates: bool = False
    prepared_mask: bool = False
    looks_back: bool = False
    all_windowed: bool = False
    generates: str = ""
    counted: bool = False
    masked_by_feature: bool = False
    gated_neurons: bool = False
    always_pools: bool = False

    @property
    def has_roles(self) -> bool:
        """Check whether weights in layers have the same roles as in other families of
        its kin."""
        return bool(self.kin) and not self.copied_by_name

    def is_cut_from(self, teacher: "Family") -> bool:
        """Check whether a student of this family can be cut out of a teacher of
        another."""
        return bool(self.kin) and self.kin == teacher.kin

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], str]]:
        return [
            (re.compile(pattern), rule)
            for pattern, rule in {**self.rules, **SENTENCE_MODULES}.items()
        ]

    def place(self, name: str) -> Place | None:
        """Find the place of a weight, such as
        `bert.encoder.layer.3.attention.self.query.weight`.

        None if no rule matches.
        """
        module, _, part = name.rpartition(".")
        for pattern, rule in self._patterns:
            match = pattern.fullmatch(module)
            if match is None:
                continue
            named = match.groupdict()
            layer = named.get("layer")
            span = match.span("layer") if layer is not None else (-1, -1)
            role, _, axes = rule.partition(": ")
            dims = tuple(tuple(each.split("+")) for each in axes.split())
            if part == "bias":  # along the outputs
                dims = (
                    dims[-1:] if self.inputs_first and layer is not None else dims[:1]
                )
            return Place(
                match.expand(role),
                named.get("block") or layer or "",
                None if layer is None else int(layer),
                span,
                dims,
            )
        return None

    def first_position(self, config: Any) -> int:
        """Return the row of the first token's position in a table: RoBERTa's follows
        the padding token's."""
        return self.first_row + (config.pad_token_id if self.after_padding else 0)

    def traced_distance(self, config: Any) -> int | None:
        """Return the number of tokens up to which a graph is right that was traced at
        fewer, or None if it is right at any length."""
        return None

    def without_kernels(self, config: Any) -> str:
        """Say what is wrong without CUDA, for a message; '' if everything can be
        computed."""
        return ""

    def embedding_work(self, config: Any, shape: Any) -> int:
        """Count the multiply-adds per token between the tables and the first layer;
        shape as of `slicing.shape`."""
        factorised = self.factorised or shape.embedding != shape.hidden
        return shape.embedding * shape.hidden if factorised else 0

    def layer_work(self, config: Any, shape: Any) -> LayerWork:
        """Count the work of one layer; shape as of `slicing.shape`."""
        width = shape.heads * shape.head_size
        keys = config.num_key_value_heads * shape.head_size if self.grouped else width
        products = 3 if self.gated_neurons else 2
        return LayerWork(
            context=2 * shape.hidden * keys,
            answer=2 * shape.hidden * width,
            feed_forward=products * shape.hidden * shape.ffn,
            heads=shape.heads,
            width=width,
            activated=shape.ffn,
            normed=2 * shape.hidden,
            mask=shape.hidden if self.masked_by_feature else 0,
        )
