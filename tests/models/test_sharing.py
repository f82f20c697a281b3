"""Layers share weights, as in ALBERT's groups, through training, resumption and files."""

from itertools import count
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, BertConfig, BertModel

from compress import families
from compress.config.stages import StudentSpec
from compress.errors import StudentError
from compress.exporters.onnx import to_onnx
from compress.models import heads
from compress.models.flops import count_parameters
from compress.models.init_weights import weight_of
from compress.models.loader import load_result
from compress.models.sharing import BLOCKS, share, share_again
from compress.models.student import build
from compress.papers.albert import from_bert
from compress.training.stage import train
from tests import learning, tiny


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(**tiny.batch()).logits


def pattern(model: Any, role: str) -> list[int]:
    """Return, for each layer, the first layer with the same parameter."""
    own: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        weight = weight_of(name, families.find("bert"))
        if weight is not None and weight.role == role and weight.part == "weight" and weight.layer is not None:
            own[weight.layer] = parameter
    return [min(m for m in own if own[m] is own[n]) for n in sorted(own)]


@pytest.mark.parametrize(
    ("attention", "ffn", "of_attention", "of_ffn"),
    [
        (1, 1, [0] * 6, [0] * 6),
        (1, None, [0] * 6, list(range(6))),
        (None, 1, list(range(6)), [0] * 6),
        (2, 3, [0, 0, 0, 3, 3, 3], [0, 0, 2, 2, 4, 4]),
        (6, 4, list(range(6)), [0, 0, 2, 3, 3, 5]),
    ],
)
def test_layers_of_a_group_share_parameters(
    attention: int | None, ffn: int | None, of_attention: list[int], of_ffn: list[int]
) -> None:
    model = tiny.model("bert", layers=6)
    share(model, attention=attention, ffn=ffn)
    assert all(pattern(model, role) == of_attention for role in BLOCKS["attention"] - {"qkv"})
    assert all(pattern(model, role) == of_ffn for role in BLOCKS["ffn"])


@pytest.mark.parametrize("family", [each.name for each in families.known() if each.has_roles])
def test_every_family(family: str) -> None:
    model, one = tiny.model(family, layers=3), tiny.model(family, layers=1)
    share(model, attention=1, ffn=1)
    first_has_none = 32 if family == "modernbert" else 0  # the norm before attention, of the other layers
    assert count_parameters(model) == count_parameters(one) + first_has_none
    assert {name for name, _ in tiny.model(family, layers=3).named_parameters()} <= model.state_dict().keys()


@pytest.mark.parametrize(
    ("attention", "ffn", "millions"), [(None, None, 108), (1, None, 83), (None, 1, 57), (1, 1, 31)]
)
def test_parameters_of_table_4(attention: int | None, ffn: int | None, millions: int) -> None:
    """E = 768, ALBERT's 30,000 tokens, each weight counted once. The table seems to leave out some 0.6M of a pooler."""
    with torch.device("meta"):
        model = BertModel(BertConfig(vocab_size=30_000))
    share(model, attention=attention, ffn=ffn)
    assert count_parameters(model) / 1e6 == pytest.approx(millions, abs=1.1)


def test_equals_albert() -> None:
    model = tiny.model("bert", layers=4)
    share(model, attention=2, ffn=2)
    albert = tiny.model("albert", layers=4, num_hidden_groups=2, embedding_size=32)
    from_bert(albert, model, layer="first")
    torch.testing.assert_close(logits(albert), logits(model), rtol=0, atol=2e-4)


def test_gradients_are_summed() -> None:
    shared, apart = tiny.model("bert", layers=3), tiny.model("bert", layers=3)
    share(shared, ffn=1)
    apart.load_state_dict(shared.state_dict())
    for model in (shared, apart):
        model(**tiny.batch()).logits.square().sum().backward()
    theirs = [layer.output.dense.weight.grad for layer in apart.bert.encoder.layer]
    torch.testing.assert_close(shared.bert.encoder.layer[2].output.dense.weight.grad, sum(theirs))


# Files


def test_save_and_share_again(tmp_path: Path) -> None:
    model = tiny.model("bert", layers=4)
    share(model, attention=1, ffn=2)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), logits(model)), "whoever knows nothing of sharing"
    assert count_parameters(loaded) > count_parameters(model)
    share_again(loaded)
    assert count_parameters(loaded) == count_parameters(model)
    assert pattern(loaded, "ffn_in") == [0, 0, 2, 2]
    assert torch.equal(logits(loaded), logits(model))


