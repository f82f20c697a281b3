"""Losses on attention ignore exactly the pairs that a local layer does not see."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM

from compress.config.term import Term
from compress.errors import ObjectiveError
from compress.models.signals import ATTENTION, has_lm_head, open_attention, read
from compress.slicing.shape import Shape
from compress.training.objective import Objective, count_items, find_loss
from compress.training.reads import reads
from tests import tiny

LOSSES = {
    name: find_loss(Term(name))
    for name in (
        *("tinybert.attention", "mobilebert.attention"),
        *(f"minilm.{each}" for each in ("attention", "value_relation", "query_relations", "key_relations")),
        "minilm.value_relations",
    )
}
OPTIONS = {name: {"heads": 4} for name in LOSSES if name.endswith("relations")}
LENGTHS = (12, 9, 2)


def band(mask_BL: Tensor, window: int) -> Tensor:
    place_L = torch.arange(mask_BL.shape[1])
    near_LL = (place_L[:, None] - place_L).abs() <= window
    return mask_BL[:, :, None].bool() & mask_BL[:, None, :].bool() & near_LL


def model(**changes: Any) -> Any:
    """Make a model of three layers, global, local and local; a local one sees two tokens to either side."""
    made = tiny.model("modernbert", layers=3, local_attention=4, **changes)
    open_attention(made)
    return made


@torch.no_grad()
def test_scores_of_local_and_global_layers() -> None:
    batch = tiny.batch(LENGTHS)
    shown = read(model(), batch, ATTENTION)
    eager = tiny.model("modernbert", layers=3, local_attention=4, eager=True)(**batch, output_attentions=True)
    kinds = [layer.seen_BLL is not None for layer in shown.attention]
    assert kinds == [False, True, True]
    real_BL, near_BLL = batch["attention_mask"].bool(), band(batch["attention_mask"], 2)
    whole_BLL = band(batch["attention_mask"], 12)
    for layer, scores, expected in zip(shown.attention, shown.scores, eager.attentions, strict=True):
        seen_BLL = whole_BLL if layer.seen_BLL is None else layer.seen_BLL & real_BL[:, :, None]
        assert torch.equal(seen_BLL, whole_BLL if layer.seen_BLL is None else near_BLL)
        chances = scores.masked_fill(~seen_BLL[:, None], -torch.inf).softmax(-1)
        mine, theirs = (each.transpose(1, 2)[real_BL] for each in (chances, expected))
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_a_window_wider_than_the_text() -> None:
    shown = read(model(), tiny.batch((3, 2)), ATTENTION)
    assert all(layer.seen_BLL is None for layer in shown.attention)


@pytest.mark.parametrize("name", LOSSES)
def test_unseen_pairs_do_not_count(name: str) -> None:
    loss, options = LOSSES[name], OPTIONS.get(name, {})
    mask_BL = tiny.batch(LENGTHS)["attention_mask"]
    shape = (3, 4, 12, 12) if loss.reading.signal == "scores" else (3, 4, 12, 6)
    draw = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(shape, generator=draw) for _ in range(2))
    assert loss.reading.windows
    wide, whole = (loss(student, teacher, mask, **options) for mask in (band(mask_BL, 11), mask_BL))
    torch.testing.assert_close(wide, whole)
    near_BLL = band(mask_BL, 2)
    local = loss(student, teacher, near_BLL, **options)
    assert not torch.allclose(local, whole)
    if loss.reading.signal == "scores":
        spoilt = student.masked_fill(~near_BLL[:, None], 1e4)
        torch.testing.assert_close(loss(spoilt, teacher, near_BLL, **options), local)


def test_formulas_as_loops() -> None:
    """TinyBERT's mean of each example over pairs in the window, weighted by squares of lengths; MiniLM's softmaxes."""
    mask_BL = tiny.batch(LENGTHS)["attention_mask"]
    draw = torch.Generator().manual_seed(1)
    student, teacher = (torch.randn(3, 2, 12, 12, generator=draw) for _ in range(2))
    squares, divergences, entropies = [], [], []
    for b, length in enumerate(LENGTHS):
        pairs = [(i, j) for i in range(length) for j in range(length) if abs(i - j) <= 2]
        error = sum(float((student[b, :, i, j] - teacher[b, :, i, j]).square().mean()) for i, j in pairs)
        squares.append(error / len(pairs) * length**2)
        divergence = 0.0
        for h in range(2):
            for i in range(length):
                near = [j for j in range(length) if abs(i - j) <= 2]
                p, q = (each[b, h, i, near].softmax(-1) for each in (teacher, student))
                divergence += float((p * (p / q).log()).sum()) / 2
                entropies.append(float(-(p * q.log()).sum()))
        divergences.append(divergence / length)
    near_BLL = band(mask_BL, 2)
    tinybert = LOSSES["tinybert.attention"](student, teacher, near_BLL)
    assert math.isclose(float(tinybert), sum(squares) / sum(n**2 for n in LENGTHS), rel_tol=1e-5)
    minilm = LOSSES["minilm.attention"](student, teacher, near_BLL)
    assert math.isclose(float(minilm), sum(divergences) / 3, rel_tol=1e-5)
    mobilebert = LOSSES["mobilebert.attention"](student, teacher, near_BLL)
    assert math.isclose(float(mobilebert), sum(entropies) / len(entropies), rel_tol=1e-5)


def compared(terms: list[Term], batch: dict[str, Tensor], **counted: Any) -> dict[str, Tensor]:
    student, teacher = model(seed=1), model(seed=0)
    objective = Objective(terms, Shape.from_config(student.config), Shape.from_config(teacher.config))
    mine, theirs = read(student, batch, objective.student_wants), read(teacher, batch, objective.teacher_wants)
    return objective(mine, theirs, **counted)


@torch.no_grad()
def test_the_objective_passes_the_common_window() -> None:
    batch = tiny.batch(LENGTHS)
    near_BLL, mask_BL = band(batch["attention_mask"], 2), batch["attention_mask"]
    student, teacher = (read(model(seed=seed), batch, ATTENTION) for seed in (1, 0))
    loss = LOSSES["tinybert.attention"]
    for pair, mask in (((0, 0), mask_BL), ((0, 1), near_BLL), ((2, 0), near_BLL), ((1, 2), near_BLL)):
        found = compared([Term("tinybert.attention", layers=[pair])], batch)["total"]
        torch.testing.assert_close(found, loss(student.scores[pair[0]], teacher.scores[pair[1]], mask))
    found = compared([Term("minilm.value_relations", layers="last", options={"heads": 2})], batch)["total"]
    expected = LOSSES["minilm.value_relations"](student.values[2], teacher.values[2], near_BLL, heads=2)
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_accumulated_means_are_exact() -> None:
    """Without dropout, the whole batch and its halves have the same outputs."""
    batch = tiny.batch((12, 9, 2, 5))
    terms = [Term("tinybert.attention"), Term("minilm.key_relations", layers="last", options={"heads": 2})]
    halves = [{name: each[at : at + 2] for name, each in batch.items()} for at in (0, 2)]
    counts = [count_items(half["attention_mask"], None) for half in halves]
    means = {per: (counts[0][per] + counts[1][per]) / 2 for per in counts[0]}
    parts = [compared(terms, half, items=means)["total"] for half in halves]
    torch.testing.assert_close(sum(parts) / 2, compared(terms, batch)["total"])


@reads("scores")
def of_all_pairs(student_BHLL: Tensor, teacher_BHLL: Tensor, mask_BL: Tensor) -> Tensor:
    return (student_BHLL - teacher_BHLL).square().mean()


@torch.no_grad()
def test_a_loss_without_windows() -> None:
    term = Term(of_all_pairs, layers="uniform")  # type: ignore[arg-type]
    assert compared([term], tiny.batch((3, 2)))["total"] > 0
    with pytest.raises(ObjectiveError, match="layer 1 of the student or 1 of the teacher attends within a window"):
        compared([term], tiny.batch(LENGTHS))


@torch.no_grad()
def test_the_head_runs_at_chosen_positions() -> None:
    batch, asked = tiny.batch(LENGTHS), frozenset({"logits"})
    masked, classifying = tiny.model("modernbert", head=AutoModelForMaskedLM), tiny.model("modernbert")
    at_BL = batch["attention_mask"].bool()
    some, everywhere = (read(masked, batch, asked, at_BL=each).logits for each in (at_BL, None))
    assert some is not None and everywhere is not None
    torch.testing.assert_close(some, everywhere[at_BL])
    assert has_lm_head(masked) and not has_lm_head(classifying)
