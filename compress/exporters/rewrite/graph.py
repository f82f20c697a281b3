"""Index a graph by the tensors that its nodes write and read, and its constants by
name; find the matrix products with constant weights, which are the ones to quantise.

A product is identified by the name of its node, which is the module's path in our
exports; it is a MatMul with a constant matrix on its right, or a Gemm, which includes a
bias. Products of two activations do not count.
"""

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from compress.arrays import Array, Floats
from compress.exporters.session import read_model

Found = TypeVar("Found")
Writers = Mapping[str, NodeProto]
Readers = Mapping[str, list[NodeProto]]

ATTENTION_OPERATOR = "Attention"
ROTARY = "Rotary"
OURS = "compress.rewriting"
"""The domain of operators that exist only during rewriting: attention as a whole
(`attention.py`), and rotary positions of queries and keys (`rotary.py`)."""

_ARITHMETIC = (
    "Abs",
    "Add",
    "Cast",
    "Clip",
    "Div",
    "Exp",
    "Identity",
    "Mul",
    "Neg",
    "Pow",
    "Sqrt",
    "Sub",
)
_ACTIVATIONS = (
    "Elu",
    "Erf",
    "Gelu",
    "HardSigmoid",
    "Relu",
    "Selu",
    "Sigmoid",
    "Softplus",
    "Tanh",
)
ELEMENTWISE = frozenset((*_ARITHMETIC, *_ACTIVATIONS))


