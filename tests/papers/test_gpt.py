"""The language model's loss beside the task's, in one forward pass of a decoder with a head."""

import copy
import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from compress.config.recipe import Recipe
from compress.config.reference import Call
from compress.config.term import Term
from compress.errors import ObjectiveError
from compress.papers.gpt import AuxiliaryObjective, next_token
from compress.slicing.shape import Shape
from compress.training.objective import Objective
from tests import tiny
from tests.papers.case import prefix, random, softmax

LABELS = torch.tensor([0, 2, 1, 0])
DECODERS = ("gpt2", "llama", "mistral", "qwen2", "qwen3")


def decoder(family: str, head: Any = AutoModelForSequenceClassification, **changes: Any) -> Any:
    special = {"bos_token_id": 2, "eos_token_id": 3, "tie_word_embeddings": True}
    return tiny.model(family, head=head, **special, **changes)


def step(student: Any, **options: Any) -> AuxiliaryObjective:
    objective = Objective([Term("bert.labels")], Shape.from_config(student.config))
    made: AuxiliaryObjective = Call("gpt.AuxiliaryObjective", options)(student, None, objective)
    return made


def batch(lengths: tuple[int, ...] = (7, 3, 5, 2)) -> dict[str, torch.Tensor]:
    return {**tiny.batch(lengths), "labels": LABELS[: len(lengths)]}


@pytest.mark.parametrize("left", [False, True])
def test_the_loss_is_the_papers_formula(left: bool) -> None:
    """Eq. 1 with eq. 2's softmax(h W_e^T), as sums over indices; a text of one token has nothing to predict."""
    states, table = random(3, 5, 4, seed=1), random(6, 4, seed=2)
    ids = torch.randint(6, (3, 5), generator=torch.Generator().manual_seed(3))
    mask = prefix(5, 3, 1)
    mask = mask.flip(1) if left else mask
    total = 0.0
    for h, u, real in zip(states.tolist(), ids.tolist(), mask.tolist(), strict=True):
        at = [t for t, one in enumerate(real) if one]
        losses = []
        for t in at[1:]:
            logits = [sum(a * b for a, b in zip(h[t - 1], word, strict=True)) for word in table.tolist()]
            losses.append(-math.log(softmax(logits)[u[t]]))
        total += sum(losses) / max(1, len(losses)) / 3
    assert next_token(states, table, ids, mask).item() == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("family", DECODERS)
def test_both_losses_are_those_of_transformers_own_heads(family: str) -> None:
    """L3 = L2 + 0.5 L1 (eq. 5), with its gradients, of rows of one length, over which transformers averages alike."""
    student = decoder(family)
    language = decoder(family, head=AutoModelForCausalLM)
    language.base_model.load_state_dict(student.base_model.state_dict())
    classifier = copy.deepcopy(student)
    rows = {**tiny.batch((6, 6, 6, 6)), "labels": LABELS}
    found = step(student, dropout=0.0)(**rows)
    labels_BL = rows["input_ids"]
    expected = classifier(**rows).loss
    auxiliary = language(input_ids=labels_BL, attention_mask=rows["attention_mask"], labels=labels_BL).loss
    torch.testing.assert_close(found["loss"], expected + 0.5 * auxiliary)
    torch.testing.assert_close(found["gpt.next_token"], 0.5 * auxiliary.detach())
    for loss in (found["loss"], expected, 0.5 * auxiliary):
        loss.backward()
    tables = [each.get_input_embeddings().weight.grad for each in (student, classifier, language)]
    torch.testing.assert_close(tables[0], tables[1] + tables[2])


def test_padding_and_the_division_into_parts_change_nothing() -> None:
    student = decoder("gpt2")
    made = step(student, dropout=0.0)
    whole = batch()
    parts = [{name: column[at] for name, column in whole.items()} for at in (slice(0, 1), slice(1, 4))]
    counts = [made.items(part) for part in parts]
    mean = {name: torch.stack([count[name] for count in counts]).mean() for name in counts[0]}
    together = made(**whole)
    apart = [made(**part, items=mean) for part in parts]
    for name in together:
        torch.testing.assert_close(together[name], (apart[0][name] + apart[1][name]) / 2)


def test_the_state_that_the_classifier_reads_is_dropped_in_training_only() -> None:
    student = decoder("llama")
    exact = student(**tiny.batch()).logits
    made = step(student, dropout=0.5, weight=0.0)
    torch.testing.assert_close(made.eval().student(**tiny.batch()).logits, exact)
    torch.manual_seed(0)
    assert not torch.allclose(made.train().student(**tiny.batch()).logits, exact)
    made.finish()
    torch.testing.assert_close(made.student(**tiny.batch()).logits, exact)


def test_a_head_with_a_dropout_of_its_own_keeps_it() -> None:
    assert not step(decoder("gpt2", head=AutoModelForTokenClassification)).hooks
    assert len(step(decoder("gpt2")).hooks) == 1


@pytest.mark.parametrize(
    ("student", "reason"),
    [
        (tiny.model("bert"), "this bert is not known to predict the next token"),
        (tiny.model("llama", tie_word_embeddings=False), "this llama has a separate output layer"),
    ],
    ids=["an encoder", "a separate output layer"],
)
def test_students_without_that_language_model_are_refused(student: Any, reason: str) -> None:
    with pytest.raises(ObjectiveError, match=f"gpt.AuxiliaryObjective: {reason}"):
        step(student)


def test_the_recipe_has_the_papers_numbers() -> None:
    """Sec. 4.1."""
    (stage,) = Recipe.load("gpt").training
    assert stage.step == Call("gpt.AuxiliaryObjective", {"weight": 0.5, "dropout": 0.1})
    assert (stage.epochs, stage.batch, stage.lr, stage.warmup, stage.schedule) == (3, 32, 6.25e-5, 0.002, "linear")
    assert (stage.teacher, stage.objective) == ("general", (Term("bert.labels"),))
