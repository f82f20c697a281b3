"""The policy gradient is that of the sequences' reverse KL; its parts are the paper's; padding is never counted."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compress.config.term import Term
from compress.errors import ObjectiveError
from compress.papers import minillm
from compress.papers.gpt2 import next_tokens
from compress.slicing.shape import Shape
from compress.training.generation import prompts, sample_continuations
from compress.training.objective import Objective
from tests import generative

WORDS = generative.words(generative.gpt2_tokenizer())
V, T = 6, 3


# The gradient, by enumeration of every sequence of three tokens


class Table(nn.Module):
    """A language model that is a table: logits for every prefix, of any policy at all."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.after = nn.ParameterList(nn.Parameter(torch.randn(V**t, V, dtype=torch.float64)) for t in range(T))

    def logits(self, sequences_BT: Tensor) -> Tensor:
        """(B, T, V) next-token logits along each sequence."""
        prefix_B = torch.zeros(len(sequences_BT), dtype=torch.long)
        found = []
        for t in range(T):
            found.append(self.after[t][prefix_B])
            prefix_B = prefix_B * V + sequences_BT[:, t]
        return torch.stack(found, 1)


EVERY_BT = torch.tensor(list(itertools.product(range(V), repeat=T)))
STUDENT, TEACHER = Table(1), Table(2)


def log_probability(model: Table) -> Tensor:
    """(B,) of every sequence."""
    return model.logits(EVERY_BT).log_softmax(-1).gather(2, EVERY_BT[:, :, None]).sum((1, 2))


def exact_gradient() -> list[Tensor]:
    log_q, log_p = log_probability(STUDENT), log_probability(TEACHER)
    return list(torch.autograd.grad((log_q.exp() * (log_q - log_p)).sum(), list(STUDENT.parameters())))


def terms(lengths: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(B,) single-step and long terms of every sequence, summed over its tokens."""
    mask_BT = torch.arange(T) < lengths[:, None]
    student_RV, teacher_RV = (model.logits(EVERY_BT)[mask_BT] for model in (STUDENT, TEACHER))
    parts = minillm.policy_gradient(
        student_RV.float(), teacher_RV.detach().float(), EVERY_BT[mask_BT], mask_BT.long(), **options
    )
    return tuple(torch.zeros(mask_BT.shape).masked_scatter(mask_BT, part).sum(1) for part in parts)  # type: ignore[return-value]


PLAIN: dict[str, Any] = {"mix": 0.0, "normalise": False, "whiten": False}


def test_the_expected_gradient_is_that_of_the_sequences_reverse_kl() -> None:
    single_B, long_B = terms(torch.full((V**T,), T), **PLAIN)
    expected = (log_probability(STUDENT).exp().detach() * (single_B + long_B).double()).sum()
    found = torch.autograd.grad(expected, list(STUDENT.parameters()))
    for mine, exact in zip(found, exact_gradient(), strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-6)


def test_neither_term_alone_gives_it() -> None:
    """So both are needed: the first tokens' gradient has the return of the later ones in it."""
    weight_B = log_probability(STUDENT).exp().detach()
    for part in terms(torch.full((V**T,), T), **PLAIN):
        found = torch.autograd.grad((weight_B * part.double()).sum(), STUDENT.after[0], retain_graph=True)[0]
        assert (found - exact_gradient()[0]).abs().max() > 0.01


def test_the_mean_over_samples_tends_to_it() -> None:
    torch.manual_seed(0)
    drawn = torch.multinomial(log_probability(STUDENT).exp().detach(), 200_000, replacement=True)
    single_B, long_B = terms(torch.full((V**T,), T), **PLAIN)
    share_B = drawn.bincount(minlength=V**T) / len(drawn)
    found = torch.autograd.grad((share_B * (single_B + long_B)).sum(), STUDENT.after[0])[0]
    assert (found - exact_gradient()[0]).abs().max() < 0.02
    assert exact_gradient()[0].abs().max() > 0.2


def test_importance_weights_undo_the_mixture() -> None:
    """Exactly, for texts of one token: the paper's weight of a token leaves out those of the tokens before it."""
    mix = 0.3
    log_q, log_p = STUDENT.after[0].log_softmax(-1)[0], TEACHER.after[0].log_softmax(-1)[0].detach()
    exact = torch.autograd.grad((log_q.exp() * (log_q - log_p)).sum(), STUDENT.after[0], retain_graph=True)[0]
    tokens_R = torch.arange(V)
    student_RV, teacher_RV = (model.after[0].expand(V, V).float() for model in (STUDENT, TEACHER))
    single_R, long_R = minillm.policy_gradient(
        student_RV, teacher_RV.detach(), tokens_R, torch.ones(V, 1), mix=mix, normalise=False, whiten=False
    )
    assert not long_R.any(), "nothing comes after"
    sampled_R = ((1 - mix) * log_q.exp() + mix * log_p.exp()).detach()
    found = torch.autograd.grad((sampled_R * single_R.double()).sum(), STUDENT.after[0])[0]
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-6)


