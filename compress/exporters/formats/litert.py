"""LiteRT's models, formerly TensorFlow Lite, for Android."""

from compress.exporters.formats.format import Extra, Format, Race

FORMAT = Format(
    name="litert",
    files="`.tflite`",
    shapes="one row, fixed lengths",
    needs="`compress-kit[litert]`",
    precisions=("fp32", "int8", "w8"),
    default=("fp32", "int8"),
    writer="compress.exporters.writers.litert.write_litert",
    reader="compress.exporters.writers.litert.open_file",
    suffixes=(".tflite",),
    runtime="ai_edge_litert",
    extra=Extra(
        "litert", "compress export --for litert; give it an environment of its own"
    ),
    library="litert",
    snippets=("litert.kotlin", "litert.python"),
    race=Race(precisions=("fp32", "int8"), one_row=True),
)
