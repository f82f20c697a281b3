"""Sums of two products in 16 bits: what a file answers where they saturate, and weights with which they cannot."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from compress.benchmark.devices import open_device
from compress.commands import quantize
from compress.config.options import Int8Options
from compress.exporters.card import proof_line
from compress.exporters.int8 import add_neighbours, quantise_matrix, quantize_dynamic, quantize_static
from compress.exporters.manifest import BUNDLE_FILES
from compress.exporters.rewrite.graph import Graph
from compress.exporters.rewrite.saturation import (
    LARGEST_CODES,
    SATURATING,
    find_integer_products,
    list_saturating,
    write_exact,
    write_saturated,
)
from compress.exporters.session import CERTIFICATE_KEY, metadata, read_model
from compress.quantization.certify import Claim, certify
from compress.quantization.saturation import saturate
from compress.records.certificate import Certificate, Saturation
from compress.records.run_report import Report
from compress.reporting.tables import certificate_table
from tests import command, tiny
from tests.quantization import graphs
from tests.quantization.test_pipeline import bundle

Array = np.ndarray[Any, Any]
SHAPES = [(1, 4, 3), (3, 7, 5), (5, 16, 9), (2, 33, 1)]


def draw(shape: tuple[int, int, int], seed: int = 0) -> tuple[Array, Array]:
    """Activations (tokens, in) and weights (in, out) of which many sums of two leave 16 bits."""
    tokens, rows, columns = shape
    random = np.random.default_rng(seed)
    activations = random.integers(0, 256, (tokens, rows)).astype(np.uint8)
    return activations, random.integers(-127, 128, (rows, columns)).astype(np.int8)


def multiply(activations: Array, weights: Array, zero: int = 0) -> tuple[Array, Array]:
    """The products with sums of two in 16 bits, in loops; and how many of each token's leave them."""
    tokens, rows = activations.shape
    found = np.zeros((tokens, weights.shape[1]), np.int64)
    beyond = np.zeros(tokens, np.int64)
    for token, column in np.ndindex(*found.shape):
        terms = [int(activations[token, k]) * int(weights[k, column]) for k in range(rows)]
        for k in range(0, rows, 2):
            both = sum(terms[k : k + 2])
            limited = max(-32768, min(32767, both))
            found[token, column] += limited
            beyond[token] += limited != both
        found[token, column] -= zero * int(weights[:, column].sum())
    return found, beyond


