"""What a file says of itself: session options, vocabulary."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from compress.errors import ExportError
from compress.exporters.int8 import quantize_dynamic
from compress.exporters.onnx import to_onnx
from compress.exporters.session import UNFUSED_SKIP, open_session, read_model, session_entries, vocabulary_size
from tests import tiny


def foreign(nodes: list[onnx.NodeProto], tables: dict[str, tuple[int, int]]) -> onnx.ModelProto:
    """A graph from another tool: int32 ids, tables of the given sizes."""
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT32, [1, None])
    output = helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)
    weights = [onnx.numpy_helper.from_array(np.zeros(size, np.float32), name) for name, size in tables.items()]
    return helper.make_model(helper.make_graph(nodes, "graph", [ids], [output], weights))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The fp32 and the int8 file of a model."""
    folder = tmp_path_factory.mktemp("files")
    to_onnx(tiny.bert(), folder / "model.onnx")
    quantize_dynamic(folder / "model.onnx", folder / "small.onnx")
    return folder / "model.onnx", folder / "small.onnx"


def test_our_files_ask_for_the_faster_graph_and_foreign_ones_for_nothing(files: tuple[Path, Path]) -> None:
    for file in files:
        assert session_entries(read_model(file)) == UNFUSED_SKIP
        options = open_session(file, threads=1).get_session_options()
        key, value = next(iter(UNFUSED_SKIP.items()))
        assert options.get_session_config_entry(key) == value
        assert options.intra_op_num_threads == 1
    assert session_entries(foreign([], {})) == {}


def test_vocabulary_is_found_in_plain_int8_and_fused_graphs(files: tuple[Path, Path], tmp_path: Path) -> None:
    for file in files:
        assert vocabulary_size(read_model(file), file) == 45
    cast = helper.make_node("Cast", ["input_ids"], ["wide"], to=TensorProto.INT64)
    looked_up = helper.make_node("Gather", ["words", "wide"], ["logits"])
    assert vocabulary_size(foreign([cast, looked_up], {"words": (77, 4)}), tmp_path / "x.onnx") == 77
    cut = helper.make_node("Slice", ["input_ids", "begin", "end"], ["wide"])
    assert vocabulary_size(foreign([cut, looked_up], {"words": (77, 4)}), tmp_path / "x.onnx") == 77
    flat = helper.make_node("Reshape", ["input_ids", "shape"], ["wide"])  # as GPT-2's
    assert vocabulary_size(foreign([flat, looked_up], {"words": (77, 4)}), tmp_path / "x.onnx") == 77
    fused = helper.make_node("EmbedLayerNormalization", ["input_ids", "", "words", "positions"], ["logits"])
    assert vocabulary_size(foreign([fused], {"words": (99, 4), "positions": (12, 4)}), tmp_path / "x.onnx") == 99


def test_vocabulary_comes_from_the_config_where_the_graph_hides_it(tmp_path: Path) -> None:
    hidden = foreign([helper.make_node("Abs", ["input_ids"], ["flat"])], {})
    with pytest.raises(ExportError, match=r"no config\.json beside it gives vocab_size"):
        vocabulary_size(hidden, tmp_path / "onnx" / "model.onnx")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 31}))
    assert vocabulary_size(hidden, tmp_path / "onnx" / "model.onnx") == 31


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"absent\.onnx: no such file"):
        open_session(tmp_path / "absent.onnx")
