"""The int8 file keeps its score, or says which products had to stay in float32."""

from pathlib import Path

import onnx
import pytest
import torch
from datasets import Dataset

from compress.data.task import Task
from compress.exam import Exam
from compress.export.bundle import Bundle
from compress.export.int8 import contracting_products, quantize_dynamic
from compress.quantize import products_to_keep
from tests import learning, tiny

TASK = Task("classification", ("text",), "label", ("a", "b", "c"), "accuracy")


def bundle(path: Path, *, outlier_in: int | None = None) -> tuple[Bundle, Exam]:
    """A bundle and an exam in which the fp32 model's own answers are right, so that fp32 scores 1.

    `outlier_in`: one inner neuron of that layer is huge and read by nobody: it changes nothing but the scale that all
    of its neighbours are quantised with.
    """
    torch.manual_seed(4)
    model = tiny.model("bert", layers=2, seed=4)
    with torch.no_grad():
        for layer in model.bert.encoder.layer:
            for linear in (layer.intermediate.dense, layer.output.dense):
                linear.weight.normal_(std=0.5)
        model.bert.pooler.dense.weight.normal_(std=1.0)
        model.classifier.weight.normal_(std=1.0)
        if outlier_in is not None:
            layer = model.bert.encoder.layer[outlier_in]
            layer.intermediate.dense.bias[3] = 2000.0
            layer.output.dense.weight[:, 3] = 0.0
    shipped = Bundle.write(
        path,
        model=model,
        tokenizer=tiny.tokenizer(),
        task=TASK,
        max_length=24,
        recipe="stages: []\n",
        card={"name": "x"},
    )
    rows = learning.rows(200)
    rows = rows.add_column("token_type_ids", [[0] * length for length in rows["length"]])
    answers = shipped.logits(rows, precision="fp32").argmax(1)
    return shipped, Exam(TASK, Dataset.from_dict({"label": answers}), rows)


@pytest.mark.parametrize("outlier_in", [0, 1])
def test_the_product_that_hurts_stays_float_and_no_other(outlier_in: int, tmp_path: Path) -> None:
    shipped, exam = bundle(tmp_path / "bundle", outlier_in=outlier_in)
    lost = 1 - exam.scores(shipped.logits(exam.rows))[TASK.metric]
    assert lost > 0.05, "the case is no case: int8 is good as it is"
    keep = products_to_keep(shipped, exam, limit=0.05, threads=1)
    assert keep == (contracting_products(shipped.files()["fp32"])[outlier_in],)
    quantize_dynamic(shipped.files()["fp32"], tmp_path / "kept.onnx", keep=keep)
    nodes = {node.name: node.op_type for node in onnx.load(tmp_path / "kept.onnx").graph.node}
    assert nodes[keep[0]] == "MatMul"
    assert "MatMulInteger" in nodes.values()


def test_nothing_is_kept_where_nothing_is_lost(tmp_path: Path) -> None:
    shipped, exam = bundle(tmp_path / "bundle")
    assert products_to_keep(shipped, exam, limit=1.0, threads=1) == ()


def test_a_limit_that_cannot_be_met_keeps_only_what_matters(tmp_path: Path) -> None:
    shipped, exam = bundle(tmp_path / "bundle", outlier_in=0)
    first, second = contracting_products(shipped.files()["fp32"])
    assert products_to_keep(shipped, exam, limit=-1.0, threads=1) == (first,)
    assert second != first
