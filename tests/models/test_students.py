"""Build students: their sizes, what they are initialised from, and that they are plain transformers models."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    CLIPConfig,
    FunnelConfig,
)

from compress.config.stages import StudentSpec
from compress.errors import CompressError, StudentError
from compress.families import known
from compress.models.signals import open_attention, read
from compress.models.student import build, choose_units, config_for, resolve_init
from compress.slicing.plan import HIDDEN, SlicePlan
from compress.slicing.sizes import select_layers
from compress.training.stage import train
from tests import generative, learning, tiny
from tests.slicing import families
from tests.slicing.oracle import masked

ROLES = [family.name for family in known() if family.has_roles]
G, L = "full_attention", "sliding_attention"

# Sizes

PUBLISHED = {
    "TinyBERT4": (14_350_248, StudentSpec(layers=4, hidden=312, ffn=1200, heads=12)),
    "TinyBERT6": (66_955_008, StudentSpec(layers=6)),
    "half of BERT-base": (66_955_008, StudentSpec(layers=0.5)),
    "DistilBERT": (66_362_880, StudentSpec(family="distilbert", layers=6)),
    "MiniLM L6-H384": (22_713_216, StudentSpec(layers=6, hidden=384, ffn=1536)),
    "MiniLM L12-H384": (33_360_000, StudentSpec(hidden=384, ffn=1536)),
    "ELECTRA-small": (13_483_008, StudentSpec(family="electra", hidden=256, ffn=1024, heads=4, embedding=128)),
    "MobileBERT": (24_844_544, StudentSpec(family="mobilebert", layers=24, hidden=512, ffn=512, heads=4)),
    "ALBERT-base": (11_683_584, StudentSpec(family="albert", embedding=128)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    """Backbones, poolers included where there is one; ALBERT's vocabulary is its own."""
    expected, spec = PUBLISHED[name]
    teacher = BertConfig(vocab_size=30_000) if name == "ALBERT-base" else BertConfig()
    with torch.device("meta"):
        student = AutoModel.from_config(config_for(spec, teacher))
    assert sum(parameter.numel() for parameter in student.parameters()) == expected


def test_default_sizes_and_shares() -> None:
    teacher = tiny.config("bert", layers=6, hidden=64, heads=4)
    config = config_for(StudentSpec(layers=0.5, hidden=0.5, heads=2), teacher)
    sizes = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.intermediate_size)
    assert sizes == (3, 32, 2, 128)
    assert (config.vocab_size, config.num_labels, config.max_position_embeddings) == (teacher.vocab_size, 3, 64)
    assert teacher.num_hidden_layers == 6, "the teacher's own config is left alone"


@pytest.mark.parametrize(
    "family", ["distilbert", "roberta", "electra", "mobilebert", "albert", "deberta-v2", "modernbert"]
)
def test_another_family_keeps_vocabulary_labels_and_positions(family: str) -> None:
    teacher = tiny.config("bert")
    teacher.id2label = {0: "no", 1: "perhaps", 2: "yes"}
    tutor = AutoModelForSequenceClassification.from_config(teacher)
    student = build(StudentSpec(family=family, layers=1, heads=2), tutor)
    assert student.config.vocab_size == teacher.vocab_size
    assert student.config.id2label == teacher.id2label
    longest = tiny.batch((64,))
    assert student.eval()(**longest).logits.shape == (1, 3)


def test_an_encoder_decoder_starts_answers_with_padding() -> None:
    student = build(StudentSpec(family="t5", layers=1, hidden=16, ffn=32, heads=2), tiny.bert(2), head="seq2seq")
    begun = student.prepare_decoder_input_ids_from_labels(torch.tensor([[5, 6]]))
    assert begun.tolist() == [[student.config.pad_token_id, 5]]