def integer_product(path: Path, weights: Array, zero: int) -> Path:
    """codes (tokens, in) -> y, in integers."""
    tensors = {"w": weights, "z": np.uint8(zero), "wz": np.int8(0)}
    node = helper.make_node("MatMulInteger", ["codes", "w", "z", "wz"], ["y"], name="product")
    graph = helper.make_graph(
        [node],
        "graph",
        [helper.make_tensor_value_info("codes", TensorProto.UINT8, ["tokens", len(weights)])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, ["tokens", weights.shape[1]])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in tensors.items()],
    )
    onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def run(path: Path, name: str, value: Array) -> dict[str, Array]:
    session = onnxruntime.InferenceSession(str(path))
    names = [node.name for node in session.get_outputs()]
    return dict(zip(names, session.run(names, {name: value}), strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_copies_of_a_product_are_the_loops(shape: tuple[int, int, int], tmp_path: Path) -> None:
    activations, weights = draw(shape)
    model = read_model(integer_product(tmp_path / "int8.onnx", weights, 7))
    (product,) = find_integer_products(Graph.copy_of(model))
    assert (product.name, product.codes, product.tensors["output"]) == ("product", "codes", "y")
    saturated, beyond = multiply(activations, weights, 7)
    assert beyond.sum() > 0
    write_exact(model, tmp_path / "exact.onnx")
    exact = run(tmp_path / "exact.onnx", "codes", activations)
    assert (exact["y"] == (activations.astype(int) - 7) @ weights.astype(int)).all()
    assert (exact[f"{LARGEST_CODES}codes"] == activations.max(0)).all()
    for limits in (np.full(shape[1], 255, np.uint8), activations.max(0)):
        write_saturated(model, tmp_path / "saturated.onnx", {"codes": limits})
        found = run(tmp_path / "saturated.onnx", "codes", activations)
        assert (found["y"] == saturated).all()
        sums = (shape[1] + 1) // 2 * shape[2]
        assert found[f"{SATURATING}product"][0] == pytest.approx(beyond / sums, abs=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_that_can_saturate_are_found_and_sorted(shape: tuple[int, int, int], tmp_path: Path) -> None:
    limits, weights = draw(shape)
    (product,) = find_integer_products(Graph.copy_of(read_model(integer_product(tmp_path / "int8.onnx", weights, 0))))
    expected = []
    for column in range(shape[2]):
        for k in range(0, shape[1], 2):
            terms = [int(limits[0, each]) * int(weights[each, column]) for each in range(k, min(k + 2, shape[1]))]
            high, low = sum(max(0, each) for each in terms), sum(min(0, each) for each in terms)
            if high > 32767 or low < -32768:
                expected.append([column, k])
    assert product.find_sums(limits[0]).tolist() == expected


@pytest.mark.parametrize("rows", [1, 2, 5, 64])
@pytest.mark.parametrize("per_channel", [True, False])
def test_neighbours_never_leave_16_bits_by_default(rows: int, per_channel: bool) -> None:
    random = np.random.default_rng(rows)
    for _ in range(20):
        matrix = (random.normal(size=(rows, 6)) * random.choice([0.01, 1.0, 30.0], (rows, 1))).astype(np.float32)
        codes, scales = quantise_matrix(matrix, per_channel=per_channel)
        assert scales.shape == ((6,) if per_channel else ())
        assert 255 * add_neighbours(codes.astype(np.float32)).max() < 2**15
        assert np.abs(codes * scales - matrix).max() <= scales.max() / 2 * 1.001
        full, finer = quantise_matrix(matrix, per_channel=per_channel, full_range=True)
        assert np.abs(full).max() == 127
        assert (finer <= scales * 1.000001).all(), "at most as coarse"
        assert (scales <= 2.000001 * finer).all(), "never coarser than 7 bits"


FORMS: dict[str, Callable[[Path, Path, bool], None]] = {
    "dynamic": lambda source, target, full: quantize_dynamic(source, target, full_range=full),
    "fused": lambda source, target, full: quantize_static(source, target, {"x": (-1.0, 2.0)}, full_range=full),
    "qdq": lambda source, target, full: quantize_static(
        source, target, {"x": (-1.0, 2.0)}, full_range=full, form="qdq"
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [None, np.linspace(-1, 1, 6)])
def test_every_form_of_file_is_read_and_fits_by_default(form: str, bias: Any, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    x, w = random.uniform(-1, 2, (1, 4, 10)).astype(np.float32), random.uniform(0.5, 1, (10, 6)) * np.linspace(1, 3, 6)
    source = graphs.one_product(tmp_path / "model.onnx", w, bias)
    FORMS[form](source, tmp_path / "int8.onnx", False)
    assert list_saturating(tmp_path / "int8.onnx") == []
    FORMS[form](source, tmp_path / "full.onnx", True)
    assert list_saturating(tmp_path / "full.onnx") == ["product"]
    model = read_model(tmp_path / "full.onnx")
    (product,) = find_integer_products(Graph.copy_of(model))
    write_exact(model, tmp_path / "exact.onnx")
    exact = run(tmp_path / "exact.onnx", "x", x)
    expected = run(source, "x", x)["y"]
    assert exact["y"] == pytest.approx(expected, abs=0.2)
    write_saturated(model, tmp_path / "saturated.onnx", {product.codes: np.full(10, 255, np.uint8)})
    found = run(tmp_path / "saturated.onnx", "x", x)
    assert found[f"{SATURATING}product"].sum() > 0
    assert (expected - found["y"]).max() > 0.2, "large sums of positive weights are cut"


@pytest.fixture
def reviews(tmp_path: Path) -> tuple[Any, str]:
    """A model whose head, for one class, has only large weights of one sign."""
    source = tiny.reviews(tmp_path / "data")
    made = bundle(tmp_path / "bundle", source, "classification")
    return made, source


def test_a_file_that_saturates_says_so_and_one_for_any_processor_does_not(
    reviews: tuple[Any, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("compress.jobs.quantize.QUANTIZE_ROUNDS", 2)
    monkeypatch.setattr("compress.jobs.quantize.QUANTIZE_RUNS", 1)
    made, source = reviews
    assert list_saturating(made.files()["int8"]) == [], "as it was shipped"
    done = quantize.quantize(made, source, method="dynamic", out=tmp_path / "any", max_drop=1.0)
    assert done.proof.saturation == Saturation()
    assert done.proof.warning == ""
    assert list_saturating(done.bundle.files()["int8"]) == []

    int8 = Int8Options(target_cpu="vnni")
    done = quantize.quantize(made, source, method="dynamic", int8=int8, out=tmp_path / "vnni", max_drop=1.0)
    found = done.proof.saturation
    assert found is not None
    assert done.proof.method == "dynamic int8, full range"
    names = list_saturating(done.bundle.files()["int8"])
    assert found.products == len(names) > 0
    assert set(found.shares) <= set(names)
    assert all(0 < share < 1 for share in found.shares.values())
    assert found.rows == done.proof.rows
    assert done.proof.warning in proof_line(done.proof)
    written = metadata(read_model(done.bundle.path / BUNDLE_FILES["int8"]))[CERTIFICATE_KEY]
    assert Certificate.from_json(written).saturation == found
    assert Report.from_json(done.bundle.path / "report.json").certificates == (done.proof,)


def test_the_command_refuses_what_training_decides(reviews: tuple[Any, str], tmp_path: Path) -> None:
    words = ["--method", "qat", "--target-cpu", "vnni", "--out", str(tmp_path / "new")]
    result = command.run("quantize", str(reviews[0].path), "--data", reviews[1], *words)
    assert result.code == 2
    assert "--target-cpu" in result.err


def test_saturated_answers_are_compared_with_exact_ones(reviews: tuple[Any, str]) -> None:
    """A classifier of large weights of one sign: sums saturate wherever the pooled text is positive."""
    made, source = reviews
    evaluator = made.evaluator(made.load_data(source).validation)
    same = saturate(made.files()["int8"], evaluator.rows, made.task, threads=1)
    assert (same.exact == same.saturated).all() and not same.shares, "it fits any processor"
    quantize_dynamic(made.files()["fp32"], made.files()["int8"], full_range=True)
    with open_device("local") as here:
        proof = certify(made, "int8", evaluator, here, Claim("dynamic int8", 1.0, "validation", "reviews"))
    found = proof.saturation
    assert found is not None and found.changed is not None
    assert 0 <= found.changed <= found.rows == len(evaluator)
    scores = [pytest.approx(score, abs=1e-9) for score in (found.before, found.after)]
    assert proof.after in scores, "this processor has VNNI, or it has not"
    assert (found.difference > 0) == bool(found.shares)


CERTIFICATE = Certificate(
    "onnx/model_quantized.onnx", "dynamic int8", "accuracy", 0.9, 0.89, 0.005, 0.99, 0.1, 10, "test", "d", "local, x",
    "onnxruntime 1", True, "", "2026-11-29",
)  # fmt: skip


def test_certificates_carry_it_and_older_ones_load() -> None:
    found = Saturation(3, {"a": 0.5}, 200, 4, 0.25, 0.9, 0.8)
    proof = Certificate(**{**asdict(CERTIFICATE), "classes": (), "kept": (), "left": (), "saturation": found})
    assert Certificate.from_json(json.dumps(asdict(proof))) == proof
    older = {name: value for name, value in asdict(CERTIFICATE).items() if name != "saturation"}
    assert Certificate.from_json(json.dumps(older)) == CERTIFICATE
    assert CERTIFICATE.saturation is None
    assert CERTIFICATE.warning == ""
    for part in ("4 answers", "200 rows", "0.8000", "0.9000", "0.25"):
        assert part in proof.warning
    assert "none of 200 rows" in Saturation(3, {}, 200).describe("accuracy")
    cells = [json.dumps(asdict(certificate_table([("file", each)]))) for each in (CERTIFICATE, proof)]
    assert "1 products" not in cells[0]
