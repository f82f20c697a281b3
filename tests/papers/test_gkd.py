"""On-policy distillation: which rows are learned from, and that padding is never counted."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compress.config.recipe import Recipe
from compress.config.term import Term
from compress.errors import ObjectiveError
from compress.papers import distilbert, gkd, minillm
from compress.papers.gpt2 import next_tokens
from compress.slicing.shape import Shape
from compress.training.objective import Objective
from tests import generative
from tests.papers.gkd import MASKED, STUDENT, TEACHER

WORDS = generative.words(generative.gpt2_tokenizer())
DIVERGENCE = (Term("gkd.divergence", options={"beta": 0.5}),)


def objective(model: Any, terms: tuple[Term, ...] = DIVERGENCE) -> Objective:
    return Objective(terms, Shape.from_config(model.config), Shape.from_config(model.config))


def step(share: float, **options: Any) -> gkd.OnPolicy:
    student, teacher = generative.gpt2(seed=1), generative.gpt2(layers=3, seed=2)
    return gkd.OnPolicy(
        student, teacher, objective(student), words=WORDS, share=share, prompt=5, new_tokens=6, **options
    )


def batch(*texts: str, left: bool = False) -> dict[str, Tensor]:
    texts = texts or ("a good film", "bad", "the story was too slow")
    return next_tokens(generative.rows(*texts, left=left), WORDS)


# The divergence's ends


def test_the_ends_are_forward_and_reverse_kl() -> None:
    """And JSD / beta tends to the first: it is the special case that jumps, not the formula that is wrong."""
    forward = gkd.divergence(STUDENT, TEACHER, MASKED, beta=0.0)
    torch.testing.assert_close(
        forward, distilbert.masked_soft_targets(STUDENT, TEACHER, MASKED, temperature=1.0), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(
        gkd.divergence(STUDENT, TEACHER, MASKED, beta=1.0), minillm.reverse_kl(STUDENT, TEACHER, MASKED)
    )
    double, twice = STUDENT.double(), TEACHER.double()
    near = gkd.divergence(double, twice, MASKED, beta=1e-3) / 1e-3
    assert near.item() == pytest.approx(forward.item(), rel=0.05)
    assert gkd.divergence(STUDENT, TEACHER, MASKED, beta=1e-3) < forward / 100


# The step


def test_the_recipe_samples_at_trls_temperature_and_compares_at_one() -> None:
    on_policy = Recipe.load("gkd").training[1]
    assert on_policy.step is not None and on_policy.step.options["temperature"] == 0.9
    assert [term.options["temperature"] for term in on_policy.objective] == [1.0]


def test_share_is_the_probability_of_learning_from_the_students_own_text(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled, rows = [], batch("aa")

    def counted(*args: Any, **options: Any) -> Any:
        sampled.append(1)
        return args[1]

    monkeypatch.setattr(gkd, "sample_continuations", counted)
    for share, expected in ((0.0, range(1)), (0.25, range(25, 80)), (1.0, range(200, 201))):
        sampled.clear()
        on_policy = step(share)
        on_policy.distillation.forward = dict  # type: ignore[method-assign]
        for _ in range(200):
            on_policy(**rows)
        assert len(sampled) in expected, share


def test_off_policy_is_the_objective_on_the_batch() -> None:
    out = step(0.0)(**batch())
    rows = batch()
    student, teacher = generative.gpt2(seed=1), generative.gpt2(layers=3, seed=2)
    inputs = {name: rows[name] for name in ("input_ids", "attention_mask")}
    mine, theirs = (model(**inputs).logits for model in (student, teacher))
    expected = gkd.divergence(mine, theirs, (rows["labels"] != -100).long())
    torch.testing.assert_close(out["loss"], expected)
    assert out["gkd.divergence"].item() == pytest.approx(expected.item())


def test_on_policy_is_the_objective_on_the_continuations() -> None:
    on_policy = step(1.0)
    torch.manual_seed(7)
    out = on_policy(**batch())
    torch.manual_seed(7)
    torch.rand(())
    rows = gkd.sample_continuations(on_policy.student, batch(), prompt=5, new_tokens=6, pad=0, temperature=0.9)
    expected = step(0.0)(**rows)
    torch.testing.assert_close(out["loss"], expected["loss"])
    assert not torch.equal(rows["labels"], batch()["labels"])


def test_padding_is_never_counted() -> None:
    """A batch is the mean of its rows alone, weighted by the tokens that are predicted."""
    texts = ("bad", "the story was too slow")
    alone = [step(0.0)(**batch(text))["loss"].item() * (len(text) - 1) for text in texts]
    together = step(0.0)(**batch(*texts))["loss"].item()
    assert together == pytest.approx(sum(alone) / sum(len(text) - 1 for text in texts), rel=1e-5)


def test_padding_of_sampled_rows_is_never_counted() -> None:
    """Though the token that pads is also the one that ends a text."""
    on_policy = step(0.0)
    rows = gkd.sample_continuations(on_policy.student, batch(), prompt=5, new_tokens=6, pad=0)
    filled = zip(rows.items(), (0, 0, -100), strict=True)
    wider = {name: nn.functional.pad(each, (0, 9), value=fill) for (name, each), fill in filled}
    assert list(rows) == ["input_ids", "attention_mask", "labels"]
    torch.testing.assert_close(on_policy(**wider)["loss"], on_policy(**rows)["loss"])


def test_the_students_dropout_is_off_and_its_gradient_on() -> None:
    on_policy = step(1.0).train()
    assert on_policy.training
    assert not on_policy.student.training
    on_policy(**batch())["loss"].backward()
    assert on_policy.student.transformer.wte.weight.grad.any()
    teacher = on_policy.distillation.teacher
    assert isinstance(teacher, nn.Module)
    assert all(each.grad is None for each in teacher.parameters())
    assert all(not name.startswith("student.") for name, _ in on_policy.named_parameters()), "kept once"


def test_it_learns_the_teachers_continuations() -> None:
    on_policy = step(0.5)
    optimiser = torch.optim.Adam(on_policy.parameters(), 3e-3)

    def apart() -> float:
        with torch.no_grad():
            return on_policy.distillation(**batch())["loss"].item()

    before = apart()
    for _ in range(30):
        optimiser.zero_grad()
        on_policy(**batch())["loss"].backward()
        optimiser.step()
    assert apart() < before / 2


def test_an_encoder_decoder_learns_its_own_answers() -> None:
    tokenizer = generative.t5_tokenizer()
    student, teacher = generative.t5(seed=1), generative.t5(seed=2)
    found = tokenizer(["a good film", "bad"], padding=True, return_tensors="pt")
    rows = {name: found[name] for name in ("input_ids", "attention_mask")}
    on_policy = gkd.OnPolicy(
        student, teacher, objective(student), words=generative.words(tokenizer), share=1.0, new_tokens=5
    )
    out = on_policy(**rows)
    out["loss"].backward()
    assert out["loss"] > 0
    assert student.shared.weight.grad.any()


@pytest.mark.parametrize("missing", ["objective", "teacher"])
def test_an_objective_and_a_model_to_ask_are_needed(missing: str) -> None:
    student = generative.gpt2()
    teacher, terms = (None, objective(student)) if missing == "teacher" else (generative.gpt2(), None)
    with pytest.raises(ObjectiveError, match="needs an `objective` for the sampled texts"):
        gkd.OnPolicy(student, teacher, terms, words=WORDS)
