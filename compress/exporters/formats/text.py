"""ONNX files that take texts and answer with labels, the tokenizer in their graphs."""

from compress.exporters.formats.format import ONNX_PRECISIONS, Format, Race

FORMAT = Format(
    name="text",
    files="`model_text.onnx`, the tokenizer inside",
    shapes="open",
    precisions=ONNX_PRECISIONS,
    default=("int8",),
    writer="compress.exporters.writers.onnxruntime.write_text",
    reader="compress.exporters.writers.onnxruntime.open_text_file",
    suffixes=(".onnx",),
    runtime="onnxruntime",
    library="onnxruntime",
    snippets=("text.python", "text.javascript", "text.kotlin", "text.swift"),
    race=Race(precisions=("int8",)),
    copies_tokenizer=False,
    leaves_out_prompts=True,
    reads_data=True,
)
