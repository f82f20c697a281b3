"""A rewritten graph computes what the model does, at any shape and padding, and is what it claims to be."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import ModelProto, helper
from transformers import AutoModelForQuestionAnswering, AutoModelForTokenClassification

from compress.exporters.embeddings import Pooling
from compress.exporters.int8 import quantize_dynamic
from compress.exporters.onnx import Pooled, parity, to_onnx
from compress.exporters.rewrite import FORM_KEY, Form, Rewritten, rewrite_graph
from compress.exporters.session import UNFUSED_SKIP, metadata, read_model, session_options
from tests import tiny
from tests.exporters.test_onnx import batches

KNOWN = ("bert", "distilbert", "roberta", "electra", "albert", "mobilebert", "ernie", "xlm-roberta")
OTHERS = ("deberta", "deberta-v2", "modernbert", "xlnet")
FORMS = (
    Form(),
    Form(merged=True),
    Form(tokens_first=False),
    Form(one_token=False),
    Form(one_token=False, tokens_first=False, merged=True),
)


def exported(model: Any, folder: Path) -> ModelProto:
    to_onnx(model, folder / "raw.onnx", form=None)
    return read_model(folder / "raw.onnx")


def saved(made: Rewritten, folder: Path) -> Path:
    onnx.checker.check_model(made.model)
    onnx.save_model(made.model, folder / "rewritten.onnx")
    return folder / "rewritten.onnx"


def operators(model: ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def as_run(path: Path, folder: Path) -> ModelProto:
    """What onnxruntime makes of a file."""
    options = session_options(1, UNFUSED_SKIP)
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return onnx.load_model(folder / "optimised.onnx")


def shape_of(path: Path, name: str, rows: int, tokens: int) -> tuple[int, ...]:
    """Of a tensor inside a graph, for a batch of this shape."""
    model = read_model(path)
    model.graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    ids = np.full((rows, tokens), 7)
    feeds = {node.name: np.ones_like(ids) if "mask" in node.name else ids % 2 for node in session.get_inputs()}
    return tuple(session.run([name], feeds)[0].shape)


@pytest.mark.parametrize("family", KNOWN)
def test_every_form_computes_the_models_logits_at_every_shape(family: str, tmp_path: Path) -> None:
    model = tiny.model(family)
    raw = exported(model, tmp_path)
    for form in FORMS:
        made = rewrite_graph(raw, form)
        assert parity(model, saved(made, tmp_path), batches(model.config)) < 2e-5, form
        assert (made.attentions, made.softmaxes, made.turned) == (2, 2, 2 * form.tokens_first)
        assert (made.rows > 0, made.merged > 0) == (form.one_token, form.merged)
        assert "Constant" not in operators(made.model)
        assert made.model.graph.node, "is not empty"


@pytest.mark.parametrize("family", OTHERS)
def test_attention_of_another_form_stays_and_is_counted(family: str, tmp_path: Path) -> None:
    model = tiny.model(family)
    made = rewrite_graph(exported(model, tmp_path), Form(merged=True))
    short = (
        {name: tensor[:, :12] for name, tensor in batch.items() if tensor.dim() == 2} for batch in batches(model.config)
    )
    assert parity(model, saved(made, tmp_path), short) < 2e-5
    assert (made.attentions, made.softmaxes, made.turned, made.merged) == (0, 2, 0, 0)


@pytest.mark.parametrize("head", [AutoModelForTokenClassification, AutoModelForQuestionAnswering])
def test_heads_that_read_all_tokens_get_all_tokens(head: Any, tmp_path: Path) -> None:
    model = tiny.model("bert", head=head, labels=2)
    made = rewrite_graph(exported(model, tmp_path))
    assert made.rows == 0
    assert made.turned
    assert parity(model, saved(made, tmp_path), batches(model.config)) < 2e-5


def test_the_last_layer_computes_one_token_and_the_others_all(tmp_path: Path) -> None:
    made = rewrite_graph(exported(tiny.bert(layers=2), tmp_path), Form(tokens_first=False))
    path = saved(made, tmp_path)
    inner = "/model/bert/encoder/layer.{}/intermediate/dense/MatMul_output_0"
    keys = "/model/bert/encoder/layer.1/attention/self/key/MatMul_output_0"
    assert shape_of(path, inner.format(0), 3, 7) == (3, 7, 64)
    assert shape_of(path, inner.format(1), 3, 7) == (3, 1, 64)
    assert shape_of(path, keys, 3, 7)[:2] == (3, 7)


def test_what_is_an_output_too_is_computed_for_all_tokens(tmp_path: Path) -> None:
    """Embeddings of the first token, with the hidden states they are taken of."""
    model = Pooled(tiny.bert(layers=2).base_model, Pooling("cls", False))
    made = rewrite_graph(exported(model, tmp_path))
    assert (made.rows, made.turned) == (0, 2)
    assert parity(model, saved(made, tmp_path), batches(model.config)) < 2e-5


def test_an_opset_too_old_stays_as_it_was_traced(tmp_path: Path) -> None:
    to_onnx(tiny.bert(layers=2), tmp_path / "old.onnx", opset=12)
    old = read_model(tmp_path / "old.onnx")
    made = rewrite_graph(old)
    assert made == Rewritten(old, 0, 2, 0, 0, 0)
    assert FORM_KEY not in metadata(made.model)


def test_residuals_that_begin_before_the_attention_are_turned_too(tmp_path: Path) -> None:
    """MobileBERT whose queries, keys and values all come from one bottleneck."""
    asked = {"use_bottleneck_attention": True, "key_query_shared_bottleneck": False}
    model = tiny.model("mobilebert", layers=3, **asked)
    made = rewrite_graph(exported(model, tmp_path))
    assert (made.attentions, made.turned) == (3, 3)
    assert parity(model, saved(made, tmp_path), batches(model.config)) < 2e-5
    turned = [node for node in made.model.graph.node if node.op_type == "Transpose"]
    assert len(turned) == 4 * 3 + 3 + 2, "four an attention, the stream, the bottleneck and the mask, padding's own two"
    assert len({node.name for node in made.model.graph.node}) == len(made.model.graph.node)


def test_neither_scale_nor_mask_touches_the_scores(tmp_path: Path) -> None:
    raw = exported(tiny.bert(layers=2), tmp_path)
    made = rewrite_graph(raw).model
    writers = {name: node for node in made.graph.node for name in node.output}
    for node in made.graph.node:
        if node.op_type == "Softmax":
            assert writers[node.input[0]].op_type == "MatMul"
    widths = {tuple(tensor.dims) for tensor in made.graph.initializer}
    assert (32, 4 * 9) in widths, "one feature more in each of 4 heads of 8"


def test_onnxruntime_reads_heads_where_they_are(tmp_path: Path) -> None:
    raw = exported(tiny.bert(layers=3), tmp_path)
    run = as_run(saved(rewrite_graph(raw, Form(one_token=False)), tmp_path), tmp_path)
    turned = [node for node in run.graph.node if node.op_type == "FusedMatMul"]
    found = [{each.name for each in node.attribute if each.i} for node in turned]
    assert sum({"transBatchA", "transBatchB", "transB"} <= names for names in found) == 3
    assert sum("transBatchB" in names for names in found) == 6
    # one at the start, one at the end of each attention, one of the mask
    assert operators(run)["Transpose"] <= 3 + 2
    before = as_run(tmp_path / "raw.onnx", tmp_path)
    assert operators(before)["Transpose"] == 3 * 3 + 3
    assert len(run.graph.node) < len(before.graph.node)


def test_structure_decides_and_not_names(tmp_path: Path) -> None:
    model = tiny.bert(layers=2)
    raw = exported(model, tmp_path)
    given = {each.name for each in (*raw.graph.input, *raw.graph.output)}
    names: dict[str, str] = {}

    def other(name: str) -> str:
        return name if not name or name in given else names.setdefault(name, f"t{len(names)}")

    for place, node in enumerate(raw.graph.node):
        node.name = f"n{place}"
        node.input[:] = [other(name) for name in node.input]
        node.output[:] = [other(name) for name in node.output]
    for tensor in raw.graph.initializer:
        tensor.name = other(tensor.name)
    made = rewrite_graph(raw)
    assert (made.attentions, made.turned) == (2, 2)
    assert parity(model, saved(made, tmp_path), batches(model.config)) < 2e-5


def test_attention_whose_probabilities_are_read_too_stays(tmp_path: Path) -> None:
    model = tiny.bert(layers=2)
    raw = exported(model, tmp_path)
    first = next(node for node in raw.graph.node if node.op_type == "Softmax")
    raw.graph.output.append(helper.make_tensor_value_info(first.output[0], onnx.TensorProto.FLOAT, [None] * 4))
    made = rewrite_graph(raw)
    assert (made.attentions, made.softmaxes) == (1, 2)
    assert parity(model, saved(made, tmp_path), batches(model.config)) < 2e-5
    assert [each.name for each in made.model.graph.output] == ["logits", first.output[0]]


def test_a_mask_that_differs_by_query_stays_on_the_scores(tmp_path: Path) -> None:
    """As GPT-2's: a row of it for every query."""
    model = tiny.bert(layers=1)
    raw = exported(model, tmp_path)
    writers = {name: node for node in raw.graph.node for name in node.output}
    softmax = next(node for node in raw.graph.node if node.op_type == "Softmax")
    added = writers[softmax.input[0]]
    square = helper.make_node("Mul", [added.input[1], added.input[0]], ["square"], name="square")
    raw.graph.node.insert(list(raw.graph.node).index(added), square)
    added.input[1] = "square"
    made = rewrite_graph(raw)
    assert made.attentions == 0


