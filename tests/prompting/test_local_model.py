"""Likelihoods are what token after token of the whole sequence gives, however they are computed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.errors import TeacherError
from compress.prompting import local_model
from compress.prompting.local_model import LocalModel, open_model
from tests import tiny
from tests.prompting import language_models

PROMPTS = (
    "Review: a gorgeous film\nSentiment:",
    "Review: the plot was slow and never good, and the actors were worse\nSentiment:",
    "Review: ???\nSentiment:",
)
SINGLE = (" Positive", " Negative")
MIXED = (" Positive", " not so very good", " Negative", " bad")
EXAMPLES = "Review: witty and true\nSentiment: Positive\n\nReview: dull, slow, worse\nSentiment: Negative\n\n"


def by_hand(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """log p(answer | prompt), a whole forward pass per token, one sequence at a time, no padding."""
    total, read = 0.0, list(prompt)
    for token in answer:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([read])).logits[0, -1].double()
        total += float(logits.log_softmax(-1)[token])
        read.append(token)
    return total


def expected(model: Any, tokenizer: Any, prompt: str, answer: str) -> float:
    before, whole = tokenizer(prompt)["input_ids"], tokenizer(prompt + answer)["input_ids"]
    assert whole[: len(before)] == before, "no token spans the boundary in these"
    return by_hand(model, before, whole[len(before) :])


def found(speaker: LocalModel, prompts: Sequence[str], answers: Sequence[str]) -> list[tuple[float, ...]]:
    known = dict(speaker.likelihoods(prompts, answers))
    assert sorted(known) == list(range(len(prompts)))
    return [known[number].log_p for number in range(len(prompts))]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return language_models.byte_bpe()


@pytest.mark.parametrize("answers", [SINGLE, MIXED], ids=["short", "of several tokens"])
@pytest.mark.parametrize("head", ["", EXAMPLES], ids=["zero-shot", "with a shared beginning"])
def test_they_are_the_direct_computation_s(answers: Sequence[str], head: str, tokenizer: Any) -> None:
    model = language_models.gpt2()
    prompts = [head + prompt for prompt in PROMPTS]
    theirs = [[expected(model, tokenizer, prompt, answer) for answer in answers] for prompt in prompts]
    ours = found(language_models.local(model, tokenizer), prompts, answers)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=1e-4)
    assert all(log_p < -0.1 for row in ours for log_p in row), "nothing is certain to a random model"


@pytest.mark.parametrize("family", language_models.CAUSAL)
def test_models_with_every_kind_of_positions(family: str, tokenizer: Any) -> None:
    model = language_models.causal(family)
    prompts = [EXAMPLES + prompt for prompt in PROMPTS]
    theirs = [[expected(model, tokenizer, prompt, answer) for answer in MIXED] for prompt in prompts]
    ours = found(language_models.local(model, tokenizer), prompts, MIXED)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=1e-4)


def test_the_shared_prefix_and_slices_change_nothing(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row at a time with one answer at a time, against all at once."""
    speaker = language_models.local(language_models.gpt2(), tokenizer)
    prompts = [EXAMPLES + prompt for prompt in PROMPTS]
    together = found(speaker, prompts, MIXED)
    monkeypatch.setattr(local_model, "TOKENS_PER_CALL", 1)
    monkeypatch.setattr(local_model, "TOKENISED", 2)
    alone = found(speaker, prompts, MIXED)
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone), rtol=0, atol=1e-4)


def test_the_prompt_is_read_once_however_many_answers(tokenizer: Any) -> None:
    """Counted in tokens that go through the model: the shared beginning once, each question once, each answer once."""
    model = language_models.gpt2()
    read: list[int] = []
    model.register_forward_pre_hook(lambda _, __, given: read.append(given["input_ids"].numel()), with_kwargs=True)
    speaker = language_models.local(model, tokenizer)
    prompts = [EXAMPLES + prompt for prompt in PROMPTS]
    tokens = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    shared = local_model._common_prefix(tokens)
    assert shared > local_model.SHARED
    found(speaker, prompts, SINGLE)
    answers = [len(tokenizer(answer)["input_ids"]) for answer in SINGLE]
    longest = max(map(len, tokens)) - shared
    assert read == [shared, 3 * longest, *([3 * 2 * (max(answers) - 1)] if max(answers) > 1 else [])]


