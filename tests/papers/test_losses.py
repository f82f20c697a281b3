"""What every loss promises: its formula, its minimum, blindness to padding, its gradients and its precision."""

import pytest
import torch
from torch import Tensor

from compress.config.reference import read_signal
from compress.training.objective import Loss
from compress.training.reads import CountedItem, Reading
from tests.papers.case import Case, case_modules, losses, papers

FOUND = {f"{paper}.{name}": loss for paper in papers() for name, loss in losses(paper).items()}
CASES: dict[str, Case] = {
    f"{paper}.{name}": case for paper, module in case_modules().items() for name, case in module.CASES.items()
}
PADDED = [name for name, case in CASES.items() if case.token_axes(FOUND[name.partition(" ")[0]].reading)]
GARBAGE = 1e4


def of(name: str) -> tuple[Loss, Reading, Case]:
    loss = FOUND[name.partition(" ")[0]]
    return loss, loss.reading, CASES[name]


def value(loss: Loss, case: Case, student: Tensor | None = None) -> Tensor:
    return loss(case.student if student is None else student, case.target, case.mask, **case.options)


def without_pads(tensor: Tensor, axes: tuple[int, ...], mask_L: Tensor) -> Tensor:
    for axis in axes:
        tensor = tensor.index_select(axis, mask_L.nonzero().flatten())
    return tensor


def spoilt(tensor: Tensor, axes: tuple[int, ...], mask_BL: Tensor) -> Tensor:
    """The same with garbage wherever one of the axes is at a pad."""
    pads = torch.zeros(tensor.shape, dtype=torch.bool)
    for axis in axes:
        shape = [1] * tensor.dim()
        shape[0], shape[axis] = mask_BL.shape
        pads |= ~mask_BL.bool().view(shape)
    return tensor.masked_fill(pads, GARBAGE)


def items(reading: Reading, target: Tensor, mask_L: Tensor) -> int:
    """How many items of the kind that the loss averages over one example holds."""
    count: dict[CountedItem, int] = {
        "example": 1,
        "token": int(mask_L.sum()),
        "pair": int(mask_L.sum()) ** 2,
        "label": int(mask_L.sum()) if reading.mask == "labels" else int((target != -100).sum()),
    }
    return count[reading.per]


def test_every_loss_has_a_case() -> None:
    assert FOUND.keys() == {name.partition(" ")[0] for name in CASES}


@pytest.mark.parametrize("name", FOUND)
def test_the_source_tells_the_signal_without_an_import(name: str) -> None:
    reading = FOUND[name].reading
    assert read_signal(name) == (reading.signal if reading.against == "teacher" else None)


@pytest.mark.parametrize("name", CASES)
def test_is_the_formula_written_as_loops(name: str) -> None:
    loss, _, case = of(name)
    expected = case.formula(case.student.tolist(), case.target.tolist(), case.mask.tolist(), **case.options)
    assert value(loss, case).item() == pytest.approx(expected, rel=1e-5)
    assert expected > 0.01


@pytest.mark.parametrize("name", CASES)
def test_is_smallest_at_the_target(name: str) -> None:
    loss, _, case = of(name)
    best = case.smallest.clone().requires_grad_()
    lowest = value(loss, case, best)
    lowest.backward()
    assert lowest.item() == pytest.approx(case.minimum, abs=1e-6)
    assert value(loss, case) > lowest + 0.01
    assert best.grad is not None
    torch.testing.assert_close(best.grad, torch.zeros_like(best), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_autocast_changes_nothing(name: str) -> None:
    loss, _, case = of(name)
    with torch.autocast("cpu", torch.bfloat16):
        found = value(loss, case)
    torch.testing.assert_close(found, value(loss, case))


@pytest.mark.parametrize("name", PADDED)
def test_garbage_in_pads_changes_nothing(name: str) -> None:
    loss, reading, case = of(name)
    axes = case.token_axes(reading)
    mask = (case.target != -100).long() if reading.per == "label" and reading.mask == "tokens" else case.mask
    student = spoilt(case.student, axes, mask).requires_grad_()
    target = spoilt(case.target, axes, mask) if reading.against == "teacher" else case.target
    spoilt_value = loss(student, target, case.mask, **case.options)
    assert spoilt_value.item() == value(loss, case).item()
    spoilt_value.backward()
    assert student.grad is not None
    pads = spoilt(torch.zeros_like(case.student), axes, mask) == GARBAGE
    assert pads.any()
    assert not student.grad[pads].any()


def padded_before(tensor: Tensor, axes: tuple[int, ...], mask_BL: Tensor) -> Tensor:
    """The same rows with their padding before the text."""
    rows = []
    for row, mask_L in zip(tensor, mask_BL, strict=True):
        shift = int((mask_L == 0).sum())
        rows.append(row.roll([shift] * len(axes), [axis - 1 for axis in axes]))
    return torch.stack(rows)


@pytest.mark.parametrize("name", PADDED)
def test_padding_may_stand_before_the_text(name: str) -> None:
    loss, reading, case = of(name)
    axes = case.token_axes(reading)
    lengths_B = case.mask.sum(-1)
    if not torch.equal(case.mask, (torch.arange(case.mask.shape[1]) < lengths_B[:, None]).long()):
        pytest.skip("its mask marks other positions than those before padding")
    student = padded_before(case.student, axes, case.mask)
    target_axes = axes if reading.against == "teacher" else axes[:1]
    target = padded_before(case.target, target_axes, case.mask) if case.target.dim() > 1 else case.target
    found = loss(student, target, padded_before(case.mask, (1,), case.mask), **case.options)
    torch.testing.assert_close(found, value(loss, case))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.across])
