"""Unlabelled text: every source streams its documents, bad ones say what and where, blocks keep to their documents.

Parallel text: files of pairs, files of aligned lines.
"""

import bz2
import errno
import gzip
import io
import json
import lzma
import os
import tarfile
import tracemalloc
import urllib.request
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from datasets import Dataset, IterableDataset
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import BertTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from compress.data import cache, documents
from compress.data.corpus import Corpus, Document, build_rows, encode_corpus, iterate_documents, load_corpus
from compress.errors import DataError
from tests import tiny

from .conftest import Folder

TWO = "The film is good.\nIt was fun.\n\n \nA dull story!\n"
TWO_DOCUMENTS = ["The film is good.\nIt was fun.\n", "A dull story!\n"]
ARTICLE = '<doc id="{0}" url="u" title="T{0}">\nTitle {0}\n\nThe text of {0}.\nHistory.\n</doc>\n'


def read(source: str | Path) -> list[str]:
    return list(load_corpus(str(source)).documents())


def corpus(*texts: str) -> Corpus:
    return Corpus("small", "/".join(texts), lambda: iter(texts))


def article(number: int) -> str:
    return f"Title {number}\n\nThe text of {number}.\nHistory."


def dump(*numbers: int) -> bytes:
    return "".join(ARTICLE.format(number) for number in numbers).encode()


def archive(path: Path, files: dict[str, bytes], mode: Any) -> Path:
    with tarfile.open(path, mode) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


# Sources


def test_plain_text(folder: Folder) -> None:
    found = load_corpus(folder({"a.txt": TWO}) + "/a.txt")
    assert found.name == "a.txt"
    assert list(found.documents()) == list(found.documents()) == TWO_DOCUMENTS


def zstandard(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


SQUEEZE = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress, "zst": zstandard}


@pytest.mark.parametrize(("suffix", "squeeze"), SQUEEZE.items())
def test_compressed_text(suffix: str, squeeze: Any, folder: Folder) -> None:
    assert read(folder({f"a.txt.{suffix}": squeeze(TWO.encode())})) == TWO_DOCUMENTS


def test_folder(tmp_path: Path) -> None:
    (tmp_path / "set" / "b").mkdir(parents=True)
    (tmp_path / "set" / "b" / "c.txt").write_text("third")
    (tmp_path / "set" / "a.txt").write_text("first\r\n\r\nsecond")
    (tmp_path / "set" / "b.jsonl").write_text('{"text": "last", "id": 3}\n')
    (tmp_path / "set" / "notes.md").write_text("not read")
    (tmp_path / "set" / ".hidden.txt").write_text("not read")
    assert [text.strip() for text in read(tmp_path / "set")] == ["first", "second", "third", "last"]


def test_folder_with_a_dump(tmp_path: Path) -> None:
    (tmp_path / "AA").mkdir()
    (tmp_path / "AA" / "wiki_01").write_bytes(dump(3))
    (tmp_path / "AA" / "wiki_00").write_bytes(dump(1, 2))
    (tmp_path / "LICENCE.txt").write_text("not an article")
    assert read(tmp_path) == [article(1), article(2), article(3)]


@pytest.mark.parametrize(("suffix", "mode"), [("tar.xz", "w:xz"), ("tar.gz", "w:gz"), ("tgz", "w:gz"), ("tar", "w")])
def test_archive_is_streamed(suffix: str, mode: str, tmp_path: Path) -> None:
    files = {"text/AB/wiki_01": dump(2), "text/AA/wiki_00": dump(1), "text/AA/._wiki_00": b"\xff", "README": b"no"}
    path = archive(tmp_path / f"dump.{suffix}", files, mode)
    before = sorted(tmp_path.rglob("*"))
    assert read(path) == [article(2), article(1)]
    assert sorted(tmp_path.rglob("*")) == before


