"""SmoothQuant: what is hard to quantise in activations is moved into the weights, where it is easy.

Xiao et al. 2022, SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models,
arXiv:2211.10438.

    Eq. 3    Y = (X diag(s)^-1) (diag(s) W)
    Eq. 4    s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)

j runs over the channels that a product reads. The graph computes what it did; only the steps of int8 become finer.
diag(s)^-1 goes into what makes X where that is exact: the LayerNorm before it, if nothing else reads it; the values'
projection before the attention's output; a linear layer, also through a ReLU.

Deviations: the paper smooths models whose LayerNorms are read by products alone. In BERT and its kin the residual reads
them too, and behind GELU nothing can take the scales exactly; there X is multiplied, once for all products that read
it: 0.98 to 1.03 of dynamic int8's latency, where one feed-forward layer left in float32 costs 1.10 to 1.15
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
from compress.exporters.rewrite.products import Product, initializers, products, readers_of
from compress.exporters.session import read_model, save_changed
from compress.quantization.calibration import watch

if TYPE_CHECKING:
    from compress.exporters.predictor import Row

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


Array = NDArray[np.float32]

SMALLEST = 1e-5
"""A channel's largest number counts as at least this, as in the authors' code."""


@dataclass(frozen=True)
class Channels:
    """Lowest and highest value of each channel of a tensor."""

    low_C: Array
    high_C: Array

    @property
    def peak(self) -> Array:
        return np.maximum(np.abs(self.low_C), np.abs(self.high_C))


@dataclass(frozen=True)
class _Group:
    """Products that must share scales, and the tensors they read: those that read one tensor or share one weight."""

    tensors: tuple[str, ...]
    products: tuple[Product, ...]


def channels(source: Path, rows: "Iterable[Row]", *, threads: int = 1) -> dict[str, Channels]:
    """The channels of each tensor that a product of the fp32 file reads, over the rows."""
    model = read_model(source)
    names = list(dict.fromkeys(product.reads for product in products(model.graph)))
    found: dict[str, Channels] = {}
    for values in watch(model, names, rows, threads=threads, source=source):
        for name, value in values.items():
            flat = value.reshape(-1, value.shape[-1])
            low_C, high_C = flat.min(0), flat.max(0)
            if (known := found.get(name)) is not None:
                low_C, high_C = np.minimum(low_C, known.low_C), np.maximum(high_C, known.high_C)
            found[name] = Channels(low_C, high_C)
    if not found:
        raise ExportError(f"{source}: calibration needs at least one row, and products that read it")
    return found


def smooth(
    source: Path, target: Path, seen: Mapping[str, Channels], *, alpha: float, multiply: bool = True
) -> dict[str, tuple[float, float]]:
    """Writes the fp32 file `source` smoothed to `target`; the min-max ranges of what its products read then, by tensor.

    seen      of `channels`, on this very file
    alpha     0: all of the difficulty stays in the activations, 1: all goes to the weights
    multiply  whether a tensor that nothing can be folded into is multiplied; if not, what reads it stays as it is.
              One that only a head's layers read, a single row, never is: there is little to win
    """
    model = read_model(source)
    found = products(model.graph)
    if unknown := sorted({product.reads for product in found} - seen.keys()):
        raise ExportError(f"{source}: no channels of {', '.join(unknown)}; watch this very file")
    smoother = _Smoother(model)
    made_by = producers(model.graph)
    scales: dict[str, Array] = {}
    for group in _groups(found):
        if not smoother.owns(group):
            continue
        scale_C = _scale(group, seen, smoother.weights, alpha)
        sources = [made_by.get(name) for name in group.tensors]
        foldable = _whole([each for each in sources if each is not None], found) if None not in sources else []
        if foldable:
            smoother.fold(foldable, scale_C)
        elif multiply and not all(product.gemm for product in group.products):
            smoother.multiply(group, scale_C)
        else:
            continue
        smoother.weigh(group, scale_C)
        scales.update(dict.fromkeys(group.tensors, scale_C))
    smoother.finish()
    save_changed(model, target)
    return {
        smoother.reads.get(name, name): _range(seen[name], scales.get(name, np.ones(1, np.float32)))
        for name in dict.fromkeys(product.reads for product in found)
    }


def _scale(group: _Group, seen: Mapping[str, Channels], weights: Mapping[str, onnx.TensorProto], alpha: float) -> Array:
    """Eq. 4."""
    peak_C = np.max([seen[name].peak for name in group.tensors], axis=0)
    weight_C = np.max([np.abs(product.matrix(weights)).max(1) for product in group.products], axis=0)
    raised_C = np.maximum(peak_C, SMALLEST).astype(np.float64) ** alpha
    return np.asarray(raised_C / np.maximum(weight_C, SMALLEST) ** (1 - alpha), np.float32)


def _range(seen: Channels, scale_C: Array) -> tuple[float, float]:
    return min(0.0, float((seen.low_C / scale_C).min())), max(0.0, float((seen.high_C / scale_C).max()))


def _groups(found: Sequence[Product]) -> list[_Group]:
    """Products are joined by a common tensor or a common weight, in the graph's order."""
    group_of: dict[str, list[Product]] = {}
    for product in found:
        keys = (f"reads {product.reads}", f"weight {product.weight}")
        joined = [product]
        for group in {id(group_of[key]): group_of[key] for key in keys if key in group_of}.values():
            joined = group + joined
        for each in joined:
            for key in (f"reads {each.reads}", f"weight {each.weight}"):
                group_of[key] = joined
    groups = {id(group): group for group in group_of.values()}.values()
    return [_Group(tuple(dict.fromkeys(each.reads for each in group)), tuple(group)) for group in groups]


