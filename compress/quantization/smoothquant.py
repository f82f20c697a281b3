"""Smooth graphs by SmoothQuant: shift the difficulty of quantisation from activations
to weights.

Xiao et al. 2022, SmoothQuant: Accurate and Efficient Post-Training Quantization for
Large Language Models, arXiv:2211.10438.

    Eq. 3    Y = (X diag(s)^-1) (diag(s) W)
    Eq. 4    s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)

j runs over the channels that a product reads. The outputs of the graph do not change;
only the steps of int8 become finer. diag(s)^-1 is folded into the producer of X if that
is exact: the LayerNorm before it, if nothing else reads it; the value projection before
the attention's output; a linear layer, also through a ReLU.

Deviations: the paper smooths models whose LayerNorms are read only by products. In
BERT-like models the residual reads them too, and behind GELU the scales cannot be
folded exactly; there X is multiplied, once for all products that read it: 0.98 to 1.03
of dynamic int8's latency, whereas one feed-forward layer in float32 costs 1.10 to 1.15
(docs/quantize.md).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from compress.errors import ExportError
from compress.exporters.rewrite.graph import (
    Graph,
    Product,
    attribute,
    find_writer,
    products,
)
from compress.exporters.session import read_model, save_changed
from compress.quantization.calibration import iterate_activations

if TYPE_CHECKING:
    from compress.exporters.session import EncodedRow

SWAPS = ([0, 2, 1, 3], [1, 0, 2])
"""Transpositions that swap tokens and heads: of (rows, tokens, heads, size), and of
(tokens, rows x heads, size)."""


@dataclass(frozen=True)
class Producer:
    """The initializers, with their axes, to divide in order to divide the channels of a
    tensor.

    product   the linear layer that they belong to; None for a LayerNorm
    """

    divided: tuple[tuple[str, int], ...]
    product: Product | None = None


def producers(source: onnx.GraphProto | Graph) -> dict[str, Producer]:
    """Find the producers of tensors that only products read, where a scale per channel
    can be folded exactly."""
    graph = source if isinstance(source, Graph) else Graph(source)
    found = products(graph)
    writers = graph.writers()
    readers = graph.readers()
    linear = {product.output: product for product in found}
    starts = {product.ends[0] for product in found}

    def reading(name: str) -> list[onnx.NodeProto]:
        return [node for node in readers.get(name, ()) if node.op_type != "Shape"]

    def is_zero(name: str) -> bool:
        """Return True for a constant of zeros, such as the bias of a LayerNorm without
        one."""
        node = find_writer(writers, name, "Constant")
        return node is not None and not any(
            numpy_helper.to_array(each.t).any() for each in node.attribute
        )

    def columns(product: Product | None) -> Producer | None:
        """Divide the output columns of a weight and its bias, unless another layer
        reads the bias too."""
        if product is None or (
            product.bias and len(readers[product.bias]) > len(readers[product.weight])
        ):
            return None
        bias = () if product.bias is None else ((product.bias, 0),)
        return Producer(
            ((product.weight, 0 if product.transposed else 1), *bias), product
        )

    def norm(name: str) -> Producer | None:
        node = find_writer(writers, name, "LayerNormalization")
        affine = (
            []
            if node is None
            else [each for each in node.input[1:] if each and not is_zero(each)]
        )
        own = all(
            each in graph.tensors
            and len(readers[each]) == 1
            and len(graph.tensors[each].dims) == 1
            for each in affine
        )
        return (
            Producer(tuple((each, 0) for each in affine))
            if node is not None and own
            else None
        )

    def find_linear(name: str) -> Producer | None:
        """Divide in a linear layer, or before its ReLU, which commutes with s > 0."""
        relu = find_writer(writers, name, "Relu")
        made = name if relu is None else relu.input[0]
        return (
            columns(linear.get(made))
            if relu is None or len(reading(made)) == 1
            else None
        )

    def find_transpose(name: str) -> onnx.NodeProto | None:
        node = find_writer(writers, name, "Transpose")
        return node if node is not None and attribute(node, "perm") in SWAPS else None

    def find_value_projection(name: str) -> Producer | None:
        """Divide in the value projection: a channel of the attention output averages
        that channel of the values."""
        joined = find_writer(writers, name, "Reshape")
        back = joined and find_transpose(joined.input[0])
        mixed = back and find_writer(writers, back.input[0], "MatMul")
        values = mixed and find_transpose(mixed.input[1])
        split = values and find_writer(writers, values.input[0], "Reshape")
        if not (joined and back and mixed and values and split):
            return None
        chain = (
            joined.input[0],
            back.input[0],
            mixed.input[1],
            values.input[0],
            split.input[0],
        )
        return (
            columns(linear.get(split.input[0]))
            if all(len(reading(each)) == 1 for each in chain)
            else None
        )

    made = {}
    for name in dict.fromkeys(product.reads for product in found):
        if all(node.output and node.output[0] in starts for node in reading(name)):
            producer = norm(name) or find_linear(name) or find_value_projection(name)
            if producer is not None:
                made[name] = producer
    return made


Array = NDArray[np.float32]

SMALLEST = 1e-5
"""The least peak of a channel, as in the authors' code."""


