"""ELECTRA's corruption and its step, against transformers' models run by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor
from transformers import AutoModelForPreTraining, ElectraForMaskedLM, ElectraForPreTraining

from compress.config.recipe import Recipe
from compress.config.term import Term
from compress.data.constants import IGNORE_INDEX
from compress.data.masking import Words
from compress.errors import ObjectiveError, StudentError
from compress.papers import electra
from compress.slicing.shape import Shape
from compress.training.objective import Objective
from tests import tiny

WORDS = Words.from_tokenizer(tiny.tokenizer())
CLS, SEP, MASK = 2, 3, 4


def discriminator(seed: int = 0, **changes: Any) -> Any:
    return tiny.model("electra", seed=seed, head=AutoModelForPreTraining, **changes)


def step(seed: int = 0, **options: Any) -> electra.ReplacedTokens:
    """In eval mode: no dropout between what the step computes and what a test does by hand."""
    student = discriminator(seed)
    made = electra.ReplacedTokens(student, None, None, **{"width": 0.5, **options})
    return made.eval()


def text(lengths: tuple[int, ...] = (12, 9, 5), seed: int = 0) -> dict[str, Tensor]:
    """Rows between [CLS] and [SEP]."""
    batch = tiny.batch(lengths, seed=seed)
    for row, length in zip(batch["input_ids"], lengths, strict=True):
        row[0], row[length - 1] = CLS, SEP
    return batch


def corrupted(seed: int = 0, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return electra.mask(text(seed=seed), WORDS, **{"rate": 0.4, **options})


def gradients(module: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    loss.backward()
    found = {name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None}
    module.zero_grad()
    return found


# Recipes


@pytest.mark.parametrize(("name", "steps", "lr"), [("electra-small", 1_000_000, 3e-4), ("electra-base", 766_000, 1e-4)])
def test_recipes_train_as_long_as_the_paper_and_decay_no_weight_of_the_task(name: str, steps: int, lr: float) -> None:
    """Tables 6 and 7."""
    pretrain, task = Recipe.load(name).training
    assert pretrain.steps == steps
    assert pretrain.warmup * steps == pytest.approx(10_000, rel=0.01)
    assert (pretrain.weight_decay, task.weight_decay, task.lr) == (0.01, 0.0, lr)


# Corruption


def test_draws_are_with_replacement_and_85_percent_become_masks() -> None:
    """Of n draws from m places, m (1 - (1 - 1/m)^n) places are hit on average."""
    batch = text((102,) * 400)
    after = electra.mask(batch, WORDS)
    chosen = after["labels"] != IGNORE_INDEX
    expected = 100 * (1 - (1 - 1 / 100) ** round(0.15 * 102))
    assert chosen.sum(-1).float().mean().item() == pytest.approx(expected, abs=0.2)
    assert chosen.sum(-1).max() <= round(0.15 * 102)
    share = (after["input_ids"][chosen] == MASK).float().mean().item()
    assert share == pytest.approx(0.85, abs=0.02)
    assert chosen[:, 1:-1].float().mean(0).std() < 0.04, "every place is as likely"
    everything = electra.mask(batch, WORDS, masked=1.0)
    assert (everything["input_ids"][everything["labels"] != IGNORE_INDEX] == MASK).all()


# Samples


def test_a_sample_equal_to_the_original_is_not_replaced() -> None:
    batch = corrupted()
    labels = batch["labels"]
    chosen = labels != IGNORE_INDEX
    right = 50 * torch.nn.functional.one_hot(labels[chosen], WORDS.size).float()
    ids, replaced = electra.replace(batch["input_ids"], labels, right)
    assert torch.equal(ids, text()["input_ids"])
    assert not replaced.any()
    wrong = 50 * torch.nn.functional.one_hot(labels[chosen].add(1) % WORDS.size, WORDS.size).float()
    ids, replaced = electra.replace(batch["input_ids"], labels, wrong)
    assert torch.equal(replaced.bool(), chosen)
    assert torch.equal(replaced.bool(), ids != text()["input_ids"])
    assert torch.equal(ids[chosen], labels[chosen].add(1) % WORDS.size)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_follow_the_softened_distribution(temperature: float) -> None:
    torch.manual_seed(0)
    logits, rows = torch.tensor([0.5, -1.0, 2.0, 0.0]), 40_000
    labels = torch.zeros(1, rows, dtype=torch.long)
    ids, _ = electra.replace(labels, labels, logits.expand(rows, 4), temperature)
    shares = torch.bincount(ids[0], minlength=4) / rows
    torch.testing.assert_close(shares, (logits / temperature).softmax(-1), atol=0.01, rtol=0)


# The step


def by_hand(made: electra.ReplacedTokens, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """L_MLM and L_Disc as transformers' own models compute them; the sample is drawn from the same seed."""
    generated = made.generator(**batch)
    chosen = batch["labels"] != IGNORE_INDEX
    torch.manual_seed(7)
    ids, replaced = electra.replace(batch["input_ids"], batch["labels"], generated.logits[chosen])
    assert 0 < replaced.sum() <= chosen.sum()
    mask = batch["attention_mask"]
    return generated.loss, made.student(input_ids=ids, attention_mask=mask, labels=replaced).loss