def test_nothing_shared() -> None:
    model = tiny.model("bert")
    before = count_parameters(model)
    share_again(model)
    share(model)
    assert count_parameters(model) == before
    assert not hasattr(model.config, "shared_layers")


def test_sharing_survives_another_head(tmp_path: Path) -> None:
    """Change the head, save, and load again, as between stages."""
    spec = StudentSpec(init="teacher", share={"attention": 1, "ffn": 2})
    student = build(spec, tiny.model("bert", layers=4))
    speaking = heads.under(student, "masked_lm", None)
    speaking.save_pretrained(tmp_path)
    loaded = load_result(tmp_path, "masked_lm", None)
    again = build(StudentSpec(init=str(tmp_path)), tiny.model("bert", layers=4))
    for model in (student, speaking, loaded, again):
        assert pattern(model, "query") == [0, 0, 0, 0]
        assert pattern(model, "ffn_in") == [0, 0, 2, 2]


def test_sharing_is_not_inherited_from_the_teacher(tmp_path: Path) -> None:
    teacher = build(StudentSpec(share={"ffn": 1}), tiny.model("bert", layers=4))
    student = build(StudentSpec(init="teacher"), teacher)
    student.save_pretrained(tmp_path)
    for model in (student, load_result(tmp_path, "task", "classification")):
        assert pattern(model, "ffn_in") == [0, 1, 2, 3]


def test_an_onnx_file_stores_weights_once(tmp_path: Path) -> None:
    model = tiny.model("bert", layers=4)
    share(model, attention=1, ffn=1)
    to_onnx(model, tmp_path / "shared.onnx")
    held = sum(onnx.numpy_helper.to_array(each).size for each in onnx.load(tmp_path / "shared.onnx").graph.initializer)
    heads, width = model.config.num_attention_heads, model.config.hidden_size
    mask = 2 * heads * (width + 1) + (width + heads)  # queries, keys: one more feature a head, and where these are
    assert 0.95 * count_parameters(model) < held <= count_parameters(model) + mask, (
        "norms that are alike are one as well"
    )
    layer = sum(weight.numel() for weight in model.bert.encoder.layer[0].parameters())
    assert mask < 0.1 * layer, "a layer stored twice would be seen"


# Training


def lesson() -> Any:
    step = learning.step()
    share(step.student, attention=1, ffn=1)
    return step


def test_resumed_training_keeps_sharing(tmp_path: Path) -> None:
    """An interrupted run ends with the same weights as an uninterrupted one."""
    stage, whole, broken, resumed = learning.stage(checkpoint=3), lesson(), lesson(), lesson()
    before = whole.student.bert.encoder.layer[1].output.dense.weight.detach().clone()

    def learn(step: Any, folder: str) -> Any:
        train(step, stage, learning.rows(), learning.context(), learning.run(tmp_path / folder))
        return step.student

    learn(whole, "whole")
    passes = count()

    def interrupt_fifth_pass(*_: Any) -> None:
        if next(passes) == 4:
            raise KeyboardInterrupt

    broken.register_forward_pre_hook(interrupt_fifth_pass)
    with pytest.raises(KeyboardInterrupt):
        learn(broken, "broken")
    assert list((tmp_path / "broken").rglob("checkpoint-3/model.safetensors"))
    student = learn(resumed, "broken")
    for name, tensor in learning.weights(whole).items():
        assert torch.equal(tensor, learning.weights(resumed)[name]), name
    assert pattern(student, "ffn_out") == pattern(student, "query") == [0, 0]
    assert not torch.equal(student.bert.encoder.layer[1].output.dense.weight, before)


# Errors


@pytest.mark.parametrize(
    ("family", "groups", "message"),
    [
        ("bert", {"attention": 5}, "student.share.attention: 5; the student has 4 layers"),
        ("bert", {"ffn": 0}, "student.share.ffn: 0"),
        ("albert", {"attention": 1}, r"found albert; albert models share by config: \{num_hidden_groups: G\}"),
    ],
)
def test_errors(family: str, groups: dict[str, int], message: str) -> None:
    with pytest.raises(StudentError, match=message):
        share(tiny.model(family, layers=4), **groups)
