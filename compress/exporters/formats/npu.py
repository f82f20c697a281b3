"""Quantised ONNX files of fixed lengths, for Qualcomm's neural processors."""

from compress.exporters.formats.format import Extra, Format, Opening, Race

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
    opening=Opening(
        "onnxruntime",
        "python",
        "import onnxruntime\nimport onnxruntime_qnn",
        """onnxruntime.register_execution_provider_library("QNN", onnxruntime_qnn.get_library_path())
options = onnxruntime.SessionOptions()
devices = [each for each in onnxruntime.get_ep_devices() if each.ep_name == onnxruntime_qnn.get_ep_name()]
options.add_provider_for_devices(devices, {{"backend_path": onnxruntime_qnn.get_qnn_htp_path()}})
session = onnxruntime.InferenceSession("{file}", options)""",  # noqa: E501
    ),
    race=Race(precisions=("w8a16",), needs_data=True, one_row=True),
    fixed_length=True,
)