def test_empty_articles_and_json_dumps(folder: Folder) -> None:
    empty = '<doc id="9" url="u" title="E">\nE\n\n</doc>\n'
    as_json = json.dumps({"title": "T", "text": "Json article."})
    assert read(folder({"wiki_00": empty + ARTICLE.format(1), "wiki_01": as_json})) == [article(1), "Json article."]


def test_parquet(tmp_path: Path) -> None:
    Dataset.from_dict({"id": [1, 2, 3], "text": ["one", None, "two"]}).to_parquet(tmp_path / "rows.parquet")
    assert read(tmp_path / "rows.parquet") == ["one", "two"]


def test_hub_data_set_is_pinned_to_a_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str, configuration: str | None, **options: Any) -> IterableDataset:
        asked.append((name, configuration, options))
        return Dataset.from_dict({"text": ["one", "two"]}).to_iterable_dataset()

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO(b'{"sha": "abc"}'))
    monkeypatch.setattr(datasets, "load_dataset", load)
    found = load_corpus("owner/name:raw")
    assert list(found.documents()) == ["one", "two"]
    assert asked[0] == ("owner/name", "raw", {"split": "train", "revision": "abc", "streaming": True})


def test_fingerprint_depends_on_text_only(tmp_path: Path) -> None:
    for name, text in (("one", "same"), ("two", "same"), ("three", "other")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(text)
    one, two, three = (load_corpus(str(tmp_path / name)).fingerprint for name in ("one", "two", "three"))
    assert one == two != three


def test_fingerprint_of_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of them are hashed; a change elsewhere is seen by its time."""
    monkeypatch.setattr("compress.data.corpus.HASHED_BYTES", 1000)
    monkeypatch.setattr("compress.data.corpus.SAMPLED_BLOCKS", 4)
    monkeypatch.setattr("compress.data.corpus.SAMPLED_BYTES", 10)
    path = tmp_path / "a.txt"
    content = bytearray(b"the film was good\n" * 100)

    def fingerprint(second: int, *changed: int) -> str:
        edited = bytearray(content)
        for place in changed:
            edited[place] = ord("x")
        path.write_bytes(edited)
        os.utime(path, (second, second))
        return load_corpus(str(path)).fingerprint

    first = fingerprint(1)
    assert fingerprint(1) == first
    others = {fingerprint(1, 0), fingerprint(1, len(content) - 1), fingerprint(2), fingerprint(2, 100)}
    assert len(others | {first}) == 4, "between the samples, the time alone tells"
    path.write_bytes(content + b"a\n")
    os.utime(path, (1, 1))
    assert load_corpus(str(path)).fingerprint not in {first, *others}


# Bad input


@pytest.mark.parametrize("name", ["a.txt", "a.parquet"])
def test_a_file_that_changes_while_it_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "a.txt":
        path.write_text("one film\n\n" * 50_000)
    else:
        Dataset.from_dict({"text": ["one film"] * 50}).to_parquet(path)
    stream = load_corpus(str(path)).documents()
    next(stream)
    with path.open("ab") as file:
        file.write(b"more\n")
    with pytest.raises(DataError, match=rf"{name}: changed while it was read, from .* bytes"):
        list(stream)


def test_a_disk_that_fills_within_a_part(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names the folder and the remedy, and keeps the parts before it."""
    monkeypatch.setattr("compress.data.corpus.BLOCKS_PER_PART", 10)
    found = corpus(*["the film is good"] * 30)
    write = cache.write
    room = [None, None]

    def fill(path: Path, batches: Any, **options: str) -> Path:
        if not room:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        room.pop()
        return write(path, batches, **options)

    monkeypatch.setattr(cache, "write", fill)
    with pytest.raises(DataError, match=r"cannot use the cache .*No space left.*COMPRESS_HOME"):
        encode_corpus(found, tiny.tokenizer(), 16)
    (partial,) = (home / "corpora").iterdir()
    kept = {path.name: path.stat().st_mtime_ns for path in partial.glob("*.arrow")}
    assert sorted(kept) == ["00000.arrow", "00001.arrow"]
    room.append(None)
    encoded = encode_corpus(found, tiny.tokenizer(), 16)
    assert encoded["document"][:] == list(range(30))
    (entry,) = (home / "corpora").iterdir()
    assert {name: (entry / name).stat().st_mtime_ns for name in kept} == kept


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        ({"a.txt": ""}, "/a.txt", r"a\.txt: has no text"),
        ({"a.txt": "\n \n\t\n"}, "/a.txt", r"a\.txt: has no text"),
        ({}, "", r"without text; it contains nothing\. Expected \.txt"),
        ({"a.png": "x", "b.pdf": "y"}, "", r"without text; it contains a\.png, b\.pdf\. Expected \.txt"),
        ({"a.txt": "good é\n\n".encode() + b"caf\xe9 au lait\n"}, "/a.txt", r"a\.txt, line 3, byte 4: 0xe9 is.*iconv"),
        ({"wiki_00": dump(1, 2)[:-8]}, "/wiki_00", r"wiki_00: is truncated; it ends inside an article"),
        ({"a.jsonl": '{"text": "a"}\n{\n'}, "/a.jsonl", r"a\.jsonl, line 2: not JSON"),
        (
            {"a.jsonl": '{"text": "a"}\n{"txt": "a"}\n'},
            "/a.jsonl",
            r'line 2: expected .* "text"\. Did you mean \'txt\'',
        ),
        ({"a.jsonl": '{"text": "a"}\n3\n'}, "/a.jsonl", r"a\.jsonl, line 2"),
        ({"b.parquet": "text"}, "/b.parquet", r"b\.parquet: not a parquet file"),
        ({"a.pdf": "x"}, "/a.pdf", r"a\.pdf: not the name of a text file\. Expected \.txt"),
        ({"books.txt": "a"}, "/boks.txt", r"no such file or folder\. Did you mean 'books\.txt'"),
        ({"a.tsv": "a\tb\nc\n"}, "/a.tsv", r"a\.tsv, line 2: expected two texts, found 'c'"),
        ({"a.tsv": "a\tb\tc\n"}, "/a.tsv", r"line 1: expected two texts"),
        ({"a.jsonl": '{"en": "a", "fr": "b"}\n{"en": "a"}\n'}, "/a.jsonl", r"a\.jsonl, line 2: expected two texts"),
        ({"a.tsv": b"caf\xe9\tb\n"}, "/a.tsv", r"a\.tsv, line 1, byte 4: 0xe9 is not UTF-8"),
        ({"a.tsv": "\t\n"}, "/a.tsv", "has no text"),
        ({"a.en": "one\ntwo\n", "a.fr": "un\n"}, "/a", r"a\.fr: ends before line 2"),
        ({"a.en": "x"}, "/a", r"no such file or folder\. Known: a\.en"),
        ({"a.en": "x", "a.fr": "x", "a.de": "x"}, "/a", "no such file or folder"),
    ],
)
def test_invalid_sources(files: dict[str, Any], name: str, message: str, folder: Folder) -> None:
    with pytest.raises(DataError, match=message):
        list(load_corpus(folder(files) + name).documents())


