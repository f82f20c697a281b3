"""The layout that transformers.js loads in browsers: the ONNX files by its names."""

from compress.exporters.formats.format import ONNX_PRECISIONS, Format, Opening

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
    opening=Opening(
        "transformers.js",
        "js",
        'import { pipeline } from "@huggingface/transformers";',
        'const model = await pipeline("{pipeline}", "owner/name", {{ dtype: "q8" }});',
    ),
    race="the ONNX files again, for browsers: measure these with --device browser",
    leaves_out_prompts=True,
)
