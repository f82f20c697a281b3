"""The products of a graph are found, with what they read, add and are called."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from compress.exporters.int8 import quantize_dynamic
from compress.exporters.onnx import to_onnx
from compress.exporters.rewrite.graph import Graph, layer, list_floats, products
from tests import tiny
from tests.quantization import graphs


def test_products_are_the_linear_layers(tmp_path: Path) -> None:
    graph = onnx.load_model(graphs.exported(tmp_path / "model.onnx", layers=2)).graph
    found = products(graph)
    assert [layer(product.name) for product in found] == [
        *(
            f"layer {at}, {part}"
            for at in range(2)
            for part in (
                "attention query", "attention key", "attention value", "attention output", "intermediate", "output"
            )
        ),
        "pooler", "classifier",
    ]  # fmt: skip
    assert all(product.bias is not None for product in found)
    assert len({product.name for product in found}) == len(found)
    query, key, value = found[:3]
    assert query.reads == key.reads == value.reads
    assert [product.gemm for product in found[-2:]] == [True, True]
    assert found[-1].matrix(Graph(graph).tensors).shape == (32, 3)
    assert len(Graph(graph).lookups()) == 3


def test_a_shared_weight_is_a_product_at_each_use_under_its_own_name(tmp_path: Path) -> None:
    graph = onnx.load_model(graphs.exported(tmp_path / "model.onnx", "albert", layers=3)).graph
    found = products(graph)
    assert len({product.name for product in found}) == len(found) == 3 + 6 * 3
    assert len({product.weight for product in found}) == 3 + 6


@pytest.mark.parametrize("bias", [None, np.ones(4)])
def test_a_bias_belongs_to_the_product_it_is_added_to(bias: np.ndarray | None, tmp_path: Path) -> None:
    (found,) = products(onnx.load_model(graphs.one_product(tmp_path / "m.onnx", np.eye(4), bias)).graph)
    assert (found.name, found.reads, found.output) == ("product", "x", "y")
    assert found.bias == (None if bias is None else "b")
    assert found.ends == (("y",) if bias is None else ("raw", "y"))


def test_an_addition_with_other_readers_is_no_bias(tmp_path: Path) -> None:
    model = onnx.load_model(graphs.one_product(tmp_path / "m.onnx", np.eye(4), np.ones(4)))
    model.graph.node.append(onnx.helper.make_node("Neg", ["raw"], ["z"], name="neg"))
    assert products(model.graph)[0].bias is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("/model/bert/encoder/layer.11/attention/self/query/MatMul", "layer 11, attention query"),
        ("/model/bert/encoder/layer.0/attention/qkv/MatMul", "layer 0, attention qkv"),
        ("/model/distilbert/transformer/layer.2/ffn/lin1/MatMul", "layer 2, ffn lin1"),
        (
            "/model/albert/encoder/albert_layer_groups.0/albert_layers.0/attention/query/MatMul",
            "layer 0, attention query",
        ),
        (
            "/model/albert/encoder/albert_layer_groups.0/albert_layers.0/attention/dense_2/MatMul",
            "layer 0, attention, use 3",
        ),
        ("/model/classifier/Gemm", "classifier"),
        ("product", "product"),
    ],
)
def test_layer_names(name: str, expected: str) -> None:
    assert layer(name) == expected


@pytest.mark.parametrize("kept", ["/model/classifier/Gemm", "/model/bert/encoder/layer.0/output/dense/MatMul"])
def test_products_in_float32_are_listed(kept: str, tmp_path: Path) -> None:
    """A head, too, which onnxruntime's quantiser takes apart under another name."""
    to_onnx(tiny.bert(), tmp_path / "fp32.onnx")
    quantize_dynamic(tmp_path / "fp32.onnx", tmp_path / "int8.onnx", keep=[kept])
    assert list_floats(tmp_path / "fp32.onnx", tmp_path / "int8.onnx") == (kept,)
    quantize_dynamic(tmp_path / "fp32.onnx", tmp_path / "all.onnx")
    assert list_floats(tmp_path / "fp32.onnx", tmp_path / "all.onnx") == ()
