"""What is learned from a label column: the kind of task, its classes, and the labels as numbers."""

import json

import pytest

from compress.data import Kind, TaskData, load_task
from compress.errors import ArgumentError, DataError
from tests.data.conftest import Folder


def loaded(folder: Folder, labels: list[object], kind: Kind | None = None, **columns: str) -> TaskData:
    rows = "".join(json.dumps({"text": f"text {n}", "label": label}) + "\n" for n, label in enumerate(labels))
    return load_task(folder({"train.jsonl": rows, "dev.jsonl": rows}), kind=kind, **columns)


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["b", "a", "b"], ("a", "b")),
        ([10, 9, 10], ("9", "10")),
        ([1.0, 0.0, 1.0], ("0", "1")),
        (["1", 0, "1.0"], ("0", "1")),
        ([True, False, True], ("false", "true")),
        ([" yes", "no", "yes "], ("no", "yes")),
        (["a, b", "c, d", "a, b"], ("a, b", "c, d")),
        ([2**60 + 1, 2**60, 2**60 + 1], (str(2**60), str(2**60 + 1))),
    ],
)
def test_words_and_whole_numbers_are_classes(folder: Folder, labels: list[object], names: tuple[str, ...]) -> None:
    data = loaded(folder, labels)
    assert (data.task.kind, data.task.labels) == ("classification", names)
    assert sorted(set(data.train["label"][:])) == [0, 1]
    assert data.train["label"][0] == data.train["label"][2]


def test_fractions_are_a_regression(folder: Folder) -> None:
    data = loaded(folder, [5, "3.8", 0.25])
    assert (data.task.kind, data.task.labels, data.task.outputs, data.task.metric) == ("regression", (), 1, "pearson")
    assert data.train["label"][:] == pytest.approx([5.0, 3.8, 0.25])


def test_whole_numbers_as_regression(folder: Folder) -> None:
    assert loaded(folder, [1, 2, 3], kind="regression").train["label"][:] == [1.0, 2.0, 3.0]
    assert (
        "whole numbers are read as 3 classes; ask for the kind regression otherwise" in loaded(folder, [1, 2, 3]).notes
    )


