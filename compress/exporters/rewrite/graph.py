"""A graph while it is rewritten: nodes found by what they write and by what they read, constants by value."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, numpy_helper

Array = NDArray[Any]

ATTENTION = "Attention"
OURS = "compress.rewriting"
"""The one operator a graph has only while it is rewritten: attention as a whole; `attention.py` says what it reads."""

_ARITHMETIC = ("Abs", "Add", "Cast", "Clip", "Div", "Exp", "Identity", "Mul", "Neg", "Pow", "Sqrt", "Sub")
_ACTIVATIONS = ("Elu", "Erf", "Gelu", "HardSigmoid", "Relu", "Selu", "Sigmoid", "Softplus", "Tanh")
ELEMENTWISE = frozenset((*_ARITHMETIC, *_ACTIVATIONS))


class Net:
    """A model's graph, copied; `model()` gives it back without what nothing reads, in an order that runs."""

    def __init__(self, model: ModelProto) -> None:
        self._source = model
        graph = model.graph
        self.tensors = {tensor.name: tensor for tensor in graph.initializer}
        self.nodes: list[NodeProto] = []
        for original in graph.node:
            node = NodeProto()
            node.CopyFrom(original)
            value = next((each.t for each in node.attribute if each.name == "value"), None)
            if node.op_type == "Constant" and value is not None:
                value.name = node.output[0]
                self.tensors[value.name] = value
            else:
                self.nodes.append(node)
        self.outputs = tuple(each.name for each in graph.output)
        self.kept: set[str] = set()
        inputs = (each.name for each in graph.input)
        self._named = {node.name for node in self.nodes}
        self._taken = {*self.tensors, *inputs, *(name for node in self.nodes for name in node.output)}

    def model(self) -> ModelProto:
        """The rewritten model, with the metadata it had."""
        source, nodes = self._source, self._living(self.outputs)
        used = {name for node in nodes for name in node.input} | set(self.outputs)
        kept = [tensor for name, tensor in self.tensors.items() if name in used]
        graph = onnx.helper.make_graph(nodes, source.graph.name, source.graph.input, source.graph.output, kept)
        made = onnx.helper.make_model(
            graph,
            ir_version=source.ir_version,
            opset_imports=source.opset_import,
            producer_name=source.producer_name,
            producer_version=source.producer_version,
        )
        made.metadata_props.extend(source.metadata_props)
        return made

    def prune(self) -> None:
        """Forgets nodes whose results nobody reads, but for those in `kept`; puts the rest in an order that runs."""
        self.nodes = self._living([*sorted(self.kept), *self.outputs])

    def writers(self) -> dict[str, NodeProto]:
        return {name: node for node in self.nodes for name in node.output}

    def readers(self) -> dict[str, list[NodeProto]]:
        """Tensor -> the nodes that read it, once for each time they do; a graph's output has one more, nameless."""
        found: dict[str, list[NodeProto]] = {name: [NodeProto()] for name in self.outputs}
        for node in self.nodes:
            for name in node.input:
                found.setdefault(name, []).append(node)
        return found

    def value(self, name: str) -> Array | None:
        """A constant's value; None for what is computed."""
        return numpy_helper.to_array(self.tensors[name]) if name in self.tensors else None

    def scalar(self, name: str) -> float | None:
        value = self.value(name)
        return float(value.item()) if value is not None and value.size == 1 else None

    def constant(self, value: Array, name: str) -> str:
        """The name of a constant of this value: `name`, or another if that is taken by another value."""
        known = self.value(name)
        if known is not None and known.dtype == value.dtype and np.array_equal(known, value):
            return name
        chosen = self._free(name)
        self.tensors[chosen] = numpy_helper.from_array(np.asarray(value, order="C"), chosen)
        return chosen

    def integers(self, *values: int) -> str:
        """The name of a constant of int64: these on one axis."""
        return self.constant(np.array(values, np.int64), f"compress.integers.{'_'.join(map(str, values))}")

    def add(self, operator: str, inputs: Sequence[str], name: str, *, output: str = "", **attributes: Any) -> str:
        """Adds a node and returns what it writes: `output`, or a name of its own."""
        called = _unlike(name, self._named)
        written = output or self._free(f"{called}_output_0")
        self.nodes.append(onnx.helper.make_node(operator, inputs, [written], name=called, **attributes))
        return written

    def replace(self, node: NodeProto, operator: str, inputs: Sequence[str], name: str, **attributes: Any) -> None:
        """Another node that writes what this one wrote."""
        place = next(place for place, each in enumerate(self.nodes) if each is node)
        self.nodes[place] = onnx.helper.make_node(operator, inputs, list(node.output), name=name, **attributes)

    def remove(self, node: NodeProto) -> None:
        self.nodes = [each for each in self.nodes if each is not node]

    def renamed(self, node: NodeProto, name: str) -> str:
        """Lets a node write under a name like this one, and returns it."""
        node.output[0] = self._free(name)
        return node.output[0]

    def attentions(self) -> list[NodeProto]:
        return [node for node in self.nodes if node.domain == OURS]

    def tokenwise(self, node: NodeProto) -> bool:
        """Whether the node treats every token by itself, whatever the order of the axes before the last one: what it
        reads is of (rows, tokens, features), or a constant along the features."""
        constants = [self.value(name) for name in node.input]
        if node.op_type == "MatMul":
            return constants[0] is None and constants[1] is not None and constants[1].ndim == 2
        if node.op_type == "LayerNormalization":
            return constants[0] is None and attribute(node, "axis", -1) == -1 and len(node.output) == 1
        flat = all(value is None or max((1, *value.shape[:-1])) == 1 for value in constants)
        return node.op_type in ELEMENTWISE and flat and any(value is None for value in constants)

    def varying(self, node: NodeProto) -> list[str]:
        """What a node reads that is no constant."""
        return [name for name in node.input if name and name not in self.tensors]

    def _living(self, needed: Sequence[str]) -> list[NodeProto]:
        """The nodes that these tensors need, each after what it reads."""
        writers = self.writers()
        ordered: list[NodeProto] = []
        begun: set[int] = set()
        stack = [(writers[name], False) for name in reversed(needed) if name in writers]
        while stack:
            node, ready = stack.pop()
            if ready:
                ordered.append(node)
            elif id(node) not in begun:
                begun.add(id(node))
                stack.append((node, True))
                stack.extend((writers[name], False) for name in reversed(node.input) if name in writers)
        return ordered

    def _free(self, name: str) -> str:
        return _unlike(name, self._taken)


def _unlike(name: str, taken: set[str]) -> str:
    """`name`, or one like it that is not taken; taken from now on."""
    chosen, count = name, 1
    while chosen in taken:
        count += 1
        chosen = f"{name}.{count}"
    taken.add(chosen)
    return chosen


def attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    """A node's attribute as Python has it."""
    return next((onnx.helper.get_attribute_value(each) for each in node.attribute if each.name == name), default)


def set_attribute(node: NodeProto, name: str, value: Any) -> None:
    kept = [each for each in node.attribute if each.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])
