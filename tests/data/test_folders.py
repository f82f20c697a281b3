"""Folders of files: formats, headers, quoting, which file is which split, which column is which."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, Value

from compress.data import load_task
from compress.errors import DataError
from compress.io import CHECKSUMS
from tests.data.conftest import Folder

ROWS = [("a fine film", "pos"), ("a dull film", "neg"), ("so very fine", "pos"), ("so very dull", "neg")]

COLUMNS = {"text": [text for text, _ in ROWS], "label": [label for _, label in ROWS]}


def tsv(rows: list[tuple[str, ...]] = ROWS, header: str = "text\tlabel\n") -> str:
    return header + "".join("\t".join(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tsv", tsv()),
        ("txt", tsv()),
        ("csv", tsv().replace("\t", ",")),
        ("csv", tsv().replace("\t", ";")),
        ("tsv", "\ufeff" + tsv().replace("\n", "\r\n")),
        ("jsonl", "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in ROWS)),
        ("json", json.dumps([{"text": text, "label": label} for text, label in ROWS], indent=1)),
        ("json", "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in ROWS)),
        (
            "json",
            json.dumps({"version": 1, "data": [{"text": text, "label": label} for text, label in ROWS]}, indent=1),
        ),
        ("json", json.dumps(COLUMNS)),
        ("json", json.dumps({name: dict(enumerate(cells)) for name, cells in COLUMNS.items()})),
    ],
)
def test_every_text_format_gives_the_same_task(folder: Folder, name: str, content: str) -> None:
    data = load_task(folder({f"train.{name}": content, f"dev.{name}": content}))
    assert data.task.labels == ("neg", "pos")
    assert data.task.metric == "accuracy"
    assert data.train.to_list() == [{"text": text, "label": int(label == "pos")} for text, label in ROWS]
    assert data.validation.to_list() == data.train.to_list()
    assert not any("header" in note or "took" in note for note in data.notes)


def test_parquet_with_class_names(tmp_path: Path) -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["pos", "neg", "mixed"])})
    rows = {"text": [text for text, _ in ROWS], "label": [0, 1, 0, 1]}
    for split in ("train-00000-of-00002", "train-00001-of-00002", "validation"):
        pq.write_table(Dataset.from_dict(rows, features).data.table, tmp_path / f"{split}.parquet")
    data = load_task(str(tmp_path))
    assert data.task.labels == ("pos", "neg", "mixed")
    assert data.train["label"][:] == [0, 1, 0, 1] * 2  # both shards


def test_parquet_without_class_names(tmp_path: Path) -> None:
    texts = [text for text, _ in ROWS]
    pq.write_table(pa.table({"text": texts, "label": [3, 20, 3, 20]}), tmp_path / "train.parquet")
    words = pa.array(["3", "20", "3", "3"]).dictionary_encode()
    pq.write_table(
        pa.table({"text": pa.array(texts).cast(pa.large_string()), "label": words}), tmp_path / "dev.parquet"
    )
    data = load_task(str(tmp_path))
    assert data.task.labels == ("3", "20")
    assert data.validation["label"][:] == [0, 1, 0, 0]


def test_a_single_file_is_a_training_split(folder: Folder) -> None:
    rows = [(f"{text}, {number}", *label) for number in range(10) for text, *label in ROWS]
    data = load_task(folder({"reviews.tsv": tsv(rows)}) + "/reviews.tsv")
    assert (len(data.train), len(data.validation), data.test) == (36, 4, None)


def test_two_texts_are_a_pair(folder: Folder) -> None:
    rows = [("0", "he ran", "she ran", "1"), ("1", "he sat", "he sat", "0")]
    content = tsv(rows, "index\tSentence 1\tsentence_2\tis_duplicate\n")
    data = load_task(folder({"train.tsv": content, "dev.tsv": content}))
    assert data.task.text == ("Sentence 1", "sentence_2")
    assert data.task.pair
    assert data.train[0] == {"text": "he ran", "text_pair": "she ran", "label": 1}


LOOSE = tsv([('" the end', "pos"), ('"quoted whole"', "neg")])
CSV = 'text,label\n"one, ""two""\nthree",a\nfour,b\n'


@pytest.mark.parametrize(
    ("files", "texts"),
    [
        ({"train.tsv": LOOSE, "dev.tsv": LOOSE}, ['" the end', '"quoted whole"', '" the end', '"quoted whole"']),
        (  # a doubled mark, or a tab inside, shows that it is quoted, and so are its siblings
            {
                "train.tsv": tsv([('"she said ""no""\tand left"', "pos"), ("nothing", "neg")]),
                "dev.tsv": tsv([('"a\tb"', "pos")]),
            },
            ['she said "no"\tand left', "nothing", "a\tb"],
        ),
        ({"train.csv": CSV, "dev.csv": CSV}, ['one, "two"\nthree', "four", 'one, "two"\nthree', "four"]),
    ],
    ids=["unquoted tsv", "quoted tsv", "csv"],
)
def test_quoting(files: dict[str, str], texts: list[str], folder: Folder) -> None:
    data = load_task(folder(files))
    assert [*data.train["text"], *data.validation["text"]] == texts


def test_header_of_a_sibling(folder: Folder) -> None:
    data = load_task(folder({"train.tsv": tsv(), "val.tsv": tsv(header="")}))
    assert len(data.validation) == len(ROWS)
    assert "val.tsv has no header: took the column names of train.tsv" in data.notes


def test_columns_by_contents(folder: Folder) -> None:
    data = load_task(folder({"train.tsv": tsv(header=""), "dev.tsv": tsv(header="")}))
    assert (data.task.text, data.task.label) == (("1",), "2")
    assert len(data.train) == len(ROWS)
    assert "took '1' as the text, by the contents" in data.notes


def test_recurring_phrases_are_no_text(folder: Folder) -> None:
    phrases = ("of the old town", "of the new town", "by the great sea", "in the high hills")
    rows = [(phrases[n % 4], f"a house with {n} rooms", "ab"[n % 2]) for n in range(10)]
    data = load_task(folder({"train.tsv": tsv(rows, ""), "dev.tsv": tsv(rows, "")}), label="3")
    assert data.task.text == ("2",)


def test_unknown_header_above_recurring_labels(folder: Folder) -> None:
    content = tsv(ROWS * 6, "phrase\tmood\n")
    data = load_task(folder({"train.tsv": content, "dev.tsv": content[len("phrase\tmood\n") :]}), text=["phrase"])
    assert (data.task.text, data.task.label) == (("phrase",), "mood")
    assert (len(data.train), len(data.validation)) == (24, 24)


def test_class_named_like_a_column(folder: Folder) -> None:
    rows = [("how are you now", "question"), ("i am just fine", "answer"), ("and what is it", "question")]
    data = load_task(folder({"train.tsv": tsv(rows, ""), "dev.tsv": tsv(rows, "")}))
    assert data.task.labels == ("answer", "question")
    assert len(data.train) == 3


def test_cells_after_numbered_columns_are_ignored(folder: Folder) -> None:
    content = "x\t0.5\tsome text here\ny\t1.0\tmore text there\tlicence\thttp\n"
    source = folder({"train.tsv": content, "dev.tsv": content})
    data = load_task(source, text=["3"], label="2")
    assert data.train.to_list() == [{"text": "some text here", "label": 0.5}, {"text": "more text there", "label": 1.0}]
    assert any("train.tsv: some rows have more than 3 cells" in note for note in data.notes)


def test_ambiguous_columns(folder: Folder) -> None:
    content = "news\t2012\t4.5\tsome text here\nwiki\t2013\t1.0\tmore text there\n"
    with pytest.raises(DataError, match=r"cannot tell which of '1', '2', '3' is the label") as refused:
        load_task(folder({"train.tsv": content}))
    assert "--label" in str(refused.value)
    assert re.search(r"^  3: '4.5'$", str(refused.value), re.MULTILINE)


def test_several_label_columns(folder: Folder) -> None:
    rows = [("some text", "a", "b"), ("more text", "c", "d")]
    with pytest.raises(DataError, match=r"which of 'sentiment', 'topic' is the label"):
        load_task(folder({"train.tsv": tsv(rows, "text\ttopic\tsentiment\n")}))
    content = tsv(rows, "text\ttopic\tlabel\n")
    assert load_task(folder({"train.tsv": content, "dev.tsv": content})).task.labels == ("b", "d")


def test_split_words_in_file_names(folder: Folder) -> None:
    names = ["msr_paraphrase_train.txt", "sts-dev.tsv", "my.test.tsv", "training_notes.txt", "README.txt"]
    files = dict.fromkeys(names[:2], tsv()) | {names[2]: tsv(ROWS[1:])} | dict.fromkeys(names[3:], "prose")
    data = load_task(folder(files))
    assert data.test is not None
    assert len(data.train) == len(data.validation) == len(data.test) + 1 == len(ROWS)


def test_second_validation_split(folder: Folder) -> None:
    splits = {"train.tsv": tsv(), "val.tsv": tsv(ROWS[:2]), "dev.tsv": tsv(ROWS[2:])}
    data = load_task(folder({**splits, "test.tsv": "index\ttext\n0\tunknown\n"}))
    assert (data.validation["text"][0], data.test and data.test["text"][0]) == (ROWS[0][0], ROWS[2][0])
    assert "skipped test.tsv: it has no labels" in data.notes
    assert "dev.tsv, a second validation split, is the test split" in data.notes
    data = load_task(folder({**splits, "test.tsv": tsv(ROWS[:1])}))
    assert data.test is not None
    assert len(data.test) == 1
    assert "skipped dev.tsv: test.tsv is the test split" in data.notes


@pytest.mark.parametrize("blank", ["", "-1", "nan"])
def test_test_split_with_blank_labels(folder: Folder, blank: str) -> None:
    test = tsv([("some text", blank), ("more text", blank)])
    data = load_task(folder({"train.tsv": tsv(), "dev.tsv": tsv(), "test.tsv": test}))
    assert data.test is None
    assert data.notes[0] == "skipped test.tsv: it has no labels"


def test_held_out_rows_are_stratified(folder: Folder) -> None:
    rows = [(f"text number {n}", "rare" if n % 10 == 0 else "common") for n in range(300)]
    source = folder({"train.tsv": tsv([*rows, ("the only one", "single")])})
    first, again, other = load_task(source, seed=1), load_task(source, seed=1), load_task(source, seed=2)
    assert (len(first.train), len(first.validation)) == (271, 30)
    assert first.validation["label"][:].count(first.task.labels.index("rare")) == 3
    assert "the only one" in first.train["text"][:]
    assert not set(first.train["text"][:]) & set(first.validation["text"][:])
    assert first.validation.to_list() == again.validation.to_list()
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert "no validation split: held out 30 of 301 training rows (seed 1)" in first.notes


def test_fingerprint(folder: Folder) -> None:
    def fingerprint(rows: list[tuple[str, ...]], validation: list[tuple[str, ...]] = ROWS, metric: str = "f1") -> str:
        return load_task(folder({"train.tsv": tsv(rows), "dev.tsv": tsv(validation)}), metric=metric).fingerprint

    renamed = [(text, label + "itive") for text, label in ROWS]
    prints = [fingerprint(ROWS), fingerprint(ROWS[:3]), fingerprint(ROWS, ROWS[:2]), fingerprint(renamed, renamed)]
    assert len(set(prints)) == 4
    assert fingerprint(ROWS, metric="matthews") == prints[0]


def test_splits_are_memory_mapped(folder: Folder, home: Path) -> None:
    data = load_task(folder({"train.tsv": tsv(), "dev.tsv": tsv()}))
    kept = home / "data" / data.fingerprint
    assert [file["filename"] for file in data.train.cache_files] == [str(kept / "train.arrow")]
    assert sorted(path.name for path in kept.parent.rglob("*")) == sorted(
        [data.fingerprint, CHECKSUMS, "train.arrow", "validation.arrow"]
    )


def test_empty_texts_stay_and_are_noted(folder: Folder) -> None:
    rows = [(None, 1), (" ", 0), ("x", 1)]
    content = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)
    data = load_task(folder({"train.jsonl": content, "dev.jsonl": content}))
    assert len(data.train) == 3
    assert "train.jsonl: 2 of 3 texts in 'text' are empty (rows 1, 2)" in data.notes


# A training split without labels, where they are not needed

FILMS = "text\n" + "".join(f"a film of {n}\n" for n in range(12))
PLOTS = "text\tlabel\n" + "".join(f"a plot of {n}\t{('bad', 'good')[n % 3 > 0]}\n" for n in range(12))


def test_unlabelled_train(folder: Folder) -> None:
    data = load_task(folder({"train.tsv": FILMS, "dev.tsv": PLOTS}), unlabelled=True)
    assert data.task.labels == ("bad", "good")
    assert data.train.column_names == ["text"]
    assert data.train["text"][:2] == ["a film of 0", "a film of 1"]
    assert data.validation["label"][:4] == [0, 1, 1, 0]
    assert len(set(data.notes)) == len(data.notes)
    found = data.task.baselines(data, data.validation)
    assert list(found) == ["majority"]
    assert found["majority"]["accuracy"] == pytest.approx(8 / 12)


def test_unlabelled_train_with_named_label(folder: Folder) -> None:
    source = folder({"train.tsv": FILMS, "dev.tsv": PLOTS.replace("label", "mood")})
    data = load_task(source, label="mood", unlabelled=True)
    assert data.task.label == "mood"
    assert data.train.column_names == ["text"]


def test_unlabelled_with_labels(folder: Folder) -> None:
    source = folder({"train.tsv": PLOTS, "dev.tsv": PLOTS})
    ours, theirs = load_task(source, unlabelled=True), load_task(source)
    assert ours.fingerprint == theirs.fingerprint
    assert ours.train._fingerprint == theirs.train._fingerprint


@pytest.mark.parametrize(("dev", "unlabelled"), [(FILMS, True), (PLOTS, False)])
def test_missing_labels(dev: str, unlabelled: bool, folder: Folder) -> None:
    with pytest.raises(DataError):
        load_task(folder({"train.tsv": FILMS, "dev.tsv": dev}), unlabelled=unlabelled)


def test_fasttext_and_semicolon_files(folder: Folder) -> None:
    labelled = "".join(f"__label__{label} {text}\n" for text, label in ROWS)
    data = load_task(folder({"train.txt": labelled, "dev.txt": labelled}))
    assert data.task.labels == ("neg", "pos")
    assert data.train.to_list() == [{"text": text, "label": int(label == "pos")} for text, label in ROWS]
    spaced = labelled.replace("\n", "\n\n", 1)
    assert load_task(folder({"train.txt": spaced, "dev.txt": labelled})).train.to_list() == data.train.to_list()
    several = "".join(f"__label__a{' __label__b' if n % 2 else ''} text {n} of it\n" for n in range(8))
    data = load_task(folder({"train.txt": several, "dev.txt": several}))
    assert (data.task.kind, data.train["label"][:2]) == ("multilabel", [[1.0, 0.0], [1.0, 1.0]])
    divided = "".join(f"so very fine a film, number {n};{'pos' if n % 3 else 'neg'}\n" for n in range(30))
    data = load_task(folder({"train.txt": divided, "dev.txt": divided}))
    assert (data.task.kind, data.task.labels) == ("classification", ("neg", "pos"))
    assert data.train["text"][0] == "so very fine a film, number 0"


def test_files_with_the_name_of_a_split_that_are_not_read_are_noted(folder: Folder) -> None:
    table = "text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in ROWS)
    data = load_task(folder({"train.tsv": table, "eval.tsv": table, "test.tsv.gz": b"x"}))
    assert len(data.validation) == len(ROWS) and data.test is None
    assert any("skipped test.tsv.gz: its name does not end in" in note for note in data.notes)


def test_texts_with_semicolons(folder: Folder) -> None:
    lines = "".join(f"one part of line {n}; the other, which is {n} too\n" for n in range(60))
    assert load_task(folder({"texts.txt": lines})).task.kind == "embedding"


@pytest.mark.parametrize(
    ("files", "rows", "has_test"),
    [
        ({"README.md": "", "data/train-00000-of-00001.tsv": tsv(ROWS * 3), "data/test-0.tsv": tsv(ROWS[:1])}, 12, True),
        ({"train/rows.csv": tsv(), "valid/rows.csv": tsv(), ".git/train/x.tsv": "x"}, 8, False),
        ({"reviews.csv": tsv(ROWS * 3).replace("\t", ","), "README.txt.bak": ""}, 12, False),
    ],
    ids=["files below name splits", "folders name splits", "single file"],
)
def test_folder_layouts(files: dict[str, str], rows: int, has_test: bool, folder: Folder) -> None:
    data = load_task(folder(files))
    assert (data.name, len(data.train) + len(data.validation), data.test is not None) == ("set", rows, has_test)


def test_a_folder_for_each_class(folder: Folder) -> None:
    files = {f"train/{label}/{n}_7.txt": f"{text} {n}" for n, (text, label) in enumerate(ROWS * 3)}
    data = load_task(folder({**files, "test/pos/a.txt": "fine", "test/neg/a.txt": "dull", "train/unsup/1.txt": "x"}))
    assert data.task.labels == ("neg", "pos")
    assert data.test is not None
    assert data.test.to_list() == [{"text": "dull", "label": 0}, {"text": "fine", "label": 1}]
    assert sorted([*data.train["text"], *data.validation["text"]]) == sorted(files.values())


def test_constant_column_is_no_label(folder: Folder) -> None:
    rows = [(f"gj{n % 9}", str(n % 2), "" if n % 2 else "*", f"The rat number {n} ate the cheese.") for n in range(40)]
    data = load_task(folder({"in_domain_train.tsv": tsv(rows, ""), "in_domain_dev.tsv": tsv(rows, "")}), label="2")
    assert (data.task.text, data.task.labels) == (("4",), ("0", "1"))
    one = [("gj", *row[1:]) for row in rows]
    assert load_task(folder({"in_domain_train.tsv": tsv(one, ""), "in_domain_dev.tsv": tsv(one, "")})).task.label == "2"
