"""SmoothQuant changes no answer of the float graph, and makes the steps of int8 finer where channels are uneven."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from compress.exporters.int8 import quantize_static
from compress.exporters.onnx import to_onnx
from compress.exporters.rewrite.forms import Form, rewrite_graph
from compress.exporters.rewrite.graph import Graph, layer, products
from compress.exporters.session import read_model
from compress.quantization.calibration import compute_ranges
from compress.quantization.smoothquant import Channels, observe_channels, producers, smooth
from tests import tiny
from tests.quantization import graphs

BY_MODEL = ["bert", "distilbert", "albert", "mobilebert", "deberta-v2", "modernbert"]


def uneven(path: Path, family: str = "bert", **changes: Any) -> Path:
    """A model in which a few inner channels of the feed-forwards, and of the values, are far larger than the others;
    what reads them makes up for it, so that the answers stay as tame as before. As traced."""
    model = tiny.model(family, **changes)
    parameters = dict(model.named_parameters())
    pairs = {
        "intermediate.dense": "output.dense", "lin1": "lin2", "ffn": "ffn_output", "value": "output.dense",
        "v_lin": "out_lin",
    }  # fmt: skip
    with torch.no_grad():
        for at, (name, weight) in enumerate(parameters.items()):
            if weight.dim() == 1:  # alike, the exporter would store them once
                weight.add_(0.02 * torch.randn(len(weight), generator=torch.Generator().manual_seed(at)))
            first = next((each for each in pairs if name.endswith(f".{each}.weight")), None)
            second = first and name.replace(f"{first}.weight", f"{pairs[first]}.weight")
            second = second and second.replace("self.output", "output")
            if first is None or second not in parameters or parameters[second].shape[1] != weight.shape[0]:
                continue
            weight[::7] *= 20
            parameters[second][:, ::7] /= 20
    to_onnx(model, path, segments=False, form=None)
    return path


@pytest.mark.parametrize("multiply", [True, False])
@pytest.mark.parametrize("family", BY_MODEL)
def test_the_float_graph_answers_as_before(family: str, multiply: bool, tmp_path: Path) -> None:
    source, target = uneven(tmp_path / "model.onnx", family, layers=3), tmp_path / "smooth.onnx"
    given = graphs.rows()
    found = smooth(source, target, observe_channels(source, given), alpha=0.6, multiply=multiply)
    before, after = graphs.logits(source, given), graphs.logits(target, given)
    assert after == pytest.approx(before, abs=2e-4 * max(1.0, float(abs(before).max())))
    assert (target.read_bytes() != source.read_bytes()) or not multiply
    expected = compute_ranges(target, given, method="minmax")
    assert found.keys() == expected.keys()
    for name, pair in expected.items():
        assert found[name] == pytest.approx(pair, rel=1e-3, abs=1e-3)


def test_a_scale_is_equation_4(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    matrix = draw.normal(size=(6, 4)).astype(np.float32)
    source = graphs.one_product(tmp_path / "model.onnx", matrix, None)
    model = onnx.load_model(source)
    low, high = -draw.uniform(0.1, 9, 6).astype(np.float32), draw.uniform(0.1, 9, 6).astype(np.float32)
    smooth(source, tmp_path / "smooth.onnx", {"x": Channels(low, high)}, alpha=0.3)
    weights = Graph(onnx.load_model(tmp_path / "smooth.onnx").graph).tensors
    scaled, factor = numpy_helper.to_array(weights["w"]), numpy_helper.to_array(weights["x_unscale"])
    for j in range(6):
        s = max(abs(low[j]), abs(high[j])) ** 0.3 / max(abs(float(w)) for w in matrix[j]) ** 0.7
        assert factor[j] == pytest.approx(1 / s, rel=1e-5)
        assert scaled[j] == pytest.approx(matrix[j] * s, rel=1e-5)
    assert model.graph.node[0].name == "product"


@pytest.mark.parametrize("family", ["bert", "albert"])
def test_smoothing_helps_if_channels_are_uneven(family: str, tmp_path: Path) -> None:
    source, given = uneven(tmp_path / "model.onnx", family), graphs.rows(40)
    full = graphs.logits(source, given)
    error = {}
    for name, file in (("plain", source), ("smooth", tmp_path / "smooth.onnx")):
        if name == "smooth":
            found = smooth(source, file, observe_channels(source, given), alpha=0.7)
        else:
            found = compute_ranges(source, given, method="minmax")
        quantize_static(file, tmp_path / "int8.onnx", found)
        error[name] = float(np.square(graphs.logits(tmp_path / "int8.onnx", given) - full).mean())
    assert error["smooth"] < 0.7 * error["plain"]


def test_scales_are_folded_if_exact_else_multiplied_once(tmp_path: Path) -> None:
    source = uneven(tmp_path / "model.onnx", layers=2)
    by_read = {product.reads: layer(product.name) for product in products(read_model(source).graph)}
    assert [by_read[name] for name in producers(read_model(source).graph)] == [
        "layer 0, attention output",
        "layer 1, attention output",
    ]
    smooth(source, tmp_path / "smooth.onnx", observe_channels(source, graphs.rows()), alpha=0.5)
    before, after = graphs.operators(source), graphs.operators(tmp_path / "smooth.onnx")
    # a layer: what q, k, v read; the intermediate layer; the output layer
    assert after.count("Mul") - before.count("Mul") == 3 * 2
    smooth(source, tmp_path / "folded.onnx", observe_channels(source, graphs.rows()), alpha=0.5, multiply=False)
    assert graphs.operators(tmp_path / "folded.onnx") == before


def test_norms_and_relus_take_scales(tmp_path: Path) -> None:
    folded = {
        family: [layer(p.name) for p in products(graph) if p.reads in producers(graph)]
        for family in ("modernbert", "mobilebert")
        for graph in [read_model(uneven(tmp_path / f"{family}.onnx", family)).graph]
    }
    assert "layer 1, attn Wqkv" in folded["modernbert"], "a norm before its layer"
    assert "layer 0, output" in folded["mobilebert"], "a ReLU between"


@pytest.mark.parametrize("form", [Form(tokens_first=False), Form(), Form(merged=True)], ids=str)
def test_rewritten_graphs_are_smoothed_and_quantised(form: Form, tmp_path: Path) -> None:
    source, given, fast = uneven(tmp_path / "model.onnx"), graphs.rows(), tmp_path / "fast.onnx"
    onnx.save_model(rewrite_graph(read_model(source), form).model, fast)
    found = smooth(fast, tmp_path / "smooth.onnx", observe_channels(fast, given), alpha=0.6)
    full = graphs.logits(source, given)
    assert graphs.logits(tmp_path / "smooth.onnx", given) == pytest.approx(full, abs=2e-4)
    folded = [
        layer(each.name) for each in products(read_model(fast).graph) if each.reads in producers(read_model(fast).graph)
    ]
    assert ("layer 0, attention output" in folded) == (not form.merged), "merged, the values are a part of a product"
    quantize_static(tmp_path / "smooth.onnx", tmp_path / "int8.onnx", found)
    assert np.corrcoef(full.ravel(), graphs.logits(tmp_path / "int8.onnx", given).ravel())[0, 1] > 0.97


def test_shared_layers_share_their_scales_and_store_their_weights_once(tmp_path: Path) -> None:
    source = uneven(tmp_path / "model.onnx", "albert", layers=3)
    smooth(source, tmp_path / "smooth.onnx", observe_channels(source, graphs.rows()), alpha=0.5)
    one, other = (
        sorted(tuple(t.dims) for t in read_model(p).graph.initializer if len(t.dims) == 2)
        for p in (source, tmp_path / "smooth.onnx")
    )
    assert one == other