def test_the_loss_is_that_of_transformers_models() -> None:
    made, batch = step(), corrupted()
    masked, detected = by_hand(made, batch)
    torch.manual_seed(7)
    parts = made(**batch)
    torch.testing.assert_close(parts["generator"], masked.detach())
    torch.testing.assert_close(parts["electra.replaced_tokens"], 50 * detected.detach())
    torch.testing.assert_close(parts["loss"], masked + 50 * detected)


def test_the_generator_learns_from_its_own_loss_alone_and_the_tied_tables_from_both() -> None:
    made, batch = step(), corrupted()
    masked, detected = by_hand(made, batch)
    from_masked, from_detected = gradients(made, masked), gradients(made, 50 * detected)
    torch.manual_seed(7)
    from_both = gradients(made, made(**batch)["loss"])
    tied = {name for name in from_both if ".embeddings." in name}
    own = {name for name in from_both if name.startswith("generator.")} - tied
    assert len(own) > 20 and len(tied) == 5
    assert from_detected.keys().isdisjoint(own)
    for name in from_both:
        zero = torch.zeros_like(from_both[name])
        expected = from_masked.get(name, zero) + from_detected.get(name, zero)
        torch.testing.assert_close(from_both[name], expected, rtol=1e-4, atol=1e-6)
    for name in tied:
        assert from_masked[name].abs().sum() > 0
        assert from_detected[name].abs().sum() > 0


def test_the_generator_answers_at_the_chosen_positions_only() -> None:
    made, batch = step(), corrupted()
    seen: list[torch.Size] = []
    made.generator.generator_lm_head.register_forward_hook(lambda _, args, out: seen.append(out.shape))
    made(**batch)
    assert seen == [(int((batch["labels"] != IGNORE_INDEX).sum()), WORDS.size)]


def test_sizes_of_the_generator() -> None:
    student = discriminator(hidden=512, heads=8, layers=4, embedding_size=16)
    generator = electra.ReplacedTokens(student, None, None, layers=0.5).generator
    assert isinstance(generator, ElectraForMaskedLM)
    config = generator.config
    assert (config.hidden_size, config.num_attention_heads, config.intermediate_size) == (128, 2, 512)
    assert (config.num_hidden_layers, config.embedding_size) == (2, 16)
    assert generator.electra.embeddings_project.weight.shape == (128, 16)
    assert student.config.hidden_size == 512


def test_the_tie_survives_saving_and_training(tmp_path: Path) -> None:
    made, other, batch = step(), step(seed=1), corrupted()
    optimiser = torch.optim.AdamW(made.parameters(), lr=1e-2)
    for _ in range(2):
        optimiser.zero_grad()
        made(**batch)["loss"].backward()
        optimiser.step()
    save_model(made, str(tmp_path / "step.safetensors"))
    load_model(other, tmp_path / "step.safetensors")
    for each in (made, other):
        words = each.student.get_input_embeddings().weight
        assert each.generator.get_input_embeddings().weight is words
        assert each.generator.get_output_embeddings().weight is words
    torch.manual_seed(7)
    expected = made(**batch)
    torch.manual_seed(7)
    assert other(**batch) == expected
    made.student.save_pretrained(tmp_path)
    kept = ElectraForPreTraining.from_pretrained(tmp_path)
    torch.testing.assert_close(kept(**text()).logits, made.student(**text()).logits)


