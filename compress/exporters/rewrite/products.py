"""The matrix products with constant weights in a graph: what quantisation quantises.

A product is known by the name of its node, which in our exports carries the module's path; it is a MatMul with a
constant matrix on its right, or a Gemm that is one with a bias. Products of two activations are none.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from compress.exporters.session import read_model

LAYER = re.compile(r"(?:\w*layers?|h|blocks?)\.(\d+)")
REPEATED = re.compile(r"(.+?)_(\d+)")
"""A module's name where the exporter meets the module again."""


OF_GEMM = "_MatMul"
"""What onnxruntime's dynamic quantiser adds to the name of a Gemm, which it takes apart, quantised or not."""


@dataclass(frozen=True)
class Product:
    """`output` = `reads` @ weight (+ bias).

    name     of the node (its output's name where the node has none)
    reads    the tensor of activations
    weight   the initializer: (in, out), or (out, in) where `transposed`
    bias     the initializer added to the product, as the node's own input or by an Add behind it; None: there is none
    output   the tensor that holds the result, bias included
    ends     the first outputs of the nodes that compute it: the product's and, where that adds the bias, the Add's
    gemm     whether the node is a Gemm, which reads rows of a matrix, and no MatMul
    """

    name: str
    reads: str
    weight: str
    transposed: bool
    bias: str | None
    output: str
    ends: tuple[str, ...]
    gemm: bool = False

    def matrix(self, weights: Mapping[str, onnx.TensorProto]) -> NDArray[np.float32]:
        """The weight as (in, out)."""
        found = numpy_helper.to_array(weights[self.weight])
        return np.asarray(found.T if self.transposed else found, np.float32)


def initializers(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    return {tensor.name: tensor for tensor in graph.initializer}


def readers_of(graph: onnx.GraphProto) -> dict[str, list[onnx.NodeProto]]:
    """Tensor -> the nodes that read it, once for each time they do."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    return readers


def products(graph: onnx.GraphProto) -> list[Product]:
    """The graph's products, in its order."""
    weights = initializers(graph)
    readers = readers_of(graph)
    shown = {value.name for value in graph.output}
    found = []
    for node in graph.node:
        if node.op_type == "MatMul" and _is_matrix(weights, node.input[1]):
            found.append(_with_bias(node, weights, readers, shown))
        elif node.op_type == "Gemm" and _is_matrix(weights, node.input[1]) and (given := _gemm(node, weights)):
            found.append(given)
    return found


def left_in_float(fp32: Path, int8: Path) -> tuple[str, ...]:
    """Names of the products of the fp32 file that the int8 file made of it computes in float32."""
    exact = {each.name for each in products(read_model(int8).graph)}
    names = [each.name for each in products(read_model(fp32).graph)]
    return tuple(name for name in names if name in exact or f"{name}{OF_GEMM}" in exact)


def table_lookups(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The Gathers of rows of constant float32 tables: embeddings."""
    weights = initializers(graph)
    return [
        node
        for node in graph.node
        if node.op_type == "Gather" and _is_matrix(weights, node.input[0]) and _attributes(node).get("axis", 0) == 0
    ]


def layer(name: str) -> str:
    """A product's name as a reader says it: `/model/bert/encoder/layer.3/output/dense/MatMul` is `layer 3, output`,
    and ALBERT's `.../albert_layers.0/attention/query_2/MatMul`, the third use of a shared layer, is
    `layer 0, attention query, use 3`.
    """
    *parts, last = name.strip("/").split("/")[:-1] or [name]
    again = REPEATED.fullmatch(last)
    use = f", use {int(again[2]) + 1}" if again else ""
    parts = [part for part in (*parts, again[1] if again else last) if part not in ("dense", "self")]
    for at in reversed(range(len(parts))):
        if match := LAYER.fullmatch(parts[at]):
            return f"layer {match[1]}, {' '.join(parts[at + 1 :]) or 'product'}{use}"
    return (" ".join(parts[2:] if len(parts) > 2 else parts[1:] or parts) or name) + use


def _with_bias(
    node: onnx.NodeProto,
    weights: Mapping[str, onnx.TensorProto],
    readers: Mapping[str, list[onnx.NodeProto]],
    shown: set[str],
) -> Product:
    made, weight = node.output[0], node.input[1]
    width = weights[weight].dims[1]
    bias, output = None, made
    after = readers.get(made, [])
    if len(after) == 1 and after[0].op_type == "Add" and made not in shown:
        other = next((name for name in after[0].input if name != made), made)
        if other in weights and list(weights[other].dims) == [width]:
            bias, output = other, after[0].output[0]
    return Product(node.name or made, node.input[0], weight, False, bias, output, tuple(dict.fromkeys((made, output))))


def _gemm(node: onnx.NodeProto, weights: Mapping[str, onnx.TensorProto]) -> Product | None:
    """None where it does more than x @ W (+ b)."""
    asked = _attributes(node)
    bias = node.input[2] if len(node.input) > 2 and node.input[2] else None
    plain = asked.get("alpha", 1.0) == asked.get("beta", 1.0) == 1.0 and not asked.get("transA", 0)
    if not plain or (bias is not None and (bias not in weights or len(weights[bias].dims) != 1)):
        return None
    made = node.output[0]
    across = bool(asked.get("transB", 0))
    return Product(node.name or made, node.input[0], node.input[1], across, bias, made, (made,), gemm=True)


def _is_matrix(weights: Mapping[str, onnx.TensorProto], name: str) -> bool:
    return name in weights and len(weights[name].dims) == 2 and weights[name].data_type == onnx.TensorProto.FLOAT


def _attributes(node: onnx.NodeProto) -> dict[str, float]:
    return {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