@pytest.mark.parametrize("labels", [[["b", "a"], [], ["b"]], ["b|a", "", "b"], ["b | a", None, " b "]])
def test_lists_and_bars_are_multilabel(folder: Folder, labels: list[object]) -> None:
    data = loaded(folder, labels)
    assert (data.task.kind, data.task.labels, data.task.metric) == ("multilabel", ("a", "b"), "f1")
    assert data.train["label"][:] == [[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]


def test_labels_with_commas(folder: Folder) -> None:
    data = loaded(folder, ["a,b", "a", "b"])
    assert (data.task.kind, data.task.labels) == ("multilabel", ("a", "b"))
    assert loaded(folder, ["a,b", "c,d"], kind="multilabel").task.labels == ("a", "b", "c", "d")


def test_several_columns_of_flags_are_multilabel(folder: Folder) -> None:
    content = "text\trude\tloud\nsome text\t1\t0\nmore text\t1\t1\n"
    data = load_task(folder({"train.tsv": content, "dev.tsv": content}), label="loud,rude")
    assert (data.task.kind, data.task.label, data.task.labels) == ("multilabel", "loud,rude", ("loud", "rude"))
    assert data.train["label"][:] == [[0.0, 1.0], [1.0, 1.0]]
    found = load_task(folder({"train.tsv": f"{content}nice text\t0\t0\n", "dev.tsv": content}))
    assert (found.task.kind, found.task.label) == ("multilabel", "rude,loud")
    assert "took 'rude', 'loud' as labels, several of which a text may have, because all are 0 or 1" in found.notes
    mixed = "text\trude\tgrade\nsome text\t1\t4\nmore text\t0\t5\n"
    with pytest.raises(DataError, match=r"which of 'rude', 'grade' is the label.*--label a,b"):
        load_task(folder({"train.tsv": mixed, "dev.tsv": mixed}))


def test_multilabel_hold_out(folder: Folder) -> None:
    rows = "".join(json.dumps({"text": f"text {n}", "label": [n % 3, 3]}) + "\n" for n in range(40))
    data = load_task(folder({"train.jsonl": rows}))
    assert (len(data.train), len(data.validation), data.task.labels) == (36, 4, ("0", "1", "2", "3"))


@pytest.mark.parametrize(
    ("labels", "kind", "message"),
    [
        (["a", "a"], None, "every training row has the class 'a'"),
        ([0.5, 0.5], None, "every training row has the number 0.5"),
        ([[], [], []], None, "every training row has the same labels"),
        (["a", None, "b", ""], None, r"2 of 4 rows have no label \(rows 2, 4\)"),
        ([0.5, float("nan"), 1.5], None, r"1 of 3 rows have no label \(row 2\)"),
        ([0.5, float("inf"), 1.5], None, "row 2: 'inf' is not a number"),
        ([0.5, 1e39, 1.5], None, r"row 2: '1e\+39' is not a number"),
        ([f"id{n // 2}" for n in range(20_010)], None, "10005 different values"),
        ([[f"tag{n}", "a"] for n in range(10_001)], None, "10002 different values"),
        (["a", "b"], "regression", "row 1: 'a' is not a number"),
        ([1, 0, "pos"], None, r"numbers in some rows and words in others \(row 3: 'pos'\)"),
        (["a", ["b"]], None, "row [12]: a column has both lists and texts"),
        (["a", {"b": 1}], None, r"1 of 2 rows have no label \(row 2\)"),
        (["a", "b"], "multiclass", "kind: .* found 'multiclass'. Did you mean 'multilabel'"),
        (
            [["a"], ["b"]],
            "classification",
            "kind classification was requested, but its label column makes it multilabel",
        ),
        ([f"id{n}" for n in range(50)], None, "looks like text or an identifier"),
    ],
)
def test_labels_that_are_no_task(folder: Folder, labels: list[object], kind: Kind | None, message: str) -> None:
    with pytest.raises((DataError, ArgumentError), match=message):
        loaded(folder, labels, kind)


@pytest.mark.parametrize(
    ("train", "validation", "message"),
    [
        (
            ["pos", "neg"],
            ["pos", "neg", "pso"],
            r"dev\.jsonl, row 3: the training split has no class 'pso'.*Did you mean 'pos'\?",
        ),
        (
            [0, 1],
            ["neg", "pos"],
            "rows 1, 2: the training split has no class 'neg', 'pos'.*write the labels of every split the same way",
        ),
        (["neg", "pos"], [0, 1], "write the labels of every split the same way"),
        ([["a"], ["b"]], [["a", "c"], []], "row 1: the training split has no class 'c'"),
        (["a", "b"], ["a", None], r"dev\.jsonl: 1 of 2 rows have no label \(row 2\)"),
    ],
)
def test_splits_that_disagree(folder: Folder, train: list[object], validation: list[object], message: str) -> None:
    def lines(labels: list[object]) -> str:
        return "".join(json.dumps({"text": "some text", "label": label}) + "\n" for label in labels)

    with pytest.raises(DataError, match=message):
        load_task(folder({"train.jsonl": lines(train), "dev.jsonl": lines(validation)}))


def test_metrics_belong_to_a_kind(folder: Folder) -> None:
    assert loaded(folder, ["a", "b"], metric="matthews").task.metric == "matthews"
    with pytest.raises(DataError, match="metric 'pearson' does not score a classification task"):
        loaded(folder, ["a", "b"], metric="pearson")
    with pytest.raises(DataError, match="Did you mean 'accuracy'"):
        loaded(folder, ["a", "b"], metric="acuracy")


def test_invalid_flags(folder: Folder) -> None:
    content = "text\trude\tloud\nsome text\t1\t0\nmore text\t2\t1\n"
    with pytest.raises(DataError, match="row 3: '2' in 'rude'"):
        load_task(folder({"train.tsv": content}), label="rude,loud")