def _whole(sources: Sequence[Producer], found: Sequence[Product]) -> list[Producer]:
    """The producers, if their scales can be changed for this group alone: a weight that also makes other tensors
    cannot."""
    making = {each.product.name for each in sources if each.product is not None}
    shared = {each.product.weight for each in sources if each.product is not None}
    elsewhere = any(product.weight in shared and product.name not in making for product in found)
    return [] if elsewhere else list(sources)


class _Smoother:
    """A model being smoothed: new initializers under new names, nodes changed to read them."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph = model.graph
        self.weights = initializers(model.graph)
        self.by_output = {node.output[0]: node for node in model.graph.node}
        self.reads: dict[str, str] = {}
        self.before: dict[str, onnx.NodeProto] = {}

    def owns(self, group: _Group) -> bool:
        """Whether nothing else reads the group's weights, as a lookup of tied embeddings would."""
        weights, starts = ({each.weight for each in group.products}, {each.ends[0] for each in group.products})
        return all(node.output[0] in starts for node in self.graph.node if weights & set(node.input))

    def fold(self, sources: Sequence[Producer], scale_C: Array) -> None:
        """Divides what makes the tensors; a weight that several of them share once."""
        done: set[str] = set()
        for each in sources:
            for name, axis in each.divided:
                if name not in done:
                    value = numpy_helper.to_array(self.weights[name])
                    shape = [-1 if at == axis else 1 for at in range(value.ndim)]
                    self._replace(name, value / scale_C.reshape(shape))
                    done.add(name)

    def multiply(self, group: _Group, scale_C: Array) -> None:
        factor = f"{group.tensors[0]}_unscale"
        self._add(factor, 1 / scale_C)
        for name in group.tensors:
            self.reads[name] = f"{name}_smooth"
            self.before[name] = helper.make_node("Mul", [name, factor], [self.reads[name]], name=f"{name}_smooth")
        for product in group.products:
            node = self.by_output[product.ends[0]]
            node.input[0] = self.reads[product.reads]

    def weigh(self, group: _Group, scale_C: Array) -> None:
        for product in {each.weight: each for each in group.products}.values():
            value = numpy_helper.to_array(self.weights[product.weight])
            self._replace(product.weight, value * (scale_C if product.transposed else scale_C[:, None]))

    def finish(self) -> None:
        """Puts the multiplications before their first reader."""
        nodes: list[onnx.NodeProto] = []
        wanted = {made: self.before[name] for name, made in self.reads.items()}
        for node in self.graph.node:
            nodes += [wanted.pop(name) for name in dict.fromkeys(node.input) if name in wanted]
            nodes.append(node)
        del self.graph.node[:]
        self.graph.node.extend(nodes)

    def _replace(self, name: str, value: NDArray[Any]) -> None:
        self.weights[name].CopyFrom(numpy_helper.from_array(value.astype(np.float32), name))

    def _add(self, name: str, value: NDArray[Any]) -> None:
        self.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
