"""Encoders whose layers differ: what is cut unevenly computes what the whole does with the rest masked, and ships."""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertForNextSentencePrediction,
)

from compress.config.term import Term
from compress.data.task import Task
from compress.errors import ObjectiveError, PruneError
from compress.exporters.artifact import Bundle
from compress.exporters.int8 import quantize_dynamic
from compress.exporters.onnx import parity, to_onnx
from compress.exporters.predictor import Prediction
from compress.exporters.rewrite import rewrite_graph
from compress.exporters.session import open_session, read_model
from compress.models.flops import flops_per_token, parameters
from compress.models.heads import create
from compress.models.signals import NAMES, open_attention, read
from compress.models.uneven import CLASSES, CONFIGS, UnevenBertConfig, kept_layerwise, to_uneven
from compress.slicing.masking import masked
from compress.slicing.plan import HIDDEN, SlicePlan
from compress.slicing.select import Kept
from compress.slicing.shape import Shape
from compress.training.objective import Objective
from tests import tiny
from tests.slicing.families import model

HEADS = ((3, 0), (), (2,), (0, 1, 2, 3))
NEURONS = (20, 7, 0, 64)
"""Of four layers of 4 heads and 64 neurons: a layer without heads, one without neurons, one whole, one narrow."""
AUTO = (
    AutoModel,
    AutoModelForPreTraining,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoModelForQuestionAnswering,
)


