"""What is learned from a label column: the kind of task, its classes, and the labels as numbers."""

import json

import pytest

from compress.data import TaskData, load_task
from compress.errors import ArgumentError, DataError
from compress.kinds import Kind
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
        (["1", 0, "1"], ("0", "1")),
        ([True, False, True], ("false", "true")),
        ([" yes", "no", "yes "], ("no", "yes")),
        (["a, b", "c, d", "a, b"], ("a, b", "c, d")),
        ([2**60 + 1, 2**60, 2**60 + 1], (str(2**60), str(2**60 + 1))),
        (["1" + 30 * "0", "2", "1" + 30 * "0"], ("2", "1" + 30 * "0")),
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


@pytest.mark.parametrize("mark", [",", ";", "; "])
def test_labels_with_commas(folder: Folder, mark: str) -> None:
    data = loaded(folder, [f"a{mark}b", "a", "b"])
    assert (data.task.kind, data.task.labels) == ("multilabel", ("a", "b"))
    assert loaded(folder, ["a,b", "c,d"], kind="multilabel").task.labels == ("a", "b", "c", "d")


@pytest.mark.parametrize("labels", [[["O", "B-geo"], ["O"], ["O", "O"]], ["O,B-geo,O", "O,O", "B-geo,O"]])
def test_tags_of_words_are_not_labels_of_texts(folder: Folder, labels: list[object]) -> None:
    """A text with a list of tags, as tutorials write them, would be read as multilabel."""
    for kind in (None, "multilabel"):
        with pytest.raises(DataError, match="the labels B-geo, O are tags of words"):
            loaded(folder, labels, kind=kind)


def test_several_columns_of_flags_are_multilabel(folder: Folder) -> None:
    content = "text\trude\tloud\nsome text\t1\t0\nmore text\t1\t1\n"
    data = load_task(folder({"train.tsv": content, "dev.tsv": content}), label="loud,rude")
    assert (data.task.kind, data.task.label, data.task.labels) == ("multilabel", "loud,rude", ("loud", "rude"))
    assert data.train["label"][:] == [[0.0, 1.0], [1.0, 1.0]]
    found = load_task(folder({"train.tsv": f"{content}nice text\t0\t0\n", "dev.tsv": content}))
    assert (found.task.kind, found.task.label) == ("multilabel", "rude,loud")
    assert "took 'rude', 'loud' as labels, of which a text may have several, because all are 0 or 1" in found.notes
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
        ([0.5, float("inf"), 1.5], None, r"row 2: 'inf'\)"),
        ([0.5, 1e39, 1.5], None, r"row 2: '1e\+39' is not a number"),
        ([f"id{n // 2}" for n in range(20_010)], None, "10005 different values"),
        ([[f"tag{n}", "a"] for n in range(10_001)], None, "10002 different values"),
        (["a", "b"], "regression", "row 1: 'a' is not a number"),
        ([1, 0, "pos"], None, r"numbers in some rows and words in others \(row 3: 'pos'\)"),
        (["a", ["b"]], None, "line 1: a column has both lists and texts"),
        ([1, 0, True], None, r"row 3: 'true'\)\. Write them the same way"),
        ([*[0, 1] * 600, "maybe"], None, r"row 1201: 'maybe'\)\. Write them the same way"),
        (["a", {"b": 1}], None, r"line 2: has an object, .* in 'label'"),
        (["a", "b"], "multiclass", "kind: .* found 'multiclass'. Did you mean 'multilabel'"),
        ([["a"], ["b", "a"]], "classification", r"row 2: the kind classification was requested, but these rows"),
        ([f"id{n}" for n in range(50)], None, "looks like text or an identifier"),
    ],
)
def test_labels_that_are_no_task(folder: Folder, labels: list[object], kind: Kind | None, message: str) -> None:
    refusal = ArgumentError if kind == "multiclass" else DataError  # no kind at all
    with pytest.raises(refusal, match=message):
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


# What is a number, what is a name


def table(folder: Folder, labels: list[str], kind: Kind | None = None) -> TaskData:
    """Load labels of a csv file, which has no types."""
    rows = "text,label\n" + "".join(f'text {n},"{label}"\n' for n, label in enumerate(labels))
    return load_task(folder({"train.csv": rows, "dev.csv": rows}), kind=kind)


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["0110", "110", "0012", "12"], ("0012", "12", "0110", "110")),
        (["1e3", "1000", "12e2"], ("1000", "1e3", "12e2")),
        (["01.10", "01.1", "47.00", "47"], ("01.1", "01.10", "47", "47.00")),
        (["1.10", "1.1", "2.0"], ("1.1", "1.10", "2.0")),
        (["1", "1.0", "2"], ("1", "1.0", "2")),
        (["+1", "-1", "0"], ("-1", "0", "+1")),
        (["nan", "None", "NA", "x"], ("NA", "None", "nan", "x")),
        (["True", "False", "true"], ("False", "True", "true")),
        (["2.0", "1.0", "2.0"], ("1", "2")),
        (["10", "9", "10"], ("9", "10")),
        (["12-14", "15-17"], ("12-14", "15-17")),
        (["1,5|2", "2"], ("1,5", "2")),
    ],
)
def test_names_in_text_files_are_kept_as_written(folder: Folder, labels: list[str], names: tuple[str, ...]) -> None:
    data = table(folder, labels)
    assert data.task.labels == names
    if data.task.kind == "classification" and labels[0] in names:
        assert [names[n] for n in data.train["label"]] == labels


