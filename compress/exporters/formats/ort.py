"""ORT files: the format of onnxruntime's small builds for phones."""

from compress.exporters.formats.format import ONNX_PRECISIONS, Format, Race

FORMAT = Format(
    name="ort",
    files="`.ort`, operators for a small build",
    shapes="open",
    precisions=ONNX_PRECISIONS,
    default=("fp32", "int8"),
    writer="compress.exporters.writers.onnxruntime.write_ort",
    reader="compress.exporters.writers.onnxruntime.open_file",
    suffixes=(".ort",),
    runtime="onnxruntime",
    library="onnxruntime",
    snippets=(
        "onnxruntime.kotlin",
        "onnxruntime.swift",
        "onnxruntime.python",
    ),
    race=Race(precisions=("fp32", "int8")),
    leaves_out_prompts=True,
)
