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

from compress.exporters.int8 import quantize_dynamic, quantize_learned
from compress.exporters.onnx import parity, to_onnx
from compress.exporters.rewrite.forms import FORM_KEY, Form, Rewritten, rewrite_graph
from compress.exporters.rewrite.graph import list_floats
from compress.exporters.session import UNFUSED_SKIP, metadata, read_model, session_options
from compress.models.sentence_settings import SentenceSettings
from compress.models.sharing import share
from tests import tiny
from tests.exporters.test_onnx import batches

KNOWN = ("bert", "distilbert", "roberta", "electra", "albert", "mobilebert", "ernie", "xlm-roberta")
OTHERS = ("deberta", "deberta-v2", "xlnet")
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
def test_other_attention_is_counted_but_not_changed(family: str, tmp_path: Path) -> None:
    model = tiny.model(family)
    made = rewrite_graph(exported(model, tmp_path), Form(merged=True))
    short = (
        {name: tensor[:, :12] for name, tensor in batch.items() if tensor.dim() == 2} for batch in batches(model.config)
    )
    assert parity(model, saved(made, tmp_path), short) < 2e-5
    assert (made.attentions, made.softmaxes, made.turned, made.merged) == (0, 2, 0, 0)


BIASES = {"attention_bias": True, "mlp_bias": True, "norm_bias": True}


def modern(**changes: Any) -> Any:
    """A global layer and two local ones, which see two tokens to either side; biases and gains are random."""
    model = tiny.model("modernbert", layers=3, local_attention=4, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("changes", [{}, BIASES], ids=["bare", "biased"])
def test_rotary_attention_is_divided(changes: dict[str, Any], form: Form, tmp_path: Path) -> None:
    model = modern(**changes)
    made = rewrite_graph(exported(model, tmp_path), form)
    assert parity(model, saved(made, tmp_path), batches(model.config)) < 2e-5
    assert (made.attentions, made.softmaxes, made.turned) == (3, 3, 0)
    assert (made.rows > 0, made.merged) == (form.one_token, 0 if not form.merged else 9 - form.one_token)
    assert not {"Slice", "Neg"} & operators(made.model).keys(), "nothing is sliced while it runs"
    wide = {tuple(tensor.dims) for tensor in made.model.graph.initializer} & {(32, 96), (32, 128)}
    assert bool(wide) == form.merged, "queries, keys, values and the halves of feed-forwards by products of their own"


def test_the_last_modern_layer_computes_one_token_and_the_others_all(tmp_path: Path) -> None:
    path = saved(rewrite_graph(exported(modern(), tmp_path), Form(tokens_first=False)), tmp_path)
    inner = "/model/model/layers.{}/mlp/Wi/inputs/MatMul_output_0"
    assert shape_of(path, inner.format(1), 3, 7) == (3, 7, 64)
    assert shape_of(path, inner.format(2), 3, 7) == (3, 1, 64)
    assert shape_of(path, "/model/model/layers.2/attn/Wqkv/keys/MatMul_output_0", 3, 7)[:2] == (3, 7)
    assert shape_of(path, "/model/model/layers.2/attn/mask_of_one_token_output_0", 3, 7) == (3, 1, 1, 7)


@pytest.mark.parametrize("spoil", ["halves", "mask", "parts", "scores"])
def test_similar_structures_are_not_changed(spoil: str, tmp_path: Path) -> None:
    """Each change is one that the found structure does not compute."""
    model = modern()
    raw = exported(model, tmp_path)
    nodes = {node.name: node for node in raw.graph.node}
    of = "/model/model/layers.1/attn"
    if spoil == "halves":  # the halves in their own places
        nodes[f"{of}/Concat_1"].input[:] = list(nodes[f"{of}/Concat_1"].input)[::-1]
    elif spoil == "mask":
        twice = helper.make_node("Mul", [nodes[f"{of}/Add_2"].input[1], nodes[f"{of}/Mul_4"].output[0]], ["m"])
        raw.graph.node.insert(list(raw.graph.node).index(nodes[f"{of}/Add_2"]), twice)
        nodes[f"{of}/Add_2"].input[1] = "m"
    elif spoil == "parts":  # keys as queries
        nodes[f"{of}/Squeeze"].input[0] = nodes[f"{of}/Split"].output[1]
    else:
        raw.graph.output.append(
            helper.make_tensor_value_info(nodes[f"{of}/Softmax"].output[0], onnx.TensorProto.FLOAT, [None] * 4)
        )
        nodes[f"{of}/Softmax"].output[0] = raw.graph.output[-1].name
    onnx.save_model(raw, tmp_path / "spoilt.onnx")
    made = rewrite_graph(raw)
    assert (made.attentions, made.softmaxes) == (2, 3)
    feeds = {"input_ids": tiny.batch((9, 9))["input_ids"].numpy(), "attention_mask": np.ones((2, 9), np.int64)}
    one, other = (
        onnxruntime.InferenceSession(path).run(["logits"], feeds)[0]
        for path in (tmp_path / "spoilt.onnx", saved(made, tmp_path))
    )
    np.testing.assert_allclose(one, other, atol=2e-5)


def test_learned_ranges_of_a_product_are_those_of_its_parts(tmp_path: Path) -> None:
    model = modern()
    to_onnx(model, tmp_path / "fp32.onnx")
    layers = [name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear) and ".layers." in name]
    quantize_learned(tmp_path / "fp32.onnx", tmp_path / "int8.onnx", dict.fromkeys(layers, (-8.0, 8.0)))
    exact = list_floats(tmp_path / "fp32.onnx", tmp_path / "int8.onnx")
    assert exact and not [name for name in exact if "/layers." in name], "all but the head's"


