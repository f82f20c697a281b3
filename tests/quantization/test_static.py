"""Static int8 computes what integer arithmetic says, in both forms, and nothing of it falls back to float."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from compress.errors import ExportError
from compress.exporters.int8 import Int8Form, quantize_static, scale_and_zero
from compress.exporters.onnx import to_onnx
from compress.exporters.rewrite.graph import products
from compress.exporters.session import metadata, read_model
from compress.quantization.calibration import compute_ranges
from tests import tiny
from tests.quantization import graphs

FORMS: tuple[Int8Form, ...] = ("fused", "qdq")
BY_MODEL = ["bert", "albert", "mobilebert", "deberta-v2", "modernbert"]


def run(path: Path, values: Any, *, optimised: Path | None = None) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if optimised is not None:
        options.optimized_model_filepath = str(optimised)
    return onnxruntime.InferenceSession(str(path), options).run(None, {"x": values})[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("bias", [None, np.linspace(-1, 1, 8)])
def test_a_product_is_the_formula(form: Int8Form, per_channel: bool, bias: Any, tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    x, w = draw.normal(size=(2, 3, 16)).astype(np.float32), draw.normal(size=(16, 8)) * np.linspace(0.1, 3, 8)
    source = graphs.one_product(tmp_path / "model.onnx", w, bias)
    ranges = {"x": (-1.0, 2.0)}
    quantize_static(source, tmp_path / "int8.onnx", ranges, per_channel=per_channel, form=form, full_range=True)

    expected = np.zeros((2, 3, 8))
    scale, zero = 3.0 / 255, round(1.0 / (3.0 / 255))
    for at in np.ndindex(2, 3, 8):
        largest = np.abs(w[:, at[2]] if per_channel else w).max()
        for i in range(16):
            code = min(255, max(0, round(float(x[at[0], at[1], i]) / scale) + zero))
            expected[at] += (code - zero) * scale * round(w[i, at[2]] / (largest / 127)) * (largest / 127)
        expected[at] += 0.0 if bias is None else bias[at[2]]
    assert run(tmp_path / "int8.onnx", x) == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("weight", [1e-7, 0.0])
def test_a_bias_beside_tiny_weights_is_kept(form: Int8Form, per_channel: bool, weight: float, tmp_path: Path) -> None:
    source, small, given = tmp_path / "model.onnx", tmp_path / "int8.onnx", graphs.rows()
    model = tiny.bert()
    with torch.no_grad():
        model.classifier.weight[:] = weight
        model.classifier.bias[:] = torch.tensor([0.0, 1.0])
    to_onnx(model, source, segments=False)
    quantize_static(source, small, compute_ranges(source, given), form=form, per_channel=per_channel)
    assert graphs.logits(small, given) == pytest.approx(np.tile([0.0, 1.0], (len(given), 1)), abs=1e-4)


def test_the_range_holds_zero_exactly() -> None:
    for low, high in ((-1.0, 2.0), (0.5, 3.0), (-3.0, -1.0), (0.0, 0.0)):
        scale, zero = scale_and_zero(low, high)
        assert 0 <= zero <= 255
        assert scale > 0
        assert (0 - np.float32(zero)) * scale <= min(low, 0.0) + scale
        assert (255 - np.float32(zero)) * scale >= max(high, 0.0) - scale


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", BY_MODEL)
def test_every_family_stays_near_and_a_quarter_of_the_size(family: str, form: Int8Form, tmp_path: Path) -> None:
    source, small = graphs.exported(tmp_path / "model.onnx", family), tmp_path / "int8.onnx"
    given = graphs.rows()
    quantize_static(source, small, compute_ranges(source, given, method="minmax"), form=form)
    full, near = graphs.logits(source, given), graphs.logits(small, given)
    assert 0 < abs(full - near).max() < 0.5 * abs(full).max()
    assert np.corrcoef(full.ravel(), near.ravel())[0, 1] > 0.97
    assert metadata(read_model(small)) == {**metadata(read_model(source)), "compress.precision": "int8"}


def test_readers_of_a_tensor_share_its_quantisation(tmp_path: Path) -> None:
    source = graphs.exported(tmp_path / "model.onnx", layers=2)
    quantize_static(source, tmp_path / "int8.onnx", compute_ranges(source, graphs.rows()))
    found = graphs.operators(tmp_path / "int8.onnx")
    assert found.count("MatMulIntegerToFloat") == 6 * 2 + 2
    assert found.count("QuantizeLinear") == 4 * 2 + 1 + 2, "the last queries read one token, their keys all"
    assert found.count("MatMul") == 2 * 2, "products of two activations"
    assert "Gemm" not in found


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_onnxruntime_runs_no_product_behind_a_dequantised_weight(
    form: Int8Form, per_channel: bool, tmp_path: Path
) -> None:
    source = graphs.exported(tmp_path / "model.onnx", layers=2)
    quantize_static(
        source, tmp_path / "int8.onnx", compute_ranges(source, graphs.rows()), form=form, per_channel=per_channel
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "run.onnx")
    onnxruntime.InferenceSession(str(tmp_path / "int8.onnx"), options, providers=["CPUExecutionProvider"])
    found = graphs.operators(tmp_path / "run.onnx")
    in_integers = [name for name in found if name in ("MatMulIntegerToFloat", "QGemm", "QLinearMatMul")]
    assert len(in_integers) == 6 * 2 + 2
    assert found.count("DequantizeLinear") == 3, "of the embeddings"
    assert found.count("MatMul") + found.count("FusedMatMul") == 2 * 2, "of two activations"


@pytest.mark.parametrize("form", FORMS)
def test_keep_takes_products_only(form: Int8Form, tmp_path: Path) -> None:
    source = graphs.exported(tmp_path / "model.onnx")
    names = [product.name for product in products(read_model(source).graph)]
    keep = [names[1], names[-1]]
    found = compute_ranges(source, graphs.rows())
    quantize_static(source, tmp_path / "int8.onnx", found, keep=keep, form=form)
    graph = onnx.load_model(tmp_path / "int8.onnx").graph
    weights = {tensor.name: tensor.data_type for tensor in graph.initializer}
    kept = [weights.get(node.input[1]) for node in graph.node if node.name in keep]
    assert kept == [onnx.TensorProto.FLOAT] * 2
    with pytest.raises(ExportError, match=r"no product '/model/classifier/Gem'. Did you mean '/model/classifier/Gemm'"):
        quantize_static(source, tmp_path / "bad.onnx", found, keep=["/model/classifier/Gem"])
    with pytest.raises(ExportError, match="no range for"):
        quantize_static(source, tmp_path / "bad.onnx", {})
    assert not (tmp_path / "bad.onnx").exists()


@pytest.mark.parametrize("form", FORMS)
def test_layers_that_share_a_weight_store_it_once(form: Int8Form, tmp_path: Path) -> None:
    sizes = []
    for layers in (1, 4):
        source = graphs.exported(tmp_path / "model.onnx", "albert", layers=layers)
        quantize_static(source, tmp_path / "int8.onnx", compute_ranges(source, graphs.rows()), form=form)
        graph = onnx.load_model(tmp_path / "int8.onnx").graph
        sizes.append(sum(np.prod(tensor.dims) for tensor in graph.initializer if len(tensor.dims) == 2))
    assert sizes[0] == sizes[1]


def test_another_runtime_reads_the_portable_form(tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino", reason="needs openvino")
    source = graphs.exported(tmp_path / "model.onnx", layers=1)
    given = graphs.rows(4)
    quantize_static(source, tmp_path / "int8.onnx", compute_ranges(source, given), form="qdq")
    model = openvino.Core().compile_model(str(tmp_path / "int8.onnx"), "CPU")
    found = [model({key: np.array([value]) for key, value in row.items()})[0][0] for row in given]
    assert np.stack(found) == pytest.approx(graphs.logits(tmp_path / "int8.onnx", given), abs=0.2)
