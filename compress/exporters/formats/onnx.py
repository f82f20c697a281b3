"""ONNX for onnxruntime: the bundle itself, with the precisions asked for besides fp32 and int8, which it always has."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from compress.exporters.artifact import FILES, Precision
from compress.exporters.formats import ExportContext, ExportedFile, ExportResult
from compress.exporters.session import certificate, onnx_run
from compress.records.run_report import NAME as REPORT

PRECISIONS = tuple(FILES)
DEFAULT = ("fp32", "int8")
NOTES = {"fp16": "for GPU and WebGPU", "w8": "for size", "q4": "for size"}
VERDICTS = {
    "fp16": "fp16: onnxruntime's CPU provider computes most of it in float32, behind casts: on an x86 CPU it saves "
    "space, not time. It is for GPUs and WebGPU",
    "w8": "w8, q4: for a smaller file where int8 activations cost too much score; int8 is faster on a CPU",
}


def write(context: ExportContext, folder: Path, precisions: Sequence[Precision]) -> ExportResult:
    """Write all of the bundle to `folder`; where that is the bundle itself, the new files alone."""
    given = context.bundle
    if given.manifest.kind == "generative":
        files = sorted(path.relative_to(given.path).as_posix() for path in given.path.rglob("*.onnx"))
        given.copy_to(folder)
        return ExportResult(
            tuple(ExportedFile(name, "int8" if "quantized" in name else "fp32", None) for name in files)
        )
    had = given.files() if context.remade else {}  # at another opset, whatever the bundle has is made anew
    wanted = [precision for precision in FILES if precision in (*DEFAULT, *precisions, *had)]
    made = []
    for precision in wanted:
        path = context.onnx(precision)
        apart, note = context.differs(onnx_run(path)), NOTES.get(precision, "")
        made.append(ExportedFile(FILES[precision], precision, apart, note, certificate=certificate(path)))
    bundle = given if folder == given.path else given.copy_to(folder)
    if context.remade and REPORT in bundle.manifest.files:  # certificates of files that are not in this bundle
        bundle = bundle.attach(REPORT, replace(bundle.report(), certificates=()).to_json())
    for precision in wanted:
        if context.onnx(precision) != given.path / FILES[precision]:
            bundle = bundle.put(precision, context.onnx(precision))
    weights = "w8" if {"w8", "q4"} & set(precisions) else ""
    said = [VERDICTS[key] for key in ("fp16" if "fp16" in precisions else "", weights) if key]
    return ExportResult(tuple(made), tuple(said))
