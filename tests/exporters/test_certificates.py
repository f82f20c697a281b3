"""What a file made of another one takes over, and what it must not: a certificate is of one file alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from compress.exporters.fp16 import to_float16
from compress.exporters.int8 import quantize_dynamic, quantize_static
from compress.exporters.session import CERTIFICATE_KEY, metadata, read_certificate, read_model, save_certified
from compress.exporters.weight_only import quantize_weights
from compress.quantization import calibration
from compress.quantization.npu import list_warnings
from compress.records.certificate import Certificate
from compress.trimming import trim_file

PROOF = Certificate(
    artefact="onnx/model.onnx", method="vocabulary trimming", metric="accuracy", before=0.9, after=0.9, max_drop=0.005,
    agreement=1.0, max_logit_difference=0.0, rows=8, split="test", data="made up", device="local",
    runtime="onnxruntime", certified=True, reason="loses 0.00 points", date="2026-11-20T00:00:00+00:00",
)  # fmt: skip
ROWS = [{"input_ids": np.arange(8)[None]}, {"input_ids": np.arange(64)[None]}]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A table of 64 tokens and a product, certified."""
    draw = np.random.default_rng(0)
    arrays = {"table": draw.normal(size=(64, 64)), "weight": draw.normal(size=(64, 64))}
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Gather", ["table", "input_ids"], ["words"], "words"),
            onnx.helper.make_node("MatMul", ["words", "weight"], ["logits"], "/model/layer.0/MatMul"),
        ],
        "tiny",
        [onnx.helper.make_tensor_value_info("input_ids", onnx.TensorProto.INT64, ["batch", "tokens"])],
        [onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", "tokens", 64])],
        [onnx.numpy_helper.from_array(each.astype(np.float32), name) for name, each in arrays.items()],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.helper.set_model_props(model, {"compress.model_type": "tiny"})
    path = tmp_path / "model.onnx"
    onnx.save_model(model, path)
    save_certified(path, path, PROOF)
    return path


def _static(source: Path, target: Path) -> None:
    rows = [{"input_ids": row["input_ids"][0].tolist()} for row in ROWS]
    quantize_static(source, target, calibration.compute_ranges(source, rows))


WAYS: dict[str, Callable[[Path, Path], object]] = {
    "dynamic int8": quantize_dynamic,
    "static int8": _static,
    "fp16": lambda source, target: to_float16(source, target, ROWS),
    "w8": lambda source, target: quantize_weights(source, target, bits=8),
    "trimmed": lambda source, target: trim_file(source, target, range(32)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_file_made_of_a_certified_one_is_not_certified(way: str, file: Path, tmp_path: Path) -> None:
    WAYS[way](file, tmp_path / "made" / "other.onnx")
    found = metadata(read_model(tmp_path / "made" / "other.onnx"))
    assert CERTIFICATE_KEY not in found
    assert {**found, "compress.precision": ""} == {"compress.model_type": "tiny", "compress.precision": ""}


def test_a_certificate_is_in_the_file_beside_what_was_there(file: Path) -> None:
    assert Certificate.from_json(read_certificate(file)) == PROOF
    assert metadata(read_model(file))["compress.model_type"] == "tiny"


def test_a_score_that_other_answers_keep_is_warned_of() -> None:
    """As by a student that answers few questions, of which other ones are right."""
    (warning,) = list_warnings([replace(PROOF, certified=True, agreement=0.69)])
    assert "31% of its answers" in warning
    assert list_warnings([replace(PROOF, certified=True, agreement=0.95)]) == []
    assert list_warnings([replace(PROOF, certified=False, agreement=0.69)]) == []
