"""IB-BERT has the paper's size, equals transformers' MobileBERT where both exist, and follows its conventions."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    MobileBertConfig,
    MobileBertForPreTraining,
    MobileBertModel,
)

from compress.config.term import Term
from compress.models.ibbert import IBBertConfig, IBBertForPreTraining, IBBertModel
from compress.models.signals import SIGNAL_NAMES, open_attention, read
from compress.slicing.shape import Shape
from compress.training.objective import Objective
from compress.training.step import Distillation
from tests import tiny

HEADS = {
    AutoModel: "IBBertModel",
    AutoModelForPreTraining: "IBBertForPreTraining",
    AutoModelForMaskedLM: "IBBertForMaskedLM",
    AutoModelForSequenceClassification: "IBBertForSequenceClassification",
    AutoModelForTokenClassification: "IBBertForTokenClassification",
    AutoModelForQuestionAnswering: "IBBertForQuestionAnswering",
}
SIZES: Mapping[str, Any] = {
    "vocab_size": len(tiny.SPECIAL) + len(tiny.WORDS),
    "embedding_size": 8,
    "hidden_size": 16,
    "intra_bottleneck_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
RENAMED = (
    ("widen_norm", "bottleneck.input.LayerNorm"),
    ("widen", "bottleneck.input.dense"),
    ("attention.query", "attention.self.query"),
    ("attention.key", "attention.self.key"),
    ("attention.value", "attention.self.value"),
    ("attention.dense", "attention.output.dense"),
    ("attention.LayerNorm", "attention.output.LayerNorm"),
    ("ffn_in", "intermediate.dense"),
    ("ffn_out", "output.dense"),
    ("ffn_norm", "output.LayerNorm"),
    ("narrow_norm", "output.bottleneck.LayerNorm"),
    ("narrow", "output.bottleneck.dense"),
)


def config(**changes: Any) -> IBBertConfig:
    return IBBertConfig(**{**SIZES, **changes})


def built(head: Any = AutoModelForPreTraining, *, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return head.from_config(config(**changes)).eval()


def test_the_papers_293_million_parameters() -> None:
    with torch.device("meta"):
        model = IBBertModel(IBBertConfig(), add_pooling_layer=False)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    positions = sum(size for name, size in sizes.items() if "position" in name or "token_type" in name)
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert sum(sizes.values()) == 294_205_184
    assert sum(sizes.values()) - positions - vectors == 24 * 12_058_624 + 3_906_816 + 196_608  # what Table 1 lists


@pytest.mark.parametrize("activated", [True, False])
def test_equals_mobilebert_without_bottleneck(activated: bool) -> None:
    """With a widened stream as wide as the stream itself, MobileBERT's queries have IB-BERT's inputs' width."""
    same = {**SIZES, "intra_bottleneck_size": 16, "classifier_activation": activated}
    ours = built(**same)
    theirs = MobileBertForPreTraining(
        MobileBertConfig(
            **same,
            hidden_act="gelu_pytorch_tanh",
            normalization_type="layer_norm",
            key_query_shared_bottleneck=False,
            num_feedforward_networks=1,
        )
    ).eval()
    for norm in (module for module in theirs.modules() if isinstance(module, nn.LayerNorm)):
        norm.eps = 1e-12
    theirs.load_state_dict({as_theirs(name): value for name, value in ours.state_dict().items()})
    batch = tiny.batch() | {"token_type_ids": tiny.batch()["input_ids"] % 2}
    mine, other = ours(**batch, output_hidden_states=True), theirs(**batch, output_hidden_states=True)
    for name in ("prediction_logits", "seq_relationship_logits"):
        torch.testing.assert_close(mine[name], other[name])
    assert len(mine.hidden_states) == len(other.hidden_states) == 4
    for h_mine, h_other in zip(mine.hidden_states, other.hidden_states, strict=True):
        torch.testing.assert_close(h_mine, h_other)


def as_theirs(name: str) -> str:
    name = name.replace("ib_bert.", "mobilebert.")
    if ".layer." not in name:
        return name
    for ours, theirs in RENAMED:
        if f".{ours}." in name:
            return name.replace(f".{ours}.", f".{theirs}.")
    raise AssertionError(name)


def test_queries_read_the_stream() -> None:
    """What transformers' MobileBERT cannot do: with the widened stream twice as wide, it asks for other matrices."""
    layer = built().base_model.encoder.layer[0]
    assert {layer.attention.query.weight.shape, layer.attention.value.weight.shape} == {(32, 16)}
    with torch.device("meta"):
        theirs = MobileBertModel(
            MobileBertConfig(**SIZES, key_query_shared_bottleneck=False, num_feedforward_networks=1)
        )
    assert theirs.encoder.layer[0].attention.self.query.weight.shape == (32, 32)


@pytest.mark.parametrize("head", HEADS)
def test_auto_classes(head: Any, tmp_path: Path) -> None:
    model = built(head)
    assert type(model).__name__ == HEADS[head]
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "ib-bert"
    again = head.from_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), IBBertConfig)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())


def test_another_head_keeps_the_encoder(tmp_path: Path) -> None:
    model = built()
    model.save_pretrained(tmp_path)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3).eval()
    mine, theirs = (each.base_model(**tiny.batch()).last_hidden_state for each in (model, classifier))
    torch.testing.assert_close(mine, theirs)
    assert classifier(**tiny.batch()).logits.shape == (3, 3)