@dataclass(frozen=True)
class Channels:
    """The lowest and highest value of each channel of a tensor."""

    low_C: Array
    high_C: Array

    @property
    def peak(self) -> Array:
        return np.maximum(np.abs(self.low_C), np.abs(self.high_C))


@dataclass(frozen=True)
class _Group:
    """Products that must share scales, since they read the same tensor or share a
    weight, and the tensors they read."""

    tensors: tuple[str, ...]
    products: tuple[Product, ...]


def observe_channels(
    source: Path, rows: "Iterable[EncodedRow]", *, threads: int = 1
) -> dict[str, Channels]:
    """Observe the channels of each tensor that a product of the fp32 file reads, over
    the rows."""
    model = read_model(source)
    names = list(dict.fromkeys(product.reads for product in products(model.graph)))
    seen: dict[str, Channels] = {}
    for values in iterate_activations(
        model, names, rows, threads=threads, source=source
    ):
        for name, value in values.items():
            flat = value.reshape(-1, value.shape[-1])
            low_C = flat.min(0)
            high_C = flat.max(0)
            if (earlier := seen.get(name)) is not None:
                low_C = np.minimum(low_C, earlier.low_C)
                high_C = np.maximum(high_C, earlier.high_C)
            seen[name] = Channels(low_C, high_C)
    if not seen:
        raise ExportError(
            f"{source}: calibration needs at least one row, and products that read it"
        )
    return seen


def smooth(
    source: Path,
    target: Path,
    seen: Mapping[str, Channels],
    *,
    alpha: float,
    multiply: bool = True,
) -> dict[str, tuple[float, float]]:
    """Write the fp32 file `source`, smoothed, to `target`; return the min-max ranges of
    the tensors its products read.

    seen      the result of `observe_channels` for this file
    alpha     0: all of the difficulty stays in the activations; 1: all goes to the
              weights
    multiply  multiply tensors whose scales cannot be folded, except those that only a
              head reads, with little to gain; otherwise leave their products unchanged
    """
    model = read_model(source)
    graph = Graph(model.graph)
    found = products(graph)
    if unknown := sorted({product.reads for product in found} - seen.keys()):
        raise ExportError(
            f"{source}: no channels of {', '.join(unknown)}; observe this file"
        )
    smoother = _Smoother(graph)
    producer_of = producers(graph)
    scales: dict[str, Array] = {}
    for group in _groups(found):
        if not smoother.owns(group):
            continue
        scale_C = _scale(group, seen, graph.tensors, alpha)
        sources = [producer_of[name] for name in group.tensors if name in producer_of]
        names = {each.product.name for each in sources if each.product is not None}
        weights = {each.product.weight for each in sources if each.product is not None}
        shared = any(
            product.weight in weights and product.name not in names for product in found
        )
        # a shared weight also produces other tensors
        if len(sources) == len(group.tensors) and not shared:
            smoother.fold(sources, scale_C)
        elif multiply and not all(product.gemm for product in group.products):
            smoother.multiply(group, scale_C)
        else:
            continue
        smoother.weigh(group, scale_C)
        scales.update(dict.fromkeys(group.tensors, scale_C))
    smoother.finish()
    save_changed(model, target)
    return {
        smoother.reads.get(name, name): _range(
            seen[name], scales.get(name, np.ones(1, np.float32))
        )
        for name in dict.fromkeys(product.reads for product in found)
    }


