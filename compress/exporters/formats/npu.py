"""Quantised ONNX files of fixed lengths, for Qualcomm's neural processors."""

from compress.exporters.formats.format import Extra, Format, Race

FORMAT = Format(
    name="npu",
    files="QDQ graphs, one for each `--seq`",
    shapes="one row, one length",
    needs="`--data`; to certify `compress-kit[npu]`",
    precisions=("w8a16", "w8a8"),
    default=("w8a16",),
    writer="compress.quantization.npu.write_npu",
    reader="compress.quantization.npu.open_file",
    suffixes=(".onnx",),
    runtime="onnxruntime",
    extra=Extra(
        "npu",
        "the emulator that certifies compress export --for npu; x86-64 Linux",
        required=False,
    ),
    library="onnxruntime",
    snippets=("qnn.kotlin", "qnn.python"),
    race=Race(precisions=("w8a16",), needs_data=True, one_row=True),
    fixed_length=True,
    reads_data=True,
)