def test_the_output_matrix_has_two_parts() -> None:
    model = built()
    head = model.cls.predictions
    assert head.decoder.weight is model.get_input_embeddings().weight
    assert head.dense.weight.shape == (16 - 8, SIZES["vocab_size"])
    stream_BLD = model.ib_bert(**tiny.batch()).last_hidden_state
    whole_VD = torch.cat([head.decoder.weight, head.dense.weight.T], 1)
    expected_BLV = head.transform(stream_BLD) @ whole_VD.T + head.bias
    torch.testing.assert_close(model(**tiny.batch()).prediction_logits, expected_BLV)


def test_resize_token_embeddings() -> None:
    model = built()
    before = model(**tiny.batch()).prediction_logits
    model.resize_token_embeddings(SIZES["vocab_size"] + 5, mean_resizing=False)
    torch.testing.assert_close(model(**tiny.batch()).prediction_logits[..., :-5], before)


def losses(head: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The labels each head takes."""
    B, L = batch["input_ids"].shape
    return {
        "IBBertForPreTraining": {"labels": batch["input_ids"], "next_sentence_label": torch.tensor([0, 1, 0])},
        "IBBertForMaskedLM": {"labels": batch["input_ids"]},
        "IBBertForSequenceClassification": {"labels": torch.arange(B) % 2},
        "IBBertForTokenClassification": {"labels": torch.arange(B * L).view(B, L) % 2},
        "IBBertForQuestionAnswering": {"start_positions": torch.arange(B), "end_positions": torch.arange(B)},
    }[HEADS[head]]


@pytest.mark.parametrize("head", [head for head in HEADS if head is not AutoModel])
def test_the_loss_reaches_every_weight(head: Any) -> None:
    model = built(head).train()
    model.set_attn_implementation("sdpa")
    out = model(**tiny.batch(), **losses(head, tiny.batch()))
    out.loss.backward()
    assert out.loss.isfinite()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_gradient_checkpointing_changes_nothing() -> None:
    changes = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    gradients = []
    for checkpointed in (False, True):
        model = built(**changes).train()
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        model(**tiny.batch()).prediction_logits.pow(2).sum().backward()
        gradients.append(model.base_model.embeddings.word_embeddings.weight.grad)
    torch.testing.assert_close(*gradients)


def test_padding_changes_nothing() -> None:
    model, batch = built(), tiny.batch((7, 5))
    alone = {name: value[1:, :5] for name, value in batch.items()}
    # the trigram of the last token sees the pad's embedding, which is zero
    assert not model.get_input_embeddings().weight[0].any()
    torch.testing.assert_close(model(**batch).prediction_logits[1:, :5], model(**alone).prediction_logits)


def test_signals_of_every_layer() -> None:
    model, eager = built(), built()
    open_attention(model)
    eager.set_attn_implementation("eager")
    shown = read(model, tiny.batch(), frozenset(SIGNAL_NAMES))
    expected = eager(**tiny.batch(), output_hidden_states=True, output_attentions=True)
    assert [layer.shape for layer in shown.layers] == 3 * [(3, 7, 16)]
    assert [layer.shape for layer in shown.queries] == 3 * [(3, 4, 7, 8)]
    torch.testing.assert_close(shown.embeddings, expected.hidden_states[0])
    torch.testing.assert_close(shown.logits, expected.prediction_logits)
    torch.testing.assert_close(shown.pair, expected.seq_relationship_logits)
    mask_B11L = tiny.batch()["attention_mask"][:, None, None, :].bool()
    for layer, state, scores, probabilities in zip(
        shown.layers, expected.hidden_states[1:], shown.scores, expected.attentions, strict=True
    ):
        torch.testing.assert_close(layer, state)
        torch.testing.assert_close(scores.masked_fill(~mask_B11L, -torch.inf).softmax(-1), probabilities)


def test_shape() -> None:
    shape = Shape.from_config(config())
    assert (shape.hidden, shape.heads, shape.head_size, shape.ffn, shape.embedding) == (16, 4, 8, 64, 8)
    mobile = Shape.from_config(MobileBertConfig())
    assert (mobile.hidden, mobile.heads, mobile.head_size, mobile.ffn, mobile.embedding) == (512, 4, 32, 512, 128)


def test_the_head_runs_only_at_masked_positions() -> None:
    model, batch = built(), tiny.batch((7, 5))
    labels = torch.full((2, 7), -100)
    labels[0, 2], labels[1, 1] = 9, 12
    terms = [Term("bert.masked_lm")]
    step = Distillation(model, None, Objective(terms, Shape.from_config(model.config)))
    few = step(**batch, labels=labels)["loss"]
    logits = model(**batch).prediction_logits
    torch.testing.assert_close(few, nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="intra_bottleneck_size 32 is not a multiple of num_attention_heads 3"):
        IBBertForPreTraining(config(num_attention_heads=3))


def test_ids_or_embeddings() -> None:
    with pytest.raises(ValueError, match="exactly one of input_ids"):
        built(AutoModel)(attention_mask=tiny.batch()["attention_mask"])
