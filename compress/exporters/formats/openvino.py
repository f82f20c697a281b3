"""OpenVINO's own files, above all for Intel processors."""

from compress.exporters.formats.format import Extra, Format, Race

FORMAT = Format(
    name="openvino",
    files="`.xml` and `.bin`",
    shapes="open",
    needs="`compress-kit[openvino]`",
    precisions=("fp32", "fp16", "w8", "int8"),
    default=("fp16", "w8"),
    writer="compress.exporters.writers.openvino.write_openvino",
    reader="compress.exporters.writers.openvino.open_file",
    suffixes=(".xml",),
    runtime="openvino",
    extra=Extra(
        "openvino", "compress export --for openvino, and measuring what it writes"
    ),
    library="openvino",
    snippets=("openvino.python",),
    race=Race(precisions=("fp32", "fp16", "w8"), with_data=("int8",)),
    reads_data=True,
)
