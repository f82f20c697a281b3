"""A model trained to compute in int8 ships the int8 file it was trained for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

from compress.config.term import Term
from compress.errors import ExportError
from compress.exporters.artifact import Bundle
from compress.exporters.int8 import module_of, quantize_learned
from compress.exporters.rewrite.graph import products
from compress.papers.q8bert import QuantizationAware
from compress.slicing.shape import Shape
from compress.training.objective import Objective
from tests import tiny
from tests.exporters.test_bundle import write


def trained(family: str, *, requantise: bool = False) -> tuple[Any, Tensor, dict[str, Tensor]]:
    """A student after one step, and what it answers while it computes in int8."""
    student = tiny.model(family, labels=2)
    objective = Objective(
        [Term("hinton.matched_logits")], Shape.from_config(student.config), Shape.from_config(student.config)
    )
    step = QuantizationAware(student, tiny.model(family, labels=2, seed=1), objective, requantise=requantise)
    batch = tiny.batch((7,))
    step.train()(**batch)
    with torch.no_grad():
        said = student.eval()(**batch).logits
    step.finish()
    return student.eval(), said, batch


@pytest.mark.parametrize("requantise", [False, True])
@pytest.mark.parametrize("family", ["bert", "distilbert", "albert", "mobilebert", "modernbert"])
def test_the_int8_file_answers_as_the_student_did_in_training(family: str, requantise: bool, tmp_path: Path) -> None:
    student, said, batch = trained(family, requantise=requantise)
    bundle = write(tmp_path / "bundle", model=student)
    rows = [{name: column[0].tolist() for name, column in batch.items()} | {"token_type_ids": [0] * 7}]
    int8, fp32 = (bundle.logits(rows, precision=which) for which in ("int8", "fp32"))
    assert np.abs(int8 - said.numpy()).max() < 1e-3 * max(1, np.abs(fp32).max())
    assert not np.array_equal(int8, fp32)
    file = onnx.load_model(bundle.files()["int8"])
    operators = {node.op_type for node in file.graph.node}
    assert "MatMulIntegerToFloat" in operators
    assert "DynamicQuantizeLinear" not in operators
    ranges = json.loads((bundle.path / "config.json").read_text())["activation_ranges"]
    rounded = sum(node.op_type == "DequantizeLinear" and node.name.endswith("MatMul_round") for node in file.graph.node)
    assert rounded == (sum(node.op_type == "MatMulIntegerToFloat" for node in file.graph.node) if requantise else 0)
    read = {module_of(product.name) for product in products(onnx.load_model(bundle.files()["fp32"]).graph)}
    read |= {name.rpartition(".")[0] for name in read}  # ModernBERT's Wqkv is three products
    assert ranges.keys() <= read, "every layer that was trained for it is in the file, by its name"


def test_kept_products_stay_in_float32(tmp_path: Path) -> None:
    student, _, _ = trained("bert")
    source = Bundle.load(write(tmp_path / "bundle", model=student).path).files()["fp32"]
    first = products(onnx.load_model(source).graph)[0].name
    quantize_learned(source, tmp_path / "kept.onnx", student.config.activation_ranges, keep=[first])
    assert [node.op_type for node in onnx.load_model(tmp_path / "kept.onnx").graph.node if node.name == first] == [
        "MatMul"
    ]
    with pytest.raises(ExportError, match="none of its products is a layer with a learned range"):
        quantize_learned(source, tmp_path / "none.onnx", {"bert.nothing": [0, 1]})
    assert not (tmp_path / "none.onnx").exists()
