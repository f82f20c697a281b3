"""Parallel text: files of pairs, files of aligned lines."""

import json
from pathlib import Path
from typing import Any

import pytest

from compress.data.corpus import load_corpus
from compress.errors import DataError

from .conftest import Folder

PAIRS = ["A film.\nUn film.", "It was fun.\nC'était drôle."]


def test_two_columns(folder: Folder) -> None:
    found = load_corpus(folder({"a.tsv": "A film.\tUn film.\nIt was  fun.\tC'était drôle.\r\n\nonly\t\n"}) + "/a.tsv")
    assert found.parallel
    assert list(found.documents()) == list(found.documents()) == PAIRS


@pytest.mark.parametrize("wrap", [lambda pair: pair, lambda pair: {"id": "7", "translation": pair}])
def test_json_lines_with_two_texts(wrap: Any, folder: Folder) -> None:
    rows = [wrap(dict(zip(("en", "fr"), pair.split("\n"), strict=True))) for pair in PAIRS]
    found = load_corpus(folder({"a.jsonl": "\n".join(map(json.dumps, rows))}) + "/a.jsonl")
    assert found.parallel
    assert list(found.documents()) == PAIRS


def test_aligned_files(folder: Folder) -> None:
    path = folder({"a.fr": "Un film.\n\nC'était drôle.", "a.en": "A film.\nNothing.\nIt was fun.", "a.txt": "x"})
    found = load_corpus(path + "/a")
    assert (found.name, found.parallel) == ("a", True)
    assert list(found.documents()) == PAIRS  # English comes first; a pair without one side is none


def test_plain_text_is_not_parallel(folder: Folder) -> None:
    path = folder({"a.txt": "one\ttwo", "b.jsonl": '{"text": "a", "title": "b"}', "c.en": "x", "c.fr": "y"})
    assert not load_corpus(path + "/a.txt").parallel
    assert not load_corpus(path + "/b.jsonl").parallel


def test_what_is_held_out_of_pairs_are_pairs(folder: Folder) -> None:
    found = load_corpus(folder({"a.tsv": "a\tb\nc\td\ne\tf\ng\th"}) + "/a.tsv").part(True)
    assert found.parallel
    assert list(found.documents()) == ["c\nd", "g\nh"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "a\tb\nc\n", r"a\.tsv, line 2: expected two texts, found 'c'"),
        ("a.tsv", "a\tb\tc\n", r"line 1: expected two texts"),
        ("a.jsonl", '{"en": "a", "fr": "b"}\n{"en": "a"}\n', r"a\.jsonl, line 2: expected two texts"),
        ("a.tsv", b"caf\xe9\tb\n", r"a\.tsv, line 1, byte 4: 0xe9 is not UTF-8"),
        ("a.tsv", "\t\n", "there is no text in it"),
    ],
)
def test_what_is_no_pair_is_named(name: str, content: Any, message: str, folder: Folder) -> None:
    with pytest.raises(DataError, match=message):
        list(load_corpus(f"{folder({name: content})}/{name}").documents())


def test_aligned_files_of_other_lengths_are_refused(folder: Folder) -> None:
    path = folder({"a.en": "one\ntwo\n", "a.fr": "un\n"})
    with pytest.raises(DataError, match=r"a\.fr: ends before line 2"):
        list(load_corpus(path + "/a").documents())


def test_one_language_alone_and_three_are_no_pair(tmp_path: Path) -> None:
    (tmp_path / "a.en").write_text("x")
    with pytest.raises(DataError, match=r"no such file or folder\. Known: a\.en"):
        load_corpus(str(tmp_path / "a"))
    (tmp_path / "a.fr").write_text("x")
    (tmp_path / "a.tsv").write_text("x")
    assert load_corpus(str(tmp_path / "a")).parallel
    (tmp_path / "a.de").write_text("x")
    with pytest.raises(DataError, match="no such file or folder"):
        load_corpus(str(tmp_path / "a"))
