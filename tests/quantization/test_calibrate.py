"""Ranges are those of the tensors that products read, on the rows as they are run: alone."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from compress.errors import ExportError
from compress.exporters.rewrite.graph import products
from compress.quantization import calibration
from tests.quantization import graphs


def watched(source: Path, name: str) -> list[np.ndarray]:
    """A tensor's values for each row alone."""
    model = onnx.load_model(source)
    model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    onnx.save_model(model, source.with_name("watched.onnx"))
    session = onnxruntime.InferenceSession(str(source.with_name("watched.onnx")))
    return [session.run([name], {key: np.array([value]) for key, value in row.items()})[0] for row in graphs.rows()]


def test_minmax_equals_rows_run_alone(tmp_path: Path) -> None:
    source = graphs.exported(tmp_path / "model.onnx")
    found = calibration.compute_ranges(source, graphs.rows(), method="minmax")
    read = {product.reads for product in products(onnx.load_model(source).graph)}
    assert found.keys() == read
    for name in list(read)[::3]:
        values = watched(source, name)
        low, high = min(0.0, *(v.min() for v in values)), max(0.0, *(v.max() for v in values))
        assert found[name] == pytest.approx((low, high), abs=1e-5)


def test_every_number_counts_once_however_rows_are_batched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, given = graphs.exported(tmp_path / "model.onnx"), graphs.rows()
    seen = calibration.observe(source, given)
    tokens = sum(len(row["input_ids"]) for row in given)
    first = products(onnx.load_model(source).graph)[0].reads
    assert seen[first].counts.sum() == tokens * 32
    monkeypatch.setattr(calibration, "TOKENS_PER_RUN", 1)
    monkeypatch.setattr(calibration, "CALIBRATION_WINDOW", 5)
    alone = calibration.observe(source, iter(given))
    for name, histogram in alone.items():
        assert histogram.range("minmax") == pytest.approx(seen[name].range("minmax"), abs=1e-5)
        assert histogram.counts.sum() == seen[name].counts.sum()


def test_methods_differ_by_what_they_clip(tmp_path: Path) -> None:
    source = graphs.exported(tmp_path / "model.onnx")
    seen = calibration.observe(source, graphs.rows())
    all_of_it, middle = calibration.choose_ranges(seen, "minmax"), calibration.choose_ranges(seen, "percentile", 95.0)
    assert all(all_of_it[name][0] <= middle[name][0] and middle[name][1] <= all_of_it[name][1] for name in seen)
    assert all_of_it != middle


def test_unsuitable_calibration_is_refused(tmp_path: Path) -> None:
    source = graphs.exported(tmp_path / "model.onnx")
    with pytest.raises(ExportError, match="at least one row"):
        calibration.compute_ranges(source, [])
    with pytest.raises(ExportError, match="expected attention_mask too"):
        calibration.compute_ranges(source, [{"input_ids": [1, 2]}])
    model = onnx.load_model(source)
    weight = next(each for each in model.graph.initializer if "embeddings.LayerNorm.weight" in each.name)
    weight.CopyFrom(onnx.numpy_helper.from_array(np.full(32, np.nan, np.float32), weight.name))
    onnx.save_model(model, source)
    with pytest.raises(ExportError, match="not finite"):
        calibration.compute_ranges(source, graphs.rows())
