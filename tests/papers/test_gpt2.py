"""Labels of a causal language model, and rows of running text."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from compress.config.term import Term
from compress.data.corpus import Document
from compress.data.masking import Frame
from compress.errors import DataError
from compress.papers import gpt2
from compress.slicing.shape import Shape
from compress.training.objective import Objective
from compress.training.step import Distillation
from tests import generative

WORDS = generative.words(generative.gpt2_tokenizer())
END, NONE = 0, -100


@pytest.mark.parametrize("left", [False, True])
def test_each_token_is_the_label_of_the_one_before_it(left: bool) -> None:
    rows = generative.rows("good", "a b", left=left)
    ids = [row[mask.bool()].tolist() for row, mask in zip(rows["input_ids"], rows["attention_mask"], strict=True)]
    found = gpt2.next_tokens(rows, WORDS)
    expected = [[*ids[0][1:], NONE], [*ids[1][1:], NONE]]
    expected[1] = [NONE, *expected[1]] if left else [*expected[1], NONE]
    assert found["labels"].tolist() == expected
    assert torch.equal(found["input_ids"], rows["input_ids"])
    assert "labels" not in rows


def test_a_real_end_token_is_predicted_even_if_it_is_the_padding_token() -> None:
    rows = {"input_ids": torch.tensor([[5, END, END]]), "attention_mask": torch.tensor([[1, 1, 0]])}
    assert gpt2.next_tokens(rows, WORDS)["labels"].tolist() == [[END, NONE, NONE]]


@pytest.mark.parametrize("left", [False, True])
def test_prompts_are_not_predicted(left: bool) -> None:
    rows = generative.rows("good", "a b", left=left) | {"prompt": torch.tensor([2, 0])}
    labels = gpt2.next_tokens(rows, WORDS)["labels"]
    assert (labels != NONE).sum(1).tolist() == [2, 2]
    assert labels[0].tolist()[1:3] == rows["input_ids"][0].tolist()[2:]


def test_the_masked_lm_loss_on_these_labels_is_the_causal_loss_of_transformers() -> None:
    model = generative.gpt2()
    rows = generative.rows("a good film", "bad", "too slow")
    shifted = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, NONE)
    expected = model(**rows, labels=shifted).loss
    step = Distillation(model, None, [Term("bert.masked_lm")])
    torch.testing.assert_close(step(**gpt2.next_tokens(rows, WORDS))["loss"], expected)


def test_padding_is_never_counted() -> None:
    """In the triple loss of DistilGPT2: a batch is its rows alone, each weighted by what it is asked."""
    student, teacher = generative.gpt2(seed=1), generative.gpt2(layers=4, seed=2)
    terms = [
        Term("distilbert.masked_soft_targets", 5),
        Term("bert.masked_lm", 0.5),
        Term("distilbert.cosine", 1, layers="last"),
    ]
    step = Distillation(
        student, teacher, Objective(terms, *(Shape.from_config(each.config) for each in (student, teacher)))
    )

    def parts(*texts: str) -> dict[str, Tensor]:
        return step(**gpt2.next_tokens(generative.rows(*texts), WORDS))

    short, long, both = parts("bad"), parts("the story was"), parts("bad", "the story was")
    for name, (few, many) in {
        "distilbert.masked_soft_targets": (2, 12),
        "bert.masked_lm": (2, 12),
        "distilbert.cosine": (3, 13),
    }.items():
        expected = (few * short[name] + many * long[name]) / (few + many)
        torch.testing.assert_close(both[name], expected)


# Blocks


def documents() -> Iterator[Document]:
    yield Document(0, [[1, 2, 3], [4]])
    yield Document(1, [[5, 6, 7, 8, 9, 10, 11]])
    yield Document(2, [[12]])


def blocks(max_length: int, begin: int | None = None) -> list[list[int]]:
    tokenizer = generative.gpt2_tokenizer()
    if begin is not None:
        around = TemplateProcessing("<begin> $A", special_tokens=[("<begin>", begin)])
        tokenizer.backend_tokenizer.post_processor = around
    frame = Frame.from_tokenizer(tokenizer)
    rows = gpt2.blocks(documents(), frame, max_length=max_length, rng=np.random.default_rng(0))
    return [row["input_ids"] for row in rows]


def test_blocks_are_running_text_with_the_end_token_after_each_document() -> None:
    text = [1, 2, 3, 4, END, 5, 6, 7, 8, 9, 10, 11, END, 12, END]
    assert blocks(4) == [text[:4], text[4:8], text[8:12], text[12:]]
    assert blocks(100) == [text]


def test_each_document_begins_as_the_tokenizer_begins_a_text() -> None:
    begin = 42
    text = [begin, 1, 2, 3, 4, END, begin, 5, 6, 7, 8, 9, 10, 11, END, begin, 12, END]
    assert blocks(100, begin) == [text]
    assert blocks(6, begin) == [text[:6], text[6:12], text[12:]]


def test_there_is_one_token_between_documents_if_it_also_begins_them() -> None:
    """As in OPT."""
    assert blocks(100, END) == [[END, 1, 2, 3, 4, END, 5, 6, 7, 8, 9, 10, 11, END, 12, END]]


def test_a_single_token_is_no_block() -> None:
    assert blocks(7) == [[1, 2, 3, 4, END, 5, 6], [7, 8, 9, 10, 11, END, 12]]


def test_an_end_token_is_needed() -> None:
    frame = replace(Frame.from_tokenizer(generative.gpt2_tokenizer()), end=None)
    with pytest.raises(DataError, match="no end-of-text token"):
        next(gpt2.blocks(documents(), frame, max_length=4, rng=np.random.default_rng(0)))
