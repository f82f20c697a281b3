"""What a student goes on with: whole prompts, real tokens only, from the model's own distribution."""

import pytest
import torch
from torch import Tensor

from compress.data.constants import IGNORE_INDEX
from compress.errors import CompressError
from compress.papers.gpt2 import next_tokens
from compress.training.generation import pack, prompts, sample_continuations, until_end
from tests import generative

TEXTS = ("a good film", "bad", "the story was too slow")
WORDS = generative.words(generative.gpt2_tokenizer())


def batch(*texts: str, left: bool = False) -> dict[str, Tensor]:
    return next_tokens(generative.rows(*(texts or TEXTS), left=left), WORDS)


def real(ids_BL: Tensor, mask_BL: Tensor) -> list[list[int]]:
    return [ids[mask.bool()].tolist() for ids, mask in zip(ids_BL, mask_BL, strict=True)]


@pytest.mark.parametrize("left", [True, False])
def test_the_prompt_is_the_first_tokens_wherever_the_padding_is(left: bool) -> None:
    rows = batch(left=left)
    found = prompts(rows, 6, pad=0)
    whole = real(rows["input_ids"], rows["attention_mask"])
    assert real(found["input_ids"], found["attention_mask"]) == [row[:6] for row in whole]
    assert found["attention_mask"].tolist() == [[1] * 6, [0, 0, 0, 1, 1, 1], [1] * 6], "padded on the left"


@pytest.mark.parametrize("left", [True, False])
def test_an_instruction_is_the_prompt_of_its_row(left: bool) -> None:
    rows = generative.rows(*TEXTS, left=left) | {"prompt": torch.tensor([5, 2, 0])}
    found = prompts(next_tokens(rows, WORDS), 4, pad=0)
    assert found["attention_mask"].sum(1).tolist() == [5, 2, 4]


def test_packing_keeps_order_and_forgets_columns_without_a_token() -> None:
    tokens, keep = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0]]).bool()
    assert [each.tolist() for each in pack(tokens, keep, 9, left=True)] == [[[2, 4], [9, 5]], [[1, 1], [0, 1]]]
    assert [each.tolist() for each in pack(tokens, keep, 9, left=False)] == [[[2, 4], [5, 9]], [[1, 1], [1, 0]]]


def test_the_end_token_counts_once_though_it_pads_as_well() -> None:
    tokens = torch.tensor([[3, 0, 0, 0], [0, 0, 0, 0], [3, 4, 5, 6]])
    assert until_end(tokens, [0]).tolist() == [[True, True, False, False], [True, False, False, False], [True] * 4]
    assert until_end(tokens, []).all()


@pytest.mark.parametrize("left", [True, False])
def test_rows_are_the_prompt_and_what_was_sampled_and_only_that_is_labelled(left: bool) -> None:
    model = generative.gpt2()
    rows = sample_continuations(model, batch(left=left), prompt=6, new_tokens=8, pad=0)
    texts = real(rows["input_ids"], rows["attention_mask"])
    starts = real(*prompts(batch(left=left), 6, pad=0).values())
    for text, start, labels in zip(texts, starts, rows["labels"].tolist(), strict=True):
        fresh = text[len(start) :]
        assert text[: len(start)] == start
        assert 1 <= len(fresh) <= 8
        assert 0 not in fresh[:-1]
        at = len(start) - 1
        assert labels[at : at + len(fresh)] == fresh
        assert set(labels[:at] + labels[at + len(fresh) :]) <= {IGNORE_INDEX}


def test_samples_do_not_depend_on_the_side_of_the_padding() -> None:
    model = generative.gpt2()
    drawn = []
    for left in (True, False):
        torch.manual_seed(3)
        rows = sample_continuations(model, batch(left=left), prompt=6, new_tokens=8, pad=0)
        drawn.append(real(rows["input_ids"], rows["attention_mask"]))
    assert drawn[0] == drawn[1]


def test_the_checkpoints_own_rules_do_not_change_what_is_sampled() -> None:
    """Neither forbidden tokens, nor penalties: a policy gradient's weights count on the model's distribution."""
    drawn = []
    for rules in ({}, {"suppress_tokens": list(range(2, 20)), "repetition_penalty": 5.0, "no_repeat_ngram_size": 1}):
        model = generative.gpt2()
        model.generation_config.update(**rules)
        own = model.generation_config
        torch.manual_seed(3)
        drawn.append(sample_continuations(model, batch(), prompt=6, new_tokens=8, pad=0)["input_ids"].tolist())
        assert model.generation_config is own
        assert own.repetition_penalty == rules.get("repetition_penalty")
    assert drawn[0] == drawn[1]


def test_the_generator_decides() -> None:
    model = generative.gpt2()
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(sample_continuations(model, batch(), prompt=3, new_tokens=8, pad=0)["input_ids"].tolist())
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_come_from_the_models_whole_distribution(temperature: float) -> None:
    model = generative.gpt2()
    text = batch(*["a good film"] * 4000)
    rows = sample_continuations(model, text, prompt=20, new_tokens=1, pad=0, temperature=temperature)
    drawn = rows["labels"].max(1).values.bincount(minlength=model.config.vocab_size) / 4000
    with torch.no_grad():
        expected = (model(text["input_ids"][:1]).logits[0, -1] / temperature).softmax(-1)
    assert (drawn - expected).abs().max() < 0.03
    assert (drawn - expected).abs().sum() < 0.15


def test_a_model_with_too_few_positions_is_refused() -> None:
    with pytest.raises(CompressError, match=r"prompt of 6 tokens and 60 new ones .* 64 positions; lower"):
        sample_continuations(generative.gpt2(), batch(), prompt=6, new_tokens=60, pad=0)


def test_an_encoder_decoder_answers_its_source() -> None:
    tokenizer = generative.t5_tokenizer()
    found = tokenizer(list(TEXTS), padding=True, return_tensors="pt")
    source = {name: found[name] for name in ("input_ids", "attention_mask")}
    rows = sample_continuations(generative.t5(), source, prompt=5, new_tokens=6, pad=0)
    assert torch.equal(rows["input_ids"], source["input_ids"])
    for labels, begun in zip(rows["labels"].tolist(), rows["decoder_input_ids"].tolist(), strict=True):
        fresh = [label for label in labels if label != IGNORE_INDEX]
        assert 1 not in fresh[:-1], "nothing after the end"
        assert len(fresh) == 6 or fresh[-1] == 1
        assert labels == fresh + [IGNORE_INDEX] * (len(labels) - len(fresh))
        assert begun[: len(fresh)] == [0, *fresh[:-1]]