class Graph:
    """The nodes and constants (initializers) of a graph, to be read and changed.

    Graph(model.graph)     the graph itself: `store` writes the changed nodes and
                           constants back to it
    Graph.copy_of(model)   a copy, in which Constant nodes are initializers: `model`
                           makes a model of it
    """

    def __init__(self, source: GraphProto) -> None:
        self._source = source
        self.nodes = list(source.node)
        self.tensors = {tensor.name: tensor for tensor in source.initializer}
        self.outputs = tuple(each.name for each in source.output)
        self.kept: set[str] = set()
        inputs = (each.name for each in source.input)
        self._named = {node.name for node in self.nodes}
        self._taken = {
            *self.tensors,
            *inputs,
            *(name for node in self.nodes for name in node.output),
        }

    @classmethod
    def copy_of(cls, model: ModelProto) -> "Graph":
        """Copy the nodes of a model; Constant nodes become tensors."""
        graph = cls(model.graph)
        graph.nodes = []
        for node in copy.deepcopy(list(model.graph.node)):
            value = attribute(node, "value")
            if node.op_type == "Constant" and value is not None:
                value.name = node.output[0]
                graph.tensors[value.name] = value
            else:
                graph.nodes.append(node)
        graph._named = {node.name for node in graph.nodes}
        return graph

    def store(self) -> None:
        """Write nodes and constants back to the graph they came from, without unused
        constants."""
        tensors = self._used(self.nodes)
        del (
            self._source.node[:],
            self._source.initializer[:],
            self._source.value_info[:],
        )
        self._source.node.extend(self.nodes)
        self._source.initializer.extend(tensors)

    def model(self, source: ModelProto) -> ModelProto:
        """Make a model like `source` from this graph, without unused parts, in
        topological order."""
        nodes = self._living(self.outputs)
        graph = onnx.helper.make_graph(
            nodes,
            source.graph.name,
            source.graph.input,
            source.graph.output,
            self._used(nodes),
        )
        made = onnx.helper.make_model(
            graph,
            ir_version=source.ir_version,
            opset_imports=source.opset_import,
            producer_name=source.producer_name,
            producer_version=source.producer_version,
        )
        made.metadata_props.extend(source.metadata_props)
        return made

    def _used(self, nodes: Iterable[NodeProto]) -> list[TensorProto]:
        """List the constants that these nodes read, or that are outputs."""
        used = {name for node in nodes for name in node.input} | set(self.outputs)
        return [tensor for name, tensor in self.tensors.items() if name in used]

    def prune(self) -> None:
        """Remove nodes whose results are unused and not in `kept`; sort the others
        topologically."""
        self.nodes = self._living([*sorted(self.kept), *self.outputs])

    def writers(self) -> dict[str, NodeProto]:
        """Map each tensor to the node that writes it."""
        return {name: node for node in self.nodes for name in node.output}

    def readers(self) -> dict[str, list[NodeProto]]:
        """Map each tensor to its readers (a node that reads it twice is listed twice);
        an output of the graph has an empty node as an additional reader."""
        found: dict[str, list[NodeProto]] = {
            name: [NodeProto()] for name in self.outputs
        }
        for node in self.nodes:
            for name in node.input:
                found.setdefault(name, []).append(node)
        return found

    def value(self, name: str) -> Array | None:
        """Return the value of a constant; None for a computed tensor."""
        return self.array(name) if name in self.tensors else None

    def array(self, name: str) -> Array:
        """Return the value of a tensor that is known to be a constant."""
        return numpy_helper.to_array(self.tensors[name])

    def scalar(self, name: str) -> float | None:
        value = self.value(name)
        return float(value.item()) if value is not None and value.size == 1 else None

    def is_matrix(self, name: str) -> bool:
        """Check whether a tensor is a constant float32 matrix."""
        found = self.tensors.get(name)
        return (
            found is not None
            and len(found.dims) == 2
            and found.data_type == TensorProto.FLOAT
        )

    def lookups(self) -> list[NodeProto]:
        """Find the Gather nodes that read rows of constant float32 tables:
        embeddings."""
        gathers = self.of_type("Gather")
        tables = (node for node in gathers if self.is_matrix(node.input[0]))
        return [node for node in tables if attribute(node, "axis", 0) == 0]

    def put(self, name: str, value: Array) -> None:
        """Add a constant, or replace the value of the constant with this name."""
        self.tensors[name] = numpy_helper.from_array(value, name)

    def constant(self, value: Array, name: str) -> str:
        """Add a constant unless it exists, and return its name: `name`, or another if
        `name` has another value."""
        known = self.value(name)
        if (
            known is not None
            and known.dtype == value.dtype
            and np.array_equal(known, value)
        ):
            return name
        chosen = _make_unique(name, self._taken)
        self.tensors[chosen] = numpy_helper.from_array(
            np.asarray(value, order="C"), chosen
        )
        return chosen

    def integers(self, *values: int) -> str:
        """Add a constant int64 vector, unless it exists, and return its name."""
        return self.constant(
            np.array(values, np.int64),
            f"compress.integers.{'_'.join(map(str, values))}",
        )

    def add(
        self,
        operator: str,
        inputs: Sequence[str],
        name: str,
        *,
        output: str = "",
        **attributes: Any,
    ) -> str:
        """Add a node and return the name of its output: `output`, or a new one."""
        name = _make_unique(name, self._named)
        output = output or _make_unique(f"{name}_output_0", self._taken)
        self.nodes.append(
            onnx.helper.make_node(operator, inputs, [output], name=name, **attributes)
        )
        return output

    def replace(
        self,
        node: NodeProto,
        operator: str,
        inputs: Sequence[str],
        name: str,
        **attributes: Any,
    ) -> NodeProto:
        """Replace a node by another with the same outputs, and return the new one."""
        place = next(place for place, each in enumerate(self.nodes) if each is node)
        self.nodes[place] = onnx.helper.make_node(
            operator, inputs, list(node.output), name=name, **attributes
        )
        return self.nodes[place]

    def split(self, tensor: str, sizes: Sequence[int], name: str) -> list[str]:
        """Split the last axis of a tensor into parts of these sizes, and return their
        names."""
        parts = [
            _make_unique(f"{name}_output_{n}", self._taken) for n in range(len(sizes))
        ]
        self._named.add(name)
        self.nodes.append(
            onnx.helper.make_node(
                "Split", [tensor, self.integers(*sizes)], parts, name=name, axis=-1
            )
        )
        return parts

    def remove(self, node: NodeProto) -> None:
        self.nodes = [each for each in self.nodes if each is not node]

    def rename_output(self, node: NodeProto, name: str) -> str:
        """Rename the output of a node to `name`, or a similar free name, and return
        it."""
        node.output[0] = _make_unique(name, self._taken)
        return node.output[0]

    def of_type(self, operator: str) -> list[NodeProto]:
        """List the nodes of an operator."""
        return [node for node in self.nodes if node.op_type == operator]

    def attentions(self) -> list[NodeProto]:
        nodes = self.of_type(ATTENTION_OPERATOR)
        return [node for node in nodes if node.domain == OURS]

    def tokenwise(self, node: NodeProto) -> bool:
        """Check whether a node computes each token by itself, whatever the order of the
        axes before the last one: its inputs are (rows, tokens, features), or constants
        along the features."""
        varying = self.varying(node)
        if node.op_type == "MatMul":
            return varying == node.input[:1] and rank(self.value(node.input[1])) == 2
        if node.op_type == "LayerNormalization":
            alone = attribute(node, "axis", -1) == -1 and len(node.output) == 1
            return node.input[0] in varying and alone
        constants = [self.tensors[name] for name in node.input if name in self.tensors]
        flat = all(max((1, *tensor.dims[:-1])) == 1 for tensor in constants)
        return node.op_type in ELEMENTWISE and bool(varying) and flat

    def varying(self, node: NodeProto) -> list[str]:
        """List the inputs of a node that are not constants."""
        return [name for name in node.input if name and name not in self.tensors]

    def _living(self, needed: Sequence[str]) -> list[NodeProto]:
        """List the nodes that these tensors depend on, in topological order."""
        writers = self.writers()
        ordered: list[NodeProto] = []
        visited: set[int] = set()
        stack = [(writers[name], False) for name in reversed(needed) if name in writers]
        while stack:
            node, inputs_done = stack.pop()
            if inputs_done:
                ordered.append(node)
            elif id(node) not in visited:
                visited.add(id(node))
                stack.append((node, True))
                stack.extend(
                    (writers[name], False)
                    for name in reversed(node.input)
                    if name in writers
                )
        return ordered


