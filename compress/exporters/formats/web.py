"""For browsers: the layout that transformers.js loads, which onnxruntime-web reads as well.

    config.json  tokenizer.json  tokenizer_config.json  onnx/model_quantized.onnx  onnx/model_fp16.onnx

`dtype: "q8"` of transformers.js is int8, for wasm; `dtype: "fp16"` is for WebGPU.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from compress.exporters.artifact import FILES, Precision
from compress.exporters.formats import ExportContext, ExportedFile, ExportResult
from compress.exporters.session import certificate, onnx_run

PRECISIONS = tuple(FILES)
DEFAULT = ("int8", "fp16")
DTYPES = {"fp32": "fp32", "int8": "q8", "fp16": "fp16", "q4": "q4"}
"""The `dtype` under which transformers.js looks for a file; `w8` has none."""


def write(context: ExportContext, folder: Path, precisions: Sequence[Precision]) -> ExportResult:
    """Copy the ONNX files by their names on the hub."""
    made = []
    for precision in precisions:
        source = context.onnx(precision)
        target = folder / FILES[precision]
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, target)
        dtype = f'transformers.js: dtype "{DTYPES[precision]}"' if precision in DTYPES else "onnxruntime-web only"
        proof = certificate(source)
        apart = context.differs(onnx_run(source))
        made.append(ExportedFile(FILES[precision], precision, apart, dtype, certificate=proof))
    return ExportResult(tuple(made), verdicts=_verdicts(precisions))


def _verdicts(precisions: Sequence[str]) -> tuple[str, ...]:
    said = []
    if "int8" in precisions:
        said.append(
            "int8: for wasm. Its logits differ a little between wasm and native processors on the very same file, so "
            "certify it there: compress quantize --device browser"
        )
    if "fp16" in precisions:
        said.append("fp16: for WebGPU; wasm computes it in float32, slower than the int8 file")
    return tuple(said)
