"""Sources and targets, each padded to its own length, and kept once encoded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from compress.data.collate import Seq2SeqCollate
from compress.data.task import Task
from compress.data.tokenize import encode_task
from compress.errors import DataError
from compress.papers import t5
from tests import generative

TOKENIZER = generative.t5_tokenizer()
TASK = Task("classification", ("text",), "label", ("bad", "good"), "accuracy")
SPLIT = {"text": ["a film", "a good film", "fun"], "label": [0, 1, 1]}


def encoded(**options: Any) -> Dataset:
    return encode_task(Dataset.from_dict(SPLIT), TASK, TOKENIZER, t5.text_to_text, options, max_length=40)


def test_encode_task() -> None:
    rows = encoded(name="x")
    assert set(rows.column_names) == {"input_ids", "attention_mask", "labels", "length", "index"}
    assert rows["index"][:] == [0, 1, 2]
    for row, text, label in zip(rows, SPLIT["text"], ("bad", "good", "good"), strict=True):
        assert TOKENIZER.decode(row["input_ids"], skip_special_tokens=True) == f"x text: {text}"
        assert TOKENIZER.decode(row["labels"], skip_special_tokens=True) == label
        assert row["length"] == len(row["input_ids"]) + len(row["labels"])
        assert row["attention_mask"] == [1] * len(row["input_ids"])


def test_rows_are_written_once_for_each_setting(home: Path) -> None:
    for name in ("x", "x", "y"):
        encoded(name=name)
    assert len(list((home / "encoded").glob("*/*.arrow"))) == 2


def empty(split: Dataset, task: Task, tokenizer: Any, *, max_length: int) -> Iterator[dict[str, Any]]:
    yield {"input_ids": [1, 2], "labels": []}


def nothing(split: Dataset, task: Task, tokenizer: Any, *, max_length: int) -> Iterator[dict[str, Any]]:
    yield from ()


def test_rows_without_a_target_are_refused() -> None:
    split = Dataset.from_dict(SPLIT)
    with pytest.raises(DataError, match=r"row 0 has .* expected input_ids and labels"):
        encode_task(split, TASK, TOKENIZER, empty, {}, max_length=40)
    with pytest.raises(DataError, match="nothing makes no row"):
        encode_task(split, TASK, TOKENIZER, nothing, {}, max_length=40)


def test_a_batch_pads_each_side_for_itself() -> None:
    model = generative.t5()
    batch = Seq2SeqCollate(TOKENIZER, model)(list(encoded()))
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (3, len("text: a good film") + 1)
    assert batch["labels"].shape == batch["decoder_input_ids"].shape == (3, 5)
    ids = TOKENIZER.convert_tokens_to_ids
    assert batch["labels"][0].tolist() == [*map(ids, "bad"), 1, -100]
    assert batch["decoder_input_ids"][0].tolist() == [0, *map(ids, "bad"), 1]
    assert batch["decoder_input_ids"][1].tolist() == [0, *map(ids, "good")]
    assert batch["attention_mask"].sum(1).tolist() == [len(f"text: {text}") + 1 for text in SPLIT["text"]]
    assert batch["index"].tolist() == [0, 1, 2]


def test_rows_of_text_alone_have_no_target() -> None:
    batch = Seq2SeqCollate(TOKENIZER, generative.t5())([{"input_ids": [7, 8, 1]}, {"input_ids": [9, 1]}])
    assert set(batch) == {"input_ids", "attention_mask"}
