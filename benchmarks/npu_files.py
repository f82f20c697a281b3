"""What files for an NPU lose on real students, beside those that onnxruntime's own recipe makes.

    python -m benchmarks.npu_files BUNDLE=DATA... --seq 64 --max-drop 1 --out FILE.json

For each bundle: `compress export --for npu` in both precisions, and onnxruntime's `qnn_preprocess_model` and
`get_qnn_qdq_config`, all its defaults, at the same shape and on the same calibration rows: once with the mask that
transformers exports (float32's lowest number), once with -1e4. All are scored on the same rows, on the CPU, and on the
emulator of the HTP where that is installed (docs/npu.md). No latency: an emulator has none. Prints a table in Markdown.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize
from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config, qnn_preprocess_model

from benchmarks.common import load_pair, log, make_parser, write_result
from compress.benchmark import htp
from compress.commands.export import export
from compress.exporters import npu
from compress.exporters.checkpoint import load_source
from compress.exporters.onnx import MASKED_SCORE, to_onnx
from compress.exporters.predictor import pad
from compress.exporters.session import read_model
from compress.exporters.writers.context import ExportContext, ExportOptions, FixedOptions
from compress.quantization.npu import NPU_ROWS, certify_emulated, certify_file, describe_proof, limit_length
from compress.records.certificate import Certificate
from compress.records.latency import DeviceError

MASKS = {"-1e4": MASKED_SCORE, "float32's lowest": float(np.finfo(np.float32).min)}
TYPES = {"w8a16": QuantType.QUInt16, "w8a8": QuantType.QUInt8}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE=DATA")
    parser.add_argument("--seq", type=int, default=64, help="tokens")
    parser.add_argument("--max-drop", type=float, default=1.0, help="points")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = []
    for named in args.bundles:
        found.append(measure_bundle(named, args.seq, args.max_drop / 100))
        write_result(args.out, {"bundles": found})
    print("\n".join(format_markdown(found)))


def measure_bundle(named: str, length: int, max_drop: float) -> dict[str, Any]:
    name, bundle, data_name = load_pair(named)
    path = named.partition("=")[0]
    data = bundle.load_data(data_name)
    rows = limit_length(bundle, length).evaluator(data.train).subsample(NPU_ROWS).rows
    lines: dict[str, list[Certificate]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        made = export(
            path, Path(scratch) / "npu", to="npu", precisions=tuple(TYPES), data=data_name,
            fixed=FixedOptions((length,), max_drop), say=log,
        )  # fmt: skip
        for file in made.files:
            lines[f"{file.precision}, ours"] = list(file.proofs)
            for proof in file.proofs:
                log(describe_proof(proof))
        for warning in made.warnings:
            log(warning)
        for mask, value in MASKS.items():
            exact = export_plain(path, Path(scratch), length, value)
            for precision, kind in TYPES.items():
                target = Path(scratch) / f"peer_{precision}.onnx"
                quantize(exact, target, get_qnn_qdq_config(exact, Reader(rows, length), activation_type=kind))
                way: dict[str, Any] = {"max_drop": max_drop, "method": f"{precision}, get_qnn_qdq_config, mask {mask}"}
                proofs = certify_file(limit_length(bundle, length), exact, target, data, **way)
                if python := htp.find_emulator():
                    try:
                        proofs.append(certify_emulated(limit_length(bundle, length), target, data, python, **way))
                    except DeviceError as error:
                        log(str(error))
                lines[way["method"]] = proofs
                for proof in proofs:
                    log(describe_proof(proof))
    return {
        "bundle": name,
        "data": data.name,
        "model_type": bundle.manifest.model_type,
        "parameters": bundle.manifest.parameters,
        "tokens": length,
        "files": {way: [asdict(proof) for proof in proofs] for way, proofs in lines.items()},
    }


def export_plain(path: str, scratch: Path, length: int, mask: float) -> Path:
    """Export the model as it is traced, at a fixed length, with this mask, and prepare it as onnxruntime advises."""
    source = load_source(path)
    context = ExportContext.open(source, scratch, options=ExportOptions(name=path))
    traced, fixed, ready = (scratch / f"{name}.onnx" for name in ("traced", "fixed", "ready"))
    segments = "token_type_ids" in [each.name for each in read_model(context.onnx("fp32")).graph.input]
    to_onnx(context.model(), traced, segments=segments, form=None)
    model = read_model(traced)
    for tensor in [each.t for node in model.graph.node for each in node.attribute] + list(model.graph.initializer):
        if tensor.data_type == onnx.TensorProto.FLOAT and onnx.numpy_helper.to_array(tensor).tolist() == MASKED_SCORE:
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.array(mask, np.float32), tensor.name))
    onnx.save_model(model, traced)
    npu.fix(traced, fixed, length)
    model = read_model(fixed)
    del model.metadata_props[:]  # on which qnn_preprocess_model of onnxruntime 1.31 fails
    onnx.save_model(model, fixed)
    return ready if qnn_preprocess_model(fixed, ready) else fixed


class Reader(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
    """Feeds calibration rows, padded to the length, as onnxruntime asks for them."""

    def __init__(self, rows: Any, length: int) -> None:
        self.rows: Iterator[Any] = iter(rows)
        self.length = length

    def get_next(self) -> dict[str, Any] | None:
        row = next(self.rows, None)
        if row is None:
            return None
        names = [name for name in row if name in ("input_ids", "attention_mask", "token_type_ids")]
        return {name: pad(np.asarray([row[name]]), self.length) for name in names}


def format_markdown(found: list[dict[str, Any]]) -> Iterator[str]:
    yield "| student | file | fp32 | on the CPU | on the HTP's emulator |"
    yield "|---|---|---|---|---|"
    for one in found:
        for way, proofs in one["files"].items():
            exact, *run = proofs
            yield (
                f"| {one['bundle']}, {one['model_type']} | {way} | {exact['before']:.4f} | "
                + " | ".join(map(format_cell, run))
                + " |"
            )


def format_cell(proof: dict[str, Any]) -> str:
    """Show score, agreement and rows, and the nodes that the HTP left."""
    said = f"{proof['after']:.4f}, {100 * (proof['before'] - proof['after']):+.2f} lost, {proof['agreement']:.1%} agree"
    left = "" if proof["context_mb"] is None else f", {len(proof['left'])} nodes left"
    return f"{said}, {proof['rows']:,} rows{left}"


if __name__ == "__main__":
    main()
