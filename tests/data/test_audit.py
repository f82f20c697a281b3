"""Faults of whole splits: rows that splits share, classes spelled twice or absent, few rows, texts all alike."""

from pathlib import Path

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Value

from compress.data import load_task
from compress.data.audit import row_keys
from compress.errors import DataError
from tests import marked
from tests.data.conftest import Folder

Labelled = list[tuple[str, str]]


def rows(first: int, last: int, labels: tuple[str, ...] = ("pos", "neg")) -> Labelled:
    return [(f"film number {n}", labels[n % len(labels)]) for n in range(first, last)]


def tsv(labelled: Labelled) -> str:
    return "text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in labelled)


def notes(folder: Folder, **splits: Labelled) -> tuple[str, ...]:
    return load_task(folder({f"{split}.tsv": tsv(labelled) for split, labelled in splits.items()})).notes


def test_clean_splits_have_no_notes(folder: Folder) -> None:
    assert notes(folder, train=rows(0, 200), dev=rows(200, 300), test=rows(300, 400)) == ()


@pytest.mark.parametrize(("shared", "loud"), [(90, True), (10, True), (9, False), (1, False)])
def test_rows_shared_with_train(folder: Folder, shared: int, loud: bool) -> None:
    test = [(f"  {text.upper()} ", label) for text, label in rows(0, shared)] + rows(400, 500 - shared)
    (note,) = notes(folder, train=rows(0, 200), dev=rows(200, 300), test=test)
    assert f"{shared} of 100 rows of test ({shared / 100:.1%}) are in train too" in note
    assert "too high" in note
    assert note.startswith("WARNING") is loud


def test_rows_shared_by_any_splits(folder: Folder) -> None:
    found = notes(folder, train=rows(0, 200), dev=rows(150, 250), test=rows(249, 349))
    assert [note.split(":")[0] for note in found if note.startswith("WARNING")] == ["WARNING"]
    assert any("50 of 100 rows of validation (50.0%) are in train too" in note for note in found)
    assert any("1 of 100 rows of test (1.0%) are in validation too" in note for note in found)


def test_test_split_equal_to_train(folder: Folder) -> None:
    train = rows(0, 100)
    with pytest.raises(DataError, match="the test split is the training split"):
        notes(folder, train=train, dev=rows(100, 200), test=train[::-1])
    assert any("are in train too" in note for note in notes(folder, train=train, dev=train, test=rows(200, 300)))
    assert any(
        note.startswith("WARNING: 50 of 50 rows of test (100.0%)")
        for note in notes(folder, train=train, dev=rows(200, 300), test=train[:50])
    )


def test_test_split_equal_to_train_before_holding_out(folder: Folder) -> None:
    with pytest.raises(DataError, match="the test split is the training split"):
        notes(folder, train=rows(0, 100), test=rows(0, 100))


def test_shared_questions_and_sentences(tmp_path: Path, folder: Folder) -> None:
    files = [marked.questions(tmp_path / f"{split}.json", count=40) for split in ("train", "dev")]
    (note,) = load_task(",".join(f"{file.stem}={file}" for file in files)).notes
    assert note.startswith("WARNING: 40 of 40 rows of validation (100.0%) are in train too")
    words = "Bonn\tB-loc\n\nParis\tB-loc\n"
    found = load_task(folder({"train.conll": words, "dev.conll": "Bonn\tB-loc\n"})).notes
    assert any("1 of 1 rows of validation" in note for note in found)


@pytest.mark.parametrize("other", ["num", "Num ", "ＮＵＭ"])
def test_classes_spelled_in_two_ways(folder: Folder, other: str) -> None:
    train = rows(0, 90, ("NUM", "LOC")) + rows(90, 200, (other, "LOC"))
    found = notes(folder, train=train, dev=rows(200, 300, ("NUM", other, "LOC")))
    (note,) = (note for note in found if "differ only in case" in note)
    assert note.startswith("WARNING")
    assert "'NUM' (78 rows)" in note


def test_classes_without_examples(folder: Folder) -> None:
    train, dev = rows(0, 200, ("a", "b", "c")), rows(200, 300, ("a", "b", "c"))
    found = notes(folder, train=train, dev=dev, test=rows(300, 400, ("a",)))
    assert found == ("test has no example of 2 of 3 classes (b, c): its score says nothing about them",)


def test_declared_classes_that_train_lacks(tmp_path: Path) -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["a", "b", "c"])})
    for split, first in (("train", 0), ("dev", 100)):
        split_rows = {"text": [f"text {n}" for n in range(first, first + 100)], "label": [n % 2 for n in range(100)]}
        Dataset.from_dict(split_rows, features).to_parquet(tmp_path / f"{split}.parquet")
    found = load_task(str(tmp_path)).notes
    assert any(note.startswith("WARNING: train has no example of 1 of 3 classes (c)") for note in found)


@pytest.mark.parametrize(("size", "points"), [(1, 100), (4, 25), (10, 10), (29, 3)])
def test_uncertainty_of_small_splits(folder: Folder, size: int, points: int) -> None:
    found = notes(folder, train=rows(0, 100), dev=rows(100, 100 + size), test=rows(200, 230))
    note = next(note for note in found if note.startswith(f"validation has {size} row"))
    assert f"{points} points" in note
    assert f"up to {98 / np.sqrt(size):.0f} points" in note
    assert not any(note.startswith("test has 30") for note in found)


def test_constant_texts_and_texts_equal_to_labels(folder: Folder) -> None:
    with pytest.raises(DataError, match="all 4 training rows have the same text"):
        notes(folder, train=[("Same", "a"), ("same ", "b")] * 2, dev=rows(0, 50, ("a", "b")))
    found = notes(folder, train=[("Pos", "pos"), ("neg", "neg"), ("a film", "neg")], dev=rows(0, 50))
    assert "WARNING: 2 of 3 training texts are the name of their class: is --text the right column?" in found


@pytest.mark.parametrize("space", ["  ", "\u3000", "\xa0", "\x1d", "\x0b", "\u2009\t"])
def test_texts_that_differ_in_case_and_spaces_are_the_same(space: str) -> None:
    texts = ["two words", f"{space}Two{space}WORDS ", "tw\u00f3 words", "TW\u00d3 words"]
    one, again, other, other_again = row_keys(Dataset.from_dict({"text": texts})).tolist()
    assert one == again != other == other_again


def test_the_border_between_two_texts_is_kept() -> None:
    one, other = row_keys(Dataset.from_dict({"text": ["a b", "a"], "text_pair": ["c", "b c"]})).tolist()
    assert one != other