def test_answers_of_one_token_each_need_one_pass(tokenizer: Any) -> None:
    model = language_models.gpt2()
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    answers = [" Positive", " bad"]
    assert [len(tokenizer(answer)["input_ids"]) for answer in answers] == [1, 1]
    found(language_models.local(model, tokenizer), [PROMPTS[1]], answers)
    assert len(calls) == 1


def test_a_token_across_the_boundary_is_scored_whole_for_every_answer(tokenizer: Any) -> None:
    """`ver` + `y` is one token of the tiny vocabulary: the answer that makes it takes the prompt's last one with it."""
    prompt, answers = "Answer: ver", ("y", "?")
    alone = tokenizer(prompt)["input_ids"]
    whole = [tokenizer(prompt + answer)["input_ids"] for answer in answers]
    shared = min(local_model._common_prefix([alone, tokens]) for tokens in whole)
    assert shared < len(alone), "the case that is meant"
    model = language_models.gpt2()
    theirs = [by_hand(model, alone[:shared], tokens[shared:]) for tokens in whole]
    known = dict(language_models.local(model, tokenizer).likelihoods([prompt], answers))[0]
    assert known.log_p == pytest.approx(theirs, abs=1e-4)
    assert known.tokens == tuple(len(tokens) - shared for tokens in whole)


def test_an_empty_prompt_begins_with_the_token_that_begins_texts(tokenizer: Any) -> None:
    model = language_models.gpt2()
    (log_p,) = found(language_models.local(model, tokenizer), [""], ["Positive"])
    assert log_p[0] == pytest.approx(by_hand(model, [0], tokenizer("Positive")["input_ids"]), abs=1e-4)


def test_seq2seq_scores_the_answer_with_its_end() -> None:
    model, tokenizer = language_models.t5(), language_models.pieces()
    rows = []
    for prompt in PROMPTS:
        row = []
        for answer in MIXED:
            target = [*tokenizer(answer.strip(), add_special_tokens=False)["input_ids"], 1]
            asked = torch.tensor([tokenizer(prompt)["input_ids"]])
            with torch.no_grad():
                logits = model(input_ids=asked, decoder_input_ids=torch.tensor([[0, *target[:-1]]])).logits[0].double()
            row.append(float(logits.log_softmax(-1)[range(len(target)), target].sum()))
        rows.append(row)
    speaker = language_models.local(model, tokenizer)
    ours = found(speaker, PROMPTS, MIXED)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(rows), rtol=0, atol=1e-4)
    assert dict(speaker.likelihoods(PROMPTS[:1], MIXED))[0].tokens[0] == len(tokenizer("Positive")["input_ids"])


def test_bfloat16_is_near(tokenizer: Any) -> None:
    exact = found(language_models.local(language_models.gpt2(), tokenizer), PROMPTS, MIXED)
    rough = found(LocalModel("tiny", "b", language_models.gpt2(), tokenizer, bf16=True), PROMPTS, MIXED)
    assert rough != exact
    torch.testing.assert_close(torch.tensor(rough), torch.tensor(exact), rtol=0.1, atol=1.0)


def test_models_are_opened_from_folders(tmp_path: Path, tokenizer: Any) -> None:
    for name, model, its_own in (
        ("gpt2", language_models.gpt2(), tokenizer),
        ("t5", language_models.t5(), language_models.pieces()),
    ):
        opened = open_model(language_models.saved(tmp_path / name, model, its_own))
        assert opened.is_seq2seq == (name == "t5")
        same = torch.tensor(found(language_models.local(model, its_own), PROMPTS, MIXED))
        torch.testing.assert_close(torch.tensor(found(opened, PROMPTS, MIXED)), same, rtol=0, atol=1e-4)
        assert opened.longest == (256 if name == "gpt2" else None)


def test_models_that_cannot_be_prompted_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(TeacherError, match="a bert model does not generate text"):
        open_model(tiny.checkpoint(tmp_path / "bert"))
    with pytest.raises(TeacherError, match=r"of its tensors are missing, such as decoder\.block"):
        open_model(language_models.saved(tmp_path / "headless", language_models.t5().encoder, language_models.pieces()))
    with pytest.raises(TeacherError, match="they do not belong together"):
        small = language_models.gpt2()
        small.resize_token_embeddings(300)
        open_model(language_models.saved(tmp_path / "small", small, tokenizer))