def test_a_teacher_that_discriminates_is_read_on_the_generators_text() -> None:
    student, teacher = discriminator(), discriminator(seed=5, layers=3)
    terms = [Term("electra.soft_replaced_tokens", 10.0), Term("tinybert.hidden", layers="last")]
    objective = Objective(terms, Shape.from_config(student.config), Shape.from_config(teacher.config))
    made = electra.ReplacedTokens(student, teacher, objective, weight=2.0).eval()
    batch = corrupted()
    masked, detected = by_hand(made, batch)
    torch.manual_seed(7)
    ids, _ = electra.replace(
        batch["input_ids"], batch["labels"], made.generator(**batch).logits[batch["labels"] != IGNORE_INDEX]
    )
    mask = batch["attention_mask"]
    soft = electra.soft_replaced_tokens(
        student(input_ids=ids, attention_mask=mask).logits, teacher(input_ids=ids, attention_mask=mask).logits, mask
    )
    torch.manual_seed(7)
    parts = made(**batch)
    torch.testing.assert_close(parts["electra.soft_replaced_tokens"], 10 * soft.detach())
    torch.testing.assert_close(parts["loss"], masked + 2 * detected + 10 * soft + parts["tinybert.hidden"])
    parts["loss"].backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert len(made.state_dict()) == len(electra.ReplacedTokens(discriminator(), None, None).state_dict())


def test_without_masks_nothing_is_replaced() -> None:
    made = step()
    parts = made(**text(), labels=torch.full_like(text()["input_ids"], IGNORE_INDEX))
    assert parts["generator"] == 0
    parts["loss"].backward()
    assert parts["loss"] > 0


def test_other_models_are_refused() -> None:
    bert = tiny.bert()
    with pytest.raises(StudentError, match=r"student must be an ELECTRA discriminator, not BertForSeq.*family electra"):
        electra.ReplacedTokens(bert, None, None)
    student = discriminator()
    objective = Objective(
        [Term("electra.soft_replaced_tokens")],
        Shape.from_config(student.config),
        Shape.from_config(discriminator().config),
    )
    with pytest.raises(StudentError, match="the teacher must be an ELECTRA discriminator, not Bert"):
        electra.ReplacedTokens(student, bert, objective)
    with pytest.raises(ObjectiveError, match=r"`corrupt: electra\.mask`"):
        step()(**text())


# Fine-tuning


def test_layers_learn_slower_towards_the_input() -> None:
    student = tiny.model("electra", layers=3)
    objective = Objective([Term("bert.labels")], Shape.from_config(student.config))
    made = electra.FineTuning(student, None, objective, decay=0.5)
    groups, factors = made.groups(), made.factors(0, 10)
    assert factors == {f"depth {depth}": 0.5 ** (5 - depth) for depth in (0, 1, 2, 3, 5)}
    assert groups.keys() == factors.keys()
    listed = [id(parameter) for group in groups.values() for parameter in group]
    assert sorted(listed) == sorted(id(parameter) for parameter in made.parameters())
    assert any(parameter is student.electra.encoder.layer[2].output.dense.weight for parameter in groups["depth 3"])
    assert any(parameter is student.electra.embeddings_project.weight for parameter in groups["depth 0"])
    assert any(parameter is student.classifier.out_proj.weight for parameter in groups["depth 5"])
    batch = tiny.batch() | {"labels": torch.tensor([0, 1, 2])}
    torch.testing.assert_close(made.eval()(**batch)["loss"], student(**batch).loss)


@pytest.mark.parametrize(("family", "first"), [("gpt2", "wte"), ("distilbert", "embeddings"), ("llama", "embed_t")])
def test_the_layers_of_every_family_have_a_depth(family: str, first: str) -> None:
    student = tiny.model(family, layers=2)
    terms = [Term("tinybert.embeddings", project=True), Term("bert.labels")]
    objective = Objective(terms, *[Shape.from_config(student.config)] * 2)
    teacher = tiny.model(family, layers=2, seed=1)
    groups = electra.FineTuning(student, teacher, objective, decay=0.5).groups()
    assert groups.keys() == {"depth 0", "depth 1", "depth 2", "depth 4"}
    depths = {id(parameter): depth for depth, group in groups.items() for parameter in group}
    named = {name: depths[id(parameter)] for name, parameter in student.named_parameters()}
    assert {depth for name, depth in named.items() if first in name} == {"depth 0"}
    assert all(depths[id(parameter)] == "depth 4" for parameter in objective.parameters())


@pytest.mark.parametrize("family", ["albert", "t5"])
def test_a_student_without_a_stack_of_layers_is_refused(family: str) -> None:
    student = tiny.model(family)
    objective = Objective([Term("bert.labels")], Shape.from_config(student.config))
    with pytest.raises(ObjectiveError, match=f"{family} has no single stack of layers"):
        electra.FineTuning(student, None, objective)