@pytest.mark.parametrize(
    ("family", "spec", "message"),
    [
        ("bert", StudentSpec(family="bart_"), "no model family 'bart_'. Did you mean 'bart'?"),
        ("bert", StudentSpec(hidden=30), "hidden 30 is not a multiple of heads 4"),
        ("bert", StudentSpec(layers=1.5), "layers: 1.5 is neither a whole number nor a share of the teacher's 4"),
        ("bert", StudentSpec(layers=0.05), "student.layers: 0.05 is neither"),
        ("bert", StudentSpec(family="distilbert", embedding=8), "embedding: distilbert models have no such size"),
        ("bert", StudentSpec(hidden=64, init="teacher"), "hidden 64 is more than the teacher's 32"),
        ("bert", StudentSpec(init="techer"), "'techer' is neither scratch, teacher, nor a folder"),
        ("bert", StudentSpec(family="mobilebert", init="teacher"), "a mobilebert model cannot begin as a bert model"),
        ("albert", StudentSpec(init="teacher", hidden=16), "layers of albert models are copied whole"),
        ("mobilebert", StudentSpec(init="teacher", hidden=16), "leave out every size but layers"),
        ("xlnet", StudentSpec(init="teacher", layers=5), "the student's 5 layers cannot all come from the teacher's 4"),
        ("modernbert", StudentSpec(layers=2, init="teacher", copy_layers="last"), "the first layer of modernbert"),
        ("modernbert", StudentSpec(hidden=24, init="teacher"), "cannot make heads of 6 out of modernbert's heads of 8"),
        (
            "modernbert",
            StudentSpec(family="bert", init="teacher"),
            "a bert model cannot begin as a modernbert model; expected modernbert",
        ),
        ("modernbert", StudentSpec(layers=2, config={"layer_types": [G]}), "names 1 layers; the student has 2"),
        ("mobilebert", StudentSpec(family="bert", init="teacher"), "cannot begin as a mobilebert model; expected mob"),
        ("llama", StudentSpec(heads=1), "heads: 1: 2 heads share"),
        ("bert", StudentSpec(config={"hidden_act": "glue"}), "cannot build a bert with these settings: 'glue'"),
        ("bert", StudentSpec(config={"hidden_dropout_prob": 10}), "has to be between 0 and 1, but got 10"),
        ("bert", StudentSpec(config={"layer_norm_eps": "1e-12"}), "Field 'layer_norm_eps' expected float, got str"),
    ],
)
def test_invalid_students(family: str, spec: StudentSpec, message: str) -> None:
    with pytest.raises(CompressError, match=re.escape(message)):
        build(spec, tiny.model(family, layers=4))


# From the teacher's layers


@pytest.mark.parametrize("student", ["bert", "roberta", "distilbert"])
@pytest.mark.parametrize("count", [16, 80])
def test_a_student_may_have_other_positions(student: str, count: int) -> None:
    """It has those of its teacher that both count."""
    teacher = tiny.model("bert")
    spec = StudentSpec(family=student, init="teacher", config={"max_position_embeddings": count})
    table = build(spec, teacher).get_submodule(f"{student}.embeddings.position_embeddings").weight
    whole = build(spec.model_copy(update={"config": {}}), teacher)
    expected = whole.get_submodule(f"{student}.embeddings.position_embeddings").weight
    first = 1 if student == "roberta" else 0
    both = min(len(table), len(expected))
    assert len(table) == count
    torch.testing.assert_close(table[first:both], expected[first:both])


@pytest.mark.parametrize(
    ("rule", "students", "teachers", "layers"),
    [
        ("even", 6, 12, [0, 2, 4, 7, 9, 11]),  # DistilBERT
        ("even", 3, 6, [0, 2, 5]),
        ("even", 1, 12, [0]),
        ("uniform", 4, 12, [2, 5, 8, 11]),  # TinyBERT's g(m) = 3m
        ("uniform", 5, 12, [1, 3, 6, 8, 11]),
        ("first", 3, 12, [0, 1, 2]),  # PKD
        ("last", 3, 12, [9, 10, 11]),
        ((0, 0, -1), 3, 4, [0, 0, 3]),
    ],
)
def test_select_layers(rule: Any, students: int, teachers: int, layers: list[int]) -> None:
    assert select_layers(rule, students, teachers) == layers


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ((0, 1), r"\[0, 1\] must name 3 layers, each of 0\.\.3"),
        ((0, 1, 4), r"\[0, 1, 4\] must name 3 layers"),
        ((0, 1, -5), r"must name 3 layers"),
    ],
)
def test_select_missing_layers(rule: tuple[int, ...], message: str) -> None:
    with pytest.raises(StudentError, match=message):
        select_layers(rule, 3, 4)


@pytest.mark.parametrize("family", [*ROLES, "mobilebert", "albert", "deberta", "xlnet"])
def test_a_full_copy_equals_its_teacher(family: str) -> None:
    teacher, batch = tiny.model(family), tiny.batch()
    torch.manual_seed(1)
    student = build(StudentSpec(init="teacher"), teacher).eval()
    assert torch.equal(student(**batch).logits, teacher(**batch).logits)
    ours, theirs = student.state_dict(), teacher.state_dict()
    assert all(ours[name].data_ptr() != theirs[name].data_ptr() for name in ours), "a copy, not the same memory"


