"""Build ONNX graphs by arithmetic on values, like NumPy's on arrays.

    longer = (sizes_R + 1)[lines_T] > limit

adds an Add, a Gather and a Greater, and the constant 1.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from compress.exporters.session import MICROSOFT

CLASSIC = "ai.onnx.ml"
DOMAINS = {MICROSOFT: 1, CLASSIC: 2}
"""The operator sets that the graphs use in addition to ONNX's; onnxruntime's standard
builds have both."""

EVERYTHING = np.iinfo(np.int64).max

LARGE = 256
"""The fewest numbers of a table that is stored in a smaller type and cast."""

Constant = NDArray[np.generic] | Sequence[int] | Sequence[str] | int | float
Dimensions = Sequence[str | int | None]


class GraphBuilder:
    """Nodes and constants in the order in which they were added; all names begin with
    `prefix`. The body of a loop counts as deeper than the graph around it."""

    def __init__(self, prefix: str, depth: int = 0) -> None:
        self.prefix = prefix
        self.depth = depth
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self._known: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def add(
        self,
        kind: str,
        *inputs: "Operand | None",
        outputs: int = 1,
        domain: str = "",
        **attributes: Any,
    ) -> "list[Value]":
        """Add a node and return its outputs; None stands for an omitted optional input.
        `onnx.checker`, which checks every file, refuses attributes that the operator
        does not have."""
        given = [self._name(each) for each in inputs]
        name = f"{self.prefix}/{kind}_{len(self.nodes)}"
        made = [name, *(f"{name}/{index}" for index in range(1, outputs))]
        node = helper.make_node(kind, given, made, name=name, domain=domain)
        node.attribute.extend(
            helper.make_attribute(key, value) for key, value in attributes.items()
        )
        self.nodes.append(node)
        return [Value(self, each) for each in made]

    def _name(self, operand: "Operand | None") -> str:
        if operand is None:
            return ""
        return (operand if isinstance(operand, Value) else self.constant(operand)).name

    def constant(self, value: Constant) -> "Value":
        """Add a constant: integers become int64, texts strings, an array keeps its
        type; equal constants share a name."""
        array = np.asarray(value)
        if array.dtype.kind in "UO":
            texts = [text.encode() for text in array.ravel().tolist()]
            tensor = helper.make_tensor("", TensorProto.STRING, array.shape, texts)
        else:
            tensor = numpy_helper.from_array(array)
        content = tensor.SerializeToString(deterministic=True)
        key = (str(array.dtype.kind), array.shape, content)
        if key not in self._known:
            tensor.name = f"{self.prefix}/constant_{len(self.constants)}"
            self._known[key] = tensor.name
            self.constants.append(tensor)
        return Value(self, self._known[key])

    def input(
        self, name: str, kind: int = TensorProto.INT64, shape: Dimensions = (None,)
    ) -> "Value":
        """Add an input of a type and shape."""
        name = f"{self.prefix}/{name}" if self.depth else name
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return Value(self, name)

    def output(
        self,
        value: "Value",
        kind: int = TensorProto.INT64,
        shape: Dimensions = (None,),
        *,
        name: str = "",
    ) -> None:
        """Make a value an output of the graph, called `name`, if given."""
        if name:
            node = f"{self.prefix}/as_{name}"
            self.nodes.append(
                helper.make_node("Identity", [value.name], [name], name=node)
            )
        self.outputs.append(
            helper.make_tensor_value_info(name or value.name, kind, shape)
        )

    def body(self, name: str) -> "GraphBuilder":
        """Begin the body of a loop in this graph."""
        return GraphBuilder(f"{self.prefix}/{name}", self.depth + 1)

    def proto(self, name: str) -> onnx.GraphProto:
        return helper.make_graph(
            self.nodes, name, self.inputs, self.outputs, self.constants
        )

    def run(
        self, body: "GraphBuilder", *inputs: "Value | None", scan: bool = False
    ) -> "list[Value]":
        """Add the loop of a body, whose first inputs are the number of rounds and
        whether to begin; or a scan, whose last input has a row for each round. Return
        the values after the last round."""
        walk = body.proto(body.prefix.rpartition("/")[2])
        kind = "Scan" if scan else "Loop"
        name = f"{self.prefix}/{kind}_{len(self.nodes)}"
        # a loop's first output says whether to go on
        count = len(body.outputs) - (not scan)
        ends = [f"{name}/{index}" for index in range(count)]
        more: dict[str, Any] = {"num_scan_inputs": 1} if scan else {}
        given = [self._name(each) for each in inputs]
        self.nodes.append(
            helper.make_node(kind, given, ends, name=name, body=walk, **more)
        )
        return [Value(self, end) for end in ends]


class Value:
    """A tensor that a graph computes. Operations on several values are added to the
    deepest of their graphs."""

    __array_ufunc__ = None  # an array on the left leaves the operator to us

    def __init__(self, graph: GraphBuilder, name: str) -> None:
        self.graph = graph
        self.name = name

    def __add__(self, other: "Operand") -> "Value":
        return op("Add", self, other)

    def __sub__(self, other: "Operand") -> "Value":
        return op("Sub", self, other)

    def __rsub__(self, other: "Operand") -> "Value":
        return op("Sub", other, self)

    def __mul__(self, other: "Operand") -> "Value":
        return op("Mul", self, other)

    def __floordiv__(self, other: "Operand") -> "Value":
        return op("Div", self, other)

    def __mod__(self, other: "Operand") -> "Value":
        return op("Mod", self, other)

    def __and__(self, other: "Operand") -> "Value":
        return op("And", self, other)

    def __or__(self, other: "Operand") -> "Value":
        return op("Or", self, other)

    def __invert__(self) -> "Value":
        return op("Not", self)

    def __lt__(self, other: "Operand") -> "Value":
        return op("Less", self, other)

    def __le__(self, other: "Operand") -> "Value":
        return op("LessOrEqual", self, other)

    def __gt__(self, other: "Operand") -> "Value":
        return op("Greater", self, other)

    def __ge__(self, other: "Operand") -> "Value":
        return op("GreaterOrEqual", self, other)

    def __getitem__(self, places: "Value | slice") -> "Value":
        """Add the values at these indices, or of a range, of the first dimension."""
        if isinstance(places, Value):
            return op("Gather", self, places)
        first = 0 if places.start is None else places.start
        end = EVERYTHING if places.stop is None else places.stop
        edges = (each if isinstance(each, Value) else [each] for each in (first, end))
        return op("Slice", self, *edges)

    def equals(self, other: "Operand") -> "Value":
        """Add bools: whether each value equals the other one."""
        return op("Equal", self, other)

    def take(self, place: int, axis: int) -> "Value":
        """Add the values at an index of a dimension, without the dimension."""
        return op("Gather", self, place, axis=axis)

    def look_up(self, table: Constant) -> "Value":
        """Add the values of a constant table, with these numbers as indices.

        A large int64 table is stored in the smallest type that holds its numbers.
        """
        array = np.asarray(table)
        if array.dtype != np.int64 or array.size < LARGE:
            return self.graph.constant(array)[self]
        ends = map(np.min_scalar_type, (array.min(), array.max()))
        return self.graph.constant(array.astype(np.result_type(*ends)))[self].integers()

    def select(self, where_n: "Value") -> "Value":
        """Select the (n,) or (n, ...) values where the condition (n,) holds."""
        return op("Compress", self, where_n, axis=0)

    def nonzero(self) -> "Value":
        """Add the indices of the (n,) values that are not 0."""
        return op("NonZero", self).flat()

    def scatter(self, places: "Value", values: "Value", **attributes: Any) -> "Value":
        """Replace the values at these indices, or add to them with
        `reduction="add"`."""
        return op("ScatterElements", self, places, values, axis=0, **attributes)

    def shift(self, by: int, kind: type = np.int64) -> "Value":
        """Add the values of a vector, in this type, shifted by `by` places; vacated
        places hold False or 0."""
        empty: NDArray[np.generic] = np.zeros(abs(by), kind)
        return concat(empty, self)[:-by] if by > 0 else concat(self, empty)[-by:]

    def cast(self, kind: int) -> "Value":
        return op("Cast", self, to=kind)

    def integers(self) -> "Value":
        """Cast bools, or small integers, to int64."""
        return self.cast(TensorProto.INT64)

    def cumsum(self, *, axis: int = 0, exclusive: bool = False) -> "Value":
        return op("CumSum", self, axis, exclusive=int(exclusive))

    def sum(self, axis: int) -> "Value":
        return op("ReduceSum", self, [axis], keepdims=0)

    def sums(self, places: "Value", count: "Value") -> "Value":
        """Add (count,): the sum of the values with each index."""
        return full(count).scatter(places, self, reduction="add")

    def sort(self) -> "tuple[Value, Value]":
        """Add the values of a vector in ascending order, and their indices; equal
        values keep their order."""
        values, places = self.graph.add(
            "TopK", self, self.size(0), outputs=2, largest=0
        )
        return values, places

    def max(self) -> "Value":
        return op("ReduceMax", self, keepdims=0)

    def min(self) -> "Value":
        return op("ReduceMin", self, keepdims=0)

    def shape(self) -> "Value":
        return op("Shape", self)

    def size(self, axis: int) -> "Value":
        """Add (1,): one dimension."""
        return op("Gather", self.shape(), [axis])

    def reshape(self, shape: "Value") -> "Value":
        return op("Reshape", self, shape, allowzero=1)

    def flat(self) -> "Value":
        return op("Reshape", self, [-1])

    def scalar(self) -> "Value":
        return op("Reshape", self, np.empty(0, np.int64))

    def unsqueeze(self, axis: int) -> "Value":
        return op("Unsqueeze", self, [axis])


Operand = Value | Constant


def op(kind: str, *operands: Operand, domain: str = "", **attributes: Any) -> Value:
    """Add an operator with one output to the deepest graph of its operands."""
    values = [each for each in operands if isinstance(each, Value)]
    graph = max((each.graph for each in values), key=lambda each: each.depth)
    return graph.add(kind, *operands, domain=domain, **attributes)[0]


def where(condition: Value, then: Operand, other: Operand) -> Value:
    """Add the first values where the condition holds, and the second ones elsewhere."""
    return op("Where", condition, then, other)


def concat(*parts: Operand, axis: int = 0) -> Value:
    return op("Concat", *parts, axis=axis)


def columns(*vectors: Value) -> Value:
    """Add (n, vectors): (n,) vectors as columns."""
    return concat(*(vector.unsqueeze(1) for vector in vectors), axis=1)


def minimum(one: Operand, other: Operand) -> Value:
    return op("Min", one, other)


def maximum(one: Operand, other: Operand) -> Value:
    return op("Max", one, other)


def arange(count: Value) -> Value:
    """Add (count,): 0, 1, 2, ... for a (1,) count."""
    return op("Range", 0, count.scalar(), 1)


def full(shape: Value, value: int = 0) -> Value:
    """Add an int64 tensor of this shape, filled with a value."""
    filling = helper.make_tensor("value", TensorProto.INT64, [1], [value])
    return op("ConstantOfShape", shape, value=filling)
