"""Quantise only the weights, to int8 or int4: the file shrinks, activations keep their
range. This saves space if full int8 costs too much score.

Weights are quantised in blocks along the inner dimension, each block with a scale (and,
in 4 bits, a zero point) of its own, and expanded where they are used: matrix products
by `MatMulNBits`, embedding tables by `GatherBlockQuantized`, both contrib operators of
onnxruntime (domain com.microsoft). A weight that several nodes read is stored once, as
is a table whose transpose is the weight of a product.

4-bit weights are multiplied in float32. With 8 bits, onnxruntime's float32 kernel takes
twice the time of the fp32 file, so it may round activations too, to int8 with a scale
per block, which is faster (TinyBERT 4 x 312, 64 tokens, 1 thread, x86-64 with VNNI,
onnxruntime 1.31, fastest of 450 runs: fp32 3.0 ms, 8 bits 6.4 ms, with rounded
activations 2.4 ms, dynamic int8 1.3 ms; 4 bits 3.3 ms either way).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from compress.arrays import Floats
from compress.errors import ExportError
from compress.exporters.int8 import PRECISION_KEY
from compress.exporters.rewrite.graph import Graph, attribute, is_plain_gemm
from compress.exporters.session import MICROSOFT, read_model, save_changed

SMALL_WEIGHT = 2**12
"""Weights with fewer numbers stay float32: token types and the outputs of a classifier
matter a lot and take no space."""

QUANTISED_BLOCKS = {8: (32, 64, 128), 4: (32,)}
"""Block sizes to choose from, by bits; for 8 bits the one with the smallest file, as
all are exact enough."""

ACCURACY = {8: 4, 4: 0}
"""`accuracy_level` of MatMulNBits by bits; 4: activations may be int8, 0: they are not
rounded."""

Bits = Literal[8, 4]


@dataclass(frozen=True)
class Packed:
    """A matrix (rows N, columns K), quantised along its columns.

    numbers_NC  uint8, `bits` per number, the low half of a byte first, the columns
                padded to whole blocks
    scales_NB, zeros_NC   one per block; zeros are packed like the numbers, or None if
                          every zero point is the middle
    """

    numbers_NC: NDArray[np.uint8]
    scales_NB: Floats
    zeros_NC: NDArray[np.uint8] | None
    columns: int
    block: int
    bits: Bits

    def parts(self, key: str) -> list[str]:
        """Name the constants that are stored with the numbers."""
        return [f"{key}.scales", *([] if self.zeros_NC is None else [f"{key}.zeros"])]


def pack(weight_NK: Floats, bits: Bits) -> Packed:
    """Quantise to the nearest number. 8 bits: w = (q - 128) s with s = max |w| / 127. 4
    bits: w = (q - z) s, where one number represents 0 exactly and the other 15 span the
    block's range, 0 included."""
    rows, columns = weight_NK.shape
    block = min(
        QUANTISED_BLOCKS[bits],
        key=lambda size: -(-columns // size) * (size * bits // 8 + 4),
    )
    count = -(-columns // block)
    blocks_NBK = np.pad(weight_NK, ((0, 0), (0, count * block - columns))).reshape(
        rows, count, block
    )
    if bits == 8:
        spans_NB = np.abs(blocks_NBK).max(-1) / 127
        zeros_NB = np.full((rows, count), 128.0, np.float32)
    else:
        low_NB = np.minimum(blocks_NBK.min(-1), 0)
        high_NB = np.maximum(blocks_NBK.max(-1), 0)
        spans_NB = (high_NB - low_NB) / 15
        zeros_NB = np.rint(-low_NB / np.where(spans_NB > 0, spans_NB, 1))
    scales_NB = np.where(spans_NB > 0, spans_NB, 1).astype(np.float32)
    found_NBK = np.rint(blocks_NBK / scales_NB[..., None]) + zeros_NB[..., None]
    numbers_NK = np.clip(found_NBK, 0, 2**bits - 1).astype(np.uint8).reshape(rows, -1)
    if bits == 8:
        return Packed(numbers_NK, scales_NB, None, columns, block, bits)
    return Packed(
        _nibbles(numbers_NK),
        scales_NB,
        _nibbles(zeros_NB.astype(np.uint8)),
        columns,
        block,
        bits,
    )


def quantize_weights(source: Path, target: Path, *, bits: Bits) -> None:
    """Write the fp32 ONNX file `source` with its weights in `bits` bits to `target`.

    Raises ExportError for a file that cannot be read or has no weights to quantise.
    """
    model = read_model(source)
    writer = _WeightOnly(Graph(model.graph), bits)
    writer.rewrite()
    if not writer.packed:
        raise ExportError(
            f"{source}: no constant matrix of {SMALL_WEIGHT} numbers or more was found "
            "to quantise; expected the fp32 file that to_onnx writes"
        )
    save_changed(model, target, {PRECISION_KEY: "w8" if bits == 8 else "q4"})


class _WeightOnly:
    """Rewrites a graph.

    packed      name of a weight -> the weight, quantised
    transposed  output of a Transpose of a constant -> the constant
    lookups     output of a lookup -> the table
    """

    def __init__(self, graph: Graph, bits: Bits) -> None:
        self.graph = graph
        self.bits = bits
        self.packed: dict[str, Packed] = {}
        self.transposed = {
            node.output[0]: node.input[0]
            for node in graph.of_type("Transpose")
            if node.input[0] in graph.tensors
        }
        self.lookups = {
            node.output[0]: node.input[0]
            for node in graph.lookups()
            if self._large(node.input[0])
        }

    def rewrite(self) -> None:
        nodes: list[onnx.NodeProto] = []
        for node in self.graph.nodes:
            if node.output[0] in self.lookups:
                nodes += self._lookup(node)
            elif (
                node.op_type in ("MatMul", "Gemm")
                and (found := self._weight(node)) is not None
            ):
                nodes += self._product(node, *found)
            else:
                nodes.append(node)
        read = {name for node in nodes for name in node.input} | set(self.graph.outputs)
        # without Transpose nodes that are no longer used
        self.graph.nodes = [node for node in nodes if read & set(node.output)]
        self.graph.store()

    def _large(self, name: str) -> bool:
        return (
            self.graph.is_matrix(name)
            and math.prod(self.graph.tensors[name].dims) >= SMALL_WEIGHT
        )

    def _weight(self, node: onnx.NodeProto) -> tuple[str, bool] | None:
        """Find the constant that a product multiplies by, and whether its rows are the
        outputs; None for other products."""
        if node.op_type == "Gemm" and not is_plain_gemm(node):
            return None
        name = node.input[1]
        rows_are_outputs = bool(attribute(node, "transB", 0))
        if name in self.transposed:
            name = self.transposed[name]
            rows_are_outputs = not rows_are_outputs
        return (name, rows_are_outputs) if self._large(name) else None

    def _lookup(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        table = node.input[0]
        output = node.output[0]
        packed = self._pack(table, self.graph.array(table), blocked=False)
        padded = packed.block * packed.scales_NB.shape[1] != packed.columns
        yield helper.make_node(
            "GatherBlockQuantized",
            [f"{table}.numbers", node.input[1], *packed.parts(table)],
            [f"{output}.padded" if padded else output],
            node.name,
            domain=MICROSOFT,
            bits=self.bits,
            block_size=packed.block,
            gather_axis=0,
            quantize_axis=1,
        )
        if padded:
            for name, value in (("start", 0), ("end", packed.columns), ("axis", -1)):
                self.graph.put(f"{output}.{name}", np.array([value]))
            names = [f"{output}.{name}" for name in ("padded", "start", "end", "axis")]
            yield helper.make_node("Slice", names, [output], f"{node.name}.columns")

    def _product(
        self, node: onnx.NodeProto, name: str, rows_are_outputs: bool
    ) -> Iterator[onnx.NodeProto]:
        array = self.graph.array(name)
        weight_NK = array if rows_are_outputs else array.T
        table = self._same_table(weight_NK)
        key = table or (name if rows_are_outputs else f"{name}.T")
        packed = self._pack(key, weight_NK, blocked=table is None)
        numbers = f"{key}.numbers"
        if table is not None:
            numbers = f"{node.output[0]}.weight"
            self.graph.put(
                f"{numbers}.shape",
                np.array((*packed.scales_NB.shape, packed.block * self.bits // 8)),
            )
            yield helper.make_node(
                "Reshape",
                [f"{key}.numbers", f"{numbers}.shape"],
                [numbers],
                f"{node.name}.weight",
            )
        bias = node.input[2] if len(node.input) > 2 else ""
        product = f"{node.output[0]}.product" if bias else node.output[0]
        yield helper.make_node(
            "MatMulNBits",
            [node.input[0], numbers, *packed.parts(key)],
            [product],
            node.name,
            domain=MICROSOFT,
            K=packed.columns,
            N=len(weight_NK),
            bits=self.bits,
            block_size=packed.block,
            accuracy_level=ACCURACY[self.bits],
        )
        if bias:
            yield helper.make_node(
                "Add", [product, bias], [node.output[0]], f"{node.name}.bias"
            )

    def _pack(self, key: str, weight_NK: Floats, *, blocked: bool) -> Packed:
        """Quantise the weight, and store it at its first use; `blocked`: with the three
        axes that a product reads."""
        if key not in self.packed:
            packed = self.packed[key] = pack(weight_NK, self.bits)
            shape = (*packed.scales_NB.shape, -1) if blocked else (len(weight_NK), -1)
            self.graph.put(f"{key}.numbers", packed.numbers_NC.reshape(shape))
            self.graph.put(f"{key}.scales", packed.scales_NB)
            if packed.zeros_NC is not None:
                self.graph.put(f"{key}.zeros", packed.zeros_NC)
        return self.packed[key]

    def _same_table(self, weight_NK: Floats) -> str | None:
        """Find the table that a product's weight copies: the exporter folds the
        transpose of a tied table."""
        for name in self.lookups.values():
            same_shape = tuple(self.graph.tensors[name].dims) == weight_NK.shape
            if same_shape and np.array_equal(self.graph.array(name), weight_NK):
                return name
        return None


def _nibbles(numbers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack two numbers per byte along the last axis, the first in the low half."""
    even = np.pad(numbers, ((0, 0), (0, numbers.shape[1] % 2)))
    return (even[:, 0::2] | even[:, 1::2] << 4).astype(np.uint8)
