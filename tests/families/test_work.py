"""The terms of a shape are those of the file that ships: counted from the config, and node by node in the graph."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from compress import families
from compress.exporters.onnx import to_onnx
from compress.kinds import Kind
from compress.latency.features import Terms
from compress.models import heads
from compress.models.flops import flops_per_token
from compress.models.ibbert import IBBertConfig
from compress.records.latency import Setting
from tests import tiny

TOKENS = 13
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family.name: (family.name, {}) for family in families.known() if family.counted and family.layered},
    "mobilebert, values narrowed too": ("mobilebert", {"use_bottleneck_attention": True}),
    "mobilebert, no bottleneck": ("mobilebert", {"use_bottleneck": False}),
    "mobilebert, one network": ("mobilebert", {"num_feedforward_networks": 1, "trigram_input": False}),
    "modernbert": ("modernbert", {"local_attention": 4}),
    "modernbert, a mean": ("modernbert", {"local_attention": 4, "classifier_pooling": "mean"}),
}
KINDS: tuple[Kind | None, ...] = ("classification", "tagging", "qa", None)


def of(name: str, kind: Kind | None, **changes: Any) -> Any:
    family, settings = SHAPES[name]
    labels = 2 if kind == "qa" else 3
    if family == "ib-bert":
        sizes: Any = {
            "num_labels": labels,
            "hidden_size": 32,
            "intra_bottleneck_size": 48,
            "embedding_size": 16,
            "intermediate_size": 64,
        }
        return IBBertConfig(vocab_size=50, num_hidden_layers=3, **sizes)
    found = tiny.config(family, layers=3, labels=labels)
    for key, value in settings.items():
        setattr(found, key, value)
    if family == "mobilebert":
        found.true_hidden_size = found.intra_bottleneck_size if found.use_bottleneck else found.hidden_size
    return found


def counted(path: Path, rows: int = 1) -> dict[str, float]:
    """What the products and softmaxes of a file compute, found by running it and looking at every tensor."""
    model = onnx.load_model(path)
    weights = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    constants = set(weights) | {node.output[0] for node in model.graph.node if node.op_type == "Constant"}
    del model.graph.output[:]
    named = [name for node in model.graph.node for name in node.output]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in named)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    feeds = {each.name: np.ones((rows, TOKENS), np.int64) for each in session.get_inputs()}
    values = {**weights, **feeds, **dict(zip(named, session.run(named, feeds), strict=True))}
    found = {"with weights": 0.0, "attention": 0.0, "softmax": 0.0}
    for node in model.graph.node:
        if node.op_type in ("MatMul", "Gemm"):
            kind = "with weights" if node.input[1] in constants else "attention"
            found[kind] += values[node.output[0]].size * values[node.input[0]].shape[-1]
        if node.op_type == "Softmax":
            found["softmax"] += values[node.output[0]].size
    return found


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in SHAPES
        for kind in KINDS
        # of the others torch counts the products of all tokens
        if kind == "classification" or name in ("bert", "ib-bert", "modernbert")
    ],
    ids=str,
)
def test_products_are_those_of_the_exported_graph(name: str, kind: Kind | None, tmp_path: Path) -> None:
    config = of(name, kind)
    model: Any = heads.create(config, "task" if kind else "encoder", kind)
    to_onnx(model.eval(), tmp_path / "model.onnx")
    terms = Terms.from_config(config, Setting(seq=TOKENS), kind).counts
    assert counted(tmp_path / "model.onnx") == {
        "with weights": terms["projections"] + terms["feed_forward"],
        "attention": terms["attention"],
        "softmax": terms["softmax"],
    }


@pytest.mark.parametrize("kind", ["classification", "tagging"])
@pytest.mark.parametrize("name", SHAPES)
def test_flops_equal_torchs_count(name: str, kind: Kind) -> None:
    config = of(name, kind)
    model = heads.create(config, "task", kind)
    found = Terms.from_config(config, Setting(seq=TOKENS), kind).flops
    assert found == pytest.approx(flops_per_token(model, TOKENS) * TOKENS)


@pytest.mark.parametrize("kind", ["tagging", None])
def test_flops_of_a_llama_equal_torchs_count(kind: Kind | None) -> None:
    """Keys and values of half as many heads, and a gate beside the first product of the neurons."""
    config = tiny.config("llama", layers=3)
    model = heads.create(config, "task" if kind else "encoder", kind)
    found = Terms.from_config(config, Setting(seq=TOKENS), kind).flops
    assert found == pytest.approx(flops_per_token(model, TOKENS) * TOKENS)


def test_rows_of_a_batch_add_up(tmp_path: Path) -> None:
    config = of("bert", "classification")
    model: Any = heads.create(config, "task", "classification")
    to_onnx(model.eval(), tmp_path / "model.onnx")
    terms = Terms.from_config(config, Setting(batch=4, seq=TOKENS)).counts
    assert counted(tmp_path / "model.onnx", rows=4)["with weights"] == terms["projections"] + terms["feed_forward"]
    assert terms["softmax"] == 4 * Terms.from_config(config, Setting(seq=TOKENS)).counts["softmax"]
    assert terms["weights"] == Terms.from_config(config, Setting(seq=TOKENS)).counts["weights"]


@pytest.mark.parametrize("family", ["gpt2", "t5", "deberta-v2", "llama"])
def test_other_families_count_as_plain_layers(family: str) -> None:
    """Enough for a fit: twice the layers is twice the work of all that is in layers."""
    from transformers import GPT2Config, T5Config

    made: dict[str, Any] = {
        "gpt2": lambda layers: GPT2Config(n_embd=32, n_layer=layers, n_head=4),
        "t5": lambda layers: T5Config(d_model=32, d_kv=8, num_layers=layers, num_heads=4, d_ff=64),
    }
    make = made.get(family, lambda layers: tiny.config(family, layers=layers))
    assert not families.find(family).counted
    two, four = (Terms.from_config(make(layers), Setting(seq=TOKENS)).counts for layers in (2, 4))
    for name in ("layers", "feed_forward", "attention", "softmax"):
        assert four[name] == 2 * two[name] > 0


def test_activations_and_norms_have_terms_of_their_own() -> None:
    relu = Terms.from_config(tiny.config("bert", hidden_act="relu"), Setting()).counts
    gelu = Terms.from_config(tiny.config("bert"), Setting()).counts
    assert relu["activation relu"] == gelu["activation gelu"] > 0
    assert "activation gelu" not in relu
    assert Terms.from_config(of("mobilebert", "classification"), Setting()).counts["norm no_norm"] > 0
