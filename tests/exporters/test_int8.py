"""Dynamic int8: small, near, silent, and alone in its folder."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from compress.errors import ExportError
from compress.exporters.int8 import quantize_dynamic, quantize_static
from compress.exporters.onnx import to_onnx
from compress.exporters.session import onnx_run, rows_for
from compress.models.static import StaticConfig, StaticModel
from compress.quantization.calibration import compute_ranges
from tests import tiny


def test_quantisation_is_silent_and_leaves_no_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    to_onnx(tiny.bert(), tmp_path / "model.onnx")
    handlers = list(logging.getLogger().handlers)
    quantize_dynamic(tmp_path / "model.onnx", tmp_path / "int8" / "model.onnx")
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    assert (logging.getLogger().handlers, logging.getLogger().filters) == (handlers, [])
    assert [path.name for path in (tmp_path / "int8").iterdir()] == ["model.onnx"]


def test_weights_and_embeddings_take_a_byte_but_products_of_activations_are_not(tmp_path: Path) -> None:
    to_onnx(tiny.bert(layers=2), tmp_path / "model.onnx")
    quantize_dynamic(tmp_path / "model.onnx", tmp_path / "small.onnx")
    file = onnx.load_model(tmp_path / "small.onnx")
    tables = {tensor.name: tensor for tensor in file.graph.initializer if tensor.dims[1:] == [32]}
    looked_up = [
        tables[node.input[0]] for node in file.graph.node if node.op_type == "Gather" and node.input[0] in tables
    ]
    assert sorted(table.dims[0] for table in looked_up) == [2, 45, 64]  # segments, words, positions
    assert {table.data_type for table in looked_up} == {onnx.TensorProto.UINT8}
    operators = [node.op_type for node in file.graph.node]
    # 6 matrices a layer, the pooler and the classifier; two products a layer remain: queries x keys, x values
    assert operators.count("MatMulInteger") == 14
    assert operators.count("MatMul") == 4


def test_per_channel_is_the_callers_choice(tmp_path: Path) -> None:
    to_onnx(tiny.bert(layers=1), tmp_path / "model.onnx")
    scales = {}
    for per_channel in (True, False):
        quantize_dynamic(tmp_path / "model.onnx", tmp_path / "small.onnx", per_channel=per_channel)
        file = onnx.load_model(tmp_path / "small.onnx")
        found = [
            tensor.dims
            for tensor in file.graph.initializer
            if "MatMul" in tensor.name and tensor.name.endswith("_scale")
        ]
        scales[per_channel] = sorted({tuple(dims) for dims in found})
    assert scales == {True: [(32,), (36,), (64,)], False: [()]}, "queries and keys hold the mask"


def test_a_table_alone_is_rounded(tmp_path: Path) -> None:
    """Word vectors of the teacher's own width have no matrix product: rows are looked up, and that is all."""
    torch.manual_seed(0)
    config = StaticConfig(vocab_size=50, hidden_size=16, pad_token_id=0)
    to_onnx(StaticModel(config).eval(), tmp_path / "model.onnx")
    quantize_dynamic(tmp_path / "model.onnx", tmp_path / "small.onnx")
    feeds = {"input_ids": np.array([[3, 7, 9]])}
    exact, small = (
        onnxruntime.InferenceSession(tmp_path / name).run(None, feeds)[0] for name in ("model.onnx", "small.onnx")
    )
    assert np.abs(exact).max() > 0.02
    assert exact == pytest.approx(small, abs=1e-3)
    assert (tmp_path / "small.onnx").stat().st_size < (tmp_path / "model.onnx").stat().st_size