def test_a_shallow_copy_has_the_chosen_layers() -> None:
    teacher = tiny.model("bert", layers=4)
    student = build(StudentSpec(layers=3, init="teacher", copy_layers=(3, 0, 2)), teacher).eval()
    ours, theirs = student.state_dict(), teacher.state_dict()
    for mine, other in ((0, 3), (1, 0), (2, 2)):
        names = [name for name in ours if f".layer.{mine}." in name]
        assert names
        assert all(torch.equal(ours[n], theirs[n.replace(f"layer.{mine}.", f"layer.{other}.")]) for n in names)
    rest = [name for name in ours if ".layer." not in name]
    assert all(torch.equal(ours[name], theirs[name]) for name in rest)


@pytest.mark.parametrize(
    ("spec", "kinds"),
    [
        (StudentSpec(layers=4, init="teacher"), [G, L, L, L]),  # layers 0 2 5 7, of G L L G L L G L
        (StudentSpec(layers=3, init="teacher", copy_layers=(0, 3, 6)), [G, G, G]),
        (StudentSpec(layers=3, init="auto", copy_layers="first"), [G, L, L]),
        (StudentSpec(layers=3, init="auto", copy_layers="last"), [G, L, L]),  # which is scratch
        (StudentSpec(layers=4, init="scratch"), [G, L, L, G]),
        (StudentSpec(layers=11, init="scratch"), [G, L, L, G, L, L, G, L, L, G, L]),
        (StudentSpec(layers=2, config={"layer_types": [L, G]}), [L, G]),
    ],
)
def test_local_and_global_layers(spec: StudentSpec, kinds: list[str]) -> None:
    teacher = tiny.config("modernbert", layers=8)
    assert config_for(spec, teacher).layer_types == kinds
    assert teacher.layer_types == [G, L, L, G, L, L, G, L]
    assert len(config_for(StudentSpec(family="modernbert", layers=30), tiny.config("bert")).layer_types) == 30


def test_a_shallow_modernbert_equals_its_teacher_without_the_other_layers() -> None:
    teacher = tiny.model("modernbert", layers=4, local_attention=4)
    student = build(StudentSpec(layers=3, init="teacher", copy_layers=(0, 2, 3)), teacher).eval()
    assert student.config.layer_types == [G, L, G]
    del teacher.base_model.layers[1]
    batch = tiny.batch((12, 5))
    torch.testing.assert_close(student(**batch).logits, teacher(**batch).logits)


def test_a_narrower_modernbert_is_a_slice_of_its_teacher() -> None:
    teacher = families.model("modernbert")
    spec = StudentSpec(layers=2, hidden=16, heads=4, ffn=40, init="teacher")
    kept = choose_units(spec, teacher)
    assert kept is not None and kept.sizes.head_size == 4
    student = build(spec, teacher, kept=kept).eval()
    with masked(teacher, kept):
        expected = families.logits(teacher)
    torch.testing.assert_close(families.logits(student), expected, rtol=1e-5, atol=1e-5)


# From another family


