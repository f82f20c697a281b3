"""What makes the tensors that products read, where a scale per channel can be folded into it exactly."""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx
from onnx import numpy_helper

from compress.quantize.products import Product, initializers, products, readers_of

SWAPS = ((0, 2, 1, 3), (1, 0, 2))
"""Transpositions that bring heads before tokens, and back: (rows, tokens, heads, size), or (tokens, rows x heads, size)
where tokens come first."""


@dataclass(frozen=True)
class Producer:
    """To divide a tensor's channels, divide these initializers along these axes: (name, axis).

    product   the linear layer they belong to; None for a LayerNorm
    """

    divided: tuple[tuple[str, int], ...]
    product: Product | None = None


@dataclass(frozen=True)
class _Graph:
    makers: Mapping[str, onnx.NodeProto]
    readers: Mapping[str, list[onnx.NodeProto]]
    weights: Mapping[str, onnx.TensorProto]
    linear: Mapping[str, Product]
    shown: frozenset[str]

    def alone(self, name: str) -> bool:
        """Whether one node reads the tensor, and nobody outside."""
        return sum(node.op_type != "Shape" for node in self.readers.get(name, [])) == 1 and name not in self.shown

    def maker(self, name: str, operator: str) -> onnx.NodeProto | None:
        """The node that makes the tensor, if it is of this kind."""
        found = self.makers.get(name)
        return found if found is not None and found.op_type == operator else None

    def zero(self, name: str) -> bool:
        """Whether the tensor is a constant of zeros, as the bias of a LayerNorm that has none."""
        node = self.maker(name, "Constant")
        return node is not None and not any(numpy_helper.to_array(each.t).any() for each in node.attribute)


def producers(graph: onnx.GraphProto) -> dict[str, Producer]:
    """The tensors read by products alone into whose making a scale per channel folds exactly, and how."""
    found = products(graph)
    readers = readers_of(graph)
    whole = _Graph(
        makers={node.output[0]: node for node in graph.node},
        readers=readers,
        weights=initializers(graph),
        linear={product.output: product for product in found},
        shown=frozenset(value.name for value in graph.output),
    )
    starts = {product.ends[0] for product in found}
    made = {}
    for name in dict.fromkeys(product.reads for product in found):
        values = [node for node in readers[name] if node.op_type != "Shape"]
        if name in whole.shown or any(node.output[0] not in starts for node in values):
            continue
        producer = _norm(whole, name) or _linear(whole, name) or _attended(whole, name)
        if producer is not None:
            made[name] = producer
    return made


def _norm(graph: _Graph, name: str) -> Producer | None:
    node = graph.maker(name, "LayerNormalization")
    if node is None:
        return None
    affine = [each for each in node.input[1:] if each and not graph.zero(each)]
    if any(each not in graph.weights for each in affine):
        return None
    own = all(len(graph.readers[each]) == 1 and len(graph.weights[each].dims) == 1 for each in affine)
    return Producer(tuple((each, 0) for each in affine)) if own else None


def _linear(graph: _Graph, name: str) -> Producer | None:
    """A linear layer, or its ReLU: s > 0 passes through that."""
    relu = graph.maker(name, "Relu")
    made = name if relu is None else relu.input[0]
    product = graph.linear.get(made)
    if product is None or (relu is not None and not graph.alone(made)):
        return None
    return _columns(graph, product)


def _attended(graph: _Graph, name: str) -> Producer | None:
    """Probabilities x values, head by head: a channel of the result is a mean of that channel of the values."""
    joined = graph.maker(name, "Reshape")
    turned = joined and _turned(graph, joined.input[0])
    mixed = turned and graph.maker(turned.input[0], "MatMul")
    turned_values = mixed and _turned(graph, mixed.input[1])
    split = turned_values and graph.maker(turned_values.input[0], "Reshape")
    if not (joined and turned and mixed and turned_values and split):
        return None
    chain = (joined.input[0], turned.input[0], mixed.input[1], turned_values.input[0], split.input[0])
    product = graph.linear.get(split.input[0])
    if product is None or not all(graph.alone(each) for each in chain):
        return None
    return _columns(graph, product)


def _turned(graph: _Graph, name: str) -> onnx.NodeProto | None:
    node = graph.maker(name, "Transpose")
    if node is None:
        return None
    perm = next((tuple(each.ints) for each in node.attribute if each.name == "perm"), ())
    return node if perm in SWAPS else None


def _columns(graph: _Graph, product: Product) -> Producer | None:
    """The output columns of a weight and its bias; a bias that another layer reads too cannot be changed."""
    if product.bias is not None and len(graph.readers[product.bias]) > len(graph.readers[product.weight]):
        return None
    bias = () if product.bias is None else ((product.bias, 0),)
    return Producer(((product.weight, 0 if product.transposed else 1), *bias), product)
