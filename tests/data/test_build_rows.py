"""Rows of a paper's builder: what is added, written, kept and refused."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.data import tokenize as module
from compress.data.corpus import Corpus, Document, build_rows
from compress.data.masking import Frame
from compress.errors import DataError
from tests import tiny


def corpus(*texts: str) -> Corpus:
    return Corpus("small", "|".join(texts), lambda: iter(texts))


THREE = corpus("The film. A plot!", "So fun", "Never. Never.")


def sentences(
    documents: Iterable[Document], frame: Frame, *, max_length: int, rng: np.random.Generator, twice: bool = False
) -> Iterator[dict[str, Any]]:
    """A row per sentence, with a random number."""
    for document in documents:
        for ids in document.sentences * (1 + twice):
            row = frame.single(ids[: max_length - frame.room()])
            yield row | {
                "draw": int(rng.integers(1000)),
                "place": list(range(len(row["input_ids"]))),
                "document": document.number,
            }


def rows(found: Corpus = THREE, builder: Any = sentences, seed: int = 0, **options: Any) -> Any:
    settings = {"max_length": options.pop("max_length", 16), "limit_tokens": options.pop("limit_tokens", None)}
    return build_rows(found, tiny.tokenizer(), builder, "mine.sentences", options, seed=seed, **settings)


def test_build_rows() -> None:
    found = rows()
    tokenizer = tiny.tokenizer()
    whole = [tokenizer(text) for text in ("the film.", "a plot!", "so fun", "never.", "never.")]
    assert found["input_ids"][:] == [each["input_ids"] for each in whole]
    assert "attention_mask" not in found.column_names, "it follows from the length"
    assert found.features["input_ids"].feature.dtype == "uint16"
    assert found["token_type_ids"][:] == [each["token_type_ids"] for each in whole]
    assert found["length"][:] == [5, 5, 4, 4, 4]
    assert found["index"][:] == [0, 1, 2, 3, 4]
    assert found["document"][:] == [0, 0, 1, 2, 2]
    assert found["place"][:] == [list(range(length)) for length in (5, 5, 4, 4, 4)]
    types = {name: str(kind) for name, kind in zip(found.column_names, found.data.schema.types, strict=True)}
    assert types == {
        "input_ids": "list<item: uint16>",
        "token_type_ids": "list<item: int8>",
        "place": "list<item: int32>",
        "draw": "int64",
        "document": "int64",
        "length": "int32",
        "index": "int64",
    }


def test_many_writes_give_what_one_gives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = rows().to_list()
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "other"))
    monkeypatch.setattr(module, "ROWS_PER_WRITE", 2)
    assert rows().to_list() == whole


def test_cache_key_of_rows(home: Path) -> None:
    first = rows()
    others = [
        rows(corpus("The film")), rows(twice=True), rows(seed=1), rows(max_length=8), rows(limit_tokens=8),
        rows(builder=elsewhere),
    ]  # fmt: skip
    assert len({each._fingerprint for each in (first, *others)}) == 7
    assert len(list((home / "corpora").iterdir())) == 7
    again = rows()
    assert again._fingerprint == first._fingerprint
    assert again.to_list() == first.to_list()


def elsewhere(
    documents: Iterable[Document], frame: Frame, *, max_length: int, rng: np.random.Generator
) -> Iterator[dict[str, Any]]:
    for document in documents:
        yield {"input_ids": document.sentences[0]}


# As if written in another file.
elsewhere.__code__ = elsewhere.__code__.replace(co_filename=str(Path(tiny.__file__)))


def test_the_same_seed_gives_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = rows()["draw"][:], rows(seed=1)["draw"][:]
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "anew"))
    assert rows()["draw"][:] == first != other


@pytest.mark.parametrize(("limit", "expected"), [(1, 1), (5, 1), (6, 2), (14, 3), (1000, 5)])
def test_limit_tokens(limit: int, expected: int) -> None:
    assert len(rows(limit_tokens=limit)) == expected


def test_a_limit_reads_no_more_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.data.sentences.SENTENCES_PER_CALL", 10)
    monkeypatch.setattr(module, "ROWS_PER_WRITE", 5)
    read = []

    def texts() -> Iterator[str]:
        for number in range(1000):
            read.append(number)
            yield "The film."

    assert len(rows(Corpus("long", "long", texts), limit_tokens=100)) == 20
    assert len(read) < 50


def yielding(*found: dict[str, Any]) -> Any:
    def builder(documents: Any, frame: Any, *, max_length: int, rng: Any) -> Iterator[dict[str, Any]]:
        yield from found

    return builder


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ((), r"small: mine\.sentences makes no rows from it"),
        (({"ids": [1]},), r"row 0: has ids; expected input_ids"),
        (({"input_ids": [1], "langs": [1]}, {"input_ids": [1]}), "row 1: has input_ids; expected"),
        (({"input_ids": [1] * 17},), "row 0: 17 tokens; expected 1 to max_length = 16"),
        (({"input_ids": []},), "row 0: 0 tokens"),
        (({"input_ids": [1, 2], "langs": [1]},), "langs must be one number, or a list of 2"),
        (({"input_ids": [1], "next": 1}, {"input_ids": [1], "next": [1]}), "row 1: next must be"),
    ],
)
def test_invalid_rows_leave_nothing(found: Any, message: str, home: Path) -> None:
    with pytest.raises(DataError, match=message):
        rows(builder=yielding(*found))
    folder = home / "corpora"
    assert not folder.exists() or not list(folder.iterdir())
