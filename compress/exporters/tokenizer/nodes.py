"""A few lines to write ONNX graphs by hand: operators in, names of tensors out."""

from collections.abc import Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from compress.exporters.session import MICROSOFT

Attribute = int | float | str | Sequence[int] | Sequence[str]

CLASSIC = "ai.onnx.ml"
DOMAINS = {MICROSOFT: 1, CLASSIC: 2}
"""Operator sets beside ONNX's own that the graphs use; onnxruntime's standard builds have them all."""

EVERYTHING = np.iinfo(np.int64).max


class GraphBuilder:
    """Nodes and constants in the order they were written; every tensor gets a name below `prefix`."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[TensorProto] = []
        self._known: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def op(self, kind: str, *inputs: str, domain: str = "", outputs: int = 1, **attributes: Attribute) -> str:
        """Add a node; return the name of its first output, the others end in /1, /2, ...

        Attributes that the operator does not have are refused by `onnx.checker`, which every file goes through.
        """
        name = f"{self.prefix}/{kind}_{len(self.nodes)}"
        names = [name, *(f"{name}/{index}" for index in range(1, outputs))]
        node = helper.make_node(kind, inputs, names, name=name, domain=domain)
        node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
        self.nodes.append(node)
        return name

    def named(self, name: str, tensor: str) -> str:
        """Write `tensor` once more, as an output of the graph called `name`."""
        self.nodes.append(helper.make_node("Identity", [tensor], [name], name=f"{self.prefix}/as_{name}"))
        return name

    def constant(self, value: NDArray[np.generic] | Sequence[int] | Sequence[str] | int) -> str:
        """Add a constant: int64 of numbers, strings of texts, an array as it is; equal ones share a name."""
        array = np.asarray(value)
        tensor = (
            helper.make_tensor("", TensorProto.STRING, array.shape, [text.encode() for text in array.ravel().tolist()])
            if array.dtype.kind in "UO"
            else numpy_helper.from_array(array)
        )
        content = tensor.SerializeToString(deterministic=True)
        key = (str(array.dtype.kind), array.shape, content)
        if key not in self._known:
            tensor.name = self._known[key] = f"{self.prefix}/constant_{len(self.constants)}"
            self.constants.append(tensor)
        return self._known[key]

    def size(self, tensor: str, axis: int) -> str:
        """Write (1,): one dimension of a tensor."""
        return self.op("Gather", self.op("Shape", tensor), self.constant([axis]))

    def flat(self, tensor: str) -> str:
        return self.op("Reshape", tensor, self.constant([-1]))

    def scalar(self, tensor: str) -> str:
        return self.op("Reshape", tensor, self.constant(np.empty(0, np.int64)))

    def full(self, shape: str, value: int = 0) -> str:
        """Write int64 of this shape, all `value`."""
        name = f"{self.prefix}/ConstantOfShape_{len(self.nodes)}"
        filling = helper.make_tensor("value", TensorProto.INT64, [1], [value])
        self.nodes.append(helper.make_node("ConstantOfShape", [shape], [name], name=name, value=filling))
        return name

    def numbers(self, count: str) -> str:
        """Write (count,): 0, 1, 2, ... of a (1,) count."""
        return self.op("Range", self.constant(0), self.scalar(count), self.constant(1))

    def integers(self, tensor: str) -> str:
        """Cast truths, or small integers, to int64."""
        return self.op("Cast", tensor, to=TensorProto.INT64)

    def sums(self, values: str, places: str, count: str) -> str:
        """Write (count,): at each place the sum of the values that belong there."""
        return self.op("ScatterElements", self.full(count), places, values, axis=0, reduction="add")

    def kept(self, values: str, where: str) -> str:
        """Keep those of (n,) or (n, ...) values where the condition (n,) holds."""
        return self.op("Compress", values, where, axis=0)
