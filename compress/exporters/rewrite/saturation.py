"""Rewrite an int8 file so that any processor computes the same as x86 processors
without VNNI.

There onnxruntime multiplies uint8 activations and int8 weights with VPMADDUBSW, which
adds the products of two neighbours, k and k + 1 with an even k, in 16 bits: a sum that
overflows saturates at the nearest 16-bit number. All later steps use 32 bits, and the
activations' zero point is subtracted last. Source: mlas, QgemmU8S8KernelAvx2,
QgemmU8X8KernelAvx512Core and QgemvU8S8KernelAvx2.

`write_exact` converts the products whose sums can overflow 16 bits to uint8 weights,
for which every processor computes exact sums. `write_saturated` then subtracts the
excess of the sums of two from each element. To keep them few, it computes only sums
that can overflow with activations up to a limit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto

from compress.arrays import Ints, Longs
from compress.exporters.rewrite.graph import (
    OF_GEMM,
    Graph,
    MismatchError,
    Wiring,
    find_all,
    require,
)
from compress.exporters.session import read_model, save_changed

INT16 = np.iinfo(np.int16)
UINT8_MOST = 255
LARGEST_CODES = "compress.largest/"
"""Prefix of the names of outputs with the largest code of each feature of a tensor of
activations."""
SATURATING = "compress.saturating/"
"""Prefix of the names of outputs with the share of a product's sums of two that
overflow 16 bits, for each token."""

Codes = Ints

OBSERVE = """
    tokens = Reshape (codes, shape)
    place = ArgMax <axis = 0> (tokens)
    largest = GatherElements <axis = 0> (tokens, place)
"""
MULTIPLY = """
    exact = MatMulInteger (codes, weights, zero, middle)
"""
EXACT = """
    sums = Identity (exact)
"""
SATURATE = """
    lowest = Constant <value_float = -32768.0> ()
    highest = Constant <value_float = 32767.0> ()
    first_axis = Constant <value_ints = [0]> ()
    numbers = Cast <to = 1> (tokens)
    features = Transpose <perm = [1, 0]> (numbers)
    first_codes = Gather <axis = 0> (features, first_places)
    first = Mul (first_codes, first_weights)
    second_codes = Gather <axis = 0> (features, second_places)
    second = Mul (second_codes, second_weights)
    both = Add (first, second)
    limited = Clip (both, lowest, highest)
    excess = Sub (both, limited)
    sign = Sign (excess)
    beyond = Abs (sign)
    count = ReduceSum <keepdims = 1> (beyond, first_axis)
    share = Div (count, all)
    integers = Cast <to = 6> (excess)
    cumulated = CumSum (integers, first_axis)
    at_start = Gather <axis = 0> (cumulated, starts)
    at_end = Gather <axis = 0> (cumulated, ends)
    difference = Sub (at_end, at_start)
    turned = Transpose <perm = [1, 0]> (difference)
    size = Shape (exact)
    total = Reshape (turned, size)
    sums = Sub (exact, total)
"""
"""Computes some of the sums of two, (sums, tokens): those of a column side by side,
after one of weight 0. The excess of a column's sums is the difference of the cumulated
excess at its end and at the end of the previous column. `all`: the number of all
sums."""
INTEGER_RESULT = """
    output = Identity (sums)
"""
FLOAT_RESULT = """
    unscaled = Cast <to = 1> (sums)
    scale = Mul (step, steps)
    scaled = Mul (unscaled, scale)