def test_invalid_archive_member_is_named(tmp_path: Path) -> None:
    path = archive(tmp_path / "d.tar.gz", {"AA/wiki_00": dump(1), "AA/wiki_01": b'<doc id="2">\nT\n\xff'}, "w:gz")
    with pytest.raises(DataError, match=r"d\.tar\.gz, AA/wiki_01, line 3, byte 1: 0xff is not UTF-8"):
        list(load_corpus(str(path)).documents())


def test_parquet_without_a_text_column(tmp_path: Path) -> None:
    Dataset.from_dict({"texts": ["one"]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"no column 'text'\. Did you mean 'texts'"):
        load_corpus(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    ("offline", "message"),
    [(True, r"owner/name: no such file.*Use a text file.*'pydoc'"), (False, r"the hub does not provide .* Use")],
)
def test_unreachable_hub(offline: bool, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=message):
        load_corpus("owner/name")


@pytest.mark.parametrize("line", ["word " * 210_000, "x" * 1_050_000, "é" * 530_000])
def test_line_of_a_megabyte(line: str, folder: Folder) -> None:
    found = load_corpus(folder({"a.txt": f"The start.\n{line}\nThe end."}) + "/a.txt")
    assert "".join(found.documents()) == f"The start.\n{line}\nThe end."
    encoded = encode_corpus(found, tiny.tokenizer(), 64)
    assert max(encoded["length"]) <= 64


def test_text_without_blank_lines_uses_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("the story was so good and so sad\n" * 200_000)
    size = path.stat().st_size
    tracemalloc.start()
    lengths = [len(document) for document in load_corpus(str(path)).documents()]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(lengths) == size
    assert max(lengths) <= documents.LONGEST_DOCUMENT
    assert peak < 6.6 * documents.LONGEST_DOCUMENT


@pytest.mark.parametrize("cut", [0.5, 0.97])
@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.xz", "a.txt.zst", "a.tar.gz", "a.tar.xz"])
def test_truncated_download(name: str, cut: float, tmp_path: Path) -> None:
    content = b"".join(b"%d is a number\n\n" % (number * 7919) for number in range(20_000))
    path = tmp_path / name
    if "tar" in name:
        archive(path, {"a.txt": content}, "w:" + name[-2:])
    else:
        path.write_bytes(SQUEEZE[name.rpartition(".")[2]](content))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * cut)])
    with pytest.raises(DataError, match=rf"{name}: damaged or truncated"):
        list(load_corpus(str(path)).documents())


