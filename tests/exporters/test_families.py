"""Every family under every head: the file computes what the model does, at shapes that were not traced."""

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GPT2Config,
    MPNetConfig,
    XLMConfig,
)

from compress.exporters.int8 import quantize_dynamic
from compress.exporters.onnx import outputs_of, parity, to_onnx
from compress.models.ibbert import IBBertConfig
from compress.models.sentence_settings import SentenceSettings
from tests import tiny
from tests.exporters.test_onnx import batches

VOCABULARY = len(tiny.SPECIAL) + len(tiny.WORDS)
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 66, "initializer_range": 0.2,
}  # fmt: skip
OTHERS: dict[str, Callable[[], Any]] = {
    "ib-bert": lambda: IBBertConfig(**SIZES, embedding_size=16, intra_bottleneck_size=32),
    # The exporter loses its bound on distances, which real models cannot reach: they have no more positions.
    "deberta": lambda: tiny.config("deberta", max_relative_positions=64),
    "mpnet": lambda: MPNetConfig(**SIZES, pad_token_id=1),
    "xlm": lambda: XLMConfig(**SIZES, pad_token_id=2),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2, pad_token_id=0,
        bos_token_id=2, eos_token_id=3,
    ),
    "bert, pruned": lambda: tiny.config("bert", heads=2, hidden=24, layers=3),
}  # fmt: skip
FAMILIES = ("bert, pruned", *tiny.FAMILIES, "ib-bert", "mpnet", "xlm", "gpt2")
HEADS = MappingProxyType(
    {
        "classification": (AutoModelForSequenceClassification, 3),
        "tagging": (AutoModelForTokenClassification, 5),
        "qa": (AutoModelForQuestionAnswering, 2),
        "embeddings": (AutoModel, 2),
    }
)
ABSENT = (("xlnet", "qa"), ("xlm", "qa"), ("gpt2", "qa"))
"""XLNet's and XLM's answer with a beam of their own; GPT-2's, which reads the question only before the text, is no
student."""
SEGMENTS = {"bert", "bert, pruned", "electra", "albert", "mobilebert", "ernie", "gpt2", "xlm", "xlnet", "ib-bert"}


def config(family: str) -> Any:
    return OTHERS[family]() if family in OTHERS else tiny.config(family)


def model(family: str, head: str) -> Any:
    torch.manual_seed(0)
    auto, labels = HEADS[head]
    settings = config(family)
    settings.num_labels = labels
    made = auto.from_config(settings).eval()
    return (
        tiny.with_settings(made, SentenceSettings.pooled(made.config.hidden_size, normalise=True))
        if head == "embeddings"
        else made
    )


@pytest.mark.parametrize(
    ("family", "head"), [(family, head) for family in FAMILIES for head in HEADS if (family, head) not in ABSENT]
)
def test_file_is_the_model_and_int8_is_near(family: str, head: str, tmp_path: Path) -> None:
    exported = model(family, head)
    to_onnx(exported, tmp_path / "model.onnx")
    assert parity(exported, tmp_path / "model.onnx", batches(exported.config)) < 5e-5
    quantize_dynamic(tmp_path / "model.onnx", tmp_path / "small.onnx")
    exact, small = (onnxruntime.InferenceSession(tmp_path / name) for name in ("model.onnx", "small.onnx"))
    names = [node.name for node in small.get_inputs()]
    expected = ["input_ids", "attention_mask"] + ["token_type_ids"] * (family in SEGMENTS)
    assert [(node.name, node.type, node.shape) for node in exact.get_inputs()] == [
        (name, "tensor(int64)", ["batch_size", "sequence_length"]) for name in expected
    ]
    for batch in batches(exported.config):
        feeds = {name: batch[name].numpy() for name in names}
        for one, other in zip(exact.run(None, feeds), small.run(None, feeds), strict=True):
            assert one.shape == other.shape
            assert np.isfinite(other).all()
            assert np.abs(one - other).mean() < 0.5 * max(0.2, np.abs(one).mean())


@pytest.mark.parametrize("opset", [18, 21])
@pytest.mark.parametrize("family", ["bert", "deberta-v2", "gpt2"])
def test_every_opset_computes_the_same(family: str, opset: int, tmp_path: Path) -> None:
    exported = model(family, "classification")
    to_onnx(exported, tmp_path / "model.onnx", opset=opset)
    assert parity(exported, tmp_path / "model.onnx", batches(exported.config)) < 5e-5
    (version,) = {entry.version for entry in onnx.load_model(tmp_path / "model.onnx").opset_import if not entry.domain}
    assert version == opset
    quantize_dynamic(tmp_path / "model.onnx", tmp_path / "small.onnx")
    onnxruntime.InferenceSession(tmp_path / "small.onnx")


def test_a_layer_that_sees_its_neighbours_only_does_so_in_the_file(tmp_path: Path) -> None:
    settings = tiny.config("modernbert", layers=3, local_attention=8)  # rows are longer than its window
    torch.manual_seed(0)
    exported = AutoModelForSequenceClassification.from_config(settings).eval()
    assert set(settings.layer_types) == {"full_attention", "sliding_attention"}
    to_onnx(exported, tmp_path / "near.onnx")
    assert parity(exported, tmp_path / "near.onnx", batches(settings)) < 5e-5
    wide = AutoModelForSequenceClassification.from_config(tiny.config("modernbert", layers=3, local_attention=128))
    wide.load_state_dict(exported.state_dict())
    assert parity(wide.eval(), tmp_path / "near.onnx", batches(settings)) > 1e-3


@pytest.mark.parametrize("kind", ["classification", "tagging", "qa"])
def test_a_modernbert_that_takes_a_mean_is_exported(kind: str, tmp_path: Path) -> None:
    """Its classifier reads the mask of tokens besides that of its layers."""
    settings = tiny.config("modernbert", layers=3, local_attention=8, classifier_pooling="mean", labels=2)
    exported = HEADS[kind][0].from_config(settings).eval()
    to_onnx(exported, tmp_path / "mean.onnx")
    assert parity(exported, tmp_path / "mean.onnx", batches(settings)) < 5e-5
    assert not exported.base_model._forward_pre_hooks, "the model stays as it was"


def narrowed(linear: nn.Linear, *, outputs: int | None = None, inputs: int | None = None) -> nn.Linear:
    """Its first rows and columns."""
    weight = linear.weight[:outputs, :inputs]
    made = nn.Linear(weight.shape[1], weight.shape[0])
    made.weight.data, made.bias.data = weight.clone(), linear.bias[:outputs].clone()
    return made


def test_layers_of_different_widths_are_exported_as_they_are(tmp_path: Path) -> None:
    exported = tiny.bert(3, layers=3)
    first, second = exported.bert.encoder.layer[0], exported.bert.encoder.layer[1]
    for name in ("query", "key", "value"):  # one head of four goes
        setattr(first.attention.self, name, narrowed(getattr(first.attention.self, name), outputs=24))
    first.attention.output.dense = narrowed(first.attention.output.dense, inputs=24)
    first.attention.self.num_attention_heads, first.attention.self.all_head_size = 3, 24
    second.intermediate.dense = narrowed(second.intermediate.dense, outputs=40)
    second.output.dense = narrowed(second.output.dense, inputs=40)
    to_onnx(exported, tmp_path / "model.onnx")
    assert parity(exported, tmp_path / "model.onnx", batches(exported.config)) < 5e-5
    quantize_dynamic(tmp_path / "model.onnx", tmp_path / "small.onnx")
    assert outputs_of(exported(**next(batches(exported.config))))["logits"].shape == (1, 3)