"""
BIAS_ENDINGS = {
    True: "    output = Add (scaled, bias)",
    False: "    output = Identity (scaled)",
}
"""The node after FLOAT_RESULT, with a bias and without."""


@dataclass(frozen=True)
class IntegerProduct:
    """A product of uint8 activations and constant int8 weights.

    matrix   (in, out)
    tensors  the tensors that the node reads and writes: `codes` and their `zero` point,
             `output`; for FLOAT_RESULT, the scales `step` of activations and `steps` of
             weights, and `bias`
    ending   the nodes that compute `output` of the int32 `sums`
    """

    node: NodeProto
    matrix: NDArray[np.int8]
    tensors: Mapping[str, str]
    ending: str

    @property
    def name(self) -> str:
        """Return the name of the float product that it was made from."""
        return self.node.name.removesuffix("_quant").removesuffix(OF_GEMM)

    @property
    def codes(self) -> str:
        return self.tensors["codes"]

    @cached_property
    def can_saturate(self) -> bool:
        """Return True if a sum of two can overflow 16 bits."""
        limits = np.full(len(self.matrix), UINT8_MOST)
        return len(self.find_sums(limits)) > 0

    def find_sums(self, limits: Codes) -> Longs:
        """Return (column, k) of the sums that can overflow 16 bits if no activation
        exceeds its limit, sorted."""
        terms = self.matrix.T * limits.astype(np.int32)
        odd = len(limits) % 2
        terms = np.pad(terms, ((0, 0), (0, odd)))
        pairs = terms.reshape(len(terms), -1, 2)
        most = pairs.clip(min=0).sum(2)
        least = pairs.clip(max=0).sum(2)
        saturates = (most > INT16.max) | (least < INT16.min)
        return np.argwhere(saturates) * (1, 2)


def find_integer_products(graph: Graph) -> list[IntegerProduct]:
    """Find the products of uint8 activations and constant int8 weights, in each form
    that this package or onnxruntime's quantiser writes."""
    wiring = Wiring(graph)
    readers = {
        "MatMulInteger": _read_integers,
        "MatMulIntegerToFloat": _read_floats,
        "MatMul": _read_dequantised,
        "Gemm": _read_dequantised,
    }

    def read(node: NodeProto) -> IntegerProduct:
        require(node.op_type in readers)
        return readers[node.op_type](wiring, node)

    return find_all(read, graph.nodes)


def _read_integers(wiring: Wiring, node: NodeProto) -> IntegerProduct:
    matrix = _read_matrix(wiring, node.input[1])
    tensors = _name_inputs(node, ("codes", "", "zero"))
    return IntegerProduct(node, matrix, tensors, INTEGER_RESULT)


def _read_floats(wiring: Wiring, node: NodeProto) -> IntegerProduct:
    matrix = _read_matrix(wiring, node.input[1])
    names = ("codes", "", "step", "steps", "zero", "", "bias")
    tensors = _name_inputs(node, names)
    ending = FLOAT_RESULT + BIAS_ENDINGS["bias" in tensors]
    return IntegerProduct(node, matrix, tensors, ending)


def _read_dequantised(wiring: Wiring, node: NodeProto) -> IntegerProduct:
    codes = wiring.writer(node.input[0], "DequantizeLinear")
    weights = wiring.writer(node.input[1], "DequantizeLinear")
    matrix = _read_matrix(wiring, weights.input[0])
    tensors = {
        **_name_inputs(node, ("", "", "bias")),
        **_name_inputs(codes, ("codes", "step", "zero")),
        "steps": weights.input[1],
        "output": node.output[0],
    }
    ending = FLOAT_RESULT + BIAS_ENDINGS["bias" in tensors]
    return IntegerProduct(node, matrix, tensors, ending)


def _name_inputs(node: NodeProto, names: tuple[str, ...]) -> dict[str, str]:
    """Name the inputs that a node has, and its output."""
    tensors = {"zero": "", "output": node.output[0]}
    given = zip(names, node.input, strict=False)
    return tensors | {name: tensor for name, tensor in given if tensor}


def _read_matrix(wiring: Wiring, name: str) -> NDArray[np.int8]:
    """Return a constant int8 matrix. Raises MismatchError for anything else."""
    value = wiring.value(name)
    if value.dtype != np.int8 or value.ndim != 2:
        raise MismatchError
    return value


