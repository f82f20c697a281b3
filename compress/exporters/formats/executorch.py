"""ExecuTorch's programs, for phones and boards."""

from compress.exporters.formats.format import Extra, Format, Race

FORMAT = Format(
    name="executorch",
    files="`.pte` for XNNPACK",
    shapes="one row, open length",
    needs="`compress-kit[executorch]`",
    precisions=("fp32", "int8"),
    default=("fp32", "int8"),
    writer="compress.exporters.writers.executorch.write_executorch",
    reader="compress.exporters.writers.executorch.open_file",
    suffixes=(".pte",),
    runtime="executorch",
    extra=Extra(
        "executorch",
        "compress export --for executorch; give it an environment of its own",
    ),
    library="executorch",
    snippets=("executorch.kotlin", "executorch.python"),
    race=Race(precisions=("fp32", "int8"), one_row=True),
)
