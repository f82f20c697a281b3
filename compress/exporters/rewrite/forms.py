"""Rewrite the graph of an encoder so that it runs faster and computes the same:
`rewrite_graph(model, Form())`.

    graph       the index of a graph, and its matrix products with constant weights
    attention   attention, found by its structure, as one node during the rewriting
    rotary      attention with rotary positions; gated feed-forwards
    layout      tokens on the first axis; only the tokens that are used; scale and mask
                folded into the weights; merged products

The result is plain ONNX, so every quantiser and runtime reads it; measured in
docs/export-speed.md."""

from dataclasses import dataclass

import onnx
from onnx import ModelProto

from compress.exporters.rewrite import rotary
from compress.exporters.rewrite.attention import collapse, write_out
from compress.exporters.rewrite.graph import Graph
from compress.exporters.rewrite.layout import (
    fold_scales,
    mask_keys,
    mask_scores,
    merge,
    one_token,
    tokens_first,
)
from compress.exporters.session import metadata, opset_of

FORM_KEY = "compress.graph"
"""The metadata property in which a rewritten file stores its form."""


@dataclass(frozen=True)
class Form:
    """One way of writing the same graph.

    one_token     only the first token is computed where no other is used
    tokens_first  tokens on the first axis, rows on the second: fewer copies in
                  onnxruntime, slower in OpenVINO
    merged        queries, keys and values by one product where they read the same
                  tensor
    masked_keys   the mask is added to the keys, not to the scores: fewer additions, but
                  a range of the keys that no fixed scale can represent
    """

    one_token: bool = True
    tokens_first: bool = True
    merged: bool = False
    masked_keys: bool = True

    def __str__(self) -> str:
        parts = (
            "one token at the end" if self.one_token else "",
            "tokens first" if self.tokens_first else "rows first",
            "merged queries, keys, values" if self.merged else "",
            "" if self.masked_keys else "mask on the scores",
        )
        return ", ".join(part for part in parts if part)


PLAIN = Form()

SHIPPED_FORM = Form(tokens_first=False)
"""The form that `to_onnx` writes: less work for any runtime. `tune` also tries tokens
first, which is faster in onnxruntime on x86 and slower in OpenVINO."""

OLDEST = 13
"""The first opset in which Squeeze and Unsqueeze read their axes as a tensor."""


@dataclass(frozen=True)
class Rewritten:
    """A rewritten model, and the number of

    attentions  of a known form, among all softmaxes
    softmaxes   in the graph
    rows        nodes that compute one token instead of all
    turned      attentions with tokens first
    merged      products that were merged
    """

    model: ModelProto
    attentions: int
    softmaxes: int
    rows: int
    turned: int
    merged: int


def rewrite_graph(model: ModelProto, form: Form = PLAIN) -> Rewritten:
    """Rewrite a float32 model as it was traced (`to_onnx(form=None)`) in another form;
    `model` is not changed.

    Where attention is recognised, by its structure, the scale is multiplied into the
    weights of the queries and, unless the form or rotary positions (ModernBERT) prevent
    it, the mask is added to the keys. Other attention is not changed. Weights that
    layers share stay shared. The results are the model's, up to float32 rounding. A
    model of an opset below OLDEST is returned unchanged, without a FORM_KEY.
    """
    graph = Graph.copy_of(model)
    softmaxes = len(graph.of_type("Softmax"))
    if opset_of(model) < OLDEST:
        return Rewritten(model, 0, softmaxes, 0, 0, 0)
    cores = [*collapse(graph), *rotary.collapse(graph)]
    rows = one_token(graph) if form.one_token else 0
    turned = tokens_first(graph) if form.tokens_first else 0
    fold_scales(graph, cores)
    (mask_keys if form.masked_keys else mask_scores)(graph, cores)
    merged = merge(graph) if form.merged else 0
    write_out(graph)
    rotary.write_out(graph)
    made = graph.model(model)
    onnx.helper.set_model_props(made, {**metadata(made), FORM_KEY: str(form)})
    return Rewritten(made, len(cores), softmaxes, rows, turned, merged)
