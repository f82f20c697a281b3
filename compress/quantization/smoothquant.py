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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import helper, numpy_helper

from compress.arrays import Array, Floats
from compress.errors import ExportError
from compress.exporters.rewrite.graph import (
    Graph,
    MismatchError,
    Product,
    Wiring,
    attribute,
    find_writer,
    products,
    rank,
    require,
)
from compress.exporters.session import read_model, save_changed
from compress.quantization.calibration import iterate_activations, list_read

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
    starts = {product.ends[0] for product in found}
    search = _Search(Wiring(graph), {product.output: product for product in found})
    made = {}
    for name in dict.fromkeys(product.reads for product in found):
        readers = search.readers(name)
        if not all(node.output and node.output[0] in starts for node in readers):
            continue
        for pattern in (search.norm, search.linear, search.values):
            with suppress(MismatchError):
                made[name] = pattern(name)
                break
    return made


@dataclass(frozen=True)
class _Search:
    """Finds what produces a tensor; methods raise MismatchError for anything else."""

    wiring: Wiring
    products: Mapping[str, Product]

    def readers(self, name: str) -> list[onnx.NodeProto]:
        """List the readers of a tensor, without those of its shape."""
        readers = self.wiring.readers.get(name, ())
        return [node for node in readers if node.op_type != "Shape"]

    def norm(self, name: str) -> Producer:
        """Divide in a LayerNorm whose weights are not shared."""
        graph = self.wiring.graph
        node = self.wiring.writer(name, "LayerNormalization")
        affine = [each for each in node.input[1:] if each and not self._is_zero(each)]
        for each in affine:
            require(rank(graph.value(each)) == 1 and self.wiring.read_once(each))
        return Producer(tuple((each, 0) for each in affine))

    def _is_zero(self, name: str) -> bool:
        """Check for a constant of zeros, such as the bias of a LayerNorm without
        one."""
        node = find_writer(self.wiring.writers, name, "Constant")
        return node is not None and not any(
            numpy_helper.to_array(each.t).any() for each in node.attribute
        )

    def linear(self, name: str) -> Producer:
        """Divide in a linear layer, or before its ReLU, which commutes with s > 0."""
        relu = find_writer(self.wiring.writers, name, "Relu")
        if relu is None:
            return self._columns(name)
        require(len(self.readers(relu.input[0])) == 1)
        return self._columns(relu.input[0])

    def values(self, name: str) -> Producer:
        """Divide in the value projection: a channel of the attention output averages
        that channel of the values."""
        joined, back, mixed = self.wiring.trace_back(
            name, "Reshape", "Transpose", "MatMul"
        )
        values, split = self.wiring.trace_back(mixed.input[1], "Transpose", "Reshape")
        for node in (back, values):
            require(attribute(node, "perm") in SWAPS)
        nodes = (joined, back, values, split)
        chain = [mixed.input[1], *(node.input[0] for node in nodes)]
        require(all(len(self.readers(each)) == 1 for each in chain))
        return self._columns(split.input[0])

    def _columns(self, name: str) -> Producer:
        """Divide the output columns of a weight and its bias, unless another layer
        reads the bias too."""
        product = self.products.get(name)
        if product is None:
            raise MismatchError
        weight = product.weight, 0 if product.transposed else 1
        if product.bias is None:
            return Producer((weight,), product)
        readers = self.wiring.readers
        require(len(readers[product.bias]) <= len(readers[product.weight]))
        return Producer((weight, (product.bias, 0)), product)


SMALLEST = 1e-5
"""The least peak of a channel, as in the authors' code."""


@dataclass(frozen=True)
class Channels:
    """The lowest and highest value of each channel of a tensor."""

    low_C: Floats
    high_C: Floats

    @property
    def peak(self) -> Floats:
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
    names = list_read(source)
    seen: dict[str, Channels] = {}
    for values in iterate_activations(source, names, rows, threads=threads):
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
    scales: dict[str, Floats] = {}
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
) -> Floats:
    """Compute the scales of Eq. 4."""
    peak_C = np.max([seen[name].peak for name in group.tensors], axis=0)
    weight_C = np.max(
        [np.abs(product.matrix(weights)).max(1) for product in group.products], axis=0
    )
    raised_C = np.maximum(peak_C, SMALLEST).astype(np.float64) ** alpha
    return np.asarray(
        raised_C / np.maximum(weight_C, SMALLEST) ** (1 - alpha), np.float32
    )


def _range(seen: Channels, scale_C: Floats) -> tuple[float, float]:
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
        """Return True if nothing else reads the group's weights, such as a lookup of
        tied embeddings."""
        weights = {each.weight for each in group.products}
        starts = {each.ends[0] for each in group.products}
        return all(
            node.output[0] in starts
            for node in self.graph.nodes
            if weights & set(node.input)
        )

    def fold(self, sources: Sequence[Producer], scale_C: Floats) -> None:
        """Divide the initializers of the producers, each once even if several share
        it."""
        for name, axis in {
            name: axis for each in sources for name, axis in each.divided
        }.items():
            value = self.graph.array(name)
            shape = [-1 if at == axis else 1 for at in range(value.ndim)]
            self._put(name, value / scale_C.reshape(shape))

    def multiply(self, group: _Group, scale_C: Floats) -> None:
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

    def weigh(self, group: _Group, scale_C: Floats) -> None:
        for product in {each.weight: each for each in group.products}.values():
            value = self.graph.array(product.weight)
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

    def _put(self, name: str, value: Array) -> None:
        self.graph.put(name, value.astype(np.float32))
