"""Make int8 ONNX files from fp32 ones.

    dynamic  weights stored as int8, activations quantised at run time: no calibration
             data is needed
    static   activations are quantised with fixed scales, from calibration or from
             training; in two forms:
      fused  the fastest in onnxruntime on a CPU: QuantizeLinear, once for all products
             that read a tensor, and com.microsoft's MatMulIntegerToFloat, which
             multiplies, scales and adds the bias in one operator
      qdq    QuantizeLinear and DequantizeLinear around float products, as OpenVINO,
             TensorRT and mobile runtimes read them

In a static file activations are uint8 with one scale and zero point per tensor, weights
int8, symmetric; embedding tables uint8, one scale and zero point each, as in
`quantize_dynamic`.

By default a file gives the same sums on every processor. x86 processors with AVX2 or
AVX-512 but without VNNI add the products of two neighbours, rows k and k + 1 of the
weight with an even k, in 16 bits, where they saturate. The scale of a column is
therefore chosen such that no two neighbours of the same sign add up to more than 128:
128 x 255 is less than 2^15. With `full_range`, its largest weight is 127, for
processors with exact sums: x86 with VNNI, and ARM."""

import logging
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime.quantization
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from compress.arrays import Array, Floats
from compress.errors import ExportError, did_you_mean, first_reason
from compress.exporters.codebook import pack_tables
from compress.exporters.rewrite.graph import (
    Graph,
    Product,
    attribute,
    products,
    read_factors,
)
from compress.exporters.rewrite.saturation import find_integer_products
from compress.exporters.session import (
    MICROSOFT,
    check_opset,
    declare_microsoft,
    inherit_metadata,
    read_model,
    save_changed,
)
from compress.io import atomic_file, name_disk_errors

PRECISION_KEY = "compress.precision"
Int8Form = Literal["fused", "qdq"]
LearnedRanges = Mapping[str, Sequence[float]]
Ranges = Mapping[str, tuple[float, float]]
"""Tensor -> the lowest and highest value that it takes."""


