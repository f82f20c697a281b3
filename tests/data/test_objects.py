"""Models and tables handed over as objects are kept by their contents, and serve as if they had been on disk."""

from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from compress import distill
from compress.data import load_task
from compress.data.objects import data_path, teacher_path
from compress.errors import ArgumentError, DataError, RunError
from compress.models import checkpoints
from compress.models import teacher as teachers
from compress.teachers.labelling import load_texts
from tests import tiny

TEXTS = [f"{text}, {number}" for number in range(10) for text in ("a good film", "a bad film", "fine", "dull")]
ROWS = {"text": TEXTS, "label": ["yes", "no", "yes", "no"] * 10}


def frame() -> pd.DataFrame:
    return pd.DataFrame(ROWS)


def classes() -> Dataset:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    return Dataset.from_dict(ROWS | {"label": [int(each == "yes") for each in ROWS["label"]]}, features=features)


def test_a_model_with_its_tokenizer_is_a_teacher(home: Path) -> None:
    first, again = (teacher_path((tiny.bert(), tiny.tokenizer())) for _ in range(2))
    assert first == again
    assert Path(first).parent == home / "models"
    assert teacher_path((tiny.bert(seed=1), tiny.tokenizer())) != first
    assert len(list((home / "models").glob("[!.]*"))) == 2
    loaded = teachers.load(first, checkpoints.resolve(first), load_task(data_path(frame())).task)
    assert loaded.trained
    assert loaded.model.num_parameters() == tiny.bert().num_parameters()


@pytest.mark.parametrize("data", [frame(), {"train": frame()}, Dataset.from_dict(ROWS), classes()])
def test_a_table_is_a_data_set(data: Any) -> None:
    path = data_path(data)
    assert data_path(data) == path
    found = load_task(path)
    assert found.task.labels == ("no", "yes")
    assert sorted([*found.train["text"][:], *found.validation["text"][:]]) == sorted(TEXTS)
    assert len(found.validation) == 4


def test_splits_are_those_of_a_dictionary() -> None:
    splits = {"train": classes(), "validation": classes().select(range(8)), "test": classes().select(range(20))}
    found = load_task(data_path(DatasetDict(splits)))
    assert (len(found.train), len(found.validation), found.test and len(found.test)) == (40, 8, 20)


def test_folders_that_save_to_disk_wrote(tmp_path: Path) -> None:
    extra = Dataset.from_dict({"text": ["a film"]})
    DatasetDict({"train": classes(), "test": classes().select(range(20)), "unsupervised": extra}).save_to_disk(
        tmp_path / "splits"
    )
    classes().save_to_disk(tmp_path / "one")
    found = load_task(tmp_path / "splits")
    assert (found.task.labels, len(found.train) + len(found.validation)) == (("no", "yes"), 40)
    assert found.test is not None
    assert len(load_task(tmp_path / "one").train) == 36
    next((tmp_path / "one").glob("*.arrow")).unlink()
    with pytest.raises(DataError, match="one: cannot be read as a data set that save_to_disk wrote"):
        load_task(tmp_path / "one")


@pytest.mark.parametrize("teacher", [tiny.bert(), (tiny.bert(),), (tiny.bert(), "minilm"), None, 3])
def test_invalid_teachers(teacher: Any) -> None:
    with pytest.raises(ArgumentError, match=r"with its tokenizer, \(model, tokenizer\)") as refused:
        distill(teacher=teacher, data="intents", out="out")
    assert refused.value.name == "teacher"


@pytest.mark.parametrize("data", [None, 3, {}, ["a", "b"], {"train": "a.tsv"}])
def test_invalid_data(data: Any) -> None:
    with pytest.raises(ArgumentError, match="DataFrame") as refused:
        load_task(data)
    assert refused.value.name == "source"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"rows": frame()}, "no split 'rows'"),
        ({"../train": frame()}, "no split"),
        (pd.DataFrame({"text": ["a", 3], "label": [1, 2]}), "cannot be written"),
        (pd.DataFrame([["a", "b"]], columns=["text", "text"]), "cannot be written"),
        (frame().iloc[:0], "is empty"),
    ],
)
def test_invalid_tables(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_task(data)


def test_load_task_takes_tables_and_paths(tmp_path: Path) -> None:
    found = load_task(frame())
    assert found.name.startswith("DataFrame-")
    frame().to_csv(tmp_path / "train.csv", index=False)
    assert load_task(tmp_path).task == load_task(tmp_path / "train.csv").task == found.task


def test_texts_to_be_labelled_may_be_a_table() -> None:
    assert load_texts(frame()[["text"]]).rows["text"][:] == TEXTS


def test_names_and_paths_are_themselves(tmp_path: Path) -> None:
    assert teacher_path("minilm") == "minilm"
    assert teacher_path(tmp_path) == data_path(tmp_path) == str(tmp_path)


def test_resume_a_run_with_objects(tmp_path: Path) -> None:
    class BeginsError(Exception):
        """Training would begin now."""

    def begin(seed: int, *, resume: bool) -> None:
        tiny.call(distill,
            teacher=(tiny.bert(seed=seed), tiny.tokenizer()), recipe=Path(tiny.recipe(tmp_path / "recipes")),
            data=frame(), out=str(tmp_path / "run"), resume=resume,
        )  # fmt: skip

    with mock.patch("compress.teachers.checkpoint.with_head", side_effect=BeginsError):
        with pytest.raises(BeginsError):
            begin(0, resume=False)
        (tmp_path / "run" / "stages").mkdir()
        with pytest.raises(BeginsError):
            begin(0, resume=True)
        with pytest.raises(RunError, match="teacher was"):
            begin(1, resume=True)