def _make_unique(name: str, taken: set[str]) -> str:
    """Return `name`, or a similar name that is not in `taken`, and add it to
    `taken`."""
    chosen = name
    count = 1
    while chosen in taken:
        count += 1
        chosen = f"{name}.{count}"
    taken.add(chosen)
    return chosen


def find_writer(writers: Writers, name: str, operator: str) -> NodeProto | None:
    """Return the node that writes a tensor, if it is of this operator."""
    node = writers.get(name)
    return node if node is not None and node.op_type == operator else None


class MismatchError(Exception):
    """A part of a graph that does not match a pattern."""


def require(condition: bool) -> None:
    """Raise MismatchError unless a condition of a pattern holds."""
    if not condition:
        raise MismatchError


def find_all(
    pattern: Callable[[NodeProto], Found], nodes: Iterable[NodeProto]
) -> list[Found]:
    """Apply a pattern to each node; list what it finds, without mismatches."""
    found = []
    for node in nodes:
        with suppress(MismatchError):
            found.append(pattern(node))
    return found


class Wiring:
    """The writers and readers of the tensors of a graph in its present state, for
    patterns. Methods raise MismatchError if a node has another operator."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.writers = graph.writers()
        self.readers = graph.readers()

    def writer(self, name: str, operator: str) -> NodeProto:
        """Return the node that writes a tensor."""
        node = find_writer(self.writers, name, operator)
        if node is None:
            raise MismatchError
        return node

    def trace_back(self, name: str, *operators: str) -> list[NodeProto]:
        """Follow the first inputs back from a tensor: return the nodes of these
        operators."""
        nodes = list[NodeProto]()
        for operator in operators:
            nodes.append(self.writer(name, operator))
            name = nodes[-1].input[0]
        return nodes

    def reader(self, name: str, operator: str) -> NodeProto:
        """Return the only node that reads a tensor."""
        found = self.readers.get(name, [])
        require([node.op_type for node in found] == [operator])
        return found[0]

    def read_once(self, name: str) -> bool:
        return len(self.readers.get(name, ())) == 1

    def uncast(self, name: str) -> str:
        """Return the tensor of which this one is a cast."""
        while (cast := find_writer(self.writers, name, "Cast")) is not None:
            name = cast.input[0]
        return name

    def value(self, name: str) -> Array:
        value = self.graph.value(name)
        if value is None:
            raise MismatchError
        return value

    def scalar(self, name: str) -> float:
        """Return the value of a constant that holds one number other than 0."""
        value = self.graph.scalar(name)
        if not value:
            raise MismatchError
        return value


def rank(value: Array | None) -> int:
    """Return the rank of a constant; 0 for a computed tensor."""
    return 0 if value is None else value.ndim


def is_plain_gemm(node: NodeProto) -> bool:
    """Check whether a Gemm is exactly x @ W (+ b), or x @ W.T (+ b)."""
    scaled = attribute(node, "alpha", 1.0) != 1.0 or attribute(node, "beta", 1.0) != 1.0
    return not scaled and not attribute(node, "transA", 0)


def attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    """Return the value of a node's attribute."""
    return next(
        (
            onnx.helper.get_attribute_value(each)
            for each in node.attribute
            if each.name == name
        ),
        default,
    )


def set_attribute(node: NodeProto, name: str, value: Any) -> None:
    kept = [each for each in node.attribute if each.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])


