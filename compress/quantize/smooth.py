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
from compress.export.changed import save_changed
from compress.export.session import read_model
from compress.quantize.calibrate import watch
from compress.quantize.producers import Producer, producers
from compress.quantize.products import Product, initializers, products

if TYPE_CHECKING:
    from compress.export.predictor import Row

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
