"""Build students of GPT-2, T5 and Llama: from whole layers of the teacher, or cut out of it."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    FunnelConfig,
    XLMConfig,
)

from compress.config.stages import StudentSpec
from compress.errors import StudentError
from compress.models.init_weights import copy_whole
from compress.models.student import build, choose_units, config_for, resolve_init
from compress.slicing.shape import Shape
from tests import generative, tiny
from tests.slicing import families
from tests.slicing.oracle import masked

HEADS: dict[str, Any] = {"gpt2": "causal_lm", "t5": "seq2seq"}


def made(family: str, spec: StudentSpec, **teacher: Any) -> tuple[Any, Any]:
    tutor = getattr(generative, family)(**teacher)
    torch.manual_seed(9)
    return build(spec, tutor, head=HEADS[family], kind=None).eval(), tutor


def logits(model: Any) -> torch.Tensor:
    batch = generative.rows("a good film", "the story")
    inputs = batch | ({"decoder_input_ids": batch["input_ids"]} if model.config.is_encoder_decoder else {})
    return model(**inputs).logits


@pytest.mark.parametrize("family", HEADS)
def test_a_full_copy_equals_its_teacher(family: str) -> None:
    student, teacher = made(family, StudentSpec(init="teacher"), layers=3)
    assert type(student) is type(teacher)
    assert torch.equal(logits(student), logits(teacher))
    ours, theirs = student.state_dict(), teacher.state_dict()
    assert all(ours[name].data_ptr() != theirs[name].data_ptr() for name in ours), "a copy, not the same memory"


def test_distilgpt2_has_layers_0_2_4_7_9_11() -> None:
    student, teacher = made("gpt2", StudentSpec(layers=0.5, init="teacher"), layers=12, hidden=16)
    for mine, other in enumerate((0, 2, 4, 7, 9, 11)):
        ours, theirs = (model.transformer.h[at].state_dict() for model, at in ((student, mine), (teacher, other)))
        assert "attn.c_attn.weight" in ours
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert len(student.transformer.h) == 6
    for name in ("transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight", "lm_head.weight"):
        assert torch.equal(student.state_dict()[name], teacher.state_dict()[name])


def test_half_of_both_stacks_of_t5() -> None:
    student, teacher = made("t5", StudentSpec(layers=0.5, init="teacher", copy_layers="last"), layers=4)
    for stack in ("encoder", "decoder"):
        ours, theirs = (getattr(model, stack).block for model in (student, teacher))
        assert len(ours) == 2
        for mine, other in ((0, 2), (1, 3)):
            wanted = theirs[other].state_dict()
            found = {name: each for name, each in ours[mine].state_dict().items() if "relative" not in name}
            assert all(torch.equal(found[name], wanted[name]) for name in found)
        bias = "layer.0.SelfAttention.relative_attention_bias.weight"
        assert torch.equal(ours[0].state_dict()[bias], theirs[0].state_dict()[bias]), "the first layer has it for all"
    assert torch.equal(student.shared.weight, teacher.shared.weight)


def test_a_shallower_decoder_of_t5() -> None:
    """Shleifer & Rush's 12-3: the whole encoder, the first, a middle and the last decoder layer."""
    spec = StudentSpec(layers=2, config={"num_layers": 4}, init="teacher")
    student, teacher = made("t5", spec, layers=4, num_decoder_layers=3)
    assert Shape.from_config(student.config).stack("encoder_layers") == 4
    assert Shape.from_config(student.config).stack("layers") == 2
    batch = generative.rows("a film")
    assert torch.equal(student.encoder(**batch).last_hidden_state, teacher.encoder(**batch).last_hidden_state)
    last = (model.decoder.block[-1].state_dict() for model in (student, teacher))
    ours, theirs = next(last), next(last)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("family", HEADS)
def test_any_size_from_scratch(family: str) -> None:
    student, _ = made(family, StudentSpec(layers=1, hidden=16, heads=2))
    assert logits(student).isfinite().all()
    shape = Shape.from_config(student.config)
    assert (shape.layers, shape.stack("layers"), shape.hidden) == (1, 1, 16)


def test_a_narrower_copy_of_t5() -> None:
    with pytest.raises(StudentError, match=r"\(\d+, 16\) in the student.* layers of t5 models are copied whole"):
        made("t5", StudentSpec(hidden=16, init="teacher"))


@pytest.mark.parametrize("family", ["gpt2", *tiny.LIKE_LLAMA])
def test_a_narrower_decoder_equals_its_masked_teacher(family: str) -> None:
    teacher = families.model(family, layers=4, head=AutoModelForCausalLM)
    heads = 3 if family == "gpt2" else 2  # whose heads fill its width
    spec = StudentSpec(layers=2, hidden=24, ffn=40, heads=heads, copy_layers="last", init="auto")
    kept = choose_units(spec, teacher)
    assert kept is not None and kept.layers == (2, 3)
    student = build(spec, teacher, head="causal_lm", kind=None).eval()
    with masked(teacher, kept):
        expected = families.logits(teacher)
    torch.testing.assert_close(families.logits(student), expected, rtol=1e-5, atol=1e-5)
    assert Shape.from_config(student.config).head_size == (12 if family == "qwen3" else 8)


