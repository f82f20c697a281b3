"""Make int8 ONNX files of fp32 ones.

    dynamic  weights stored as int8, activations quantised as they come: no calibration data is needed
    static   activations are quantised with scales known beforehand, from calibration or from training; of two forms:
      fused  what is fastest in onnxruntime on a CPU: QuantizeLinear, once for all products that read a tensor, and
             com.microsoft's MatMulIntegerToFloat, which multiplies, scales and adds the bias in one operator
      qdq    QuantizeLinear and DequantizeLinear around float products, as OpenVINO, TensorRT and mobile runtimes read
             them

In a static file activations are uint8 with one scale and zero point per tensor, weights int8, symmetric; embedding
tables uint8, one scale and zero point each, as in `quantize_dynamic`.
"""

import logging
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime.quantization
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from compress.errors import ExportError, did_you_mean
from compress.exporters.rewrite.graph import Graph, Product, products
from compress.exporters.session import MICROSOFT, declare_microsoft, inherit_metadata, read_model, save_changed
from compress.io import atomic_file, name_disk_errors

PRECISION_KEY = "compress.precision"


def quantize_dynamic(source: Path, target: Path, *, per_channel: bool = True, keep: Sequence[str] = ()) -> None:
    """Write the fp32 ONNX file `source` as int8 to `target`: a quarter of the size.

    Weights of matrix products become symmetric int8, one scale per output channel (`per_channel`) or per matrix;
    embedding tables uint8 with one scale and zero point each. Products of two activations (queries x keys,
    probabilities x values) stay float32: quantising them too is slower. Activations get one uint8 scale per tensor
    and run, so a row's logits depend a little on the rows and the padding it shares a batch with, and they differ
    between processors.
    `keep` names nodes that stay float32. Raises ExportError for a file that cannot be read or has no weights to
    quantise.
    """
    file = read_model(source)
    properties = inherit_metadata(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    # onnxruntime writes beside its input, and leaves that behind when it fails: hence a folder that goes away
    with (
        tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch,
        atomic_file(target) as partial,
    ):
        raw = Path(scratch) / "raw.onnx"
        onnx.save_model(file, raw)
        try:
            with name_disk_errors(target), _silent_root_logger():
                onnxruntime.quantization.quantize_dynamic(
                    raw,
                    partial,
                    per_channel=per_channel,
                    nodes_to_exclude=[*keep, *(f"{name}_MatMul" for name in keep)],  # that is what becomes of a Gemm
                    extra_options={"MatMulConstBOnly": True},
                )
        except (AssertionError, RuntimeError, ValueError) as error:  # onnxruntime asserts that weights are numbers
            raise ExportError(f"{source}: cannot be quantised ({type(error).__name__}: {error})") from error
        small = onnx.load_model(partial)
        if not keep and not any(node.op_type == "MatMulInteger" for node in small.graph.node):
            raise ExportError(
                f"{source}: no matrix product with constant weights was found to quantise; "
                "expected the fp32 file that to_onnx writes"
            )
        onnx.helper.set_model_props(small, {**properties, PRECISION_KEY: "int8"})
        onnx.save_model(small, partial)


@contextmanager
def _silent_root_logger() -> Iterator[None]:
    """Drop what is logged on the root logger itself: there onnxruntime asks for a pre-processing that would fuse the
    graph, names integer tensors it rightly leaves alone, and installs a handler if there is none."""
    root, handler = logging.getLogger(), logging.NullHandler()

    def not_root(record: logging.LogRecord) -> bool:
        return record.name != root.name

    root.addHandler(handler)
    root.addFilter(not_root)
    try:
        yield
    finally:
        root.removeFilter(not_root)
        root.removeHandler(handler)


Form = Literal["fused", "qdq"]
Ranges = Mapping[str, tuple[float, float]]


def quantize_static(
    source: Path,
    target: Path,
    ranges: Ranges,
    *,
    keep: Sequence[str] = (),
    per_channel: bool = True,
    form: Form = "fused",
    reduce_range: bool = False,
) -> None:
    """Write the fp32 ONNX file `source` as static int8 to `target`.

    ranges        tensor that a product reads -> its lowest and highest value; see `quantization.calibration.ranges`
    keep          names of the products that stay float32
    per_channel   one scale per output column of a weight, or one per weight
    reduce_range  weights of 7 bits: processors with AVX2 or AVX-512 but without VNNI add two products of 8 x 8 bits in
                  16 bits, where they saturate; with 7 bits they cannot

    Raises ExportError for a file without products, a name in `keep` that is none, and tensors without range.
    """
    model = read_model(source)
    graph = Graph(model.graph)
    found = products(graph)
    names = [product.name for product in found]
    if not found:
        raise ExportError(f"{source}: no matrix product with constant weights; expected the fp32 file of a bundle")
    for name in keep:
        if name not in names:
            raise ExportError(f"{source}: keep: no product {name!r}.{did_you_mean(name, names)}")
    chosen = [product for product in found if product.name not in keep]
    if unknown := sorted({product.reads for product in chosen} - ranges.keys()):
        raise ExportError(
            f"{source}: no range for {', '.join(unknown)}; calibrate this very file: compress.quantization.calibration"
        )
    writer = _Static(graph, ranges, per_channel=per_channel, bits=7 if reduce_range else 8, form=form)
    writer.rewrite(chosen)
    if form == "fused":
        declare_microsoft(model)
    save_changed(model, target, {PRECISION_KEY: "int8"})


def scale_and_zero(low: float, high: float) -> tuple[np.float32, np.uint8]:
    """Compute scale and zero point of uint8 numbers that stand for low..high, 0 among them exactly."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = np.float32((high - low) / 255 or 1.0)
    return scale, np.uint8(np.clip(np.rint(-low / scale), 0, 255))


def quantise_matrix(
    matrix: NDArray[np.float32], *, per_channel: bool, bits: int = 8
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantise (in, out) to int8; return it and the scales: (out,) or ()."""
    most = 2 ** (bits - 1) - 1
    largest = np.abs(matrix).max(axis=0 if per_channel else None)
    scales = np.where(largest > 0, largest / most, 1.0).astype(np.float32)
    return np.clip(np.rint(matrix / scales), -most, most).astype(np.int8), np.asarray(scales)


class _Static:
    """A graph being rewritten."""

    def __init__(self, graph: Graph, ranges: Ranges, *, per_channel: bool, bits: int, form: Form) -> None:
        self.graph, self.ranges, self.per_channel, self.bits, self.form = graph, ranges, per_channel, bits, form
        self.made: set[str] = set()

    def rewrite(self, chosen: Sequence[Product]) -> None:
        graph = self.graph
        ending = {product.ends[-1]: product for product in chosen}
        gone = {end for product in chosen for end in product.ends}
        lookups = {node.output[0] for node in graph.lookups()}
        nodes: list[onnx.NodeProto] = []
        for node in graph.nodes:
            made = node.output[0]
            if made in ending:
                nodes += self._product(ending[made])
            elif made in lookups:
                nodes += self._lookup(node)
            elif made not in gone:
                nodes.append(node)
        graph.nodes = nodes
        graph.store()

    def _product(self, product: Product) -> list[onnx.NodeProto]:
        before, eight = self._activations(product.reads)
        if self.form == "qdq":
            return before + self._qdq(product)
        matrix, scales = self._weight(product)
        inputs = [eight, matrix, f"{product.reads}_scale", scales, f"{product.reads}_zero"]
        inputs += [] if product.bias is None else ["", product.bias]
        whole = helper.make_node("MatMulIntegerToFloat", inputs, [product.output], name=product.name, domain=MICROSOFT)
        return [*before, whole]

    def _qdq(self, product: Product) -> list[onnx.NodeProto]:
        matrix, scales = self._weight(product)
        read, back, raw = f"{product.reads}_float", f"{product.weight}_float", f"{product.ends[0]}_raw"
        nodes = self._dequantise(matrix, scales, self._zeros(scales, onnx.TensorProto.INT8), back, axis=1)
        if product.gemm:  # onnxruntime makes QGemm of it, but only if the bias is quantised too
            inputs = [read, back]
            if product.bias is not None:
                inputs.append(f"{product.name}_bias_float")
                nodes += self._bias(product, scales, inputs[-1])
            return [*nodes, helper.make_node("Gemm", inputs, [product.output], name=product.name)]
        if product.bias is None:
            return [*nodes, helper.make_node("MatMul", [read, back], [product.output], name=product.name)]
        return [
            *nodes,
            helper.make_node("MatMul", [read, back], [raw], name=product.name),
            helper.make_node("Add", [raw, product.bias], [product.output], name=f"{product.name}_bias"),
        ]

    def _bias(self, product: Product, scales: str, made: str) -> list[onnx.NodeProto]:
        """Write the bias as int32, in units of what the integer product is in."""
        assert product.bias is not None
        unit = scale_and_zero(*self.ranges[product.reads])[0] * numpy_helper.to_array(self.graph.tensors[scales])
        codes, step = f"{product.name}_bias_int32", f"{product.name}_bias_scale"
        values = np.rint(numpy_helper.to_array(self.graph.tensors[product.bias]).astype(np.float64) / unit)
        most = np.iinfo(np.int32)
        self.graph.put(codes, np.clip(values, most.min, most.max).astype(np.int32))
        self.graph.put(step, np.asarray(unit, np.float32))
        return self._dequantise(codes, step, self._zeros(step, onnx.TensorProto.INT32), made, axis=0)

    def _dequantise(self, codes: str, scales: str, zeros: str, made: str, *, axis: int) -> list[onnx.NodeProto]:
        if made in self.made:
            return []
        self.made.add(made)
        asked: dict[str, Any] = {"axis": axis} if self.graph.tensors[scales].dims else {}
        return [helper.make_node("DequantizeLinear", [codes, scales, zeros], [made], name=f"{made}_made", **asked)]

    def _activations(self, name: str) -> tuple[list[onnx.NodeProto], str]:
        """Make the nodes that quantise a tensor, when it is the first time, and name what they make."""
        eight, scale, zero = (f"{name}_{part}" for part in ("uint8", "scale", "zero"))
        if eight in self.made:
            return [], eight
        self.made.add(eight)
        for key, value in zip((scale, zero), scale_and_zero(*self.ranges[name]), strict=True):
            self.graph.put(key, np.asarray(value))
        nodes = [helper.make_node("QuantizeLinear", [name, scale, zero], [eight], name=f"{name}_quantize")]
        if self.form == "qdq":
            nodes.append(
                helper.make_node("DequantizeLinear", [eight, scale, zero], [f"{name}_float"], name=f"{name}_dequantize")
            )
        return nodes, eight

    def _weight(self, product: Product) -> tuple[str, str]:
        """Name the int8 matrix and its scales; layers that share a weight share these."""
        matrix, scales = f"{product.weight}_int8", f"{product.weight}_scale"
        if matrix not in self.graph.tensors:
            values = quantise_matrix(product.matrix(self.graph.tensors), per_channel=self.per_channel, bits=self.bits)
            self.graph.put(matrix, values[0])
            self.graph.put(scales, values[1])
        return matrix, scales

    def _zeros(self, scales: str, kind: int) -> str:
        key = f"{scales}_zero"
        if key not in self.graph.tensors:
            shape = tuple(self.graph.tensors[scales].dims)
            self.graph.put(key, np.zeros(shape, helper.tensor_dtype_to_np_dtype(kind)))
        return key

    def _lookup(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Look the table's rows up as bytes, and make only those floats."""
        table, (made, *_) = node.input[0], node.output
        eight, scale, zero = (f"{table}_{part}" for part in ("uint8", "scale", "zero"))
        if eight not in self.graph.tensors:
            values = numpy_helper.to_array(self.graph.tensors[table])
            step, middle = scale_and_zero(float(values.min()), float(values.max()))
            codes = np.clip(np.rint(values / step) + middle, 0, 255).astype(np.uint8)
            for key, value in zip((eight, scale, zero), (codes, step, middle), strict=True):
                self.graph.put(key, np.asarray(value))
        found = helper.make_node("Gather", [eight, node.input[1]], [f"{made}_uint8"], name=node.name)
        back = helper.make_node("DequantizeLinear", [f"{made}_uint8", scale, zero], [made], name=f"{node.name}_float")
        return [found, back]


LEARNED_KEY = "activation_ranges"
"""The key of a config that holds the ranges of a model that was trained for int8 (compress.papers.q8bert)."""

REPEATED = re.compile(r"_\d+(?=\.|$)")
"""The suffix that the exporter adds to a layer's name where the layer is called again."""


def read_learned_ranges(config: Any) -> Mapping[str, Sequence[float]]:
    """Read the ranges of quantisation-aware training: layer -> [low, high] of what it reads; empty without it."""
    found: Mapping[str, Sequence[float]] = getattr(config, LEARNED_KEY, None) or {}
    return found


def quantize_learned(
    source: Path, target: Path, learned: Mapping[str, Sequence[float]], *, keep: Sequence[str] = ()
) -> None:
    """Write `source`, the fp32 file of such a model, as static int8 with its own ranges.

    Layers without a range stay in float32, as they were in training; so do those of `keep`. Raises ExportError when
    `source` has none of the layers.
    """
    ranges, exact = {}, list(keep)
    for product in products(read_model(source).graph):
        module = module_of(product.name)
        places = (module, REPEATED.sub("", module), module.rpartition(".")[0])  # the last: of a part of its product
        found = next((learned[place] for place in places if place in learned), None)
        if found is None:
            exact.append(product.name)
        else:
            ranges[product.reads] = (found[0], found[1])
    if not ranges:
        raise ExportError(
            f"{source}: none of its products is a layer with a learned range ({', '.join(list(learned)[:3])}, ...); "
            "expected the file that to_onnx writes of the trained model"
        )
    quantize_static(source, target, ranges, keep=list(dict.fromkeys(exact)))


def module_of(name: str) -> str:
    """Name a product's module: `/model/bert/encoder/layer.0/output/dense/MatMul` ->
    `bert.encoder.layer.0.output.dense`."""
    return ".".join(name.strip("/").split("/")[1:-1])