@pytest.mark.parametrize("family", ["albert", "modernbert"])
def test_shared_weights_stay_shared(family: str, tmp_path: Path) -> None:
    sizes = {}
    for layers in (2, 5):
        model = tiny.model(family, layers=layers)
        if family == "modernbert":
            share(model, attention=1, ffn=1)
        made = rewrite_graph(exported(model, tmp_path)).model.graph.initializer
        sizes[layers] = sum(np.prod(tensor.dims) for tensor in made if len(tensor.dims) == 2)
    assert sizes[2] == sizes[5]


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


def test_outputs_are_computed_for_all_tokens(tmp_path: Path) -> None:
    """Embeddings of the first token, with the hidden states they are taken of."""
    model = tiny.with_settings(tiny.bert(layers=2).base_model, SentenceSettings.pooled(32, "cls"))
    made = rewrite_graph(exported(model, tmp_path))
    assert (made.rows, made.turned) == (3, 2)  # three nodes of the mask, of which the first token's row is read
    assert parity(model, saved(made, tmp_path), batches(model.config)) < 2e-5


def test_old_opsets_are_not_rewritten(tmp_path: Path) -> None:
    to_onnx(tiny.bert(layers=2), tmp_path / "old.onnx", opset=12)
    old = read_model(tmp_path / "old.onnx")
    made = rewrite_graph(old)
    assert made == Rewritten(old, 0, 2, 0, 0, 0)
    assert FORM_KEY not in metadata(made.model)


def test_residuals_that_begin_before_the_attention_are_turned_too(tmp_path: Path) -> None:
    """MobileBERT whose queries, keys and values all come from one bottleneck."""
    settings = {"use_bottleneck_attention": True, "key_query_shared_bottleneck": False}
    model = tiny.model("mobilebert", layers=3, **settings)
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


def test_the_input_model_and_its_metadata_are_kept(tmp_path: Path) -> None:
    raw = exported(tiny.bert(), tmp_path)
    before = raw.SerializeToString(deterministic=True)
    made = rewrite_graph(raw).model
    assert raw.SerializeToString(deterministic=True) == before
    assert metadata(made) == {**metadata(raw), FORM_KEY: "one token at the end, tokens first"}
    assert [each.name for each in made.graph.input] == [each.name for each in raw.graph.input]
    assert made.opset_import == raw.opset_import
    assert made.ir_version == raw.ir_version


@pytest.mark.parametrize("family", ["bert", "mobilebert", "modernbert"])
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
