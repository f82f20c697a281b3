"""Cache entries are verified before use, made anew where they are damaged, and gone on with where they were stopped."""

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from datasets import Dataset

from compress.data import cache, load_task
from compress.data import corpus as corpora
from compress.data.corpus import Corpus, encode_corpus
from compress.data.tokenize import encode
from compress.errors import DataError
from compress.io import CHECKSUMS
from tests import tiny
from tests.damage import KINDS, damaged

TEXTS = [f"the film is {word} . the plot is {word}" for word in tiny.WORDS]


def corpus(read: Callable[[], Iterator[str]] = lambda: iter(TEXTS)) -> Corpus:
    return Corpus("films", "films", read)


def split() -> Dataset:
    return Dataset.from_dict({"text": TEXTS, "label": [0, 1] * (len(TEXTS) // 2) + [0] * (len(TEXTS) % 2)})


def task(folder: Path) -> Dataset:
    rows: Dataset = load_task(str(folder)).train
    return rows


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    return Path(tiny.reviews(tmp_path / "reviews"))


@pytest.mark.parametrize("damage", KINDS)
@pytest.mark.parametrize("kind", ["data", "encoded", "corpora"])
def test_damaged_entry_is_remade(
    kind: str, damage: str, reviews: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make: Callable[[], Dataset] = {
        "data": lambda: task(reviews),
        "encoded": lambda: encode(split(), tiny.tokenizer(), 16),
        "corpora": lambda: encode_corpus(corpus(), tiny.tokenizer(), 16),
    }[kind]
    whole = make().to_list()
    assert "note:" not in capsys.readouterr().err
    (entry,) = (home / kind).iterdir()
    for name in sorted(path.name for path in entry.iterdir()):
        damaged(entry / name, damage)
        assert make().to_list() == whole
        notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note:")]
        assert len(notes) == 1
        assert str(entry) in notes[0]
        assert name in notes[0] or name == CHECKSUMS
        assert make().to_list() == whole
        assert "note:" not in capsys.readouterr().err, "it is whole again"
    assert list((home / kind).iterdir()) == [entry]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.data.sentences.SENTENCES_PER_CALL", 4)
    monkeypatch.setattr(corpora, "BLOCKS_PER_PART", 6)


@pytest.mark.parametrize("limit", [None, 150, 250])
def test_interrupted_encoding_is_resumed(limit: int | None, small_parts: None, home: Path) -> None:
    """With documents of several blocks, so that parts end within them."""
    whole = encode_corpus(corpus(), tiny.tokenizer(), 8, limit_tokens=limit)
    expected = whole.to_list()
    (entry,) = (home / "corpora").iterdir()
    contents = {path.name: path.read_bytes() for path in entry.iterdir()}
    entry.rename(home / "elsewhere")

    def stopped() -> Iterator[str]:
        yield from TEXTS[:8]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode_corpus(corpus(stopped), tiny.tokenizer(), 8, limit_tokens=limit)
    (partial,) = (home / "corpora").iterdir()
    parts = {path.name: path.stat().st_mtime_ns for path in partial.glob("*.arrow")}
    assert 1 < len(parts) < len(contents)
    (partial / ".00009.arrow.partial").write_bytes(b"half")

    again = encode_corpus(corpus(), tiny.tokenizer(), 8, limit_tokens=limit)
    assert again.to_list() == expected
    assert {path.name: path.read_bytes() for path in entry.iterdir()} == contents
    assert {name: (entry / name).stat().st_mtime_ns for name in parts} == parts
    assert list((home / "corpora").iterdir()) == [entry]


def test_parts_after_a_damaged_one_are_remade(small_parts: None, home: Path) -> None:
    expected = encode_corpus(corpus(), tiny.tokenizer(), 8).to_list()
    (entry,) = (home / "corpora").iterdir()
    first = (entry / "00000.arrow").stat().st_mtime_ns
    damaged(entry / "00002.arrow", "bit")
    assert encode_corpus(corpus(), tiny.tokenizer(), 8).to_list() == expected
    assert (entry / "00000.arrow").stat().st_mtime_ns == first


def left_over(entry: Path, *, parts: bool = False) -> Path:
    partial = entry.with_name(f".{entry.name}.partial")
    partial.mkdir(parents=True)
    (partial / "half").write_text("x")
    entry.with_name(f".{entry.name}.lock").touch()
    if parts:
        with cache.part(partial, "00000.arrow") as path:
            path.write_text("x")
    return partial


def test_leftovers_are_removed(tmp_path: Path) -> None:
    dead, parts, old = (tmp_path / name for name in ("dead", "parts", "old"))
    left_over(dead)
    left_over(parts, parts=True)
    os.utime(left_over(old, parts=True), (0, 0))
    cache.load_or_create(tmp_path / "entry", lambda folder: (folder / "file").write_text("x"))
    assert {path.name for path in tmp_path.iterdir()} == {"entry", ".parts.partial"}


def test_unfinished_entry_of_another_process_stays(tmp_path: Path) -> None:
    partial = left_over(tmp_path / "busy")
    with (tmp_path / ".busy.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        cache.load_or_create(tmp_path / "entry", lambda folder: (folder / "file").write_text("x"))
    assert (partial / "half").is_file()


def test_failed_entry_leaves_nothing(tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.load_or_create(tmp_path / "entry", broken)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make every later write below the caches fail, as on a disk that is mounted so; root may write anywhere else."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, os.strerror(30))

    def begin() -> None:
        monkeypatch.setattr(cache, "locked", refuse)
        monkeypatch.setattr(os, "access", lambda *_: False)

    return begin


def test_read_only_cache(reviews: Path, read_only: Callable[[], None], home: Path) -> None:
    def use() -> list[list[object]]:
        rows = task(reviews)
        return [rows.to_list(), encode(rows, tiny.tokenizer(), 16).to_list()]

    expected = use()
    before = {path: path.stat().st_mtime_ns for path in home.rglob("*")}
    read_only()
    assert use() == expected
    assert {path: path.stat().st_mtime_ns for path in home.rglob("*")} == before
    with pytest.raises(DataError, match=r"COMPRESS_HOME"):
        encode(task(reviews), tiny.tokenizer(), 8)
