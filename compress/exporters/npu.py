"""Write graphs for neural processors: one row of a fixed number of tokens, every value
in 8 or 16 bits.

    prepare   the fp32 file of dynamic shape -> the same in operators of an NPU (GELU as
              one)
    fix       -> one row of a fixed number of tokens, int32 ids; shapes are constants
    quantize  -> QuantizeLinear and DequantizeLinear around every operator (QDQ)

Weights are int8, symmetric, a scale per output; embedding tables uint8 with one scale;
activations uint16, or uint8 in the `narrow` operators. Operators that only move data
keep the scale of their input. There are no integer operators (no MatMulInteger, no
DynamicQuantizeLinear): the execution provider finds them in the QDQ pattern.

A mask of -1e4 would take nearly all of the range of the scores it is added to,
float32's lowest number all of it (microsoft/winml-cli#179). So it is as small as
possible: the widest range of scores and NPU_MARGIN, which leaves a masked token
exp(-NPU_MARGIN) of the least of the others; and scores are clipped NPU_MARGIN below the
calibrated minimum.
"""

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper

from compress.arrays import Array, Floats
from compress.errors import ExportError
from compress.exporters.int8 import (
    PRECISION_KEY,
    Ranges,
    finest_scale,
    quantise_bias,
    quantise_matrix,
)
from compress.exporters.onnx import MASKED_SCORE
from compress.exporters.rewrite.forms import Form
from compress.exporters.rewrite.graph import Graph, Product, attribute, products
from compress.exporters.session import (
    MICROSOFT,
    UNOPENED,
    create_session,
    expose,
    read_model,
    runtime_reason,
    save_changed,
    session_options,
)

FORM = Form(tokens_first=False, masked_keys=False)
"""The form of the graph to prepare: rows first, and the mask on the scores, as it would
widen the range of the keys."""
NPU_MARGIN = 12.0
MOVES = frozenset(
    (
        "Expand",
        "Flatten",
        "Gather",
        "GatherElements",
        "Identity",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    )
)
"""Operators that only move data."""
ONE_TYPE = frozenset(("Add", "Concat", "CumSum", "Equal", "Mul", "Sub", "Where"))
"""Operators whose integers must all have the same type."""
LEAST_RANGE = 1e-4


def prepare(source: Path, target: Path) -> None:
    """Write the fp32 file `source` with GELU as one operator, so that only its result
    needs a range."""
    from onnxruntime.quantization.fusions import FusionGelu
    from onnxruntime.quantization.onnx_model import ONNXModel

    model = read_model(source)
    model = Graph.copy_of(model).model(model)
    FusionGelu(ONNXModel(model)).apply()
    graph = Graph(model.graph)
    graph.prune()  # which also sorts the new nodes in
    graph.store()
    save_changed(model, target)


def fix(source: Path, target: Path, tokens: int) -> None:
    """Write the fp32 file `source` for one row of `tokens` tokens: its inputs are int32
    (1, tokens), and everything that depends on sizes alone becomes a constant. Raises
    ExportError if onnxruntime cannot run it at that length."""
    model = read_model(source)
    for value in (*model.graph.input, *model.graph.output):
        for at, size in enumerate(value.type.tensor_type.shape.dim):
            if size.dim_param:
                size.dim_value = tokens if at == 1 else 1
    graph = Graph(model.graph)
    constant = _find_constant(graph)
    names = [
        name
        for node in graph.nodes
        if set(node.output) <= constant
        for name in node.output
    ]
    for name, value in zip(names, _evaluate(model, names, tokens, source), strict=True):
        graph.put(name, value)
    graph.nodes = [node for node in graph.nodes if not set(node.output) <= constant]
    for value in model.graph.input:
        value.type.tensor_type.elem_type = TensorProto.INT32
    _use_int32(graph)
    graph.prune()
    graph.store()
    save_changed(model, target)


def _evaluate(
    model: onnx.ModelProto,
    names: list[str],
    tokens: int,
    source: Path,
) -> list[Array]:
    """Compute tensors that do not depend on the ids."""
    if not names:
        return []
    feeds = {each.name: np.ones((1, tokens), np.int64) for each in model.graph.input}
    exposed = expose(model, names).SerializeToString()
    session = create_session(exposed, session_options(1, {}), source)
    try:
        return list(session.run(names, feeds))
    except UNOPENED as error:
        raise ExportError(
            f"{source}: cannot be run on {tokens} tokens: {runtime_reason(error)}"
        ) from None


