"""Encoder-decoders: which states are compared, over which tokens; copied stacks of layers."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss, pad

from compress.config.term import Term
from compress.errors import ObjectiveError
from compress.models.signals import read
from compress.papers import distilbert
from compress.slicing.shape import Shape
from compress.training.objective import Objective
from compress.training.step import Distillation
from tests import generative, tiny

TERMS = (
    Term("distilbert.masked_soft_targets", 0.8, options={"temperature": 2.0}),
    Term("bert.masked_lm", 1.0),
    Term("seq2seq.encoder_hidden", 3.0),
    Term("seq2seq.decoder_hidden", 3.0),
)


def batch(*pairs: tuple[str, str]) -> dict[str, Tensor]:
    from compress.data.collate import Seq2SeqCollate

    tokenizer = generative.t5_tokenizer()
    pairs = pairs or (("a good film", "good"), ("bad", "not so very bad"))
    rows = [
        {"input_ids": tokenizer(source)["input_ids"], "labels": tokenizer(target)["input_ids"]}
        for source, target in pairs
    ]
    return Seq2SeqCollate(tokenizer, generative.t5())(rows)


def step(terms: tuple[Term, ...] = TERMS, **sizes: Any) -> Distillation:
    student = generative.t5(seed=1, **{"layers": 2, "num_decoder_layers": 1, **sizes})
    teacher = generative.t5(layers=4, seed=2, num_decoder_layers=3)
    torch.manual_seed(0)
    return Distillation(
        student, teacher, Objective(terms, Shape.from_config(student.config), Shape.from_config(teacher.config))
    )


def test_each_stack_is_mapped_by_its_own_number_of_layers() -> None:
    pairs = step().objective.pairs
    assert pairs[2] == [(0, 1), (1, 3)], "encoder: 2 of 4"
    assert pairs[3] == [(0, 2)], "decoder: 1 of 3"


def test_states_are_those_of_transformers() -> None:
    model = generative.t5(layers=3, num_decoder_layers=2)
    rows = batch()
    shown = read(model, rows, frozenset({"layers", "encoder_layers"}))
    out = model(**{k: v for k, v in rows.items() if k != "labels"}, output_hidden_states=True)
    assert len(shown.encoder_layers) == 3
    assert len(shown.layers) == 2
    assert all(torch.equal(*two) for two in zip(shown.encoder_layers, out.encoder_hidden_states[1:], strict=True))
    assert all(torch.equal(*two) for two in zip(shown.layers, out.decoder_hidden_states[1:], strict=True))


def test_the_loss_is_the_weighted_sum_over_target_and_source_tokens() -> None:
    plain = tuple(
        Term(term.loss, term.weight, options={"normalise": False}) if "hidden" in term.name else term for term in TERMS
    )
    distillation, rows = step(plain), batch()
    out = distillation(**rows)
    source, target = rows["attention_mask"].bool(), rows["labels"] != -100
    wants = frozenset({"logits", "layers", "encoder_layers"})
    mine, theirs = (read(model, rows, wants) for model in (distillation.student, distillation.teacher))  # type: ignore[arg-type]
    expected = 3 * mse_loss(mine.layers[0][target], theirs.layers[2][target])
    expected += 3 * sum(
        mse_loss(mine.encoder_layers[m][source], theirs.encoder_layers[n][source]) for m, n in ((0, 1), (1, 3))
    )
    assert mine.logits is not None
    assert theirs.logits is not None
    expected += torch.nn.functional.cross_entropy(mine.logits[target], rows["labels"][target])
    expected += 0.8 * distilbert.masked_soft_targets(mine.logits, theirs.logits, target.long())
    torch.testing.assert_close(out["loss"], expected)


def test_the_loss_of_the_labels_is_that_of_transformers() -> None:
    model, rows = generative.t5(), batch()
    expected = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"], labels=rows["labels"]).loss
    torch.testing.assert_close(Distillation(model, None, [Term("bert.masked_lm")])(**rows)["loss"], expected)


@pytest.mark.parametrize("side", ["source", "target"])
def test_padding_is_never_counted(side: str) -> None:
    distillation, rows = step(), batch()
    fill = {"input_ids": 0, "attention_mask": 0} if side == "source" else {"labels": -100, "decoder_input_ids": 0}
    wider = {name: pad(each, (0, 7), value=fill[name]) if name in fill else each for name, each in rows.items()}
    torch.testing.assert_close(distillation(**wider), distillation(**rows))


def test_every_target_token_counts_the_first_too() -> None:
    """T5 begins with the padding token; the authors' mask drops that position."""
    distillation, rows = step(TERMS[:1]), batch()
    first = {**rows, "labels": rows["labels"].clone()}
    first["labels"][:, 1:] = -100
    assert distillation(**first)["loss"] > 0
    assert distillation(**first)["loss"] != distillation(**rows)["loss"]


def test_other_widths_need_a_projection_for_each_side() -> None:
    with pytest.raises(ObjectiveError, match="student has width 16 and the teacher 32"):
        step(hidden=16)
    projected = tuple(Term(t.loss, t.weight, project="hidden" in t.name, options=t.options) for t in TERMS)
    step(projected, hidden=16)(**batch())["loss"].backward()


def test_a_model_without_an_encoder_is_refused() -> None:
    model = tiny.model("bert")
    distillation = Distillation(model, copy.deepcopy(model), [Term("seq2seq.encoder_hidden")])
    with pytest.raises(ObjectiveError, match="reads encoder_layers, but this model has none"):
        distillation(**tiny.batch())


def test_gradients_reach_both_stacks_of_the_student_only() -> None:
    distillation = step()
    distillation(**batch())["loss"].backward()
    student = distillation.student
    assert student.encoder.block[0].layer[0].SelfAttention.q.weight.grad.any()
    assert student.decoder.block[0].layer[1].EncDecAttention.q.weight.grad.any()
    assert all(each.grad is None for each in distillation.teacher.parameters())  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["tinybert.hidden", "tinybert.embeddings", "distilbert.soft_targets"])
def test_losses_over_tokens_of_the_source_are_refused(name: str) -> None:
    with pytest.raises(ObjectiveError, match=f"{name} averages over tokens of the source"):
        step((Term(name),))(**batch())