# Its parts


def test_returns_are_the_mean_of_what_comes_after() -> None:
    rewards = torch.tensor([[0.0, 1.0, 2.0, 6.0, 0.0], [0.0, 0.0, 3.0, 0.0, 0.0]])
    mask = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 1, 0, 0]])
    assert minillm.later_rewards(rewards, mask, normalise=False).tolist() == [[0, 8, 6, 0, 0], [0] * 5]
    assert minillm.later_rewards(rewards, mask).tolist() == [[0, 4, 6, 0, 0], [0] * 5]


def sampled(seed: int = 0, *, lengths: tuple[int, ...] = (3, 1, 2)) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(4) < torch.tensor(lengths)[:, None]).long()
    R = int(mask.sum())
    student, teacher = torch.randn(2, R, V, generator=generator)
    return student, teacher, torch.randint(V, (R,), generator=generator), mask


def test_terms_are_the_papers_written_as_loops() -> None:
    student, teacher, tokens, mask = sampled()
    single_R, long_R = minillm.policy_gradient(student, teacher, tokens, mask)
    q, p = student.softmax(-1).tolist(), teacher.softmax(-1).tolist()
    rewards = [(p[r][y] / q[r][y]) for r, y in enumerate(tokens.tolist())]
    returns, start = [], 0
    for length in mask.sum(1).tolist():
        for t in range(start, start + length):
            after = [torch.tensor(rewards[u]).log().item() for u in range(t + 1, start + length)]
            returns.append(sum(after) / max(len(after), 1))
        start += length
    mean = sum(returns) / len(returns)
    deviation = (sum((each - mean) ** 2 for each in returns) / len(returns)) ** 0.5
    for r, y in enumerate(tokens.tolist()):
        weight = q[r][y] / (0.2 * p[r][y] + 0.8 * q[r][y])
        kl = sum(a * (torch.tensor(a / b).log().item()) for a, b in zip(q[r], p[r], strict=True))
        assert single_R[r].item() == pytest.approx(weight * kl, rel=1e-4)
        advantage = (returns[r] - mean) / deviation
        clipped = min(max(weight, 0.8), 1.2)
        assert long_R[r].item() == pytest.approx(-min(advantage * weight, advantage * clipped), rel=1e-3, abs=1e-5)


def test_clipping_stops_the_gradient_of_likely_tokens() -> None:
    student, teacher, tokens, mask = sampled(lengths=(4, 4))
    student = (student * 3).requires_grad_()
    _, long_R = minillm.policy_gradient(student, teacher, tokens, mask)
    log_q, log_p = (each.log_softmax(-1).gather(1, tokens[:, None])[:, 0].exp() for each in (student, teacher))
    weight = log_q / (0.2 * log_p + 0.8 * log_q)
    for r in range(len(tokens)):
        (gradient,) = torch.autograd.grad(long_R[r], student, retain_graph=True)
        outside = (weight[r] > 1.2 and long_R[r] < 0) or (weight[r] < 0.8 and long_R[r] > 0)
        assert gradient.any() == (not outside and bool(long_R[r] != 0))
    assert (weight > 1.2).any()


def test_returns_ignore_other_rows_and_padding() -> None:
    student, teacher, tokens, mask = sampled()
    whole = minillm.policy_gradient(student, teacher, tokens, mask, whiten=False)
    wide = minillm.policy_gradient(student, teacher, tokens, nn.functional.pad(mask, (2, 5)), whiten=False)
    start = 0
    for b, length in enumerate(mask.sum(1).tolist()):
        chosen = slice(start, start + length)
        alone = minillm.policy_gradient(student[chosen], teacher[chosen], tokens[chosen], mask[b : b + 1], whiten=False)
        for part, other, mine in zip(whole, wide, alone, strict=True):
            torch.testing.assert_close(part[chosen], mine)
            torch.testing.assert_close(part, other)
        start += length


def test_whitening_is_over_sampled_tokens_only() -> None:
    student, teacher, tokens, mask = sampled()
    narrow = minillm.policy_gradient(student, teacher, tokens, mask)
    wide = minillm.policy_gradient(student, teacher, tokens, nn.functional.pad(mask, (0, 50)))
    torch.testing.assert_close(narrow, wide)
    values = minillm.standardise(torch.tensor([1.0, 2.0, 6.0]))
    assert values.mean().item() == pytest.approx(0, abs=1e-6)
    assert values.var(correction=0).item() == pytest.approx(1, rel=1e-5)


# Teacher-mixed sampling