def list_saturating(file: Path) -> list[str]:
    """List the products of a file in which a sum of two can overflow 16 bits for some
    activations."""
    graph = Graph.copy_of(read_model(file))
    found = find_integer_products(graph)
    return [product.name for product in found if product.can_saturate]


def write_exact(model: ModelProto, target: Path) -> None:
    """Write a copy of an int8 file with exact sums on every processor."""
    copy = _Copy(model)
    for product in copy.products:
        copy.replace(product, EXACT)
    copy.save(target)


def write_saturated(
    model: ModelProto,
    target: Path,
    limits: Mapping[str, Codes],
) -> None:
    """Write a copy of an int8 file that computes the same on every processor as the
    file does without VNNI, if no activation exceeds its limit (tensor -> a code for
    each feature)."""
    copy = _Copy(model)
    for product in copy.products:
        copy.put_sums(product, limits[product.codes])
        copy.replace(product, SATURATE)
        copy.outputs[SATURATING + product.name] = f"{product.name}/share"
    copy.save(target)


class _Copy:
    """A copy of an int8 file, to be changed.

    products  those of which a sum of two can leave 16 bits
    outputs   outputs besides the file's own, and the tensors that they give
    """

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        self.graph = Graph.copy_of(model)
        found = find_integer_products(self.graph)
        self.products = [product for product in found if product.can_saturate]
        self.outputs = dict[str, str]()

    def replace(self, product: IntegerProduct, sums: str) -> None:
        """Compute a product exactly, then `sums` of it, and observe what it reads."""
        put = self.graph.put
        where = product.name
        middle = np.uint8(128)
        put(f"{where}/weights", product.matrix.view(np.uint8) + middle)
        put(f"{where}/middle", np.asarray(middle))
        put(f"{where}/shape", np.array([-1, len(product.matrix)]))
        text = OBSERVE + MULTIPLY + sums + product.ending
        self.graph.remove(product.node)
        for line in text.split("\n"):
            if line:
                self._add(line, where, product.tensors)
        self.outputs[LARGEST_CODES + product.codes] = f"{where}/largest"

    def _add(
        self,
        line: str,
        where: str,
        tensors: Mapping[str, str],
    ) -> None:
        """Add a node in ONNX's own syntax; tensors of other names are its own."""
        node = onnx.parser.parse_node(line)
        for names in (node.input, node.output):
            names[:] = [tensors.get(name, f"{where}/{name}") for name in names]
        self.graph.nodes.append(node)

    def put_sums(self, product: IntegerProduct, limits: Codes) -> None:
        """Add the constants of SATURATE."""
        put = self.graph.put
        where = product.name
        height, width = product.matrix.shape
        columns, rows = product.find_sums(limits).T
        self._put_terms(f"{where}/first", product, rows, columns)
        self._put_terms(f"{where}/second", product, rows + 1, columns)
        boundaries = np.arange(-1, width)
        ends = np.searchsorted(columns, boundaries, side="right")
        put(f"{where}/starts", ends[:-1])
        put(f"{where}/ends", ends[1:])
        sums = (height + 1) // 2 * width
        put(f"{where}/all", np.array(sums, np.float32))

    def _put_terms(
        self,
        where: str,
        product: IntegerProduct,
        rows: Longs,
        columns: Longs,
    ) -> None:
        """Add the positions and weights of one term of each sum, after a first one of
        weight 0."""
        places = np.append(0, rows)
        chosen = product.matrix[rows, columns]
        weights = np.append(0, chosen)
        self.graph.put(f"{where}_places", places)
        self.graph.put(f"{where}_weights", weights.astype(np.float32)[:, None])

    def save(self, target: Path) -> None:
        for name, tensor in self.outputs.items():
            self.graph.add("Identity", [tensor], name, output=name)
        self.graph.outputs += tuple(self.outputs)
        made = self.graph.model(self.model)
        infos = map(onnx.helper.make_empty_tensor_value_info, self.outputs)
        made.graph.output.extend(infos)
        save_changed(made, target)