def _use_int32(graph: Graph) -> None:
    """Turn the integers that are computed with the ids into int32, the type of the
    ids."""
    for node in graph.nodes:
        if node.op_type == "Cast" and attribute(node, "to") == TensorProto.INT64:
            del node.attribute[:]
            node.attribute.append(helper.make_attribute("to", TensorProto.INT32))
        wanted: Sequence[str] = ()
        if node.op_type in ONE_TYPE:
            wanted = node.input
        elif node.op_type.startswith("Gather"):
            wanted = node.input[1:2]
        for at, name in enumerate(node.input):
            value = graph.value(name) if name in wanted else None
            if value is not None and value.dtype == np.int64:
                node.input[at] = graph.constant(value.astype(np.int32), f"{name}_int32")


def find_mask(
    model: onnx.ModelProto,
    name: str = "the model",
) -> tuple[str, list[tuple[str, str]]]:
    """Find the mask, and the (scores, masked scores) of every attention.

    Raises ExportError, naming the model `name`, for attention that masks in another
    way, whose range is unknown.
    """
    graph = Graph(model.graph)
    masks = {node.output[0] for node in graph.nodes if _makes_mask(graph, node)}
    sums = [node for node in graph.of_type("Add") if masks & set(node.input)]
    softmaxes = {node.input[0] for node in graph.of_type("Softmax")}
    if (
        len(masks) != 1
        or not softmaxes
        or softmaxes != {node.output[0] for node in sums}
    ):
        raise ExportError(
            f"{name} hides padding in another way than by a mask added to the scores "
            "of its attention; NPU files can be made for BERT, DistilBERT, RoBERTa, "
            "ELECTRA, ALBERT and MobileBERT. --for onnx and --for ort support every "
            "family"
        )
    return masks.copy().pop(), [
        (next(each for each in node.input if each not in masks), node.output[0])
        for node in sums
    ]


def _makes_mask(graph: Graph, node: NodeProto) -> bool:
    return node.op_type == "Mul" and any(
        graph.scalar(name) == MASKED_SCORE for name in node.input
    )


def bound_mask(
    model: onnx.ModelProto,
    ranges: Ranges,
    mask: str,
    scores: Collection[tuple[str, str]],
) -> Ranges:
    """Bound the mask, in place, and return the ranges, including those of the mask and
    of the masked scores. `ranges` come from rows without padding."""
    widest = max(
        (high - low for low, high in (ranges[name] for name, _ in scores)), default=0.0
    )
    least = -math.ceil(widest + NPU_MARGIN)
    graph = Graph(model.graph)
    for node in graph.nodes:
        if _makes_mask(graph, node):
            at = next(
                at
                for at, name in enumerate(node.input)
                if graph.scalar(name) == MASKED_SCORE
            )
            node.input[at] = graph.constant(np.array(least, np.float32), "bounded_mask")
    graph.store()
    masked = {
        made: (ranges[read][0] - NPU_MARGIN, ranges[read][1]) for read, made in scores
    }
    sources = dict.fromkeys(_find_sources(graph, mask), (0.0, 1.0))
    return {**ranges, **masked, **sources, mask: (float(least), 0.0)}


def _find_sources(graph: Graph, name: str) -> set[str]:
    """Find all computed tensors that a tensor depends on."""
    writers = graph.writers()
    found = set[str]()
    waiting = [name]
    while waiting:
        node = writers.get(waiting.pop())
        new = (
            set()
            if node is None
            else {each for each in node.input if each in writers} - found
        )
        found |= new
        waiting += new
    return found


def activations(source: Path) -> list[str]:
    """List the float tensors of a file that depend on the ids, in the graph's order."""
    model = read_model(source)
    graph = Graph(model.graph)
    constant = _find_constant(graph)
    types = _infer_types(model)
    outputs = (name for node in graph.nodes for name in node.output)
    return [
        name
        for name in outputs
        if name not in constant and types.get(name) == TensorProto.FLOAT
    ]


def _find_constant(graph: Graph) -> set[str]:
    """Find the tensors that depend on constants and sizes alone."""
    found = set(graph.tensors)
    for node in graph.nodes:
        if node.op_type == "Shape" or all(name in found for name in node.input if name):
            found.update(node.output)
    return found


def _infer_types(model: onnx.ModelProto) -> dict[str, int]:
    """Infer the element type of each tensor. GELU, which opset 17 does not have, keeps
    the type of its input."""
    copied = copy.deepcopy(model)
    for node in copied.graph.node:
        if node.domain == MICROSOFT:
            node.op_type = "Identity"
            node.domain = ""
    found = onnx.shape_inference.infer_shapes(copied).graph
    values = (*found.value_info, *found.input, *found.output)
    return {value.name: value.type.tensor_type.elem_type for value in values}