def test_a_classifier_from_a_language_model() -> None:
    """Its own head stays as it was drawn; the rest is the teacher's."""
    teacher = tiny.model("llama", head=AutoModelForCausalLM)
    student = build(StudentSpec(layers=1, init="teacher"), teacher, head="task", kind="classification")
    assert torch.equal(student.model.layers[0].mlp.up_proj.weight, teacher.model.layers[0].mlp.up_proj.weight)
    assert student.score.weight.shape == (3, 32)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"heads": 2}, (2, 1, 8)),
        ({"heads": 2, "hidden": 16}, (2, 1, 8)),
        ({"heads": 1, "config": {"num_key_value_heads": 1}}, (1, 1, 8)),
        ({"config": {"head_dim": 4}}, (4, 2, 4)),
    ],
)
def test_grouped_heads(asked: dict[str, Any], found: tuple[int, int, int]) -> None:
    teacher = tiny.model("llama", head=AutoModelForCausalLM)
    student = build(StudentSpec(**asked), teacher, head="causal_lm", kind=None)
    config = student.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == found
    assert families.logits(student).isfinite().all()
    if "config" in asked:  # not a share of the teacher's
        assert resolve_init(StudentSpec(**asked, init="auto"), teacher.config).init == "scratch"
        with pytest.raises(StudentError, match="heads keep their size, and the number that share keys and values"):
            build(StudentSpec(**asked, init="teacher"), teacher, head="causal_lm", kind=None)


def test_a_llama_student_of_a_gpt2() -> None:
    student, _ = made("gpt2", StudentSpec(family="llama", layers=1, hidden=16, heads=2, ffn=24))
    config = student.config
    assert (config.head_dim, config.num_key_value_heads, config.vocab_size) == (8, 2, len(generative.gpt2_tokenizer()))
    assert logits(student).isfinite().all()


def test_shares_of_each_stack() -> None:
    teacher = generative.t5(layers=4, num_decoder_layers=2).config
    config = config_for(StudentSpec(layers=0.5), teacher)
    assert (config.num_layers, config.num_decoder_layers) == (2, 1)
    assert (teacher.num_layers, teacher.num_decoder_layers) == (4, 2)


def test_another_head_is_not_copied() -> None:
    from transformers import GPT2ForSequenceClassification

    teacher = generative.gpt2()
    student = GPT2ForSequenceClassification(teacher.config)
    before = student.score.weight.detach().clone()
    copy_whole(student, teacher, "even")
    assert torch.equal(student.score.weight, before)
    assert torch.equal(student.transformer.wte.weight, teacher.transformer.wte.weight)


@pytest.mark.parametrize("family", ["albert", "mobilebert", "deberta", "xlnet", "xlm", "mpnet", "camembert"])
def test_whole_layers_of_any_family(family: str) -> None:
    """A student of layers 1 and 3 equals its teacher without the others; those of ALBERT are all the same."""
    xlm = XLMConfig(vocab_size=45, emb_dim=32, n_layers=4, n_heads=4, num_labels=3, pad_index=0, init_std=0.2)
    config = xlm if family == "xlm" else tiny.config(family, layers=4)
    teacher = AutoModelForSequenceClassification.from_config(config).eval()
    student = build(StudentSpec(layers=2, copy_layers=(1, 3), init="auto"), teacher).eval()
    assert Shape.from_config(student.config).layers == 2
    for module in teacher.modules():
        for name, stack in module.named_children():
            if isinstance(stack, torch.nn.ModuleList) and len(stack) == 4:
                setattr(module, name, torch.nn.ModuleList([stack[1], stack[3]]))
                stack[1].layer_id, stack[3].layer_id = 0, 1  # places in XLM's cache
    encoder = teacher.base_model.encoder if family == "albert" else teacher.base_model
    encoder.config.num_hidden_layers = encoder.n_layers = 2  # XLM and ALBERT count
    assert torch.equal(families.logits(student), families.logits(teacher))


def test_layers_that_cannot_be_told_are_refused() -> None:
    """Funnel's weights are numbered by block and layer."""
    config = {"vocab_size": 45, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "num_labels": 3}
    teacher, student = (
        AutoModelForSequenceClassification.from_config(FunnelConfig(block_sizes=[count], **config)) for count in (4, 2)
    )
    with pytest.raises(
        StudentError, match="layers of funnel models cannot be recognised by the names of their weights"
    ):
        copy_whole(student, teacher, "even")
