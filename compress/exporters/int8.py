"""Dynamic int8: weights stored as int8, activations quantised as they come. No calibration data is needed."""

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import onnx
import onnxruntime.quantization

from compress.errors import ExportError
from compress.exporters.session import inherited, read_model
from compress.io import naming, written

PRECISION_KEY = "compress.precision"


def quantize_dynamic(source: Path, target: Path, *, per_channel: bool = True, keep: Sequence[str] = ()) -> None:
    """Writes the fp32 ONNX file `source` as int8 to `target`: a quarter of the size.

    Weights of matrix products become symmetric int8, one scale per output channel (`per_channel`) or per matrix;
    embedding tables uint8 with one scale and zero point each. Products of two activations (queries x keys,
    probabilities x values) stay float32: quantising them too is slower. Activations get one uint8 scale per tensor
    and run, so a row's logits depend a little on the rows and the padding it shares a batch with, and they differ
    between processors.
    `keep` names nodes that stay float32. Raises ExportError for a file that cannot be read or has no weights to
    quantise.
    """
    file = read_model(source)
    properties = inherited(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    # onnxruntime writes beside its input, and leaves that behind when it fails: hence a folder that goes away
    with (
        tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch,
        written(target) as partial,
    ):
        raw = Path(scratch) / "raw.onnx"
        onnx.save_model(file, raw)
        try:
            with naming(target), _silent_root_logger():
                onnxruntime.quantization.quantize_dynamic(
                    raw,
                    partial,
                    per_channel=per_channel,
                    nodes_to_exclude=[*keep, *(f"{name}_MatMul" for name in keep)],  # that is what becomes of a Gemm
                    extra_options={"MatMulConstBOnly": True},
                )
        except (AssertionError, RuntimeError, ValueError) as error:  # onnxruntime asserts that weights are numbers
            raise ExportError(f"{source}: cannot be quantised ({type(error).__name__}: {error})") from error
        small = onnx.load_model(partial)
        if not keep and not any(node.op_type == "MatMulInteger" for node in small.graph.node):
            raise ExportError(
                f"{source}: no matrix product with constant weights was found to quantise; "
                "expected the fp32 file that to_onnx writes"
            )
        onnx.helper.set_model_props(small, {**properties, PRECISION_KEY: "int8"})
        onnx.save_model(small, partial)


@contextmanager
def _silent_root_logger() -> Iterator[None]:
    """Drops what is logged on the root logger itself: there onnxruntime asks for a pre-processing that would fuse the
    graph, names integer tensors it rightly leaves alone, and installs a handler if there is none."""
    root, handler = logging.getLogger(), logging.NullHandler()

    def not_root(record: logging.LogRecord) -> bool:
        return record.name != root.name

    root.addHandler(handler)
    root.addFilter(not_root)
    try:
        yield
    finally:
        root.removeFilter(not_root)
        root.removeHandler(handler)