def test_a_class_that_may_mean_a_missing_label_is_noted(folder: Folder) -> None:
    """SNLI's gold_label is - where its annotators disagree."""
    data = table(folder, ["-", "neutral", "entailment"])
    assert data.task.labels == ("-", "entailment", "neutral")
    assert any("'-' is read as a class" in note for note in data.notes)


@pytest.mark.parametrize("labels", [["0110", "110"], ["1e3", "1000"], ["1", "1.0"], ["0.5", "1.5"]])
def test_strings_stay_strings(folder: Folder, labels: list[str]) -> None:
    data = loaded(folder, labels * 2)
    assert (data.task.kind, set(data.task.labels)) == ("classification", set(labels))


def test_spellings_of_scores_are_a_regression(folder: Folder) -> None:
    """STS-B has 0, 0.00 and 0.000, and more values than classes have."""
    numbers = [f"{n / 7:.3f}" for n in range(30)]
    assert table(folder, ["0", "0.00", *numbers]).task.kind == "regression"


@pytest.mark.parametrize(
    "labels", [["3,5", "4,0", "2,25"], ["1,234.5", "2"], ["45%", "50%"], ["$5", "$10"], ["1 000", "2"]]
)
def test_numbers_in_other_notations_are_refused(folder: Folder, labels: list[str]) -> None:
    with pytest.raises(DataError, match=r"rows? [23].*the label .* may be a number, several or a name"):
        table(folder, labels)
    assert set(table(folder, labels, "classification").task.labels) == set(labels)


def test_decimal_commas_of_a_requested_regression(folder: Folder) -> None:
    assert table(folder, ["3,5", "4", "2,25"], "regression").train["label"][:] == [3.5, 4.0, 2.25]
    with pytest.raises(DataError, match="row 2: '1,234' is not a number"):  # or one thousand
        table(folder, ["1,234", "2,500"], "regression")


@pytest.mark.parametrize(
    "labels",
    [["('a', 'b')", "('a',)"], ["[a, b]", "[a]"], ["[0 1 1]", "[1 0 0]"], ["{'a'}", "x"], ["['a' 'b']", "['a']"]],
)
def test_lists_in_other_notations_are_refused(folder: Folder, labels: list[str]) -> None:
    with pytest.raises(DataError, match="looks like a list"):
        table(folder, labels)


def test_lists_written_as_text_are_lists(folder: Folder) -> None:
    data = table(folder, ["['a', 'b']", "['b']", "[]"])
    assert (data.task.kind, data.task.labels) == ("multilabel", ("a", "b"))
    assert data.train["label"][:] == [[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("number", [int, float, bool])
def test_lists_of_flags_have_a_label_for_each_place(folder: Folder, number: type) -> None:
    rows = [[1, 0, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]]
    data = loaded(folder, [list(map(number, row)) for row in rows])
    assert (data.task.kind, data.task.labels) == ("multilabel", ("0", "1", "2", "3"))
    assert data.train["label"][:] == rows


def test_one_label_in_each_list(folder: Folder) -> None:
    for rows in ([[1, 0], [0, 1], [1, 0]], [["a"], ["b"], ["a"]]):
        assert any("exactly one label" in note for note in loaded(folder, list(rows)).notes)
        data = loaded(folder, list(rows), "classification")
        assert (data.task.kind, data.train["label"][:]) == ("classification", [0, 1, 0])
    assert loaded(folder, [[3], [5], [3]]).task.labels == ("3", "5")


def test_splits_with_other_flags(folder: Folder) -> None:
    def lines(labels: list[list[float]]) -> str:
        return "".join(json.dumps({"text": "some text", "label": label}) + "\n" for label in labels)

    for wrong, message in (
        ([[1, 0]], "row 1: expected a list of 3 numbers"),
        ([[1, 0, 2]], "row 1: expected a list of 3"),
    ):
        with pytest.raises(DataError, match=message):
            load_task(folder({"train.jsonl": lines([[1, 0, 0], [0, 1, 1]]), "dev.jsonl": lines(wrong)}))
    with pytest.raises(DataError, match=r"lists of numbers with fractions, such as 0\.[28]"):
        load_task(folder({"train.jsonl": lines([[0.2, 0.8], [0.8, 0.2]])}))


def test_splits_in_other_number_forms(folder: Folder) -> None:
    def csv(labels: list[str]) -> str:
        return "text,label\n" + "".join(f"text {n},{label}\n" for n, label in enumerate(labels))

    data = load_task(folder({"train.csv": csv(["1", "0", "1"]), "dev.csv": csv(["1.0", "0.0"])}))
    assert data.validation["label"][:] == [1, 0]
    with pytest.raises(DataError, match="the training split has no class '0110'"):
        load_task(folder({"train.csv": csv(["110", "120"]), "dev.csv": csv(["0110"])}))
