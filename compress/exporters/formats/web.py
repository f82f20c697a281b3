"""For browsers: the layout that transformers.js loads, which onnxruntime-web reads as well.

    config.json  tokenizer.json  tokenizer_config.json  onnx/model_quantized.onnx  onnx/model_fp16.onnx

`dtype: "q8"` of transformers.js is int8, for wasm; `dtype: "fp16"` is for WebGPU.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from compress.exporters.artifact import FILES
from compress.exporters.formats.outcome import Made, Outcome
from compress.exporters.formats.subject import Subject, name_of
from compress.exporters.parity import onnx_run
from compress.exporters.session import certificate

PRECISIONS = tuple(FILES)
DEFAULT = ("int8", "fp16")
DTYPES = {"fp32": "fp32", "int8": "q8", "fp16": "fp16", "q4": "q4"}
"""The `dtype` under which transformers.js looks for a file; `w8` has none."""


def write(subject: Subject, folder: Path, precisions: Sequence[str]) -> Outcome:
    """The ONNX files by their names on the hub."""
    made = []
    for precision in precisions:
        source = subject.onnx(precision)
        target = folder / name_of(precision)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, target)
        dtype = f'transformers.js: dtype "{DTYPES[precision]}"' if precision in DTYPES else "onnxruntime-web only"
        proof = certificate(source)
        apart = subject.differs(onnx_run(source))
        made.append(Made(name_of(precision), precision, apart, dtype, certificate=proof))
    return Outcome(tuple(made), verdicts=_verdicts(precisions))


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
