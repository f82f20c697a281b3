"""Weight-only files: what is stored is the nearest the bits allow, once per weight, and the graph computes with it."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from compress.errors import ExportError
from compress.exporters.onnx import to_onnx
from compress.exporters.session import difference, metadata, onnx_run, read_model, rows_for
from compress.exporters.weight_only import SMALL_WEIGHT, Bits, Packed, pack, quantize_weights
from tests import tiny

WIDE = {"hidden": 64, "layers": 2, "vocab_size": 300}


def weights(rows: int, columns: int) -> Any:
    return np.random.default_rng(0).normal(size=(rows, columns)).astype(np.float32)


def unpack(packed: Packed) -> NDArray[np.float32]:
    """The matrix (rows N, columns K) that the file computes with."""
    numbers, zeros = packed.numbers_NC, packed.zeros_NC
    blocks = packed.scales_NB.shape[1]
    if packed.bits == 4:
        numbers = np.stack((numbers & 15, numbers >> 4), -1).reshape(len(numbers), -1)
    middles: NDArray[np.uint8] | int = 128
    if zeros is not None:
        middles = np.stack((zeros & 15, zeros >> 4), -1).reshape(len(zeros), -1)[:, :blocks, None]
    numbers_NBK = numbers.reshape(len(numbers), blocks, packed.block).astype(np.float32)
    matrix_NBK = (numbers_NBK - middles) * packed.scales_NB[..., None]
    return matrix_NBK.reshape(len(numbers), -1)[:, : packed.columns].astype(np.float32)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide") / "model.onnx"
    to_onnx(tiny.bert(3, **WIDE), path)
    return path


@pytest.mark.parametrize("columns", [16, 32, 33, 100, 312])
def test_values_are_rounded_to_the_nearest(columns: int) -> None:
    weight = weights(5, columns)
    for bits, steps in ((8, 254), (4, 15)):
        packed = pack(weight, bits)  # type: ignore[arg-type]
        found = unpack(packed)
        assert found.shape == weight.shape
        for row in range(5):
            for start in range(0, columns, packed.block):
                block = weight[row, start : start + packed.block]
                span = 2 * abs(block).max() if bits == 8 else max(block.max(), 0) - min(block.min(), 0)
                off = abs(found[row, start : start + packed.block] - block).max()
                assert off <= span / steps * (0.51 if bits == 8 else 1.01)


def test_zero_is_exact_and_a_constant_block_survives() -> None:
    weight = weights(4, 64)
    weight[1] = 0
    weight[2, ::2] = 0
    weight[3] = 0.25
    for bits in (8, 4):
        found = unpack(pack(weight, bits))  # type: ignore[arg-type]
        assert (found[1] == 0).all()
        assert (found[2, ::2] == 0).all()
        assert np.allclose(found[3], 0.25, rtol=1e-6)


@pytest.mark.parametrize(("bits", "share"), [(8, 0.35), (4, 0.25)])
def test_the_file_computes_with_the_stored_weights(wide: Path, tmp_path: Path, bits: Bits, share: float) -> None:
    """Its logits are those of the model whose weights were rounded in torch; of 8 bits activations are rounded too."""
    quantize_weights(wide, tmp_path / "small.onnx", bits=bits)
    model = tiny.bert(3, **WIDE)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding) and module.weight.numel() >= SMALL_WEIGHT:
                module.weight.copy_(torch.from_numpy(unpack(pack(module.weight.numpy(), bits))))
    to_onnx(model, tmp_path / "rounded.onnx")
    rows = rows_for(wide, 64)
    exact, small = onnx_run(tmp_path / "rounded.onnx"), onnx_run(tmp_path / "small.onnx")
    assert difference(exact, small, rows).relative < (1e-4 if bits == 4 else 0.05)
    assert difference(onnx_run(wide), small, rows).relative > 1e-3, "the weights are not those of the model"
    assert (tmp_path / "small.onnx").stat().st_size < share * wide.stat().st_size + 30_000


def test_tables_are_quantised_and_small_weights_are_not(wide: Path, tmp_path: Path) -> None:
    quantize_weights(wide, tmp_path / "small.onnx", bits=4)
    model = read_model(tmp_path / "small.onnx")
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("GatherBlockQuantized") == 2, "words and positions; token types are two rows"
    assert kinds.count("MatMulNBits") == 2 * 6 + 1, "the pooler too, which is a Gemm; the classifier is small"
    assert metadata(model) == {**metadata(read_model(wide)), "compress.precision": "q4"}
    left = [each.name for each in model.graph.initializer if each.data_type == TensorProto.FLOAT and len(each.dims) > 1]
    assert all("scales" in name or "token_type" in name or "classifier" in name for name in left), left


def test_weights_that_layers_share_are_stored_once(tmp_path: Path) -> None:
    to_onnx(tiny.model("albert", hidden=64, layers=3, embedding_size=64), tmp_path / "model.onnx")
    quantize_weights(tmp_path / "model.onnx", tmp_path / "small.onnx", bits=8)
    graph = read_model(tmp_path / "small.onnx").graph
    stored = [each.name for each in graph.initializer if each.name.endswith(".numbers")]
    read = [name for node in graph.node if node.op_type == "MatMulNBits" for name in node.input[1:2]]
    assert len(read) > len(set(read)) == len([name for name in stored if name in read])
    rows = rows_for(tmp_path / "model.onnx", 32)
    assert difference(*(onnx_run(tmp_path / f"{name}.onnx") for name in ("model", "small")), rows).relative < 0.05


@pytest.mark.parametrize("columns", [64, 40])
@pytest.mark.parametrize("folded", [True, False])
def test_a_tied_table_is_stored_once(tmp_path: Path, columns: int, folded: bool) -> None:
    """A table that is also the output weight, whether the exporter folded the transpose or left it in the graph."""
    table = weights(200, columns)
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["words"], "lookup")]
    constants = [numpy_helper.from_array(table, "table")]
    if folded:
        constants.append(numpy_helper.from_array(np.ascontiguousarray(table.T), "turned"))
    else:
        nodes.append(helper.make_node("Transpose", ["table"], ["turned"], "turn", perm=[1, 0]))
    nodes.append(helper.make_node("MatMul", ["words", "turned"], ["logits"], "product"))
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "tokens"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, "tokens", 200])
    graph = helper.make_graph(nodes, "tied", [ids], [logits], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save_model(model, tmp_path / "model.onnx")
    for bits in (8, 4):
        quantize_weights(tmp_path / "model.onnx", tmp_path / "small.onnx", bits=bits)  # type: ignore[arg-type]
        small = read_model(tmp_path / "small.onnx")
        assert [each.name for each in small.graph.initializer if each.name.endswith(".numbers")] == ["table.numbers"]
        session = onnxruntime.InferenceSession(tmp_path / "small.onnx", providers=["CPUExecutionProvider"])
        given = np.array([[0, 7, 199]])
        rounded = unpack(pack(table, bits))  # type: ignore[arg-type]
        (found,) = session.run(None, {"input_ids": given})
        assert np.allclose(found, rounded[given] @ rounded.T, atol=1e-4 if bits == 4 else 0.3)


def test_a_file_without_matrices_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    with pytest.raises(ExportError, match="not an ONNX model"):
        quantize_weights(tmp_path / "broken.onnx", tmp_path / "small.onnx", bits=8)
    to_onnx(tiny.bert(hidden=8), tmp_path / "model.onnx")
    with pytest.raises(ExportError, match="no constant matrix of 4096"):
        quantize_weights(tmp_path / "model.onnx", tmp_path / "small.onnx", bits=8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.onnx", "model.onnx"]