FACTOR_KEY = "compress.factor"
"""The metadata key of a node that holds the factor by which a rewritten product's
output differs from the module's."""

LAYER_NUMBER = re.compile(r"(?:\w*layers?|h|blocks?)\.(\d+)")
REPEATED = re.compile(r"(.+?)_(\d+)")
"""The pattern of a module's name when the module is called again."""
OF_GEMM = "_MatMul"
"""The suffix that onnxruntime's dynamic quantiser adds to a Gemm's name when it splits
it, quantised or not."""


@dataclass(frozen=True)
class Product:
    """`output` = `reads` @ weight (+ bias).

    name     of the node
    reads    the tensor of activations
    weight   the initializer: (in, out), or (out, in) if `transposed`
    bias     the initializer that is added, as an input of the node or by the Add after
             it; None if there is none
    output   the tensor of the result, bias included
    ends     the outputs of the nodes that compute it: of the product and, if there is
             one, of the Add
    gemm     whether the node is a Gemm, which reads a matrix, not a MatMul
    """

    name: str
    reads: str
    weight: str
    transposed: bool
    bias: str | None
    output: str
    ends: tuple[str, ...]
    gemm: bool = False

    def matrix(self, weights: Mapping[str, TensorProto]) -> Floats:
        """Return the weight as (in, out)."""
        found = numpy_helper.to_array(weights[self.weight])
        return np.asarray(found.T if self.transposed else found, np.float32)


def products(source: GraphProto | Graph) -> list[Product]:
    """Find the graph's products, in its order."""
    graph = source if isinstance(source, Graph) else Graph(source)
    readers = graph.readers()
    nodes = [
        node
        for node in graph.nodes
        if node.op_type in ("Gemm", "MatMul") and graph.is_matrix(node.input[1])
    ]
    return find_all(partial(_read_product, graph, readers), nodes)


def read_factors(graph: GraphProto) -> dict[str, float]:
    """Read the factors that rewriting folded into the weights of products, by the
    product's name: the ratio of the product's output to the module's."""
    return {
        node.name: float(each.value)
        for node in graph.node
        for each in node.metadata_props
        if each.key == FACTOR_KEY
    }


def list_floats(fp32: Path, int8: Path) -> tuple[str, ...]:
    """List the products of the fp32 file that stay float32 in the int8 file made from
    it."""
    exact = {each.name for each in products(read_model(int8).graph)}
    names = [each.name for each in products(read_model(fp32).graph)]
    return tuple(name for name in names if name in exact or f"{name}{OF_GEMM}" in exact)


def layer(name: str) -> str:
    """Shorten a product's name for people:
    `/model/bert/encoder/layer.3/output/dense/MatMul` is `layer 3, output`, and ALBERT's
    `.../albert_layers.0/attention/query_2/MatMul`, the third use of a shared layer, is
    `layer 0, attention query, use 3`."""
    *parts, last = name.strip("/").split("/")[:-1] or [name]
    again = REPEATED.fullmatch(last)
    use = f", use {int(again[2]) + 1}" if again else ""
    parts = [
        part
        for part in (*parts, again[1] if again else last)
        if part not in ("dense", "self")
    ]
    for at in reversed(range(len(parts))):
        if match := LAYER_NUMBER.fullmatch(parts[at]):
            return f"layer {match[1]}, {' '.join(parts[at + 1 :]) or 'product'}{use}"
    return (" ".join(parts[2:] if len(parts) > 2 else parts[1:] or parts) or name) + use


def _read_product(graph: Graph, readers: Readers, node: NodeProto) -> Product:
    """Read a MatMul with its bias, or a Gemm. Raises MismatchError for a Gemm that is
    more than x @ W (+ b)."""
    output = node.output[0]
    weight = node.input[1]
    bias = None
    gemm = node.op_type == "Gemm"
    ends: tuple[str, ...] = (output,)
    if gemm:
        bias = node.input[2] if len(node.input) > 2 and node.input[2] else None
        require(bias is None or rank(graph.value(bias)) == 1)
        require(is_plain_gemm(node))
    else:
        after = readers.get(output, [])
        if len(after) == 1 and after[0].op_type == "Add":
            other = next((each for each in after[0].input if each != output), output)
            if other in graph.tensors and list(graph.tensors[other].dims) == [
                graph.tensors[weight].dims[1]
            ]:
                bias = other
                ends = (output, after[0].output[0])
    transposed = gemm and bool(attribute(node, "transB", 0))
    return Product(
        node.name, node.input[0], weight, transposed, bias, ends[-1], ends, gemm
    )
