"""Rewrite the graph of a static embedding model for batches, so that each row of a
batch gets the same answer as alone, bit by bit.

Devices compute each row alone, and every score was measured that way. Two operators
make the answer of a row depend on the rest of the batch; both are rewritten:

    ReduceSum over tokens    onnxruntime adds up the tokens of a single row one after
                             another, but tokens of several rows in another order. With
                             tokens as the first axis it adds the tokens of each row in
                             their order.
    DynamicQuantizeLinear    one scale for all rows becomes a scale for each. The
                             products stay integers.

Padding changes nothing: a lookup times a mask of 0 adds 0.
"""

from collections.abc import Collection
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from compress.exporters.rewrite.graph import (
    Graph,
    MismatchError,
    Wiring,
    attribute,
    require,
)
from compress.exporters.session import input_names, opset_of


def batch_rows(model: ModelProto) -> ModelProto | None:
    """Return the model for batches; None for a model that does more than look up
    tokens, add up their vectors, and compute the answer from the sum."""
    graph = Graph.copy_of(model)
    try:
        require(opset_of(model) < 18)  # later ones reduce by other inputs
        _put_tokens_first(graph, input_names(model))
        for node in graph.of_type("DynamicQuantizeLinear"):
            _quantise_rows(graph, node)
    except MismatchError:
        return None
    return graph.model(model)


def _put_tokens_first(graph: Graph, inputs: Collection[str]) -> None:
    """Turn inputs (B, L) into (L, B), and sum over the first axis. Raises MismatchError
    for a graph that does more with its tokens."""
    tokenwise = ("Add", "Cast", "DequantizeLinear", "Gather", "Mul", "Reshape")
    nodes = list(graph.nodes)
    turned = {
        name: graph.add("Transpose", [name], f"{name}/tokens_first", perm=[1, 0])
        for name in inputs
    }
    tokens = set(turned.values())
    for node in nodes:
        node.input[:] = [turned.get(name, name) for name in node.input]
        if tokens.isdisjoint(node.input):
            continue
        if node.op_type == "ReduceSum":
            _sum_first_axis(graph, node)
        else:
            require(node.op_type in (*tokenwise, "Unsqueeze"))
            tokens.update(node.output)


def _sum_first_axis(graph: Graph, node: NodeProto) -> None:
    """Sum (L, B, ...) over its tokens instead of (B, L, ...)."""
    require(np.array_equal(Wiring(graph).value(node.input[1]), [1]))
    inputs = [node.input[0], graph.integers(0)]
    name = node.name
    if not attribute(node, "keepdims", 1):
        graph.replace(node, "ReduceSum", inputs, name, keepdims=0)
        return
    flat = graph.add("ReduceSum", inputs, f"{name}/tokens", keepdims=0)
    graph.replace(node, "Unsqueeze", [flat, graph.integers(1)], name)


def _quantise_rows(graph: Graph, node: NodeProto) -> None:
    """Quantise each row of (B, D) by its own range, as DynamicQuantizeLinear does for
    all rows together. Raises MismatchError unless only products of integers read the
    codes."""
    values = node.input[0]
    codes, scale, zero = node.output
    name = node.name
    wiring = Wiring(graph)
    products = wiring.readers[codes]
    for product in products:
        require(product.op_type == "MatMulInteger" and product.input[2] == zero)
    require(len(wiring.readers[zero]) == len(products))
    nothing = graph.constant(np.array(0, np.float32), f"{name}/zero")
    one = graph.constant(np.array(1, np.float32), f"{name}/one")
    most = graph.constant(np.array(255, np.float32), f"{name}/most")

    def add(operator: str, *inputs: str, **attributes: Any) -> str:
        return graph.add(operator, inputs, f"{name}/{operator}", **attributes)

    graph.remove(node)
    high = add("Max", add("ReduceMax", values, axes=[-1]), nothing)
    low = add("Min", add("ReduceMin", values, axes=[-1]), nothing)
    span = add("Sub", high, low)
    step = add("Div", span, most)
    flat = add("Equal", span, nothing)
    scales = graph.add("Where", [flat, one, step], f"{name}/scale", output=scale)
    below = add("Neg", add("Div", low, scales))
    zeros = add("Round", add("Clip", below, nothing, most))
    steps = add("Round", add("Div", values, scales))
    bytes_ = add("Clip", add("Add", steps, zeros), nothing, most)
    graph.add("Cast", [bytes_], f"{name}/codes", output=codes, to=TensorProto.UINT8)
    whole = add("Cast", zeros, to=TensorProto.INT32)
    for product in products:
        _subtract_zeros(graph, product, whole)


def _subtract_zeros(graph: Graph, product: NodeProto, zeros: str) -> None:
    """Compute a product of codes whose rows have their own zero points: the product of
    the codes, minus the zero point times the sum of each column."""
    codes, weights = product.input[:2]
    wiring = Wiring(graph)
    matrix = wiring.value(weights).astype(np.int32)
    if len(product.input) > 3:
        matrix -= wiring.value(product.input[3])
    sums = np.asarray(matrix.sum(axis=0), np.int32)
    columns = graph.constant(sums, f"{weights}.sums")
    name = product.name
    without = graph.add(
        "MatMulInteger", [codes, weights, "", *product.input[3:]], f"{name}/codes"
    )
    surplus = graph.add("Mul", [zeros, columns], f"{name}/surplus")
    graph.replace(product, "Sub", [without, surplus], name)
