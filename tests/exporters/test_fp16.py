"""float16 files: exact enough where arithmetic really is float16, or refused."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from compress.errors import ExportError
from compress.exporters.fp16 import to_float16
from compress.exporters.onnx import to_onnx
from compress.exporters.session import difference, metadata, onnx_run, read_model, rows_for
from tests import tiny

FAMILIES = ("bert", "albert", "mobilebert", "deberta-v2")


def written(folder: Path, model: Any) -> Path:
    to_onnx(model, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize("family", FAMILIES)
def test_files_are_accurate_and_half_as_large(family: str, tmp_path: Path) -> None:
    source = written(tmp_path, tiny.model(family, hidden=64))
    rows = rows_for(source, 32)
    kept = to_float16(source, tmp_path / "half.onnx", rows)
    if family == "deberta-v2":
        assert all("attention/self" in name for name in kept), "its own mask, of float32's lowest number"
    else:
        assert kept == ()
    assert 0 < difference(onnx_run(source), onnx_run(tmp_path / "half.onnx"), rows).relative < 0.02
    weights = [each for each in read_model(tmp_path / "half.onnx").graph.initializer if len(each.dims) == 2]
    assert all(each.data_type == onnx.TensorProto.FLOAT16 for each in weights if np.prod(each.dims) > 100)
    assert (tmp_path / "half.onnx").stat().st_size < 0.75 * source.stat().st_size


def test_inputs_outputs_and_settings_stay(tmp_path: Path) -> None:
    source = written(tmp_path, tiny.bert())
    to_float16(source, tmp_path / "half.onnx", rows_for(source, 32))
    one, two = (onnxruntime.InferenceSession(tmp_path / f"{name}.onnx") for name in ("model", "half"))
    for here, there in zip(
        (*one.get_inputs(), *one.get_outputs()), (*two.get_inputs(), *two.get_outputs()), strict=True
    ):
        assert (here.name, here.type, here.shape) == (there.name, there.type, there.shape)
    assert metadata(read_model(tmp_path / "half.onnx")) == {
        **metadata(read_model(source)), "compress.precision": "fp16",
    }  # fmt: skip


def test_numbers_beyond_float16_stay_float32(tmp_path: Path) -> None:
    """A feed-forward layer whose inner activations overflow float16: kept, and the answers hold."""
    model = tiny.bert()
    with torch.no_grad():
        layer = model.bert.encoder.layer[0]
        layer.intermediate.dense.weight.mul_(3e4)
        layer.output.dense.weight.div_(3e4)
    source = written(tmp_path, model)
    kept = to_float16(source, tmp_path / "half.onnx", rows_for(source, 32))
    assert any("layer.0/intermediate" in name for name in kept)
    assert not any("layer.1" in name for name in kept)
    rows = rows_for(source, 32)
    apart = difference(onnx_run(source), onnx_run(tmp_path / "half.onnx"), rows)
    assert apart.relative < 0.02, "no infinity between two of them"


def test_inaccurate_conversions_are_refused(tmp_path: Path) -> None:
    """Weights below float16's smallest number: they vanish, and so does what they say."""
    model = tiny.bert()
    with torch.no_grad():
        model.classifier.weight.mul_(1e-9)
        model.bert.pooler.dense.weight.zero_()
        model.bert.pooler.dense.bias.fill_(1.0)
    source = written(tmp_path, model)
    file = read_model(source)
    (last,) = (node for node in file.graph.node if "classifier" in node.name)
    next(each for each in last.attribute if each.name == "alpha").f = 1e9
    onnx.save_model(file, source)
    with pytest.raises(ExportError, match=r"in float16 the logits differ from fp32's .* Use int8 or w8"):
        to_float16(source, tmp_path / "half.onnx", rows_for(source, 32))
    assert not (tmp_path / "half.onnx").exists()
