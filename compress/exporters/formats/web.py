"""The layout that transformers.js loads in browsers: the ONNX files by its names."""

from compress.exporters.formats.format import ONNX_PRECISIONS, Format

FORMAT = Format(
    name="web",
    files="the layout of transformers.js",
    shapes="open",
    precisions=ONNX_PRECISIONS,
    default=("int8", "fp16"),
    writer="compress.exporters.writers.onnxruntime.write_web",
    reader="compress.exporters.writers.onnxruntime.open_file",
    suffixes=(".onnx",),
    runtime="onnxruntime",
    library="transformers.js",
    snippets=("transformers.javascript",),
    race="the ONNX files again, for browsers: measure these with --device browser",
    leaves_out_prompts=True,
)
