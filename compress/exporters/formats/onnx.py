"""ONNX: the bundle itself, with its int8 and any other precision."""

from compress.exporters.formats.format import ONNX_PRECISIONS, Format, Race

FORMAT = Format(
    name="onnx",
    files="the bundle",
    shapes="open",
    precisions=ONNX_PRECISIONS,
    default=("fp32", "int8"),
    writer="compress.exporters.writers.onnxruntime.write_onnx",
    reader="compress.exporters.writers.onnxruntime.open_file",
    suffixes=(".onnx",),
    runtime="onnxruntime",
    race=Race(precisions=("fp32", "int8", "fp16", "w8")),
    copies_tokenizer=False,
    leaves_out_prompts=True,
)
