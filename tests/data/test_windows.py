"""Rows of questions and of words: every answer and every word is seen, where it is, whatever the text is made of."""

import os
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from compress.data import windows
from compress.data.collate import Collate
from compress.data.encoder import text_encoder_of
from compress.data.tokenize import encode
from compress.errors import DataError
from tests import generative, tiny

HERE = Path(os.environ.get("COMPRESS_DATA", Path(__file__).parents[3] / "shared" / "data")) / "tokenizers"
REAL = ("bert-base-uncased", "roberta-base")
CONTEXT = (
    "Zoë's café 🙂🙂 in “Malmö” opened — finally! — in 1999; naïve ﬁsh 東京, e\u0301tude.  It   isn't U.S.-owned " * 3
)


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    if name == "tiny":
        return tiny.tokenizer()
    if not (HERE / name).is_dir():
        pytest.skip(f"no {name} in {HERE}: set COMPRESS_DATA")
    special = {"pad_token": "[PAD]"} if name.startswith("bert") else {"pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_file=str(HERE / name / "tokenizer.json"), **special)


@cache
def plain(name: str) -> Tokenizer:
    return text_encoder_of(tokenizer(name)).backend


def asked(name: str, question: str, context: str, max_length: int) -> list[windows.QuestionWindow]:
    (found,) = windows.read_questions(plain(name), [question], [context], max_length)
    return found


@pytest.mark.parametrize("name", REAL)
def test_pair_equals_transformers(name: str) -> None:
    given = tokenizer(name)
    (row,) = asked(name, "Who opened it?", CONTEXT, 512)
    theirs = given("Who opened it?", CONTEXT, return_offsets_mapping=True)
    assert row.row.ids == theirs["input_ids"]
    context = [k == 1 for k in theirs.sequence_ids(0)]
    assert [start for start in row.starts if start >= 0] == [
        offset[0] for offset, inside in zip(theirs["offset_mapping"], context, strict=True) if inside
    ]
    assert row.null == 0


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("answer", ["café", "🙂🙂", "Malmö", "1999", "東京", "owned", "It   isn't"])
def test_answer_tokens(name: str, answer: str) -> None:
    start = CONTEXT.rindex(answer)
    held = 0
    for window in asked(name, "where?", CONTEXT, 48):
        first, last = window.span(start, start + len(answer))
        if (first, last) == (window.null, window.null):
            continue
        held += 1
        covered = CONTEXT[window.starts[first] : window.ends[last]]
        assert covered.strip() == answer
    assert held >= 1


def test_windows() -> None:
    context = " ".join(tiny.WORDS[n % 20] for n in range(100))
    found = asked("tiny", "is this film good ?", context, 24)
    assert all(len(window.row.ids) <= 24 for window in found)
    spans = [[(s, e) for s, e in zip(w.starts, w.ends, strict=True) if s >= 0] for w in found]
    assert {span for each in spans for span in each} == {
        (s, e) for s, e in Tokenizer.from_str(tiny.tokenizer().backend_tokenizer.to_str()).encode(context).offsets if e
    }
    for before, after in pairwise(spans):
        assert len(set(before) & set(after)) == 24 // 3
    assert all(set(w.row.types[:7]) == {0} and set(w.row.types[7:]) == {1} for w in found)


def test_answer_at_the_end() -> None:
    context = " ".join(["film"] * 40) + " good"
    found = asked("tiny", "is it ?", context, 20)
    spans = [window.span(len(context) - 4, len(context)) for window in found]
    assert spans[:-1] == [[0, 0]] * (len(found) - 1)
    first, last = spans[-1]
    assert first == last == len(found[-1].row.ids) - 2


@pytest.mark.parametrize("answer", ["cafe\u0301", "\u200bgood", "good\u00ad", "good\u0301 \u0301film\u200b"])
@pytest.mark.parametrize("before", ["", "film "])
@pytest.mark.parametrize("after", ["", " film"])
def test_marks_without_a_token_do_not_lose_an_answer(answer: str, before: str, after: str) -> None:
    """BERT's uncased tokenizers drop accents, and all of them zero-width characters."""
    row = {
        "question": ["is it ?"],
        "context": [before + answer + after],
        "answers": [[answer]],
        "starts": [[len(before)]],
    }
    (encoded,) = encode(Dataset.from_dict({"id": ["0"]} | row), tiny.tokenizer(), 24)
    first, last = encoded["labels"]
    assert first != encoded["null"]
    assert (row["context"][0][encoded["starts"][first] : encoded["ends"][last]]).strip("\u0301\u200b\u00ad") in answer


def test_answer_cut_by_a_window() -> None:
    context = " ".join(["film"] * 12 + ["good", "great"] + ["film"] * 12)
    start = context.index("good")
    found = asked("tiny", "?", context, 16)  # 12 tokens of context: the second of the answer is cut off
    spans = [window.span(start, start + len("good great")) for window in found]
    assert spans[0] == [0, 0]
    assert any(last - first == 1 for first, last in spans)


def test_a_long_question_leaves_half_of_the_row() -> None:
    (window, *_) = asked("tiny", "film " * 200, "good", 32)
    assert window.row.ids.count(tiny.tokenizer().convert_tokens_to_ids("film")) == 16
    assert window.span(0, 4) == [18, 18]


def test_short_rows_and_missing_special_tokens() -> None:
    with pytest.raises(DataError, match="max_length 4 is too short for a question"):
        asked("tiny", "film film", "good", 4)
    bare = Tokenizer.from_str(tiny.tokenizer().backend_tokenizer.to_str())
    bare.post_processor = TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    with pytest.raises(DataError, match="'no answer'"):
        list(windows.read_questions(bare, ["film"], ["good"], 16))
    bare.post_processor = TemplateProcessing(single="$A [CLS]", pair="$A $B:1 [CLS]:2", special_tokens=[("[CLS]", 2)])
    ((window,),) = windows.read_questions(bare, ["film"], ["good"], 16)
    assert (window.null, window.row.types) == (2, [0, 1, 2])


@pytest.mark.parametrize("name", ["tiny", *REAL])
@pytest.mark.parametrize("max_length", [8, 16, 17, 33, 256])
def test_every_word_is_predicted_once(name: str, max_length: int) -> None:
    words = ["Zoë's", "@user", "🙂", "U.S.", "the", "movies", "ﬁsh", "東京", "\u200b", "well-known"] * 6
    given = plain(name)
    (found,) = windows.read_words(given, [words], max_length)
    judged = [word for window in found for word in window.word if word >= 0]
    silent = {n for n, word in enumerate(words) if not given.encode(word, add_special_tokens=False).ids}
    assert sorted(judged) == [n for n in range(len(words)) if n not in silent]
    for window in found:
        assert len(window.row.ids) == len(window.word) <= max_length
        for at, word in enumerate(window.word):
            if word >= 0:
                first = given.encode(f" {words[word]}", add_special_tokens=False).ids[0]
                assert window.row.ids[at] == first


def split_of_questions(**changes: Any) -> Dataset:
    columns = {
        "id": ["a", "b"],
        "question": ["is it good ?", "is it bad ?"],
        "context": ["film " * 30 + "good", "this film"],
        "answers": [["good"], []],
        "starts": [[150], []],
    }
    return Dataset.from_dict({**columns, **changes})


def test_encoded_questions() -> None:
    rows = encode(split_of_questions(), tiny.tokenizer(), 24)
    assert rows["index"][:] == list(range(len(rows)))
    assert rows["example"][:] == [0] * (len(rows) - 1) + [1]
    assert rows["labels"][-1] == [0, 0]
    last = rows[len(rows) - 2]
    first, end = last["labels"]
    assert first == end
    assert (last["starts"][first], last["ends"][end]) == (150, 154)
    batch = Collate(tiny.tokenizer())([rows[n] for n in range(len(rows))])
    assert batch["labels"].tolist() == rows["labels"][:]
    assert set(batch) == {"input_ids", "attention_mask", "token_type_ids", "labels", "index"}


def test_places_move_with_padding_on_the_left() -> None:
    words = tiny.tokenizer()
    rows = encode(split_of_questions(), words, 24)
    batch = Collate(words, left=True)([rows[n] for n in range(len(rows))])
    for row, ids, (first, last) in zip(rows, batch["input_ids"], batch["labels"], strict=True):
        start, end = row["labels"]
        assert ids[first : last + 1].tolist() == row["input_ids"][start : end + 1]


def test_encoded_words() -> None:
    split = Dataset.from_dict(
        {"words": [["the", "movies", "was", "fun"] * 5, ["good"]], "tags": [[0, 1, 0, 2] * 5, [3]]}
    )
    rows = encode(split, tiny.tokenizer(), 12)
    labels = [label for row in rows.select(range(len(rows) - 1)) for label in row["labels"] if label != -100]
    words = [word for row in rows.select(range(len(rows) - 1)) for word in row["word"] if word >= 0]
    assert words == list(range(20))
    assert labels == [0, 1, 0, 2] * 5
    assert rows[len(rows) - 1]["labels"] == [-100, 3, -100]
    batch = Collate(tiny.tokenizer())([rows[0], rows[len(rows) - 1]])
    assert batch["labels"].shape == batch["input_ids"].shape
    assert batch["labels"].dtype == torch.int64
    assert (batch["labels"][1, 3:] == -100).all()


def test_a_sentence_without_tokens_has_no_window() -> None:
    bare = text_encoder_of(generative.gpt2_tokenizer()).backend
    none, one = windows.read_words(bare, [[], ["a"]], 8)
    assert none == []
    assert [len(window.row.ids) for window in one] == [2]


def test_slow_tokenizer() -> None:
    slow = tiny.tokenizer()
    slow.__class__ = type("Slow", (slow.__class__,), {"is_fast": property(lambda self: False)})
    with pytest.raises(DataError, match="expected a fast tokenizer"):
        encode(split_of_questions(), slow, 24)


def test_word_tokens_equal_running_text() -> None:
    given = plain("roberta-base")
    ((window,),) = windows.read_words(given, [["New", "York", "is", "big"]], 64)
    assert window.row.ids[1:-1] == given.encode(" New York is big", add_special_tokens=False).ids
    assert np.flatnonzero(np.array(window.word) >= 0).tolist() == [1, 2, 3, 4]