def batch(*texts: str) -> dict[str, Tensor]:
    return next_tokens(generative.rows(*(texts or ("a good film", "bad", "the story was too slow"))), WORDS)


def test_the_teacher_is_mixed_in_as_if_it_read_everything_anew() -> None:
    """With a cache, and prompts of different lengths padded on the left."""
    teacher, rows = generative.gpt2(seed=2), ("a good", "bad")
    prompt = prompts(batch(*rows), 6, 0)
    mixed = minillm.TeacherMixed(teacher, prompt["attention_mask"], mix=0.25)
    ids = prompt["input_ids"]
    for _ in range(3):
        scores = torch.randn(2, len(generative.gpt2_tokenizer()))
        with torch.no_grad():
            found = mixed(ids, scores).exp()
            for b, start in enumerate((6 - len(rows[0]), 6 - len(rows[1]))):
                p = teacher(ids[b : b + 1, start:]).logits[0, -1].softmax(-1)
                torch.testing.assert_close(found[b], 0.25 * p + 0.75 * scores[b].softmax(-1), rtol=1e-4, atol=1e-6)
        ids = torch.cat([ids, torch.tensor([[5], [9]])], 1)


@pytest.mark.parametrize("mix", [0.0, 0.5, 1.0])
def test_tokens_come_from_the_mixture(mix: float) -> None:
    on_policy = step(mix=mix, new_tokens=1)
    teacher = on_policy.corpus.teacher
    assert isinstance(teacher, nn.Module)
    text = batch(*["a good film"] * 3000)
    rows = sample_continuations(
        on_policy.student,
        text,
        prompt=20,
        new_tokens=1,
        pad=0,
        processors=lambda mask_BL: [minillm.TeacherMixed(teacher, mask_BL, mix)] if mix else [],
    )
    drawn = rows["labels"].max(1).values.bincount(minlength=len(WORDS.special_V)) / 3000
    with torch.no_grad():
        p, q = (model(text["input_ids"][:1]).logits[0, -1].softmax(-1) for model in (teacher, on_policy.student))
    assert (drawn - (mix * p + (1 - mix) * q)).abs().sum() < 0.2
    assert (p - q).abs().sum() > 0.5


# The step


def step(**options: Any) -> minillm.PolicyGradient:
    student, teacher = generative.gpt2(seed=1), generative.gpt2(layers=3, seed=2)
    terms = (Term("bert.masked_lm", 0.5), Term("distilbert.masked_soft_targets", 0.5, options={"temperature": 1.0}))
    objective = Objective(terms, Shape.from_config(student.config), Shape.from_config(teacher.config))
    return minillm.PolicyGradient(student, teacher, objective, words=WORDS, **{"prompt": 5, "new_tokens": 6, **options})


def test_the_loss_is_policy_gradient_and_corpus() -> None:
    on_policy = step()
    torch.manual_seed(5)
    out = on_policy(**batch())
    assert list(out) == ["loss", "minillm.single", "minillm.long", "bert.masked_lm", "distilbert.masked_soft_targets"]
    torch.testing.assert_close(out["loss"].detach(), sum(part for name, part in out.items() if name != "loss"))
    corpus = on_policy.corpus(**batch())
    assert out["bert.masked_lm"].item() == corpus["bert.masked_lm"].item()
    torch.manual_seed(5)
    assert on_policy(**batch())["loss"].item() == out["loss"].item()


def test_gradients_reach_the_student_only_and_its_dropout_is_off() -> None:
    on_policy = step().train()
    assert not on_policy.student.training
    on_policy(**batch())["loss"].backward()
    assert on_policy.student.transformer.wte.weight.grad.any()
    teacher = on_policy.corpus.teacher
    assert isinstance(teacher, nn.Module)
    assert all(each.grad is None for each in teacher.parameters())


def test_it_learns() -> None:
    on_policy = step(prompt=2, new_tokens=4)
    optimiser = torch.optim.Adam(on_policy.parameters(), 3e-3)
    kl = []
    for _ in range(40):
        optimiser.zero_grad()
        out = on_policy(**batch())
        kl.append(out["minillm.single"].item())
        (out["loss"] - out["bert.masked_lm"]).backward()
        optimiser.step()
    assert sum(kl[-5:]) < 0.6 * sum(kl[:5])


def test_missing_requirements_are_reported() -> None:
    student, objective = generative.gpt2(), step().corpus.objective
    for teacher, terms in ((None, objective), (generative.gpt2(), None)):
        with pytest.raises(ObjectiveError, match="needs an `objective` for the corpus"):
            minillm.PolicyGradient(student, teacher, terms, words=WORDS)
    with pytest.raises(ObjectiveError, match=r"needs causal models; see gkd\.OnPolicy"):
        minillm.PolicyGradient(generative.t5(), generative.t5(), objective, words=WORDS)
