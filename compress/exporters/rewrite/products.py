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

from compress.exporters.rewrite.graph import Graph, Readers, attribute, is_plain_gemm
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


def products(source: onnx.GraphProto | Graph) -> list[Product]:
    """Find the graph's products, in its order."""
    graph = source if isinstance(source, Graph) else Graph(source)
    readers = graph.readers()
    found = []
    for node in graph.nodes:
        if node.op_type == "MatMul" and graph.is_matrix(node.input[1]):
            found.append(_with_bias(graph, node, readers))
        elif node.op_type == "Gemm" and graph.is_matrix(node.input[1]) and (product := _gemm(graph, node)):
            found.append(product)
    return found


def left_in_float(fp32: Path, int8: Path) -> tuple[str, ...]:
    """Names of the products of the fp32 file that the int8 file made of it computes in float32."""
    exact = {each.name for each in products(read_model(int8).graph)}
    names = [each.name for each in products(read_model(fp32).graph)]
    return tuple(name for name in names if name in exact or f"{name}{OF_GEMM}" in exact)


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


def _with_bias(graph: Graph, node: onnx.NodeProto, readers: Readers) -> Product:
    made, weight = node.output[0], node.input[1]
    width = graph.tensors[weight].dims[1]
    bias, output = None, made
    after = readers.get(made, [])
    if len(after) == 1 and after[0].op_type == "Add":
        other = next((name for name in after[0].input if name != made), made)
        if other in graph.tensors and list(graph.tensors[other].dims) == [width]:
            bias, output = other, after[0].output[0]
    return Product(node.name or made, node.input[0], weight, False, bias, output, tuple(dict.fromkeys((made, output))))


def _gemm(graph: Graph, node: onnx.NodeProto) -> Product | None:
    """None where it does more than x @ W (+ b)."""
    bias = node.input[2] if len(node.input) > 2 and node.input[2] else None
    constant = bias is None or (bias in graph.tensors and len(graph.tensors[bias].dims) == 1)
    if not constant or not is_plain_gemm(node):
        return None
    made = node.output[0]
    across = bool(attribute(node, "transB", 0))
    return Product(node.name or made, node.input[0], node.input[1], across, bias, made, (made,), gemm=True)
