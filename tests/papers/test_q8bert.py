"""Q8BERT: what int8 holds of weights and activations, and a student that learns to answer through it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from compress.config.term import Term
from compress.errors import ObjectiveError
from compress.papers.q8bert import Int8Linear, QuantizationAware, activations, portable_weights, weights
from compress.slicing.shape import Shape
from compress.training.objective import Objective
from tests import tiny
from tests.papers.case import random

TERMS = (Term("hinton.soft_targets"),)


def aware(student: Any, teacher: Any, *, terms: Sequence[Term] = TERMS, **options: Any) -> QuantizationAware:
    objective = Objective(terms, Shape.from_config(student.config), Shape.from_config(teacher.config))
    return QuantizationAware(student, teacher, objective, **options).train()


def neighbours(row: list[float]) -> float:
    pairs = zip([*row, 0.0][0::2], [*row, 0.0][1::2], strict=True)
    return max(abs(a) + abs(b) if a * b > 0 else max(abs(a), abs(b)) for a, b in pairs)


@pytest.mark.parametrize(
    ("rounding", "largest"), [(weights, lambda row: max(map(abs, row))), (portable_weights, neighbours)]
)
def test_weights_are_the_formula_for_every_output(
    rounding: Callable[[torch.Tensor], torch.Tensor], largest: Callable[[list[float]], float]
) -> None:
    """Eq. 1 and 2 in nested loops; S is of one row, or of two neighbours of one sign in it."""
    W = random(3, 5, seed=1)
    for row, found in zip(W.tolist(), rounding(W).tolist(), strict=True):
        S = 127 / largest(row)
        assert found == pytest.approx([max(-127, min(127, round(w * S))) / S for w in row], abs=1e-6)
    assert rounding(torch.zeros(2, 3)).equal(torch.zeros(2, 3)), "no row of zeros divides by zero"


def test_activations_have_256_levels_between_the_ends_and_are_clamped_to_them() -> None:
    low, high = torch.tensor(-1.0), torch.tensor(2.0)
    x = torch.linspace(-3, 4, 10_001)
    found = activations(x, low, high)
    assert len(found.unique()) == 256
    step = 3 / 255
    assert found.min() == pytest.approx(-1.0, abs=step)
    assert found.max() == pytest.approx(2.0, abs=step)
    inside = (x > -1) & (x < 2)
    assert (found - x)[inside].abs().max() <= step / 2 + 1e-6
    assert activations(torch.zeros(1), low, high).item() == 0, "zero, as pads and masks are, is exact"


def test_gradients_pass_the_rounding_and_stop_outside_the_range() -> None:
    x = torch.tensor([-2.0, -0.5, 0.5, 2.0], requires_grad=True)
    activations(x, torch.tensor(-1.0), torch.tensor(1.0)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1, 1, 0]
    W = random(2, 3, seed=2).requires_grad_()
    weights(W).sum().backward()
    assert W.grad is not None
    assert W.grad.tolist() == [[1, 1, 1], [1, 1, 1]]


def test_the_range_is_a_moving_average_that_begins_with_the_first_batch_and_sees_no_pads() -> None:
    layer = Int8Linear(nn.Linear(1, 1), decay=0.9).train()
    layer.real_BL = torch.tensor([[True, True, False]])
    layer(torch.tensor([[[-1.0], [3.0], [1000.0]]]))
    assert layer.ranges_R2.tolist() == [[-1, 3]]
    layer(torch.tensor([[[2.0], [5.0], [-1000.0]]]))
    assert layer.ranges_R2[0].tolist() == pytest.approx([0.9 * -1 + 0.1 * 0, 0.9 * 3 + 0.1 * 5])
    before = layer.ranges_R2.clone()
    layer.eval()(torch.tensor([[[99.0], [99.0], [99.0]]]))
    assert layer.ranges_R2.equal(before), "evaluation does not move it"


def test_the_student_computes_in_int8_while_it_trains_and_is_plain_when_it_is_done() -> None:
    student, teacher, batch = tiny.bert(), tiny.bert(seed=1), tiny.batch()
    kinds = {name: type(each) for name, each in student.named_modules()}
    exact = student.eval()(**batch).logits
    step = aware(student, teacher)
    step(**batch)
    rounded = student.eval()(**batch).logits
    assert 0 < (rounded - exact).abs().max() < 0.1
    assert "q8bert" not in str(step.state_dict().keys())
    step.finish()
    assert {name: type(each) for name, each in student.named_modules()} == kinds
    assert student.eval()(**batch).logits.equal(exact)
    ranges = student.config.activation_ranges
    read = {name for name, kind in kinds.items() if kind is nn.Linear and ".layer." in name}
    assert ranges.keys() == read, "those that read tokens; pooler and classifier read one vector"
    assert all(low <= 0 <= high and low < high for low, high in ranges.values())


def test_outputs_are_rounded_within_their_own_moving_range_if_requantised() -> None:
    plain = nn.Linear(1, 1, bias=False)
    nn.init.constant_(plain.weight, 2.0)
    layer = Int8Linear(plain, decay=0.9, requantise=True).train()
    layer.real_BL = torch.tensor([[True, True, False]])
    x = torch.tensor([[[-1.0], [3.0], [1000.0]]])
    given = layer(x)
    layer(torch.tensor([[[2.0], [5.0], [-1000.0]]]))
    (low, high), (low_out, high_out) = layer.ranges_R2.tolist()
    assert (low, high) == pytest.approx((-0.9, 3.2))
    assert (low_out, high_out) == pytest.approx((0.9 * -2, 0.9 * 6 + 0.1 * 2 * high), rel=0.01), "5 is clamped to 3.2"
    assert given[0, 2].item() == pytest.approx(6, rel=0.01), "padding is clamped to the range of real tokens"
    exact = Int8Linear(plain, decay=0.9)
    exact.ranges_R2.copy_(layer.ranges_R2[:1])
    rounded = activations(exact.eval()(x), *layer.ranges_R2[1])
    assert layer.eval()(x).equal(rounded)
    student = tiny.bert()
    step = aware(student, tiny.bert(seed=1), requantise=True)
    step(**tiny.batch())
    step.finish()
    assert {len(each) for each in student.config.activation_ranges.values()} == {4}


def test_training_brings_the_int8_answers_nearer_to_the_float_ones() -> None:
    """A few large activations coarsen the rest, as in real encoders; weights learn to make up for it."""
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.1}
    student, teacher, batch = tiny.bert(**still), tiny.bert(**still), tiny.batch()
    for model in (student, teacher):
        with torch.no_grad():
            model.bert.embeddings.LayerNorm.weight[0] *= 50
    step = aware(student, teacher, terms=(Term("hinton.matched_logits"),))
    optimizer = torch.optim.Adam(step.parameters(), 1e-4)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = step.train()(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) / 10 < 0.3 * losses[0]


def test_what_it_cannot_do_it_says() -> None:
    with pytest.raises(ObjectiveError, match="decay is 1"):
        aware(tiny.bert(), tiny.bert(), decay=1.0)