def quantize_dynamic(
    source: Path,
    target: Path,
    *,
    per_channel: bool = True,
    keep: Sequence[str] = (),
    full_range: bool = False,
) -> None:
    """Write the fp32 ONNX file `source` as int8 to `target`: a quarter of the size.

    Weights of matrix products become symmetric int8, one scale per output channel
    (`per_channel`) or per matrix; embedding tables uint8 with one scale and zero point
    each. Products of two activations (queries x keys, probabilities x values) stay
    float32: quantising them too is slower. Activations get one uint8 scale per tensor
    and run, so a row's logits depend slightly on its batch and padding, and on the
    processor. `keep` names nodes that stay float32. Raises ExportError for a file that
    cannot be read, has other operators than ONNX and onnxruntime, or has no float32
    weights to quantise.
    """
    file = read_model(source)
    graph = Graph(file.graph)
    known = {node.domain for node in graph.nodes} <= {"", MICROSOFT}
    if not (known and (products(graph) or graph.lookups())):
        raise ExportError(
            f"{source}: no matrix product or table of constant float32 weights was "
            "found to quantise; expected the fp32 file that to_onnx writes"
        )
    properties = inherit_metadata(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    # onnxruntime writes next to its input, and leaves files behind if it fails: hence a
    # temporary folder
    with (
        tempfile.TemporaryDirectory(
            dir=target.parent, prefix=f".{target.name}."
        ) as scratch,
        atomic_file(target) as partial,
    ):
        raw = Path(scratch) / "raw.onnx"
        onnx.save_model(file, raw)
        try:
            with name_disk_errors(target), _silence_root_logger():
                onnxruntime.quantization.quantize_dynamic(
                    raw,
                    partial,
                    per_channel=per_channel,
                    # the name that it gives to a Gemm
                    nodes_to_exclude=[*keep, *(f"{name}_MatMul" for name in keep)],
                    extra_options={"MatMulConstBOnly": True},
                )
        except (AssertionError, RuntimeError, ValueError) as error:
            # onnxruntime asserts that weights are numbers
            raise ExportError(
                f"{source}: cannot be quantised ({first_reason(error)}); use the fp32 "
                "file"
            ) from error
        small = onnx.load_model(partial)
        if not full_range:
            _fit_neighbours(small.graph, file.graph, per_channel=per_channel)
        pack_tables(Graph(small.graph))
        onnx.helper.set_model_props(small, {**properties, PRECISION_KEY: "int8"})
        onnx.save_model(small, partial)


def _fit_neighbours(
    small: onnx.GraphProto,
    exact: onnx.GraphProto,
    *,
    per_channel: bool,
) -> None:
    """Round the weights of a graph that onnxruntime has quantised from `exact` again,
    such that no sum of two products overflows 16 bits."""
    graph = Graph(small)
    weights = Graph(exact).tensors
    nodes = {node.name: node for node in exact.node}
    for made in find_integer_products(graph):
        source = nodes[made.name]
        matrix = numpy_helper.to_array(weights[source.input[1]])
        if attribute(source, "transB", 0):
            matrix = matrix.T
        codes, scales = quantise_matrix(matrix, per_channel=per_channel)
        rounded = made.node.input[1]
        step = f"{rounded.removesuffix('_quantized')}_scale"
        graph.put(rounded, codes)
        graph.put(step, scales.reshape(graph.tensors[step].dims))
    graph.store()


@contextmanager
def _silence_root_logger() -> Iterator[None]:
    """Drop the records of the root logger: there, onnxruntime asks for a pre-processing
    that would fuse the graph, lists integer tensors that it rightly leaves unchanged,
    and installs a handler if there is none."""
    root = logging.getLogger()
    handler = logging.NullHandler()

    def not_root(record: logging.LogRecord) -> bool:
        return record.name != root.name

    root.addHandler(handler)
    root.addFilter(not_root)
    try:
        yield
    finally:
        root.removeFilter(not_root)
        root.removeHandler(handler)


def quantize_static(
    source: Path,
    target: Path,
    ranges: Ranges,
    *,
    keep: Sequence[str] = (),
    per_channel: bool = True,
    form: Int8Form = "fused",
    full_range: bool = False,
    outputs: Ranges | None = None,
) -> None:
    """Write the fp32 ONNX file `source` as static int8 to `target`.

    ranges        tensor that a product reads -> its lowest and highest value; see
                  `quantization.calibration.ranges`
    keep          names of the products that stay float32
    per_channel   one scale per output column of a weight, or one per weight
    full_range    use all 8 bits of a weight, for processors that sum exactly
    outputs       tensor that a product writes -> its lowest and highest value, if it is
                  rounded to uint8 as well

    Raises ExportError for a file without products, a name in `keep` that is no product,
    and tensors without a range."""
    model = read_model(source)
    if form == "qdq":
        check_opset(model, source, 13, "--form qdq")
    graph = Graph(model.graph)
    found = products(graph)
    names = [product.name for product in found]
    if not found:
        raise ExportError(
            f"{source}: no matrix product with constant weights; expected the fp32 "
            "file of a bundle"
        )
    for name in keep:
        if name not in names:
            raise ExportError(
                f"{source}: keep: no product {name!r}.{did_you_mean(name, names)}"
            )
    chosen = [product for product in found if product.name not in keep]
    if unknown := sorted({product.reads for product in chosen} - ranges.keys()):
        raise ExportError(
            f"{source}: no range for {', '.join(unknown)}; calibrate this very file: "
            "compress.quantization.calibration"
        )
    quantise = partial(quantise_matrix, per_channel=per_channel, full_range=full_range)
    _Static(graph, ranges, outputs or {}, quantise, form=form).rewrite(chosen)
    pack_tables(graph)
    if form == "fused":  # also where every product is kept
        declare_microsoft(model)
    save_changed(model, target, {PRECISION_KEY: "int8"})


def scale_and_zero(low: float, high: float) -> tuple[np.float32, np.uint8]:
    """Compute scale and zero point of uint8 numbers that represent low..high, with 0
    exact."""
    low = min(low, 0.0)
    high = max(high, 0.0)
    scale = np.float32((high - low) / 255 or 1.0)
    return scale, np.uint8(np.clip(np.rint(-low / scale), 0, 255))


def quantise_bias(
    bias: Floats,
    unit: Floats,
) -> NDArray[np.int32]:
    """Quantise a bias in the unit of the integer product: the scale of the activations
    times the weight's."""
    limits = np.iinfo(np.int32)
    return np.clip(
        np.rint(bias.astype(np.float64) / unit), limits.min, limits.max
    ).astype(np.int32)


def finest_scale(bias: Floats, activations: Floats | np.float32) -> Floats:
    """Compute the smallest scale of each column at which its bias, in units of that
    scale times the activations', fits into an int32 sum."""
    return np.asarray(np.abs(bias) / (activations * np.float32(2**30)), np.float32)


def quantise_matrix(
    matrix: Floats,
    *,
    per_channel: bool,
    full_range: bool = False,
    finest: Floats | float = 0.0,
) -> tuple[NDArray[np.int8], Floats]:
    """Quantise (in, out) to int8; return it and the scales: (out,) or (), at least
    `finest`.

    Unless `full_range`, two neighbours of the same sign add up to at most 127 before
    rounding, hence to 128 after it."""
    most = 127
    sizes = np.abs(matrix) if full_range else add_neighbours(matrix)
    largest = sizes.max(axis=0 if per_channel else None)
    least = finest if per_channel else np.max(finest)
    steps = np.maximum(largest / most, least)
    scales = np.asarray(np.where(steps > 0, steps, 1.0), np.float32)
    codes = np.rint(matrix / scales)
    return np.clip(codes, -most, most).astype(np.int8), scales


def add_neighbours(matrix: Floats) -> Floats:
    """Add rows 0 and 1, 2 and 3, ... of (in, out) where they have the same sign, and
    return the absolute sums; where signs differ, return the larger absolute value."""
    padded = np.pad(matrix, ((0, len(matrix) % 2), (0, 0)))
    above = np.maximum(padded, 0.0)
    below = np.maximum(-padded, 0.0)
    return np.maximum(above[0::2] + above[1::2], below[0::2] + below[1::2])


QuantiseMatrix = Callable[..., tuple[NDArray[np.int8], Floats]]


class _Static:
    """Rewrites a graph. `done` names the tensors whose nodes are written already."""

    def __init__(
        self,
        graph: Graph,
        ranges: Ranges,
        outputs: Ranges,
        quantise: QuantiseMatrix,
        *,
        form: Int8Form,
    ) -> None:
        self.graph = graph
        self.ranges = ranges
        self.outputs = outputs
        self.quantise = quantise
        self.form = form
        self.nodes: list[onnx.NodeProto] = []
        self.done: set[str] = set()

    def rewrite(self, chosen: Sequence[Product]) -> None:
        last = {product.ends[-1]: product for product in chosen}
        inner = {end for product in chosen for end in product.ends}
        lookups = {node.output[0] for node in self.graph.lookups()}
        for node in self.graph.nodes:
            output = node.output[0]
            if output in last:
                self._product(last[output])
            elif output in lookups:
                self._lookup(node)
            elif output not in inner:
                self.nodes.append(node)
        self.graph.nodes = self.nodes
        self.graph.store()

    def _add(
        self,
        operator: str,
        inputs: Sequence[str],
        output: str,
        name: str,
        **attributes: Any,
    ) -> None:
        self.nodes.append(
            helper.make_node(operator, inputs, [output], name=name, **attributes)
        )

    def _product(self, product: Product) -> None:
        if product.output not in self.outputs:
            self._multiply(product, product.output)
            return
        exact = f"{product.output}_exact"
        self._multiply(product, exact)
        codes, scale, zero = self._quantise(exact, self.outputs[product.output])
        self._add(
            "DequantizeLinear",
            [codes, scale, zero],
            product.output,
            f"{product.name}_round",
        )

    def _multiply(self, product: Product, output: str) -> None:
        codes, scale, zero = self._activations(product.reads)
        matrix, scales = self._weight(product)
        if self.form == "fused":
            inputs = [
                codes,
                matrix,
                scale,
                scales,
                zero,
                *([] if product.bias is None else ["", product.bias]),
            ]
            self._add(
                "MatMulIntegerToFloat", inputs, output, product.name, domain=MICROSOFT
            )
            return
        inputs = [f"{product.reads}_float", f"{product.weight}_float"]
        self._dequantise(matrix, scales, inputs[1], axis=1)
        # onnxruntime fuses it into QGemm, but only if the bias is quantised too
        if product.gemm:
            if product.bias is not None:
                inputs.append(f"{product.name}_bias_float")
                unit = scale_and_zero(*self.ranges[product.reads])[0] * self._value(
                    scales
                )
                bias = f"{product.name}_bias_int32"
                step = f"{product.name}_bias_scale"
                self.graph.put(bias, quantise_bias(self._value(product.bias), unit))
                self.graph.put(step, np.asarray(unit, np.float32))
                self._dequantise(bias, step, inputs[2], axis=0)
            self._add("Gemm", inputs, output, product.name)
        elif product.bias is None:
            self._add("MatMul", inputs, output, product.name)
        else:
            self._add("MatMul", inputs, f"{product.ends[0]}_raw", product.name)
            self._add(
                "Add",
                [f"{product.ends[0]}_raw", product.bias],
                output,
                f"{product.name}_bias",
            )

    def _dequantise(self, codes: str, scales: str, output: str, *, axis: int) -> None:
        """Write the node once; zero points are 0."""
        if output in self.done:
            return
        self.done.add(output)
        zeros = np.zeros(self._value(scales).shape, self._value(codes).dtype)
        self.graph.put(f"{scales}_zero", zeros)
        attributes = {"axis": axis} if zeros.ndim else {}
        self._add(
            "DequantizeLinear",
            [codes, scales, f"{scales}_zero"],
            output,
            f"{output}_made",
            **attributes,
        )

    def _activations(self, name: str) -> tuple[str, str, str]:
        """Quantise a tensor that products read, once; return the names of codes, scale
        and zero point."""
        if f"{name}_uint8" not in self.done:
            self.done.add(f"{name}_uint8")
            written = self._quantise(name, self.ranges[name])
            if self.form == "qdq":
                self._add(
                    "DequantizeLinear", written, f"{name}_float", f"{name}_dequantize"
                )
        return f"{name}_uint8", f"{name}_scale", f"{name}_zero"

    def _quantise(self, name: str, ends: tuple[float, float]) -> tuple[str, str, str]:
        codes = f"{name}_uint8"
        scale = f"{name}_scale"
        zero = f"{name}_zero"
        for key, value in zip((scale, zero), scale_and_zero(*ends), strict=True):
            self.graph.put(key, np.asarray(value))
        self._add("QuantizeLinear", [name, scale, zero], codes, f"{name}_quantize")
        return codes, scale, zero

    def _weight(self, product: Product) -> tuple[str, str]:
        """Return the names of the int8 matrix and its scales; layers that share a
        weight share these."""
        names = f"{product.weight}_int8", f"{product.weight}_scale"
        if names[0] not in self.graph.tensors:
            finest: Floats | float = 0.0
            if self.form == "qdq" and product.gemm and product.bias is not None:
                step, _ = scale_and_zero(*self.ranges[product.reads])
                finest = finest_scale(self._value(product.bias), step)
            matrix = product.matrix(self.graph.tensors)
            values, scales = self.quantise(matrix, finest=finest)
            self.graph.put(names[0], values)
            self.graph.put(names[1], scales)
        return names

    def _lookup(self, node: onnx.NodeProto) -> None:
        """Look the table's rows up as bytes, and turn only those into floats."""
        table = node.input[0]
        output = node.output[0]
        codes, scale, zero = (f"{table}_{part}" for part in ("uint8", "scale", "zero"))
        if codes not in self.graph.tensors:
            values = self._value(table)
            step, middle = scale_and_zero(float(values.min()), float(values.max()))
            self.graph.put(
                codes, np.clip(np.rint(values / step) + middle, 0, 255).astype(np.uint8)
            )
            self.graph.put(scale, np.asarray(step))
            self.graph.put(zero, np.asarray(middle))
        self._add("Gather", [codes, node.input[1]], f"{output}_uint8", node.name)
        self._add(
            "DequantizeLinear",
            [f"{output}_uint8", scale, zero],
            output,
            f"{node.name}_float",
        )

    def _value(self, name: str) -> Array:
        return self.graph.array(name)


LEARNED_KEY = "activation_ranges"
"""The key of a config that holds the ranges of a model that was trained for int8
(compress.papers.q8bert)."""

REPEAT_SUFFIX = re.compile(r"_\d+(?=\.|$)")
"""The suffix that the exporter adds to a layer's name where the layer is called
again."""


def read_learned_ranges(config: Any) -> LearnedRanges:
    """Read the ranges of quantisation-aware training: layer -> [low, high] of its
    input, extended by [low, high] of its output if that is rounded too; empty without
    such training."""
    found: LearnedRanges = getattr(config, LEARNED_KEY, None) or {}
    return found


def quantize_learned(
    source: Path,
    target: Path,
    learned: LearnedRanges,
    *,
    keep: Sequence[str] = (),
) -> None:
    """Write `source`, the fp32 file of a model trained for int8, as static int8 with
    its learned ranges.

    Layers without a range stay in float32, as in training; so do the layers in `keep`.
    Raises ExportError if `source` has none of the layers.
    """
    ranges = {}
    outputs = {}
    exact = list(keep)
    graph = read_model(source).graph
    factors = read_factors(graph)
    for product in products(graph):
        module = module_of(product.name)
        # the last one belongs to a part of its product
        places = (module, REPEAT_SUFFIX.sub("", module), module.rpartition(".")[0])
        found = next((learned[place] for place in places if place in learned), None)
        if found is None:
            exact.append(product.name)
        else:
            ranges[product.reads] = (found[0], found[1])
            factor = factors.get(product.name, 1.0)
            if len(found) == 4:
                outputs[product.output] = (factor * found[2], factor * found[3])
    if not ranges:
        raise ExportError(
            f"{source}: none of its products is a layer with a learned range "
            f"({', '.join(list(learned)[:3])}, ...); expected the file that to_onnx "
            "writes of the trained model"
        )
    quantize_static(
        source, target, ranges, keep=list(dict.fromkeys(exact)), outputs=outputs
    )


def module_of(name: str) -> str:
    """Name a product's module: `/model/bert/encoder/layer.0/output/dense/MatMul` ->
    `bert.encoder.layer.0.output.dense`."""
    return ".".join(name.strip("/").split("/")[1:-1])