@dataclass(frozen=True)
class Scale:
    """The values of the codes 0 to 2**bits - 1: (code - zero) x step."""

    step: np.float32
    zero: int
    bits: int

    @staticmethod
    def from_range(low: float, high: float, bits: int) -> "Scale":
        """Choose the scale of low..high, with 0 represented exactly."""
        low = min(low, 0.0)
        high = max(high, 0.0)
        step = np.float32(max(high - low, LEAST_RANGE) / (2**bits - 1))
        return Scale(step, int(np.clip(np.rint(-low / step), 0, 2**bits - 1)), bits)

    def to(self, bits: int) -> "Scale":
        """Choose the scale of the same range for another number of bits."""
        step = float(self.step)
        most = 2**self.bits - 1 - self.zero
        return (
            self
            if bits == self.bits
            else Scale.from_range(-self.zero * step, most * step, bits)
        )

    def codes(self, values: Array) -> Array:
        """Quantise values."""
        return np.clip(
            np.rint(values / self.step) + self.zero, 0, 2**self.bits - 1
        ).astype(self.dtype)

    @property
    def dtype(self) -> Any:
        return np.uint8 if self.bits == 8 else np.uint16


SQUASHED: Mapping[str, tuple[int, int]] = {"Sigmoid": (0, 0), "Tanh": (1, 1)}
"""Operators whose scale the HTP prescribes: a step of 2**(first - bits), zero at the
middle code where second is 1."""


def quantize(
    source: Path,
    target: Path,
    ranges: Ranges,
    *,
    precision: str,
    narrow: Collection[str] = (),
) -> None:
    """Write the fp32 file `source` of fixed length in QDQ to `target`.

    ranges     of all activations: see `activations`
    precision  for the file's metadata
    narrow     names of the operators whose activations are uint8; the others' are
               uint16

    Raises ExportError for an activation without a range.
    """
    model = read_model(source)
    _Writer(model, ranges, narrow).rewrite()
    save_changed(model, target, {PRECISION_KEY: precision})