def test_the_batch_is_the_mean_of_its_unpadded_examples(name: str) -> None:
    """Weighted by the number of items that `Reading.per` names: so the frame may split a batch."""
    loss, reading, case = of(name)
    axes = case.token_axes(reading)
    target_axes = axes if reading.against == "teacher" else axes[:1]
    total, weight = 0.0, 0
    if case.query is not None:
        for query in case.query.unique():
            rows = case.query == query
            mask = case.mask[rows][:, rows]
            count = int(mask.sum()) if reading.per == "preference" else 1
            total += count * loss(case.student[rows], case.target[rows], mask, **case.options).item()
            weight += count
        assert value(loss, case).item() == pytest.approx(total / weight, rel=1e-5)
        return
    for b, mask_L in enumerate(case.mask):
        student = without_pads(case.student[b : b + 1], axes, mask_L)
        target = without_pads(case.target[b : b + 1], target_axes, mask_L)
        ones = torch.ones_like(mask_L[mask_L.bool()])[None]
        count = items(reading, target, ones[0])
        total += count * loss(student, target, ones, **case.options).item()
        weight += count
    assert value(loss, case).item() == pytest.approx(total / weight, rel=1e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scale", [1.0, 0.0, 1e4])
def test_gradients_reach_the_student_finite(name: str, scale: float) -> None:
    loss, _, case = of(name)
    student = (case.student * scale).requires_grad_()
    value(loss, case, student).backward()
    assert student.grad is not None
    assert student.grad.isfinite().all()
    assert student.grad.abs().sum() > 0 or scale != 1.0


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_in_float32_out(name: str) -> None:
    loss, reading, case = of(name)
    target = case.target.bfloat16() if reading.against == "teacher" else case.target
    low = loss(case.student.bfloat16(), target, case.mask, **case.options)
    exact = loss(case.student.bfloat16().float(), target.to(case.target.dtype), case.mask, **case.options)
    assert low.dtype == torch.float32
    assert low.item() == exact.item()


@pytest.mark.parametrize(
    "name", ["bert.masked_lm", "distilbert.masked_soft_targets", "distilbert.soft_targets", "margin_mse.margins"]
)
def test_nothing_to_predict_costs_nothing(name: str) -> None:
    loss, reading, case = of(name)
    student = case.student.clone().requires_grad_()
    target = case.target if reading.against == "teacher" else torch.full_like(case.target, -100)
    nothing = loss(student, target, torch.zeros_like(case.mask), **case.options)
    nothing.backward()
    assert nothing.item() == 0
    assert student.grad is not None
    assert not student.grad.any()


SHARES = ("gkd.divergence", "hinton.soft_targets", "pkd.soft_targets", "tinybert.prediction")
TOKEN_SHARES = ("distilbert.soft_targets", "distilbert.masked_soft_targets", "mobilebert.masked_lm")


@pytest.mark.parametrize("name", [name for name in CASES if name.partition(" ")[0] in (*SHARES, *TOKEN_SHARES)])
def test_a_class_that_the_teacher_rules_out_adds_nothing(name: str) -> None:
    """Its logit is -inf, as where only the largest logits of a teacher are kept."""
    loss, _, case = of(name)
    ruled_out = torch.zeros_like(case.target, dtype=torch.bool)
    ruled_out[..., 0] = True
    low = loss(case.student, case.target.masked_fill(ruled_out, -1e4), case.mask, **case.options)
    student = case.student.clone().requires_grad_()
    found = loss(student, case.target.masked_fill(ruled_out, -torch.inf), case.mask, **case.options)
    if case.options.get("beta") == 1:
        assert not found.isfinite(), "the student may not choose it"
        return
    torch.testing.assert_close(found, low)
    found.backward()
    assert student.grad is not None
    assert student.grad.isfinite().all()