def _scale(
    group: _Group,
    seen: Mapping[str, Channels],
    weights: Mapping[str, onnx.TensorProto],
    alpha: float,
) -> Array:
    """Compute the scales of Eq. 4."""
    peak_C = np.max([seen[name].peak for name in group.tensors], axis=0)
    weight_C = np.max(
        [np.abs(product.matrix(weights)).max(1) for product in group.products], axis=0
    )
    raised_C = np.maximum(peak_C, SMALLEST).astype(np.float64) ** alpha
    return np.asarray(
        raised_C / np.maximum(weight_C, SMALLEST) ** (1 - alpha), np.float32
    )


def _range(seen: Channels, scale_C: Array) -> tuple[float, float]:
    return min(0.0, float((seen.low_C / scale_C).min())), max(
        0.0, float((seen.high_C / scale_C).max())
    )


def _groups(found: Sequence[Product]) -> list[_Group]:
    """Join products by a common tensor or a common weight, in the graph's order."""
    group_of: dict[str, list[Product]] = {}
    for product in found:
        keys = (f"reads {product.reads}", f"weight {product.weight}")
        joined = [product]
        for group in {
            id(group_of[key]): group_of[key] for key in keys if key in group_of
        }.values():
            joined = group + joined
        for each in joined:
            for key in (f"reads {each.reads}", f"weight {each.weight}"):
                group_of[key] = joined
    groups = {id(group): group for group in group_of.values()}.values()
    return [
        _Group(tuple(dict.fromkeys(each.reads for each in group)), tuple(group))
        for group in groups
    ]


class _Smoother:
    """Edits a graph: adds initializers under new names, and lets nodes read them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.by_output = graph.writers()
        self.reads: dict[str, str] = {}
        self.before: dict[str, onnx.NodeProto] = {}

    def owns(self, group: _Group) -> bool:
        """Return True if nothing else reads the group's weights, as a lookup of tied
        embeddings would."""
        weights = {each.weight for each in group.products}
        starts = {each.ends[0] for each in group.products}
        return all(
            node.output[0] in starts
            for node in self.graph.nodes
            if weights & set(node.input)
        )

    def fold(self, sources: Sequence[Producer], scale_C: Array) -> None:
        """Divide the initializers of the producers, each once even if several share
        it."""
        for name, axis in {
            name: axis for each in sources for name, axis in each.divided
        }.items():
            value = numpy_helper.to_array(self.graph.tensors[name])
            shape = [-1 if at == axis else 1 for at in range(value.ndim)]
            self._put(name, value / scale_C.reshape(shape))

    def multiply(self, group: _Group, scale_C: Array) -> None:
        factor = f"{group.tensors[0]}_unscale"
        self._put(factor, 1 / scale_C)
        for name in group.tensors:
            self.reads[name] = f"{name}_smooth"
            self.before[name] = helper.make_node(
                "Mul", [name, factor], [self.reads[name]], name=f"{name}_smooth"
            )
        for product in group.products:
            node = self.by_output[product.ends[0]]
            node.input[0] = self.reads[product.reads]

    def weigh(self, group: _Group, scale_C: Array) -> None:
        for product in {each.weight: each for each in group.products}.values():
            value = numpy_helper.to_array(self.graph.tensors[product.weight])
            self._put(
                product.weight,
                value * (scale_C if product.transposed else scale_C[:, None]),
            )

    def finish(self) -> None:
        """Insert the multiplications before their first readers."""
        nodes: list[onnx.NodeProto] = []
        pending = {output: self.before[name] for name, output in self.reads.items()}
        for node in self.graph.nodes:
            nodes += [
                pending.pop(name)
                for name in dict.fromkeys(node.input)
                if name in pending
            ]
            nodes.append(node)
        self.graph.nodes = nodes
        self.graph.store()

    def _put(self, name: str, value: NDArray[Any]) -> None:
        self.graph.put(name, value.astype(np.float32))