# Blocks


def tokens(encoded: Dataset, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [tokenizer.decode(row) for row in encoded["input_ids"]]


def test_blocks_pack_whole_sentences_of_a_document() -> None:
    tokenizer = tiny.tokenizer()
    found = corpus("The film is good. It was fun!\nA dull story. So sad.", "Never.", "The plot is cold and the scene.")
    encoded = encode_corpus(found, tokenizer, 10)
    assert tokens(encoded, tokenizer) == [
        "[CLS] the film is good. [SEP]",
        "[CLS] [UNK] was fun! a dull story. [SEP]",
        "[CLS] so sad. [SEP]",
        "[CLS] never. [SEP]",
        "[CLS] the plot is cold and the scene. [SEP]",
    ]
    assert encoded["document"][:] == [0, 0, 0, 1, 2]
    assert encoded["index"][:] == [0, 1, 2, 3, 4]
    assert encoded["length"][:] == [len(row) for row in encoded["input_ids"]]
    assert sorted(encoded.column_names) == ["document", "index", "input_ids", "length"], "others follow from these"


def test_long_sentence_is_cut() -> None:
    tokenizer = tiny.tokenizer()
    encoded = encode_corpus(corpus("good " * 7 + "bad. Fine."), tokenizer, 6)
    assert tokens(encoded, tokenizer) == [
        "[CLS] good good good good [SEP]",
        "[CLS] good good good bad [SEP]",
        "[CLS]. fine. [SEP]",
    ]


def test_blocks_keep_all_tokens() -> None:
    tokenizer = tiny.tokenizer()
    texts = [" ".join(tiny.WORDS[: 5 + n % 20] * (1 + n % 3)) + ".\nA film? Yes" for n in range(40)]
    encoded = encode_corpus(corpus(*texts), tokenizer, 16)
    kept: list[list[int]] = [[] for _ in texts]
    for row in encoded:
        kept[row["document"]] += row["input_ids"][1:-1]
    assert kept == [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def test_call_and_write_sizes_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["the film was good. so fun. " * (n % 7) + "a plot" for n in range(50)]
    whole = encode_corpus(corpus(*texts), tiny.tokenizer(), 16)
    monkeypatch.setattr("compress.data.sentences.SENTENCES_PER_CALL", 3)
    monkeypatch.setattr("compress.data.corpus.BLOCKS_PER_PART", 2)
    again = encode_corpus(Corpus("other", "other", lambda: iter(texts)), tiny.tokenizer(), 16)
    assert again.to_list() == whole.to_list()
    assert again.features == whole.features


@pytest.mark.parametrize("limit", [1, 6, 7, 100])
def test_limit_tokens(limit: int) -> None:
    encoded = encode_corpus(corpus(*["the film is good"] * 30), tiny.tokenizer(), 16, limit_tokens=limit)
    assert len(encoded) == -(-limit // 6)


def test_blocks_are_cached(home: Path) -> None:
    calls = []

    def texts() -> Iterator[str]:
        calls.append(1)
        yield "the film"

    encode = partial(encode_corpus, Corpus("once", "once", texts), tiny.tokenizer())
    first, second, longer = encode(16), encode(16), encode(32)
    assert len(calls) == 2
    assert first._fingerprint == second._fingerprint != longer._fingerprint
    written = sorted(path.name for path in (home / "corpora").iterdir())
    assert written == sorted(encoded._fingerprint for encoded in (first, longer))


def test_ids_take_two_bytes_where_the_vocabulary_fits(home: Path) -> None:
    texts = ["the film was good. so fun. a plot"] * 2000
    encoded = encode_corpus(corpus(*texts), tiny.tokenizer(), 128)
    assert encoded.features["input_ids"].feature.dtype == "uint16"
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "a": 70_000}
    encoded = encode_corpus(corpus("a a"), BertTokenizer(vocab=words), 128)
    assert encoded.features["input_ids"].feature.dtype == "uint32"
    assert encoded["input_ids"][:] == [[2, 70_000, 70_000, 3]]


def test_token_types_are_kept_where_they_are_not_zero() -> None:
    tokenizer = tiny.tokenizer()
    template = processors.TemplateProcessing("[CLS]:2 $A:1 [SEP]:0", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.backend_tokenizer.post_processor = template
    encoded = encode_corpus(corpus("the film"), tokenizer, 128)
    assert encoded["token_type_ids"][:] == [[2, 1, 1, 0]]


def test_blocks_without_tokens() -> None:
    with pytest.raises(DataError, match="max_length 2: too short for a block of 2 special tokens"):
        encode_corpus(corpus("a film"), tiny.tokenizer(), 2)
    with pytest.raises(DataError, match="small: no tokens"):
        encode_corpus(corpus("\u200b\n"), tiny.tokenizer(), 16)


# Sentences


def test_iterate_documents() -> None:
    tokenizer = tiny.tokenizer()
    found = list(iterate_documents(corpus("The film. A plot!\nSo fun", "\u200b", "Never."), tokenizer))
    ids = tokenizer(["the film.", "a plot!", "so fun", "never."], add_special_tokens=False)["input_ids"]
    assert found == [Document(0, ids[:3]), Document(2, ids[3:])]


def test_documents_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.data.sentences.SENTENCES_PER_CALL", 4)
    read = []

    def texts() -> Iterator[str]:
        for number in range(1000):
            read.append(number)
            yield "The film. A plot."

    stream = iterate_documents(Corpus("long", "long", texts), tiny.tokenizer())
    for number, document in zip(range(100), stream, strict=False):
        assert document.number == number
        assert len(document.sentences) == 2
        assert len(read) <= number + 5


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer that tells "a" at the beginning of a text from " a"."""
    words = {"<pad>": 0, "a": 1, "Ġa": 2, ".": 3}
    model = Tokenizer(WordLevel(words, unk_token="<pad>"))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>")


def test_sentences_keep_the_space_before_them() -> None:
    (found,) = iterate_documents(corpus("a.\na."), spaced_tokenizer())
    assert found.sentences == [[1, 3], [2, 3]]


@pytest.mark.parametrize("length", [2, 4, 64])
def test_blocks_keep_the_space_between_sentences(length: int) -> None:
    encoded = encode_corpus(corpus("a. A a.\na a.", "a."), spaced_tokenizer(), length)
    kept: dict[int, list[int]] = {0: [], 1: []}
    for row in encoded:
        kept[row["document"]] += row["input_ids"]
    assert kept == {0: [1, 3, 0, 2, 3, 2, 2, 3], 1: [1, 3]}


def test_parallel_document_has_two_sentences() -> None:
    texts = ("The film. A plot!\nSo fun. So good", "\u200b\nnever")
    tokenizer = tiny.tokenizer()
    (found,) = iterate_documents(Corpus("pairs", "pairs", lambda: iter(texts), parallel=True), tokenizer)
    ids = tokenizer(["the film. a plot!", "so fun. so good"], add_special_tokens=False)["input_ids"]
    assert found == Document(0, ids, parallel=True)


# What is held out


@pytest.mark.parametrize(
    ("count", "held"),
    [(2, [1]), (3, [1]), (4, [1, 3]), (7, [2, 5]), (50, [24, 49]), (99, [48, 97]), (100, [49, 99]), (120, [49, 99])],
)
def test_held_out_documents(count: int, held: list[int]) -> None:
    whole = corpus(*[f"film {number}" for number in range(count)])
    kept, out = whole.part(False), whole.part(True)
    texts = list(whole.documents())
    assert list(out.documents()) == list(out.documents()) == [texts[number] for number in held]
    assert list(kept.documents()) == [text for number, text in enumerate(texts) if number not in held]
    assert len({whole.fingerprint, kept.fingerprint, out.fingerprint}) == 3
    assert (kept.name, out.name) == ("small (without what is held out)", "small (held out)")


def test_held_out_fingerprint() -> None:
    one, other = corpus("a", "b", "c"), corpus("a", "b", "d")
    assert one.part(True).fingerprint == corpus("a", "b", "c").part(True).fingerprint
    assert one.part(True).fingerprint != other.part(True).fingerprint
    many = corpus(*map(str, range(9)))
    assert many.part(True, every=2).fingerprint != many.part(True).fingerprint
    assert list(corpus("a", "b", "c", "d", "e").part(True, every=2).documents()) == ["b", "d"]


def test_single_document_cannot_be_held_out() -> None:
    with pytest.raises(DataError, match=r"small: has only one document, .* blank lines"):
        corpus("a film").part(True)


# Real input


def test_real_dump() -> None:
    root = Path(os.environ.get("COMPRESS_DATA", Path(__file__).parents[3] / "shared" / "data"))
    if not (root / "enwiki_2015").is_dir():
        pytest.skip(f"no enwiki_2015 in {root}: set COMPRESS_DATA")
    first = list(islice(load_corpus(str(root / "enwiki_2015")).documents(), 20))
    assert first[0].startswith("Gunpowder\n")
    assert all("\n" in document for document in first)
    assert not any("<doc " in document or "</doc>" in document for document in first)


# Parallel text

PAIRS = ["A film.\nUn film.", "It was fun.\nC'était drôle."]


def test_parallel_columns(folder: Folder) -> None:
    found = load_corpus(folder({"a.tsv": "A film.\tUn film.\nIt was  fun.\tC'était drôle.\r\n\nonly\t\n"}) + "/a.tsv")
    assert found.parallel
    assert list(found.documents()) == list(found.documents()) == PAIRS


@pytest.mark.parametrize("wrap", [lambda pair: pair, lambda pair: {"id": "7", "translation": pair}])
def test_parallel_json_lines(wrap: Any, folder: Folder) -> None:
    rows = [wrap(dict(zip(("en", "fr"), pair.split("\n"), strict=True))) for pair in PAIRS]
    found = load_corpus(folder({"a.jsonl": "\n".join(map(json.dumps, rows))}) + "/a.jsonl")
    assert found.parallel
    assert list(found.documents()) == PAIRS


def test_parallel_files(folder: Folder) -> None:
    path = folder({"a.fr": "Un film.\n\nC'était drôle.", "a.en": "A film.\nNothing.\nIt was fun.", "a.tsv": "x"})
    found = load_corpus(path + "/a")
    assert (found.name, found.parallel) == ("a", True)
    assert list(found.documents()) == PAIRS  # English comes first; a pair without one side is left out


def test_text_is_not_parallel(folder: Folder) -> None:
    path = folder({"a.txt": "one\ttwo", "b.jsonl": '{"text": "a", "title": "b"}', "c.en": "x", "c.fr": "y"})
    assert not load_corpus(path + "/a.txt").parallel
    assert not load_corpus(path + "/b.jsonl").parallel
    path = folder({"d.jsonl": '{"id": "12", "content": "A text."}'})
    with pytest.raises(DataError, match='an object with "text"'):
        list(load_corpus(path + "/d.jsonl").documents())


# Several languages

LANGUAGES = {
    "en/a.txt": "\n\n".join(f"The film {n}." for n in range(4)), "en/b.txt": "A plot.",
    "fr/a.jsonl": '{"text": "Un film."}\n' * 3,
    "en-fr.tsv": "A film.\tUn film.\nFun.\tDrôle.\nGood.\tBon.", "pt_BR-en.en": "A\nB", "pt_BR-en.pt_BR": "C\nD",
    "README.md": "-",
}  # fmt: skip


def test_a_folder_of_languages_and_pairs(folder: Folder) -> None:
    found = load_corpus(folder(LANGUAGES))
    assert [(part.languages, part.parallel) for part in found.parts] == [
        ((0,), False), ((0, 1), True), ((1,), False), ((0, 2), True),
    ]  # fmt: skip
    assert found.language_count == 3, "en, fr, pt_BR"
    texts = list(found.documents())
    assert texts == [text for part in found.parts for text in part.documents()]
    assert (len(texts), texts[5], texts[11]) == (13, "A film.\nUn film.", "A\nC"), (
        "files of a pair are in order of codes"
    )
    kept, out = found.part(False), found.part(True)
    assert sorted([*kept.documents(), *out.documents()]) == sorted(texts)
    assert all(list(part.documents()) for part in out.parts), "each language has some held out"
    assert [part.languages for part in out.parts] == [part.languages for part in found.parts]
    assert (
        len({found.fingerprint, kept.fingerprint, out.fingerprint, load_corpus(folder({"fr/b.txt": "c"})).fingerprint})
        == 4
    )


@pytest.mark.parametrize(
    "files",
    [
        {"en/a.txt": "a", "notes/b.txt": "b"},
        {"en/a.txt": "a", "fr/b.txt": "b", "c.txt": "c"},
        {"en/a.txt": "a"},
        {"AA/wiki_00": ARTICLE.format(1), "AB/wiki_00": ARTICLE.format(2)},
        {"a-b.tsv": "x\ty", "en/a.txt": "a"},
    ],
)
def test_other_folders_have_no_languages(files: dict[str, str], folder: Folder) -> None:
    found = load_corpus(folder(files))
    assert (found.parts, found.language_count) == ((), 0)


def test_rows_of_each_language_are_marked_and_share_the_limit(folder: Folder) -> None:
    def by_document(
        documents: Iterator[Document], frame: Any, *, max_length: int, rng: Any
    ) -> Iterator[dict[str, Any]]:
        for document in documents:
            yield {"input_ids": document.sentences[0], "first": document.languages[0]}

    found, tokenizer = load_corpus(folder(LANGUAGES)), tiny.tokenizer()
    given = {"max_length": 32, "seed": 0}
    rows = build_rows(found, tokenizer, by_document, "by_document", {}, **given)
    assert rows["part"][:] == [0] * 5 + [1] * 3 + [2] * 3 + [3] * 2
    assert rows["paired"][:] == [0] * 5 + [1] * 3 + [0] * 3 + [1] * 2
    assert rows["first"][:] == [0] * 8 + [1] * 3 + [0] * 2
    few = build_rows(found, tokenizer, by_document, "by_document", {}, limit_tokens=4, **given)
    assert few["part"][:] == [0, 1, 2, 3], "one row of each reaches its share"
