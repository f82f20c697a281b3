"""Text-to-text: what goes in, what comes out and what it means; corrupted spans."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from compress.config.recipe import Recipe
from compress.data.task import Task
from compress.errors import DataError
from compress.papers import t5
from tests import generative

TOKENIZER = generative.t5_tokenizer()
REVIEWS = Task("classification", ("sentence",), "label", ("bad", "good", "not bad"), "accuracy")
PAIRS = Task("classification", ("sentence1", "sentence2"), "label", ("not_equivalent", "equivalent"), "f1")
SCORES = Task("regression", ("sentence1", "sentence2"), "score", (), "pearson")


# Text


@pytest.mark.parametrize(
    ("value", "text"),
    [(3.84, "3.8"), (3.7, "3.6"), (0.0, "0.0"), (5.0, "5.0"), (2.57, "2.6"), (-0.05, "0.0"), (4.9999, "5.0")],
)
def test_numbers_become_text_in_steps_of_a_fifth(value: float, text: str) -> None:
    assert t5.number_text(value) == text
    assert abs(t5.text_number(text) - value) <= 0.1 + 1e-9


def test_a_text_that_is_no_number_has_the_value_minus_one() -> None:
    assert t5.text_number("three") == t5.text_number("") == -1.0
    assert t5.text_number(" 3.8 ") == 3.8


def test_prompts_name_the_task_and_each_column() -> None:
    assert t5.prompt(REVIEWS, ["fine ."], name="sst2") == "sst2 sentence: fine ."
    assert t5.prompt(PAIRS, ["a", "b"], name="mrpc") == "mrpc sentence1: a sentence2: b"
    assert t5.prompt(PAIRS, ["a", "b"]) == "sentence1: a sentence2: b"


def split(task: Task, count: int = 6) -> Dataset:
    columns: dict[str, Any] = {"text": [f"it is {'very ' * (i % 3)}good {i}" for i in range(count)]}
    if task.pair:
        columns["text_pair"] = [f"a film {i}" for i in range(count)]
    answers = [0.9 * i for i in range(count)] if task.kind == "regression" else [i % task.outputs for i in range(count)]
    return Dataset.from_dict(columns | {"label": answers})


@pytest.mark.parametrize("task", [REVIEWS, PAIRS, SCORES], ids=["one text", "pairs", "numbers"])
def test_rows_read_back_as_prompt_and_answer(task: Task) -> None:
    rows = list(t5.text_to_text(split(task), task, TOKENIZER, max_length=200, name="x"))
    assert len(rows) == 6
    for i, (row, example) in enumerate(zip(rows, split(task), strict=True)):
        source, target = (TOKENIZER.decode(row[name], skip_special_tokens=True) for name in ("input_ids", "labels"))
        texts = [example[name] for name in ("text", "text_pair") if name in example]
        assert source == t5.prompt(task, texts, name="x")
        assert target == (f"{round(0.9 * i / 0.2) * 0.2:.1f}" if task is SCORES else task.labels[example["label"]])
        assert row["input_ids"][-1] == row["labels"][-1] == TOKENIZER.eos_token_id


def test_truncated_sources_keep_their_end_token() -> None:
    row = next(t5.text_to_text(split(REVIEWS), REVIEWS, TOKENIZER, max_length=12))
    assert len(row["input_ids"]) == 12
    assert row["input_ids"][-1] == TOKENIZER.eos_token_id


def test_tasks_without_one_word_answers_are_refused() -> None:
    tags = Task("multilabel", ("text",), "a,b", ("a", "b"), "f1")
    with pytest.raises(DataError, match="a multilabel task has no one-word answer"):
        next(t5.text_to_text(split(REVIEWS), tags, TOKENIZER, max_length=12))


# Answers


def test_a_class_is_as_likely_as_its_word() -> None:
    """Against transformers' own loss, which is a mean over the word's tokens; row by row, so nothing is padded."""
    model, rows = generative.t5(), split(REVIEWS)
    found = t5.answers(model, rows, REVIEWS, TOKENIZER, max_length=100, name="x", batch=4)
    assert found.shape == (6, 3)
    for i, text in enumerate(rows["text"]):
        source = TOKENIZER(t5.prompt(REVIEWS, [text], name="x"), return_tensors="pt")
        for c, word in enumerate(REVIEWS.labels):
            labels = TOKENIZER(word, return_tensors="pt")["input_ids"]
            out = model(input_ids=source["input_ids"], attention_mask=source["attention_mask"], labels=labels)
            assert found[i, c] == pytest.approx(-out.loss.item() * labels.shape[1], rel=1e-4)


def test_numbers_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = generative.t5(), split(SCORES)
    texts = ["3.8", "x", "0.0", "5.0"]

    def generate(**inputs: Any) -> torch.Tensor:
        count = len(inputs["input_ids"])
        said = TOKENIZER(texts[:count], padding=True, return_tensors="pt")["input_ids"]
        return torch.cat([torch.zeros(count, 1, dtype=torch.long), said], 1)

    monkeypatch.setattr(model, "generate", generate)
    found = t5.answers(model, rows, SCORES, TOKENIZER, max_length=100, batch=4)
    assert sorted(found[:, 0].tolist()) == pytest.approx([-1.0, -1.0, 0.0, 3.8, 3.8, 5.0])


def test_answers_are_in_the_splits_order_and_leave_the_models_mode() -> None:
    model, rows = generative.t5().train(), split(SCORES)
    whole = t5.answers(model, rows, SCORES, TOKENIZER, max_length=100, batch=6)
    assert model.training
    assert whole.shape == (6, 1)
    likely = t5.answers(model, rows, PAIRS, TOKENIZER, max_length=100, batch=6)
    one = t5.answers(model, rows.select([3]), PAIRS, TOKENIZER, max_length=100)
    np.testing.assert_allclose(likely[3:4], one, rtol=1e-4)


def test_a_trained_model_scores() -> None:
    """The whole way: rows, batches, training, answers, accuracy."""
    from compress.config.term import Term
    from compress.data.collate import Seq2SeqCollate
    from compress.training.step import Distillation

    texts = [f"{word} {i}" for i in range(8) for word in ("bad", "good")]
    task = Task("classification", ("text",), "label", ("no", "yes"), "accuracy")
    rows = Dataset.from_dict({"text": texts, "label": [0, 1] * 8})
    model = generative.t5(layers=1)
    step = Distillation(model, None, [Term("bert.masked_lm")])
    batch = Seq2SeqCollate(TOKENIZER, model)(list(t5.text_to_text(rows, task, TOKENIZER, max_length=40)))
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(40):
        optimiser.zero_grad()
        step(**batch)["loss"].backward()
        optimiser.step()
    found = t5.answers(model, rows, task, TOKENIZER, max_length=40)
    assert task.score_rows(found, np.array([0, 1] * 8))["accuracy"] == 1.0


# Corrupted spans

WORDS = generative.words(TOKENIZER)
SENTINEL = 6


def corrupted(text: list[int], **options: Any) -> tuple[list[int], list[int]]:
    batch = {
        "input_ids": torch.tensor([[*text, 1, 0, 0]]),
        "attention_mask": torch.tensor([[1] * (len(text) + 1) + [0, 0]]),
    }
    found = t5.corrupt_spans(batch, WORDS, sentinel=SENTINEL, **options)
    assert found["attention_mask"].all()
    return found["input_ids"][0].tolist(), found["labels"][0].tolist()


def restored(source: list[int], target: list[int]) -> list[int]:
    """Each sentinel of the source replaced by what follows it in the target."""
    spans: dict[int, list[int]] = {}
    for token in target[:-1]:
        if 3 <= token <= SENTINEL:
            spans[token] = []
            last = token
        else:
            spans[last].append(token)
    text: list[int] = []
    for token in source[:-1]:
        text += spans.get(token, [token])
    return text


def test_spans_put_back_give_the_text_and_sentinels_count_down() -> None:
    text = list(range(7, 27))
    for _ in range(20):
        source, target = corrupted(text)
        assert source[-1] == target[-1] == 1
        assert restored(source, target) == text
        assert [token for token in target if 3 <= token <= SENTINEL] == [6, 5], (
            "one span of three, and the last sentinel"
        )
        assert len(source) == 20 - 3 + 1 + 1


def test_rate_and_mean_length_are_met() -> None:
    text = list(range(7, 47))
    for rate, span, noise, spans in ((0.15, 3.0, 6, 2), (0.25, 10.0, 10, 1)):
        source, target = corrupted(text, rate=rate, span=span)
        assert len([token for token in target[:-1] if token > SENTINEL]) == noise
        assert len([token for token in source if 3 <= token <= SENTINEL]) == spans


def test_every_place_but_the_first_is_chosen_about_equally_often() -> None:
    gone: Counter[int] = Counter()
    for _ in range(2000):
        _, target = corrupted(list(range(7, 47)))
        gone.update(token for token in target if token > SENTINEL)
    assert 7 not in gone
    assert all(gone[token] > 0 for token in range(8, 47))
    assert sum(gone.values()) == 6 * 2000


def test_decoders_begin_with_the_padding_token_and_padding_has_no_label() -> None:
    batch = {
        "input_ids": torch.tensor([[*range(7, 37), 1], [7, 8, 9, 1, *[0] * 27]]),
        "attention_mask": torch.tensor([[1] * 31, [1] * 4 + [0] * 27]),
    }
    found = t5.corrupt_spans(batch, WORDS, sentinel=SENTINEL)
    for labels, begun in zip(found["labels"].tolist(), found["decoder_input_ids"].tolist(), strict=True):
        real = [label for label in labels if label != -100]
        assert begun[: len(real)] == [0, *real[:-1]]
        assert set(begun[len(real) + 1 :]) <= {0}
    assert (found["input_ids"] != 0).long().tolist() == found["attention_mask"].tolist()
    short = found["input_ids"][1][found["attention_mask"][1].bool()].tolist()
    assert restored(short, [label for label in found["labels"][1].tolist() if label != -100]) == [7, 8, 9]


@pytest.mark.parametrize("sentinel", [32_099, 9])
def test_a_sentinel_is_a_special_token(sentinel: int) -> None:
    ones = torch.ones(1, 9, dtype=torch.long)
    with pytest.raises(DataError, match=f"tokens .* to {sentinel} have to be special tokens"):
        t5.corrupt_spans({"input_ids": ones, "attention_mask": ones}, WORDS, sentinel=sentinel)


def test_a_row_with_more_spans_than_sentinels_is_refused() -> None:
    ids = torch.full((1, 900), 7)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with pytest.raises(DataError, match=rf"tokens {SENTINEL - 150} to {SENTINEL} .*shorten max_length"):
        t5.corrupt_spans(batch, WORDS, rate=0.5, sentinel=SENTINEL)


def test_unknown_tokens_are_words() -> None:
    """Without them, words would stand side by side that do not in the text."""
    special_V = WORDS.special_V.clone()
    special_V[2] = True
    words = replace(WORDS, special_V=special_V, unknown=2)
    ids = torch.tensor([[7, 2, 8, 2, 9, 10, 1]])
    found = t5.corrupt_spans({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, words, sentinel=SENTINEL)
    source, target = found["input_ids"][0].tolist(), found["labels"][0].tolist()
    assert restored(source, target) == [7, 2, 8, 2, 9, 10]


def test_rows_of_the_recipes_length_become_inputs_of_512() -> None:
    """The authors' random_spans_helper finds 568 tokens for inputs of 512, targets of 114 without a last sentinel."""
    stage = Recipe.load("t5-spans").training[0]
    text = stage.max_length - 1
    words = replace(WORDS, size=100 + text, special_V=torch.arange(100 + text) < 100)
    ids = torch.cat([torch.arange(100, 100 + text), torch.ones(1, dtype=torch.long)])[None]
    assert stage.corrupt is not None
    found = stage.corrupt({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, words=words, sentinel=99)
    assert found["input_ids"].shape == (1, 512)
    assert found["labels"].shape == (1, 115)


@pytest.mark.parametrize("text", [[], [7], [7, 8]])
def test_texts_too_short_to_corrupt_stay_whole(text: list[int]) -> None:
    source, target = corrupted(text)
    assert restored(source, target) == text
    assert source[-1] == target[-1] == 1
