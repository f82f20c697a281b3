"""DeBERTa: the enhanced mask decoder, SiFT."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm
from transformers import AutoModelForMaskedLM
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from compress.config.recipe import Recipe
from compress.config.term import Term
from compress.data.constants import IGNORE_INDEX
from compress.data.masking import Words
from compress.errors import ObjectiveError, StudentError
from compress.kinds import Kind, find
from compress.papers import deberta, electra
from compress.papers.bert import masked_lm
from compress.slicing.shape import Shape
from compress.training.objective import Objective
from compress.training.step import Distillation
from tests import tiny
from tests.papers import rows

WORDS = Words.from_tokenizer(tiny.tokenizer())


def corrupted(lengths: tuple[int, ...] = (12, 9, 5)) -> dict[str, Tensor]:
    torch.manual_seed(3)
    return electra.mask(tiny.batch(lengths), WORDS, rate=0.4, masked=1.0)


def has_gradient(module: nn.Module) -> set[str]:
    return {name for name, each in module.named_parameters() if each.grad is not None and each.grad.any()}


# Enhanced mask decoder


def masked_model(**changes: Any) -> Any:
    return tiny.model("deberta-v2", head=AutoModelForMaskedLM, layers=3, **changes)


@pytest.mark.parametrize("legacy", [True, False])
def test_the_decoder_by_hand(legacy: bool) -> None:
    model, batch = masked_model(legacy=legacy), corrupted()
    step = deberta.EnhancedMaskDecoder(model, None, None).eval()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    states = model.deberta(**inputs, output_hidden_states=True).hidden_states
    encoder, real = model.deberta.encoder, batch["attention_mask"]
    below, query = states[2], states[2] + step.decoder.positions.weight[: real.shape[1]]
    both_real = real[:, None, :, None] * real[:, None, None, :]
    distances = make_log_bucket_position(torch.arange(12)[:, None] - torch.arange(12), 8, 64).long()
    table = encoder.LayerNorm(encoder.rel_embeddings.weight)
    for _ in range(2):
        attended = encoder.layer[2].attention.self(below, both_real, False, query, distances[None], table)[0]
        attended = encoder.layer[2].attention.output(attended, query)
        query = encoder.layer[2].output(encoder.layer[2].intermediate(attended), attended)
    logits = model.cls(query) if legacy else model.lm_predictions(query, model.deberta.embeddings.word_embeddings)
    torch.testing.assert_close(step(**batch)["loss"], masked_lm(logits, batch["labels"], None))


def test_without_positions_the_first_pass_is_the_plain_last_layer() -> None:
    model, batch = masked_model(), tiny.batch()
    states = model.deberta(**batch, output_hidden_states=True).hidden_states
    encoder = model.deberta.encoder
    twice = deberta.enhanced_mask_decoder(encoder, states[2], torch.zeros(7, 32), batch["attention_mask"])
    mask = encoder.get_attention_mask(batch["attention_mask"])
    again = encoder.layer[2](states[2], mask, states[3], encoder.get_rel_pos(states[2]), encoder.get_rel_embedding())[0]
    torch.testing.assert_close(twice, again)


def test_gradients_of_the_decoder() -> None:
    model, batch = masked_model(), corrupted((6, 5, 4))
    step = deberta.EnhancedMaskDecoder(model, None, None)
    seen: list[torch.Size] = []
    model.cls.register_forward_hook(lambda _, args, out: seen.append(out.shape))
    step(**batch)["loss"].backward()
    assert seen == [(int((batch["labels"] != IGNORE_INDEX).sum()), WORDS.size)]
    used = step.decoder.positions.weight.grad.abs().sum(-1) > 0
    assert torch.equal(used[:6], (batch["labels"] != IGNORE_INDEX).any(0)), "a query is its own position's alone"
    assert used[:6].any() and not used[:6].all() and not used[6:].any()
    # key biases shift all scores of a query alike: rounding decides whether their gradient is exactly 0
    still = {name for name, _ in step.named_parameters()} - has_gradient(step)
    assert {name for name in still if not name.endswith("key_proj.bias")} == set()
    assert step.student is model
    assert not any("positions" in name for name in model.state_dict())


def test_a_student_without_such_a_decoder_is_refused() -> None:
    with pytest.raises(StudentError, match="position_biased_input: false"):
        deberta.EnhancedMaskDecoder(masked_model(position_biased_input=True), None, None)
    with pytest.raises(StudentError, match=r"not BertForSequenceClassification.*`head: masked_lm`"):
        deberta.EnhancedMaskDecoder(tiny.bert(), None, None)
    model = masked_model()
    objective = Objective([Term("bert.masked_lm")], Shape.from_config(model.config))
    with pytest.raises(ObjectiveError, match="leave `objective` out"):
        deberta.EnhancedMaskDecoder(model, None, objective)
    with pytest.raises(ObjectiveError, match=r"`corrupt: bert\.mask`"):
        deberta.EnhancedMaskDecoder(model, None, None)(**tiny.batch())


# Recipes

MNLI = 392_702
"""Training rows of MNLI, whose script is where the fine-tuning numbers are from."""


def test_the_recipe_masks_whole_words_as_spans_of_up_to_three() -> None:
    pretrain = Recipe.load("deberta").training[0]
    assert pretrain.corrupt is not None
    inside = range(500, 1000)
    words = rows.words(inside=inside)
    ids = [rows.CLS, *(number for word in range(120) for number in (5 + word, 500 + word)), rows.SEP]
    runs: list[int] = []
    torch.manual_seed(0)
    for row in pretrain.corrupt(rows.batch(*[ids] * 50), words)["labels"] != IGNORE_INDEX:
        chosen_W = row[1:-1].view(-1, 2)
        assert torch.equal(chosen_W[:, 0], chosen_W[:, 1]), "a word is chosen whole"
        assert int(row.sum()) == 36  # round(0.15 * 242)
        marks = "".join("x" if word else " " for word in chosen_W[:, 0])
        runs += [len(run) for run in marks.split()]
    assert 1.3 < sum(runs) / len(runs) < 2.2, "single words alone are in runs of 1.2 on average"


@pytest.mark.parametrize(("name", "epochs"), [("deberta", 3), ("deberta-v3", 3), ("deberta-sift", 6)])
def test_fine_tuning_is_that_of_the_authors_mnli_script(name: str, epochs: int) -> None:
    """1,000 steps of warm-up, texts of 256 tokens."""
    stage = Recipe.load(name).training[-1]
    steps = MNLI * epochs / stage.batch
    assert (stage.epochs, stage.batch, stage.max_length) == (epochs, 64, 256)
    assert stage.warmup * steps == pytest.approx(1000, rel=0.01)


@pytest.mark.parametrize(("name", "batch", "lr"), [("deberta", 2048, 2e-4), ("deberta-v3", 64, 3e-4)])
def test_pre_training_is_as_long_as_the_authors(name: str, batch: int, lr: float) -> None:
    stage = Recipe.load(name).training[0]
    assert (stage.steps, stage.batch, stage.lr, stage.max_length) == (1_000_000, batch, lr, 512)
    assert stage.warmup * 1_000_000 == 10_000


# SiFT


def labels_of(student: Any, kind: str | None = None) -> Objective:
    return Objective([Term("bert.labels")], Shape.from_config(student.config), kind=kind)


def sift(student: Any, kind: str | None = None, **options: Any) -> deberta.ScaleInvariantFineTuning:
    return deberta.ScaleInvariantFineTuning(student, None, labels_of(student, kind), **options)


CLASSES = tiny.batch() | {"labels": torch.tensor([0, 2, 1])}


def embeddings_norm(student: Any) -> nn.Module:
    return student.base_model.embeddings.LayerNorm  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", ["bert", "deberta-v2", "electra", "distilbert"])
def test_the_perturbation_has_the_stated_size(family: str) -> None:
    """On normalised embeddings: a start within two deviations, then one step, `step_size` in its largest component."""
    student = tiny.model(family)
    entered: list[Tensor] = []
    embeddings_norm(student).register_forward_hook(lambda _, args, out: entered.append(args[0].detach()))
    sift(student, step_size=0.3, start=0.2)(**CLASSES)
    plain, started, moved = entered
    normal = layer_norm(plain, plain.shape[-1:], eps=1e-7)
    noise = started - normal
    assert noise.std().item() == pytest.approx(0.2 * 0.96, rel=0.05), "a normal, clamped at two deviations"
    assert noise.abs().max() <= 0.4 + 1e-5
    real = CLASSES["attention_mask"].bool()
    largest = (moved - started)[real].abs().amax(-1)
    torch.testing.assert_close(largest, torch.full_like(largest, 0.3), rtol=0.02, atol=0)


def test_the_perturbation_follows_the_gradient() -> None:
    student = tiny.model("deberta-v2")
    answers: list[Tensor] = []
    student.register_forward_hook(lambda _, args, out: answers.append(out.logits.detach()))
    parts = sift(student, step_size=0.05, start=0.01, weight=3.0)(**CLASSES)
    clean, started, moved = answers
    distance = deberta.symmetric_kl(moved, clean, None)
    assert distance > 2 * deberta.symmetric_kl(started, clean, None)
    torch.testing.assert_close(parts["deberta.sift"], 3 * distance)
    torch.testing.assert_close(parts["loss"].detach(), parts["bert.labels"] + 3 * distance)


def test_a_regression_is_compared_by_its_squared_error() -> None:
    student = tiny.model("bert", labels=1)
    answers: list[Tensor] = []
    student.register_forward_hook(lambda _, args, out: answers.append(out.logits.detach()))
    batch = tiny.batch() | {"labels": torch.tensor([0.5, 1.0, 2.0])}
    parts = sift(student, "regression", weight=2.0)(**batch)
    torch.testing.assert_close(parts["deberta.sift"], 2 * (answers[2] - answers[0]).square().mean())
    assert parts["deberta.sift"] > 0


def test_a_regression_in_another_unit_is_perturbed_alike() -> None:
    student = tiny.model("bert", labels=1)
    batch = tiny.batch() | {"labels": torch.tensor([0.5, 1.0, 2.0])}
    found = []
    for unit in (1.0, 100.0):
        objective = Objective([Term("bert.labels")], Shape.from_config(student.config), kind="regression", unit=unit)
        torch.manual_seed(0)
        with torch.no_grad():
            student.classifier.weight *= unit
            student.classifier.bias *= unit
        step = deberta.ScaleInvariantFineTuning(student, None, objective)
        assert step.unit == unit
        found.append(step(**batch | {"labels": unit * batch["labels"]}))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-7)


def test_weight_0_is_plain_fine_tuning() -> None:
    """Also with dropout: the clean pass comes first."""
    students = [tiny.model("deberta-v2").train() for _ in range(2)]
    torch.manual_seed(1)
    parts = sift(students[0], weight=0.0)(**CLASSES)
    torch.manual_seed(1)
    plain = Distillation(students[1], None, labels_of(students[1]))(**CLASSES)
    assert parts["loss"].item() == plain["loss"].item()
    parts["loss"].backward()
    plain["loss"].backward()
    for mine, other in zip(students[0].parameters(), students[1].parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None and other.grad is not None:
            assert torch.equal(mine.grad, other.grad)


@pytest.mark.parametrize("kind", ["classification", "multilabel", "tagging", "qa"])
def test_gradients_are_finite_for_every_kind_of_task(kind: Kind) -> None:
    student = tiny.model("bert", head=find(kind).auto_class(), labels=2 if kind == "qa" else 3)
    batch = tiny.batch()
    tags = batch["input_ids"] % 3
    labels = {
        "classification": torch.tensor([0, 2, 1]),
        "multilabel": torch.tensor([[1.0, 0.0, 1.0], [0.0] * 3, [0.0, 1.0, 1.0]]),
        "tagging": tags.masked_fill(batch["attention_mask"] == 0, IGNORE_INDEX),
        "qa": torch.tensor([[1, 2], [0, 3], [0, 0]]),
    }
    parts = sift(student, kind)(**batch, labels=labels[kind])
    assert parts["deberta.sift"] > 0
    parts["loss"].backward()
    assert all(each.grad.isfinite().all() for each in student.parameters() if each.grad is not None)


def test_hooks_are_gone_afterwards() -> None:
    student = tiny.model("bert")
    before = student(**CLASSES).logits
    sift(student, start=1.0)(**CLASSES)
    assert torch.equal(student(**CLASSES).logits, before)
    assert not embeddings_norm(student)._forward_pre_hooks
    assert not student._forward_hooks


def test_sift_refuses_what_it_cannot_perturb() -> None:
    with pytest.raises(StudentError, match=r"`embeddings\.LayerNorm`.*XLNet"):
        sift(tiny.model("xlnet"))
    student = tiny.model("bert")
    objective = Objective(
        [Term("tinybert.hidden")], Shape.from_config(student.config), Shape.from_config(student.config)
    )
    with pytest.raises(ObjectiveError, match="reads the student's logits"):
        deberta.ScaleInvariantFineTuning(student, tiny.model("bert"), objective)