def noisy(whole: Any) -> Any:
    """Biases and gains too, so that none of them could be left out unseen."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return whole


def kept_of(whole: Any, *, hidden: int | None = 24) -> Kept:
    draw = torch.Generator().manual_seed(5)
    return kept_layerwise(
        SlicePlan.of(whole),
        heads=[torch.tensor(each, dtype=torch.long) for each in HEADS],
        ffn=[torch.randperm(64, generator=draw)[:count] for count in NEURONS],
        hidden=None if hidden is None else torch.randperm(32, generator=draw)[:hidden].sort().values,
    )


@torch.no_grad()
def answers(model: Any, kept: Kept | None = None) -> tuple[Tensor, ...]:
    """Every tensor that it answers with, on rows of several lengths; pads left out where there is one per token.

    Of hidden states, the dimensions that are `kept`.
    """
    batch = tiny.batch()
    found = []
    for value in model(**batch).to_tuple():
        per_token = value.shape[:2] == batch["input_ids"].shape
        real = value[batch["attention_mask"].bool()] if per_token else value
        found.append(real if kept is None or real.shape[-1] != 32 else real[..., kept.indices[HIDDEN]])
    return tuple(found)


def batches() -> Iterator[dict[str, Tensor]]:
    """Rows of several lengths, the second half of each marked as another segment."""
    for lengths in ((1,), (9, 4, 1), (40, 33)):
        batch = tiny.batch(lengths)
        segments = torch.arange(max(lengths)).ge(max(lengths) // 2).long() * batch["attention_mask"]
        yield batch | {"token_type_ids": segments}


def close(mine: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("head", AUTO)
def test_it_computes_what_the_whole_does_with_the_rest_masked_and_loads_as_it_was(
    family: str, head: Any, tmp_path: Path
) -> None:
    whole = noisy(tiny.model(family, layers=4, head=head, labels=2 if head is AutoModelForQuestionAnswering else 3))
    kept = kept_of(whole)
    small = to_uneven(whole, kept)
    with masked(whole, kept):
        assert close(answers(small), answers(whole, kept))
    assert not close(answers(small), answers(whole, kept)), "something was cut"
    assert type(small) is CLASSES[type(whole)]
    assert (small.config.heads, small.config.ffn, small.config.head_size) == ([2, 0, 1, 4], list(NEURONS), 8)

    small.save_pretrained(tmp_path)
    again = head.from_pretrained(tmp_path)
    assert type(again) is type(small)
    assert all(torch.equal(one, other) for one, other in zip(answers(again), answers(small), strict=True))
    eager = head.from_pretrained(tmp_path, attn_implementation="eager")
    assert close(answers(eager), answers(small))
    assert pickle.loads(pickle.dumps(type(small))) is type(small)


@pytest.mark.parametrize("family", CONFIGS)
def test_signals_stay_one_per_layer(family: str) -> None:
    whole = model(family, layers=4)
    small = to_uneven(whole, kept_of(whole, hidden=None))
    plain = answers(small)
    open_attention(small)
    shown = read(small, tiny.batch(), frozenset(NAMES) - {"pair", "encoder_layers"})
    assert [each.shape for each in shown.queries] == [(3, heads, 7, 8) for heads in small.config.heads]
    assert [each.shape[1] for each in shown.scores] == small.config.heads
    assert len(shown.layers) == 4
    assert shown.logits is not None
    torch.testing.assert_close(shown.logits, plain[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_files_that_ship_compute_what_the_model_does(family: str, tmp_path: Path) -> None:
    whole = model(family, layers=4)
    small = to_uneven(whole, kept_of(whole))
    to_onnx(small, tmp_path / "raw.onnx", form=None)
    made = rewrite_graph(read_model(tmp_path / "raw.onnx"))
    assert (made.attentions, made.softmaxes, made.rows > 0) == (3, 3, True), "one layer has no attention; one token"
    to_onnx(small, tmp_path / "model.onnx")
    assert parity(small, tmp_path / "model.onnx", batches()) < 2e-5
    quantize_dynamic(tmp_path / "model.onnx", tmp_path / "int8.onnx")
    session = open_session(tmp_path / "int8.onnx")
    for batch in batches():
        with torch.no_grad():
            inputs = {node.name: batch[node.name] for node in session.get_inputs()}
            expected = small(**inputs).logits.numpy()
        (found,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        assert np.abs(found - expected).max() < 0.1 * max(1.0, np.abs(expected).max())


def test_a_last_layer_without_heads_or_neurons_ships_too(tmp_path: Path) -> None:
    for family in ("bert", "distilbert"):
        whole = model(family, layers=2)
        none = torch.zeros(0, dtype=torch.long)
        kept = kept_layerwise(
            SlicePlan.of(whole), heads=[torch.tensor([1]), none], ffn=[torch.arange(9), none], hidden=torch.arange(20)
        )
        small = to_uneven(whole, kept)
        with masked(whole, kept):
            assert close(answers(small), answers(whole))
        to_onnx(small, tmp_path / "model.onnx")
        assert parity(small, tmp_path / "model.onnx", batches()) < 2e-5
        quantize_dynamic(tmp_path / "model.onnx", tmp_path / "int8.onnx")
        open_session(tmp_path / "int8.onnx")


def test_a_bundle_of_one_loads_and_predicts(tmp_path: Path) -> None:
    whole = model("bert", layers=4, seed=1)
    small = to_uneven(whole, kept_of(whole))
    task = Task("classification", ("sentence",), "label", ("a", "b", "c"), "accuracy")
    bundle = Bundle.write(
        tmp_path / "bundle", model=small, tokenizer=tiny.tokenizer(), task=task, max_length=16, recipe="stages: []\n",
        card={"name": "uneven"},
    )  # fmt: skip
    assert bundle.manifest.model_type == "uneven-bert"
    assert "import compress.models.families  #" in (bundle.path / "README.md").read_text(encoding="utf-8")
    again = AutoModelForSequenceClassification.from_pretrained(bundle.path)
    tokenizer = AutoTokenizer.from_pretrained(bundle.path)
    with torch.no_grad():
        expected = again(**tokenizer("a good film", return_tensors="pt")).logits.softmax(-1)[0]
    (found,) = Bundle.load(bundle.path).predict(["a good film"], precision="fp32")
    assert isinstance(found, Prediction)
    assert found.label == task.labels[int(expected.argmax())]
    assert found.score == pytest.approx(float(expected.max()), abs=1e-4)


def test_sizes_and_cost_are_those_of_its_layers() -> None:
    whole = model("bert", layers=4)
    small = to_uneven(whole, kept_of(whole))
    shape = Shape.of(small.config)
    assert (shape.layers, shape.hidden, shape.heads, shape.head_size, shape.ffn) == (4, 24, 4, 8, 64)
    embedded = 24 * (small.config.vocab_size + 64 + 2 + 2)
    heads, neurons = 7, 20 + 7 + 64
    blocks = heads * 8 * (4 * 24 + 3) + 4 * 24 + neurons * (2 * 24 + 1) + 4 * 24 + 4 * 4 * 24
    assert parameters(small) == embedded + blocks + 24 * 24 + 24 + 3 * 24 + 3
    assert 2 * (4 * heads * 8 * 24 + 2 * neurons * 24) < flops_per_token(small, 32) < flops_per_token(whole, 32) / 2


def test_it_trains_with_dropout_in_every_block() -> None:
    for family in ("bert", "distilbert"):
        whole = model(family, layers=4)
        small = to_uneven(whole, kept_of(whole)).train()
        small(**tiny.batch(), labels=torch.tensor([0, 1, 2])).loss.backward()
        assert all(each.grad is not None and each.grad.isfinite().all() for each in small.parameters())


@pytest.mark.parametrize(
    ("term", "said"),
    [
        (Term("tinybert.attention"), "layer 0 of the student has 2 heads and layer 0 of the teacher 4: compare hidden"),
        (Term("minilm.value_relation", layers=((1, 1),)), "layer 1 of the student has 0 heads and layer 1 of the teac"),
        (Term("minilm.key_relations", options={"heads": 32}), "teacher 4, which 32 relation heads do not divide"),
        (Term("minilm.key_relations", layers=((1, 1),), options={"heads": 8}), "0 heads .* which 8 relation heads do"),
    ],
)
def test_what_cannot_be_compared_layer_by_layer_is_named(term: Term, said: str) -> None:
    whole = model("bert", layers=4)
    student, teacher = (Shape.of(each.config) for each in (to_uneven(whole, kept_of(whole)), whole))
    assert student.heads == teacher.heads == 4, "what differs is in the layers"
    with pytest.raises(ObjectiveError, match=said):
        Objective([term], student, teacher)


@pytest.mark.parametrize(
    "term",
    [
        Term("tinybert.attention", layers=((3, 3),)),
        Term("minilm.key_relations", layers=((0, 0), (2, 2)), options={"heads": 8}),
    ],
)
def test_layers_that_agree_are_compared(term: Term) -> None:
    whole = model("bert", layers=4).eval()
    small = to_uneven(whole, kept_of(whole))
    objective = Objective([term], Shape.of(small.config), Shape.of(whole.config))
    for each in (small, whole):
        open_attention(each)
    shown = [read(each, tiny.batch(), objective.student_wants) for each in (small, whole)]
    assert objective(*shown)["total"].isfinite()


def test_a_new_one_is_drawn_as_its_family_is() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 45, "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = UnevenBertConfig(**sizes, heads=[3, 3], ffn=[9, 9], head_size=4, initializer_range=0.2)
    made: Any = create(config, "task", "classification")
    query = made.bert.encoder.layer[0].attention.self.query
    assert (query.in_features, query.out_features) == (20, 12), "attention narrower than the stream, in all layers"
    assert 0.15 < float(query.weight.detach().std()) < 0.25
    assert not query.bias.any()
    assert made.config.num_attention_heads == 3
    assert copy.deepcopy(made).config.heads == [3, 3]


@pytest.mark.parametrize("wrong", [{"heads": [1]}, {"ffn": None}, {"heads": [1, -1]}])
def test_sizes_that_do_not_fit_the_layers_are_refused(wrong: dict[str, Any]) -> None:
    sizes = {"num_hidden_layers": 2, "heads": [1, 1], "ffn": [3, 3], "head_size": 4, "hidden_size": 8, **wrong}
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*expected a number, 0 or more, for each of the 2"):
        create(UnevenBertConfig(vocab_size=45, **sizes), "encoder", None)


def test_families_and_heads_without_such_a_form_are_named() -> None:
    whole = model("albert")
    with pytest.raises(PruneError, match=r"AlbertFor.*they can in transformers' bert, roberta, xlm-rob"):
        to_uneven(whole, Kept(SlicePlan.of(whole).sizes, (0, 1, 2), {}))
    other = BertForNextSentencePrediction(tiny.config("bert"))
    with pytest.raises(PruneError, match="BertForNextSentencePrediction"):
        to_uneven(other, Kept(SlicePlan.of(model("bert")).sizes, (0, 1, 2), {}))


def test_the_registered_types_are_known_to_the_auto_classes() -> None:
    for family, config in CONFIGS.items():
        assert AutoConfig.for_model(f"uneven-{family}").__class__ is config