class _Writer:
    """Rewrites a graph; the dequantised tensors keep the names of the float ones.

    scales  the scales of the float activations so far; `done`: tensors whose nodes are
            written already
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        ranges: Ranges,
        narrow: Collection[str],
    ) -> None:
        self.graph = Graph(model.graph)
        self.ranges = ranges
        self.narrow = narrow
        self.types = _infer_types(model)
        self.products: Mapping[str, Product] = {
            each.ends[0]: each for each in products(self.graph)
        }
        self.nodes: list[NodeProto] = []
        self.scales: dict[str, Scale] = {}
        self.done: set[str] = set()

    def rewrite(self) -> None:
        lookups = {node.output[0] for node in self.graph.lookups()}
        for node in self.graph.nodes:
            if node.output[0] in lookups:
                self._look_up(node)
            elif any(self._is_float(name) for name in (*node.input, *node.output)):
                self._operate(node)
            else:
                self.nodes.append(node)
        self.graph.nodes = self.nodes
        self.graph.store()

    def _is_float(self, name: str) -> bool:
        tensor = self.graph.tensors.get(name)
        return (
            self.types.get(name) if tensor is None else tensor.data_type
        ) == TensorProto.FLOAT

    def _operate(self, node: NodeProto) -> None:
        """Write an operator between its dequantised inputs and the quantisation of its
        outputs."""
        moved = self.scales.get(node.input[0]) if node.op_type in MOVES else None
        bits = 8 if node.name in self.narrow else 16
        if moved:
            bits = moved.bits
        product = self.products.get(node.output[0])
        written = list(node.output)
        if product is None:
            node.input[:] = [
                self._read(name, bits) if self._is_float(name) else name
                for name in node.input
            ]
        else:
            matrix, scales = self._weight(product, bits)
            bias = (
                [self._bias(product, scales, bits)]
                if product.gemm and product.bias
                else []
            )
            node.input[:] = [self._read(product.reads, bits), matrix, *bias]
            del node.attribute[:]  # of a Gemm: its weight is (in, out) now
        node.output[:] = [
            f"{name}_exact" if self._is_float(name) else name for name in written
        ]
        self.nodes.append(node)
        for exact, name in zip(node.output, written, strict=True):
            if exact != name:
                scale = moved or self._scale(name, bits, node.op_type)
                self.scales[name] = scale
                self._requantise(exact, name, scale)

    def _scale(self, name: str, bits: int, operator: str = "") -> Scale:
        if operator in SQUASHED:
            power, half = SQUASHED[operator]
            return Scale(
                np.float32(2.0 ** (power - bits)), half * 2 ** (bits - 1), bits
            )
        if name not in self.ranges:
            raise ExportError(
                f"no range for {name}; calibrate the file that was given to `fix`"
            )
        return Scale.from_range(*self.ranges[name], bits)

    def _read(self, name: str, bits: int) -> str:
        """Return the name of a tensor's values quantised to this number of bits."""
        if name in self.graph.tensors:
            return self._constant(name, bits)
        if name not in self.scales:
            raise ExportError(
                f"{name}: is a float input of the file; expected integer inputs"
            )
        if self.scales[name].bits == bits:
            return name
        other = f"{name}_{bits}"
        if other not in self.done:
            self.done.add(other)
            self._requantise(name, other, self.scales[name].to(bits))
        return other

    def _constant(self, name: str, bits: int) -> str:
        made = f"{name}_{bits}"
        if made not in self.done:
            self.done.add(made)
            values = self.graph.array(name)
            scale = Scale.from_range(float(values.min()), float(values.max()), bits)
            self.graph.put(f"{made}_codes", scale.codes(values))
            self._dequantise(f"{made}_codes", made, *self._put(made, scale))
        return made

    def _weight(self, product: Product, bits: int) -> tuple[str, str]:
        """Return the names of the int8 weight, dequantised, and its scales; layers that
        share a weight share these."""
        made = f"{product.weight}_weight"
        scales = f"{product.weight}_step"
        if made not in self.done:
            self.done.add(made)
            finest: Floats | float = 0.0
            if product.bias is not None:
                bias = self.graph.array(product.bias)
                finest = finest_scale(bias, self.scales[product.reads].to(bits).step)
            codes, steps = quantise_matrix(
                product.matrix(self.graph.tensors),
                per_channel=True,
                full_range=True,
                finest=finest,
            )
            self.graph.put(f"{made}_codes", codes)
            self.graph.put(scales, steps)
            self.graph.put(f"{made}_zero", np.zeros_like(steps, np.int8))
            self._dequantise(f"{made}_codes", made, scales, f"{made}_zero", axis=1)
        return made, scales

    def _bias(self, product: Product, scales: str, bits: int) -> str:
        """Return the name of the int32 bias, dequantised."""
        assert product.bias is not None
        made = f"{product.name}_bias"
        read = self.scales[product.reads].to(bits)
        steps = np.asarray(read.step * self.graph.array(scales), np.float32)
        self.graph.put(
            f"{made}_codes",
            quantise_bias(self.graph.array(product.bias), steps),
        )
        self.graph.put(f"{made}_step", steps)
        self.graph.put(f"{made}_zero", np.zeros_like(steps, np.int32))
        self._dequantise(f"{made}_codes", made, f"{made}_step", f"{made}_zero", axis=0)
        return made

    def _look_up(self, node: NodeProto) -> None:
        """Look up rows of a table in uint8."""
        (table, ids) = node.input
        made = node.output[0]
        values = self.graph.array(table)
        scale = Scale.from_range(float(values.min()), float(values.max()), 8)
        node.input[:] = [self._constant(table, 8), ids]
        node.output[:] = [f"{made}_exact"]
        self.nodes.append(node)
        self.scales[made] = scale
        self._requantise(node.output[0], made, scale)

    def _put(self, made: str, scale: Scale) -> tuple[str, str]:
        self.graph.put(f"{made}_step", np.asarray(scale.step))
        self.graph.put(f"{made}_zero", np.asarray(scale.zero, scale.dtype))
        return f"{made}_step", f"{made}_zero"

    def _requantise(self, name: str, made: str, scale: Scale) -> None:
        step, zero = self._put(made, scale)
        self._add(
            "QuantizeLinear", [name, step, zero], f"{made}_codes", f"{made}_quantize"
        )
        self._dequantise(f"{made}_codes", made, step, zero)

    def _dequantise(
        self, codes: str, made: str, step: str, zero: str, **axis: Any
    ) -> None:
        self._add(
            "DequantizeLinear", [codes, step, zero], made, f"{made}_dequantize", **axis
        )

    def _add(
        self, operator: str, inputs: list[str], output: str, name: str, **axis: Any
    ) -> None:
        self.nodes.append(
            helper.make_node(
                operator, inputs, [output], name=name, domain=MICROSOFT, **axis
            )
        )
