"""Files and options that are wrong: what is said about them. And odd ones that are right."""

import time
from pathlib import Path

import pytest

from compress.data import cache, load_task
from compress.errors import DataError
from tests.data.conftest import Folder

GOOD = "text\tlabel\na fine film\tpos\na dull film\tneg\n"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train.tsv": ""}, r"train\.tsv is empty"),
        ({"train.tsv": "\n\n"}, r"train\.tsv is empty"),
        ({"train.jsonl": ""}, r"train\.jsonl is empty"),
        ({"train.json": "[]"}, r"train\.json is empty"),
        ({"train.tsv": GOOD, "dev.tsv": ""}, r"dev\.tsv is empty"),
        ({"train.tsv": "text\tlabel\n"}, r"train\.tsv has a header but no rows"),
        (
            {"train.tsv": GOOD + "one cell\n"},
            r"train\.tsv, line 4: 1 cells, not 2 as expected .*without quoting.*'one cell'",
        ),
        ({"train.tsv": GOOD + "a\tb\tpos\n"}, r"train\.tsv, line 4: 3 cells, not 2"),
        ({"train.csv": 'text,label\n"two\nlines",a\nb\n'}, r"train\.csv, line 4: 1 cells, not 2"),
        (
            {"train.csv": 'text,label\nfine,a\n"never closed,b\nmore,c\n'},
            r"train\.csv, line 3: unexpected end of data: close the quotation mark",
        ),
        ({"train.tsv": GOOD.encode() + b"caf\xe9 noir\tpos\n"}, r"train\.tsv, line 4, byte 4: 0xe9 is not UTF-8"),
        ({"train.jsonl": b'{"text": "caf\xe9", "label": 1}'}, r"train\.jsonl, line 1, byte 14: 0xe9 is not UTF-8"),
        ({"train.tsv": GOOD.encode("utf-16-le")}, "line 1: has a NUL byte.*iconv -f UTF-16LE -t UTF-8 train.tsv > new"),
        ({"train.csv": GOOD.encode("utf-16-be")}, "line 1: has a NUL byte.*iconv -f UTF-16BE -t UTF-8 train.csv > new"),
        ({"train.tsv": GOOD + "a\0b\tpos\n"}, r"line 4: has a NUL byte.*tr -d '\\000' < train.tsv > new"),
        ({"train.tsv": GOOD.encode("utf-16")[:-1]}, "begins as utf-16, but is not valid"),
        ({"train.jsonl": '{"text": "a", "label": 1}\n' + "[" * 20_000}, "line 2: JSON is nested too deeply"),
        ({"train.json": '{"data": [{"paragraphs": [' + "[" * 20_000}, "train.json.*nested too deeply"),
        ({"train.json": "[" * 20_000}, "train.json.*nested too deeply"),
        ({"train.jsonl": '{"text": "a\\ud800b", "label": 1}\n'}, r"line 1: half a surrogate pair, \\ud800"),
        ({"train.jsonl": '{"text": "a", "label": ' + "9" * 5000 + "}"}, "line 1: .*4300 digits"),
        ({"train.tsv": "text\ttext\tlabel\na\tb\tc\n"}, r"train\.tsv: the header names 'text' more than once"),
        ({"train.jsonl": '{"text": "a", "label": 1}\n{"text"\n'}, r"train\.jsonl, line 2: not JSON"),
        ({"train.jsonl": "[1, 2]\n"}, r"train\.jsonl, line 1: expected an object"),
        (
            {"train.jsonl": '{"chat": [{"role": "user"}]}'},
            r"column 'chat' cannot be read: \[\{'role': 'user'\}\]",
        ),
        ({"train.json": '{"data": {}}'}, r"train\.json: cannot tell which column is the text|no column"),
        ({"train.parquet": b"no parquet"}, r"train\.parquet: not a parquet file"),
        ({"train.tsv": "text\nonly text here\n"}, "has texts, but no labels"),
        ({"train.tsv": "text\tlabel\n\ta\n \tb\n"}, "the text column 'text' is empty in every row"),
        ({"train.tsv": GOOD, "dev.tsv": "text\tmood\na fine film\tpos\n"}, r"dev\.tsv: no column 'label'"),
        (
            {"train.tsv": GOOD, "train.csv": "text,label\na,b\n"},
            r"several training splits, .*train\.csv and .*train\.tsv\.",
        ),
        (
            {"dev.tsv": GOOD, "notes.md": ""},
            r"no training split; .* holds dev\.tsv, notes\.md\. Expected a file with 'train'",
        ),
        ({}, "no training split; .* holds nothing"),
        ({"train.tsv": "text\tlabel\na\tx\nb\ty\n"}, "2 different rows are too few to hold some out"),
    ],
)
def test_invalid_files(folder: Folder, files: dict[str, str | bytes], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_task(folder(files))


def test_named_columns_must_exist(folder: Folder) -> None:
    source = folder({"train.tsv": GOOD})
    with pytest.raises(DataError, match=r"no column 'lable'\. Did you mean 'label'\?"):
        load_task(source, label="lable")
    with pytest.raises(DataError, match=r"no column 'txet'\. Did you mean 'text'\?"):
        load_task(source, text=["txet"])
    with pytest.raises(DataError, match="'label' cannot be both text and label"):
        load_task(source, text=["label"], label="label")
    with pytest.raises(DataError, match="one or two different text columns"):
        load_task(source, text=["text", "label", "more"])


def test_texts_that_are_not_taken_are_noted(folder: Folder) -> None:
    """WikiQA's answers are texts, without a usual name."""
    rows = "".join(f"who is it {n},it is a fine film {n},{n % 2}\n" for n in range(20))
    data = load_task(folder({"train.csv": f"question,answer,label\n{rows}"}))
    assert data.task.text == ("question",)
    assert "took 'question' as the text, not 'answer'" in data.notes


@pytest.mark.parametrize(
    "start", [b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", b"PK\x03\x04", b"\x1f\x8b"]
)
@pytest.mark.parametrize("suffix", ["csv", "tsv", "txt", "jsonl", "json"])
def test_files_that_are_packed_or_pointers(suffix: str, start: bytes, folder: Folder) -> None:
    with pytest.raises(DataError, match=rf"train.{suffix}: is compressed, a workbook, or a pointer of git-lfs"):
        load_task(folder({f"train.{suffix}": start + b"\x14\0\x06\0 xyz"}))


def test_a_label_that_is_a_number_does_not_make_a_header(folder: Folder) -> None:
    rows = "".join(f"{n % 2 + 1}\ta film, row {n}\n" for n in range(20))
    data = load_task(folder({"train.tsv": rows}), text=["2"], label="1")
    assert (len(data.train) + len(data.validation), data.task.labels) == (20, ("1", "2"))
    titled = load_task(folder({"train.tsv": "1\t2\n" + rows}), text=["2"], label="1")
    assert len(titled.train) + len(titled.validation) == 20


def test_a_first_row_that_may_be_a_header_is_asked_about(folder: Folder) -> None:
    """A title that is unknown stands above labels that recur."""
    rows = "".join(f"a fine film {n}\t{'pos' if n % 2 else 'neg'}\n" for n in range(8))
    source = folder({"train.tsv": f"phrase\tpolarity\n{rows}"})
    with pytest.raises(DataError, match="cannot tell whether its first row is a header"):
        load_task(source)
    assert load_task(source, text=["phrase"], label="polarity").task.labels == ("neg", "pos")


def test_unknown_column_number(folder: Folder) -> None:
    with pytest.raises(DataError, match=r"no column '7'\. It has no header.*\n  1: 'a fine film'\n  2: 'pos'"):
        load_task(folder({"train.tsv": GOOD.split("\n", 1)[1]}), text=["7"], label="2")


def test_path_below_a_local_folder_is_no_hub_id(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(folder({"train.tsv": GOOD})).parent)
    with pytest.raises(DataError, match="no such file or folder"):
        load_task("set/missing")


def test_unsupported_file(folder: Folder) -> None:
    with pytest.raises(DataError, match=r"expected a file that ends in \.tsv"):
        load_task(folder({"train.xlsx": b""}) + "/train.xlsx")


@pytest.mark.parametrize("name", ["train.tsv", "train.csv", "train.jsonl"])
def test_line_of_a_megabyte_is_read_in_linear_time(folder: Folder, name: str) -> None:
    long = "word " * 200_000
    plain = f"text\tlabel\n{long}\tpos\na dull film\tneg\nshort\tpos\n"
    contents = {
        "train.tsv": plain,
        "train.csv": plain.replace("\t", ","),
        "train.jsonl": f'{{"text": "{long}", "label": 1}}\n{{"text": "a", "label": 0}}\n{{"text": "b", "label": 1}}\n',
    }
    begin = time.process_time()
    data = load_task(folder({name: contents[name], name.replace("train", "dev"): contents[name]}))
    assert time.process_time() - begin < 2  # linear: about 0.05 s
    assert data.train["text"][0] == long


def test_unwritable_cache(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder({"train.tsv": GOOD, "dev.tsv": GOOD})
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"cannot use the cache .*COMPRESS_HOME"):
        load_task(source)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_full_disk(folder: Folder, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder({"train.tsv": GOOD, "dev.tsv": GOOD})
    write = cache.write
    monkeypatch.setattr(cache, "write", lambda path, batches: write(Path("/dev/full"), batches))
    with pytest.raises(DataError, match="No space left on device"):
        load_task(source)
    assert not list((home / "data").iterdir())