def test_files_that_cannot_be_quantised_are_refused(tmp_path: Path) -> None:
    to_onnx(tiny.bert(layers=1), tmp_path / "model.onnx")
    quantize_dynamic(tmp_path / "model.onnx", tmp_path / "small.onnx")
    (tmp_path / "cut.onnx").write_bytes((tmp_path / "model.onnx").read_bytes()[:-100])
    before = sorted(tmp_path.iterdir())
    for name, message in {"absent.onnx": "no such file", "cut.onnx": "truncated"}.items():
        with pytest.raises(ExportError, match=message):
            quantize_dynamic(tmp_path / name, tmp_path / "out.onnx")
    with pytest.raises(ExportError, match="no matrix product"):
        add = onnx.helper.make_node("Add", ["a", "a"], ["b"])
        values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "ab"]
        graph = onnx.helper.make_graph([add], "graph", values[:1], values[1:])
        onnx.save_model(onnx.helper.make_model(graph), tmp_path / "add.onnx")
        quantize_dynamic(tmp_path / "add.onnx", tmp_path / "out.onnx")
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "add.onnx"])


def test_only_files_with_float32_weights_are_quantised(tmp_path: Path) -> None:
    """A float16 file would become one that cannot be opened; one whose weights are nodes would be copied as int8."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    to_onnx(tiny.bert(layers=1), tmp_path / "model.onnx")
    half = convert_float_to_float16(onnx.load_model(tmp_path / "model.onnx"))
    computed = onnx.load_model(tmp_path / "model.onnx")
    constants = [
        onnx.helper.make_node("Constant", [], [each.name], each.name, value=each) for each in computed.graph.initializer
    ]
    nodes = [*constants, *computed.graph.node]
    del computed.graph.initializer[:], computed.graph.node[:]
    computed.graph.node.extend(nodes)
    for name, model in {"half.onnx": half, "computed.onnx": computed}.items():
        onnx.save_model(model, tmp_path / name)
        with pytest.raises(ExportError, match="float32 weights"):
            quantize_dynamic(tmp_path / name, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("form", ["dynamic", "fused", "qdq"])
def test_nodes_need_no_names(form: Any, tmp_path: Path) -> None:
    to_onnx(tiny.bert(layers=1), tmp_path / "named.onnx")
    nameless = onnx.load_model(tmp_path / "named.onnx")
    for node in nameless.graph.node:
        node.name = ""
    onnx.save_model(nameless, tmp_path / "nameless.onnx")
    answers = []
    for name in ("named.onnx", "nameless.onnx"):
        source, target = tmp_path / name, tmp_path / f"small-{name}"
        rows = rows_for(source, 16)
        if form == "dynamic":
            quantize_dynamic(source, target)
        else:
            encoded = [{key: value[0].tolist() for key, value in row.items()} for row in rows]
            quantize_static(source, target, compute_ranges(source, encoded), form=form)
        run = onnx_run(target)
        answers.append([run(row)[0] for row in rows])
    for one, other in zip(*answers, strict=True):
        assert np.array_equal(one, other)


def test_qdq_needs_opset_13(tmp_path: Path) -> None:
    """Scales for each channel came with it."""
    to_onnx(tiny.bert(layers=1), tmp_path / "model.onnx", opset=12)
    with pytest.raises(ExportError, match=r"model.onnx: is of opset 12; --form qdq needs 13 or newer: .* --opset 13"):
        quantize_static(tmp_path / "model.onnx", tmp_path / "out.onnx", {}, form="qdq")


def test_shared_weights_are_quantised_once(tmp_path: Path) -> None:
    """ALBERT: the exporter hides a shared weight behind an Identity."""
    sizes = {}
    for layers in (1, 4):
        to_onnx(tiny.model("albert", layers=layers), tmp_path / "model.onnx")
        quantize_dynamic(tmp_path / "model.onnx", tmp_path / "small.onnx")
        graph = onnx.load_model(tmp_path / "small.onnx").graph
        products = [node.op_type for node in graph.node if node.op_type.startswith("MatMul")]
        assert products.count("MatMulInteger") == 3 + 6 * layers, "the up-projection, pooler and head, six in a layer"
        assert products.count("MatMul") == 2 * layers, "of two activations"
        sizes[layers] = sum(np.prod(tensor.dims) for tensor in graph.initializer if len(tensor.dims) == 2)
    assert sizes[1] == sizes[4]
