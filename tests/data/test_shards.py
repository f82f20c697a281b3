"""Files that differ only in digits are one split, for every kind of task; of other files none is dropped in silence."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from compress.data import load_task
from compress.errors import DataError
from tests.data.conftest import Folder


def paragraphs(*topics: str) -> str:
    """SQuAD's json with two questions about a paragraph for each topic."""
    rows: list[dict[str, Any]] = [
        {
            "context": f"The {topic} is blue.",
            "qas": [
                {"id": f"{topic} {n}", "question": f"{word} {topic}?", "answers": [{"text": topic, "answer_start": 4}]}
                for n, word in enumerate(("What is", "Which thing is a"))
            ],
        }
        for topic in topics
    ]
    return json.dumps({"data": [{"title": "things", "paragraphs": rows}]})


@pytest.mark.parametrize("kind", ["embedding", "ranking"])
def test_queries_of_all_shards(kind: str, tmp_path: Path) -> None:
    for shard in range(3):
        asked, found = ([f"{word} {shard} {n}" for n in range(20)] for word in ("what is", "it is"))
        table = pa.table({"query": asked, "positive": found})
        pq.write_table(table, tmp_path / f"train-{shard:05}-of-00003.parquet")
    data = load_task(str(tmp_path), kind=kind)
    splits = (data.train, data.validation)
    columns = [split[name][:] for split in splits for name in ("text", "passage") if name in split.column_names]
    texts = {text for column in columns for text in column if isinstance(text, str)}
    assert {text for text in texts if text.startswith("what is")} == {
        f"what is {shard} {n}" for shard in range(3) for n in range(20)
    }


@pytest.mark.parametrize("kind", ["embedding", "ranking", "qa"])
def test_questions_of_all_shards(kind: str, folder: Folder) -> None:
    files = {"train-1.json": paragraphs("sky", "sea"), "train-2.json": paragraphs("jay", "ice")}
    source = folder(files | {"dev.json": paragraphs("bay", "hay")})
    data = load_task(source, kind=kind)
    read = json.dumps([data.train[name][:] for name in data.train.column_names], default=str)
    assert all(topic in read for topic in ("sky", "sea", "jay", "ice"))
    assert "train: read train-1.json, train-2.json as one split" in data.notes


def test_a_file_of_another_type_is_no_split(folder: Folder) -> None:
    rows = "".join(f'{{"query": "what is {n}", "positive": "it is {n}"}}\n' for n in range(20))
    data = load_task(folder({"train.jsonl": rows, "dev.pdf": "no table"}), kind="embedding")
    assert any("no validation split" in note for note in data.notes)


def test_sentences_of_all_shards_and_files_that_are_skipped(folder: Folder) -> None:
    files = {"train-1.conll": "EU\tB-org\n", "train-2.conll": "Bonn\tB-loc\n", "valid.conll": "EU\tB-org\n"}
    data = load_task(folder(files | {"dev.conll": "Bonn\tB-loc\n"}))
    assert data.train["words"][:] == [["EU"], ["Bonn"]]
    assert data.task.labels == ("O", "B-loc", "I-loc", "B-org", "I-org")
    assert "skipped dev.conll: valid.conll is the validation split" in data.notes


def test_files_of_one_name_in_two_folders_are_two_splits(folder: Folder) -> None:
    rows = "text,label\n" + "".join(f"a film {n},{'pos' if n % 2 else 'neg'}\n" for n in range(8))
    with pytest.raises(DataError, match="several training splits"):
        load_task(folder({"en/train.csv": rows, "fr/train.csv": rows}))


@pytest.mark.parametrize(
    ("kind", "text"), [("tagging", "EU\tB-org\n\nin\tO\n"), ("qa", paragraphs("sky")), ("embedding", paragraphs("sky"))]
)
def test_two_training_splits_are_refused(kind: str, text: str, folder: Folder) -> None:
    ending = "conll" if kind == "tagging" else "json"
    with pytest.raises(DataError, match=r"several training splits, .*train-a\.\w+ and .*train-b\.\w+\. Keep one"):
        load_task(folder({f"train-a.{ending}": text, f"train-b.{ending}": text}), kind=kind)


def test_shards_with_the_hash_of_the_hub(tmp_path: Path) -> None:
    hashes = {"train": ("6ef3991c06080e14", "5fd8b8ba1f5a3a4c"), "validation": ("b42a775f407cee45", "0123456789abcdef")}
    for role, names in hashes.items():
        for shard, name in enumerate(names):
            rows = {"text": [f"{role} {shard} {n}" for n in range(20)], "label": ["a", "b"] * 10}
            pq.write_table(pa.table(rows), tmp_path / f"{role}-0000{shard}-of-00002-{name}.parquet")
    data = load_task(str(tmp_path))
    assert (len(data.train), len(data.validation), data.test) == (40, 40, None)
    assert "train-00000-of-00002-6ef3991c06080e14.parquet: read 2 files as one" in data.notes


def test_shards_are_read_by_name(folder: Folder) -> None:
    first = "".join(json.dumps({"text": f"film {n}", "label": "ab"[n % 2]}) + "\n" for n in range(20))
    other = "".join(json.dumps({"label": "ab"[n % 2], "text": f"story {n}"}) + "\n" for n in range(20))
    data = load_task(folder({"train-0.jsonl": first, "train-1.jsonl": other}))
    assert len(data.train) + len(data.validation) == 40
    lists = other.replace('"a"', '["a"]').replace('"b"', '["b"]')
    with pytest.raises(DataError, match=r"train-1.jsonl: its columns, or which of them have lists, differ"):
        load_task(folder({"train-0.jsonl": first, "train-1.jsonl": lists}))
