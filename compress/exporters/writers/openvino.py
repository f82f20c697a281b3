"""Export OpenVINO's own files (.xml and .bin), above all for Intel processors; shapes
stay dynamic.

    fp32   as it is
    fp16   weights stored in float16, computed in the processor's fastest precision
    w8     weights int8, one scale per row; OpenVINO quantises activations at run time
           if that is faster
    int8   static: activations in ranges calibrated on data, the fastest; needs `--data`

The dynamic int8 ONNX file of a bundle is not used: OpenVINO expands its weights to
float and is slower. OpenVINO is also slower with a form of the graph that `tune` chose
for onnxruntime, so the files are made from the rows-first form
(docs/export-speed.md)."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compress.errors import ExportError, first_reason
from compress.exporters.int8 import quantize_static
from compress.exporters.session import Feeds, RunFeeds
from compress.exporters.weight_only import SMALL_WEIGHT
from compress.exporters.writers.context import (
    ExportContext,
    ExportedFile,
    ExportResult,
    import_extra,
)

STEMS = {
    "fp32": "openvino_model",
    "fp16": "openvino_model_fp16",
    "w8": "openvino_model_w8",
    "int8": "openvino_model_int8",
}
"""The names of the files; the first is the one that optimum-intel expects."""

EXTRA = "openvino"
OPENVINO_NOTES = {"w8": "int8 weights", "int8": "static, calibrated"}


def write_openvino(
    context: ExportContext, folder: Path, precisions: Sequence[str]
) -> ExportResult:
    """Write each precision as .xml and .bin, and run it in OpenVINO."""
    openvino = import_extra("openvino", EXTRA)
    files = []
    calibrate = context.options.calibrate
    if "int8" in precisions and (
        context.bundle.manifest.kind != "task" or calibrate is None
    ):
        raise ExportError(
            "--for openvino --precision int8: is calibrated on real rows of the task; "
            "expected --data with them. w8 needs none"
        )
    for precision in precisions:
        target = folder / f"{STEMS[precision]}.xml"
        source = context.as_written()
        if precision == "int8" and calibrate is not None:
            exact = source
            source = context.scratch / "qdq.onnx"
            quantize_static(exact, source, calibrate(context.bundle, exact), form="qdq")
        try:
            model = openvino.convert_model(source)
        except RuntimeError as error:
            raise ExportError(
                f"{context.name}: OpenVINO cannot read {source.name} "
                f"({first_reason(error)}); --for onnx and --for ort take every family"
            ) from error
        if precision == "w8":
            _compress(model)
        try:
            openvino.save_model(model, target, compress_to_fp16=precision == "fp16")
        except RuntimeError as error:  # an error of C++ streams, which give no reason
            free = shutil.disk_usage(folder).free / 1e6
            raise ExportError(
                f"{target.name}: OpenVINO cannot write it ({first_reason(error)}); "
                f"{free:.0f} MB are free in {folder.parent}. Make room, or name "
                "another --out"
            ) from error
        difference = context.differs(open_file(context, target))
        note = OPENVINO_NOTES.get(precision, "")
        weights = f"{target.stem}.bin"
        files.append(ExportedFile(target.name, precision, difference, note, (weights,)))
    able = ", ".join(
        sorted(openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"))
    )
    verdicts = (
        "compared here in float32 (INFERENCE_PRECISION_HINT f32); unless told so, "
        "OpenVINO computes in bfloat16 where the processor has it, faster and a little "
        "less exact",
        f"what this processor has, by OpenVINO: {able}",
    )
    return ExportResult(
        tuple(files), verdicts, packages=("onnx", "onnxruntime", "openvino")
    )


def _compress(model: Any) -> None:
    """Store large matrices as int8 with one scale per output (per row of a table),
    multiplied where they are read: OpenVINO keeps this form small in memory and has a
    faster product for it."""
    openvino = import_extra("openvino", EXTRA)
    opset13 = import_extra("openvino.opset13", EXTRA)
    for node in model.get_ordered_ops():
        large = (
            node.get_type_name() == "Constant"
            and len(node.shape) == 2
            and node.output(0).element_type.is_real()
        )
        if not large or np.prod(node.shape) < SMALL_WEIGHT:
            continue
        readers = list(node.output(0).get_target_inputs())
        inner = {_inner_axis(reader.get_node()) for reader in readers}
        if len(inner) != 1 or None in inner:
            continue
        weight = node.data.astype(np.float32)
        scales = np.abs(weight).max(inner.pop(), keepdims=True) / 127
        scales = np.where(scales > 0, scales, 1).astype(np.float32)
        numbers = opset13.convert(
            opset13.constant(np.rint(weight / scales).astype(np.int8)),
            openvino.Type.f32,
        )
        expanded = opset13.multiply(numbers, opset13.constant(scales))
        for reader in readers:
            reader.replace_source_output(expanded.output(0))


def _inner_axis(reader: Any) -> int | None:
    """Return the axis of the weight that a node sums over, or looks up whole; None for
    any other node."""
    if reader.get_type_name() == "MatMul":
        return 1 if reader.get_attributes()["transpose_b"] else 0
    return 1 if reader.get_type_name() == "Gather" else None


def open_file(context: ExportContext, file: Path) -> RunFeeds:
    """Compile a file for one thread of the CPU, in float32."""
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": "1"}
    openvino = import_extra("openvino", EXTRA)
    request = openvino.Core().compile_model(file, "CPU", settings)
    request = request.create_infer_request()

    def run(row: Feeds) -> list[Any]:
        found = request.infer(dict(row))
        return [found[index].copy() for index in range(len(found))]

    return run
