"""A training split without labels, where they are not needed."""

from pathlib import Path

import pytest

from compress.data import load_task
from compress.errors import DataError
from compress.evaluation.baselines import baselines


def folder(path: Path, train: str, dev: str) -> str:
    path.mkdir()
    (path / "train.tsv").write_text(train, encoding="utf-8")
    (path / "dev.tsv").write_text(dev, encoding="utf-8")
    return str(path)


TRAIN = "text\n" + "".join(f"a film of {n}\n" for n in range(12))
DEV = "text\tlabel\n" + "".join(f"a plot of {n}\t{('bad', 'good')[n % 3 > 0]}\n" for n in range(12))


def test_validation_names_the_classes_and_train_has_texts_alone(tmp_path: Path) -> None:
    data = load_task(folder(tmp_path / "data", TRAIN, DEV), unlabelled=True)
    assert data.task.labels == ("bad", "good")
    assert data.train.column_names == ["text"]
    assert data.train["text"][:2] == ["a film of 0", "a film of 1"]
    assert data.validation["label"][:4] == [0, 1, 1, 0]
    assert len(set(data.notes)) == len(data.notes)
    found = baselines(data, data.validation)
    assert list(found) == ["majority"]
    assert found["majority"]["accuracy"] == pytest.approx(8 / 12)


def test_it_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        load_task(folder(tmp_path / "data", TRAIN, DEV))


def test_with_labels_nothing_changes(tmp_path: Path) -> None:
    source = folder(tmp_path / "data", DEV, DEV)
    ours, theirs = load_task(source, unlabelled=True), load_task(source)
    assert ours.fingerprint == theirs.fingerprint
    assert ours.train._fingerprint == theirs.train._fingerprint


def test_a_named_label_column_that_only_validation_has(tmp_path: Path) -> None:
    source = folder(tmp_path / "data", TRAIN, DEV.replace("label", "mood"))
    data = load_task(source, label="mood", unlabelled=True)
    assert data.task.label == "mood"
    assert data.train.column_names == ["text"]


def test_without_labels_anywhere(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        load_task(folder(tmp_path / "data", TRAIN, TRAIN), unlabelled=True)