def test_layers_share_weights_afterwards_too(tmp_path: Path) -> None:
    sizes = {}
    for layers in (2, 5):
        raw = exported(tiny.model("albert", layers=layers, hidden=64), tmp_path)
        made = rewrite_graph(raw).model.graph.initializer
        sizes[layers] = sum(np.prod(tensor.dims) for tensor in made if len(tensor.dims) == 2)
    assert sizes[2] == sizes[5]


def test_the_given_model_and_what_is_known_of_it_stay(tmp_path: Path) -> None:
    raw = exported(tiny.bert(), tmp_path)
    before = raw.SerializeToString(deterministic=True)
    made = rewrite_graph(raw).model
    assert raw.SerializeToString(deterministic=True) == before
    assert metadata(made) == {**metadata(raw), FORM_KEY: "one token at the end, tokens first"}
    assert [each.name for each in made.graph.input] == [each.name for each in raw.graph.input]
    assert made.opset_import == raw.opset_import
    assert made.ir_version == raw.ir_version


@pytest.mark.parametrize("family", ["bert", "mobilebert"])
def test_int8_of_a_rewritten_graph_is_as_near_as_of_the_raw_one(family: str, tmp_path: Path) -> None:
    model = tiny.model(family, hidden=64)
    raw = exported(model, tmp_path)
    apart = {}
    for name, source in (("raw", raw), ("rewritten", rewrite_graph(raw).model)):
        onnx.save_model(source, tmp_path / "fp32.onnx")
        quantize_dynamic(tmp_path / "fp32.onnx", tmp_path / "int8.onnx")
        torch.manual_seed(0)
        apart[name] = parity(model, tmp_path / "int8.onnx", batches(model.config))
    assert 0 < apart["rewritten"] < 3 * apart["raw"]