def layers(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    with torch.no_grad():
        shown = read(model, batch, frozenset({"layers", "embeddings"}))
    return [each[batch["attention_mask"].bool()] for each in (shown.embeddings, *shown.layers)]


@pytest.mark.parametrize(
    ("teacher", "student"),
    [
        ("bert", "distilbert"),
        ("roberta", "bert"),
        ("bert", "roberta"),
        ("xlm-roberta", "distilbert"),
        ("ernie", "bert"),
    ],
)
def test_a_copy_in_another_family_has_the_same_states(teacher: str, student: str) -> None:
    """For one segment; the families pool differently, so logits may differ. RoBERTa's positions start after the pad."""
    tutor = tiny.model(teacher)
    pupil = build(StudentSpec(family=student, init="teacher"), tutor).eval()
    batch = tiny.batch()
    for ours, theirs in zip(layers(pupil, batch), layers(tutor, batch), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
    assert not torch.equal(
        layers(build(StudentSpec(family=student), tutor).eval(), batch)[-1], layers(tutor, batch)[-1]
    )


# Narrower


def silenced(model: Any, *, heads: Sequence[int] = (), neurons: Sequence[int] = (), hidden: Sequence[int] = ()) -> Any:
    """Zero their outputs in every layer."""
    for layer in model.bert.encoder.layer:
        for head in heads:
            layer.attention.output.dense.weight.data[:, head * 8 : (head + 1) * 8] = 0
        layer.output.dense.weight.data[:, list(neurons)] = 0
        layer.output.dense.weight.data[list(hidden)] = 0
    return model


def test_silent_neurons_are_cut_first() -> None:
    teacher = silenced(tiny.model("bert"), neurons=range(0, 64, 2))
    student = build(StudentSpec(ffn=32, init="teacher"), teacher).eval()
    torch.testing.assert_close(student(**tiny.batch()).logits, teacher(**tiny.batch()).logits, rtol=0, atol=1e-6)


def test_silent_heads_and_dimensions_are_cut_first() -> None:
    """Heads go with dimensions, as their product is the width: half of both, heads as wide as before."""
    silent = [i for i in range(32) if i % 4 in (1, 2)]
    teacher = silenced(tiny.model("bert"), heads=[0, 2], hidden=silent)
    student = build(StudentSpec(hidden=16, heads=2, init="teacher"), teacher)
    dims, rows = [i for i in range(32) if i not in silent], [*range(8, 16), *range(24, 32)]
    for mine, other in zip(student.bert.encoder.layer, teacher.bert.encoder.layer, strict=True):
        for name in ("query", "key", "value"):
            ours, theirs = (getattr(layer.attention.self, name) for layer in (mine, other))
            assert torch.equal(ours.weight, theirs.weight[rows][:, dims])
            assert torch.equal(ours.bias, theirs.bias[rows])
        ours, theirs = (layer.attention.output.dense.weight for layer in (mine, other))
        assert torch.equal(ours, theirs[dims][:, rows])
        assert torch.equal(mine.output.LayerNorm.weight, other.output.LayerNorm.weight[dims])
    words = (model.bert.embeddings.word_embeddings.weight for model in (student, teacher))
    assert torch.equal(next(words), next(words)[:, dims])
    assert torch.equal(student.classifier.weight, teacher.classifier.weight[:, dims])


# From a checkpoint, and saved as one


def test_init_from_a_checkpoint(tmp_path: Path) -> None:
    saved = tiny.model("distilbert", layers=1, labels=2, seed=4)
    saved.save_pretrained(tmp_path)
    teacher = tiny.model("bert")
    teacher.config.id2label = {0: "no", 1: "perhaps", 2: "yes"}
    student = build(StudentSpec(init=str(tmp_path)), teacher)
    assert student.config.model_type == "distilbert"
    assert student.config.id2label == teacher.config.id2label
    ours = student.distilbert.state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in saved.distilbert.state_dict().items())
    assert student(**tiny.batch()).logits.shape == (3, 3)


def test_a_size_that_a_config_does_not_set() -> None:
    with pytest.raises(StudentError, match=r"student\.layers: funnel: This model does not support"):
        config_for(StudentSpec(layers=1), FunnelConfig())


def test_a_checkpoint_with_another_vocabulary(tmp_path: Path) -> None:
    tiny.model("bert", vocab_size=50).save_pretrained(tmp_path)
    with pytest.raises(StudentError, match=r"has 50 tokens, the teacher \d+: student and teacher must share"):
        build(StudentSpec(init=str(tmp_path)), tiny.model("bert"), head="masked_lm")


def test_a_trained_student_is_a_plain_model(tmp_path: Path) -> None:
    """Projections and other parts of distillation are not saved with it."""
    step = learning.step()
    train(step, learning.stage(steps=2), learning.rows(), learning.context(), learning.run(tmp_path / "run"))
    step.student.save_pretrained(tmp_path / "saved")
    loaded, found = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(found.values()), found
    fresh = AutoModelForSequenceClassification.from_config(loaded.config)
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == fresh.state_dict().keys()
    batch = tiny.batch()
    assert torch.equal(loaded.eval()(**batch).logits, step.student.eval()(**batch).logits)


def test_the_attention_implementation_is_not_the_teachers() -> None:
    opened = tiny.model("bert")
    open_attention(opened)
    assert build(StudentSpec(layers=1), opened).config._attn_implementation == "sdpa"
    assert build(StudentSpec(family="deberta-v2"), opened).config._attn_implementation == "eager"


@pytest.mark.parametrize("family", [name for name in ROLES if name != "modernbert"])
def test_a_narrower_student_keeps_the_most_important_units(family: str) -> None:
    teacher = tiny.model(family, layers=2, hidden=32, seed=4)
    random = torch.Generator().manual_seed(1)
    plan = SlicePlan.from_model(teacher)
    importance = {group: torch.rand(size, generator=random) for group, size in plan.groups.items()}
    spec = StudentSpec(hidden=0.5, init="teacher")
    student = build(spec, teacher, kept=choose_units(spec, teacher, lambda: importance))
    kept = importance[HIDDEN].topk(16).indices.sort().values
    mine, theirs = (model.get_input_embeddings().weight for model in (student, teacher))
    if family != "electra":  # whose table has a width of its own
        assert torch.equal(mine, theirs[:, kept]), "columns of the most important widths, in their order"
    assert student(**tiny.batch()).logits.isfinite().all()


@pytest.mark.parametrize(
    ("family", "teacher", "sizes", "init"),
    [
        ("bert", {"layers": 4}, {"layers": 2, "hidden": 16}, "teacher"),
        ("bert", {"layers": 4}, {"hidden": 64}, "scratch"),
        ("bert", {"layers": 2}, {"layers": 4}, "scratch"),
        ("modernbert", {"layers": 2}, {}, "scratch"),
        ("modernbert", {"layers": 4}, {"family": "teacher", "layers": 2, "hidden": 16, "heads": 2}, "teacher"),
        ("modernbert", {"layers": 4}, {"family": "teacher", "hidden": 24, "heads": 4}, "scratch"),
        ("modernbert", {"layers": 4}, {"family": "teacher", "layers": 2, "copy_layers": "uniform"}, "scratch"),
    ],
)
def test_init_auto(family: str, teacher: dict[str, int], sizes: dict[str, int], init: str) -> None:
    spec = StudentSpec.model_validate({"family": "bert", "init": "auto", **sizes})
    assert resolve_init(spec, tiny.config(family, **{"hidden": 32, **teacher})).init == init


@pytest.mark.parametrize("init", ["teacher", "scratch"])
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_a_student_ends_its_texts_as_its_teacher_does(family: str, init: str) -> None:
    teacher = getattr(generative, family)()
    teacher.generation_config.update(eos_token_id=[0, 2], repetition_penalty=1.5)
    head = "causal_lm" if family == "gpt2" else "seq2seq"
    settings = build(StudentSpec(layers=1, init=init), teacher, head=head).generation_config
    assert (settings.eos_token_id, settings.repetition_penalty) == ([0, 2], 1.5)
    assert settings is not teacher.generation_config
    build(StudentSpec(layers=1, init="scratch"), tiny.model("bert"))  # which does not write


@pytest.mark.parametrize("family", ["gpt2", "mobilebert"])
def test_a_row_of_a_checkpoint_is_the_same_in_a_batch(family: str, tmp_path: Path) -> None:
    """The padding is that of the rows; a checkpoint may know none, or have trained its embedding."""
    teacher, own = (tiny.model(family, labels=2, seed=seed, pad_token_id=0) for seed in (0, 1))
    with torch.no_grad():
        own.get_input_embeddings().weight[0] = 1.0
    if family == "gpt2":
        own.config.pad_token_id = None
    own.save_pretrained(tmp_path / "own")
    tiny.tokenizer().save_pretrained(tmp_path / "own")
    student = build(StudentSpec(init=str(tmp_path / "own")), teacher).eval()
    rows = tiny.batch((6, 2))
    alone = student(**{name: values[1:, :2] for name, values in rows.items()}).logits[0]
    torch.testing.assert_close(student(**rows).logits[1], alone)


def test_settings_of_each_layer_are_cut_with_the_layers() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    teacher = CONFIG_MAPPING["longformer"](num_hidden_layers=4, attention_window=[2, 4, 6, 8], **sizes)
    assert config_for(StudentSpec(layers=2, copy_layers=(1, 3)), teacher).attention_window == [4, 8]
    kinds = [[["global", "local"], 2]]
    neo = CONFIG_MAPPING["gpt_neo"](num_layers=4, attention_types=kinds, hidden_size=32, num_heads=4)
    made = config_for(StudentSpec(layers=2, copy_layers=(0, 1)), neo)
    assert made.attention_layers == ["global", "local"]
    assert type(neo)(**made.to_dict()).attention_layers == ["global", "local"]


@pytest.mark.parametrize("make", [generative.llama, generative.t5])
def test_a_head_of_its_own_weights_is_copied_whatever_the_config_ties(make: Any, tmp_path: Path) -> None:
    """Configs of Flan-T5 and mT5 tie their heads, and their files hold both matrices."""
    teacher = generative.separated(make(tie_word_embeddings=True))
    head = "seq2seq" if teacher.config.is_encoder_decoder else "causal_lm"
    student = build(StudentSpec(layers=1, init="teacher"), teacher, head=head, kind=None)
    student.save_pretrained(tmp_path)
    for found in (student, type(student).from_pretrained(tmp_path)):
        torch.testing.assert_close(found.lm_head.weight, teacher.lm_head.weight)
        torch.testing.assert_close(found.get_input_embeddings().weight, teacher.get_input_embeddings().weight)


def test_a_model_that_also_reads_images_is_refused_by_its_family() -> None:
    with pytest.raises(StudentError, match="clip: its config states no hidden for the whole model"):
        config_for(StudentSpec(layers=1), CLIPConfig())
