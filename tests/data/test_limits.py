"""Memory stays bounded whatever a file holds: long lines and cells, small files that unpack to large ones."""

import bz2
import gzip
import io
import lzma
import resource
import subprocess
import sys
import tarfile
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from compress.data import dialects, documents, load_task, text_files
from compress.data.corpus import load_corpus
from compress.data.text_files import LONGEST_LINE, SMALL_FILE, decode_lines
from compress.errors import DataError
from tests.data.conftest import Folder

GOOD = "text\tlabel\na fine film\tpos\na dull film\tneg\n"
LONG = "x" * (4 * LONGEST_LINE)


@contextmanager
def at_most(size: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "start", "message"),
    [
        ("train.tsv", GOOD, r"train\.tsv, line 4: is longer than"),
        ("train.csv", GOOD.replace("\t", ","), r"train\.csv, line 4: is longer than"),
        ("train.csv", GOOD.replace("\t", ",") + '"', r"train\.csv, line 4: is longer than"),
        ("train.jsonl", '{"text": "a", "label": 1}\n{"text": "', r"train\.jsonl, line 2: is longer than"),
    ],
)
def test_endless_line(folder: Folder, name: str, start: str, message: str) -> None:
    source = folder({name: start + LONG})
    with at_most(6 * LONGEST_LINE), pytest.raises(DataError, match=message):
        load_task(source)


def test_cell_of_many_lines(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialects, "LONGEST_LINE", 2**16)
    source = folder({"train.csv": 'text,label\nfine,a\n"never closed,b\n' + "more,c\n" * 2**14})
    with pytest.raises(DataError, match=r"line 3: more than .* characters"):
        load_task(source)


def test_file_too_large_to_be_read_whole(tmp_path: Path) -> None:
    for name, start in (("train.json", "["), ("questions.json", '{"data": [{"paragraphs": [')):
        with (tmp_path / name).open("w") as file:
            file.write(start)
            file.truncate(2**40)  # takes no space
        with pytest.raises(DataError, match=rf"{name}: has 1,099,.* bytes; expected at most"):
            load_task(str(tmp_path / name))


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_compression_bomb(tmp_path: Path, pack: object, name: str) -> None:
    part = pack(b"x" * SMALL_FILE)  # type: ignore[operator]
    suffix = {gzip: "gz", bz2: "bz2", lzma: "xz"}[sys.modules[pack.__module__]]
    path = tmp_path / f"{name}.{suffix}"
    path.write_bytes(part * 16)
    with at_most(12 * LONGEST_LINE), pytest.raises(DataError, match=r"longer than|unpacks to more than 100 times"):
        for _ in load_corpus(str(path)).documents():
            pass


def test_archive_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "SMALL_FILE", 2**18)
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = 2**20
        archive.addfile(member, io.BytesIO(b"\n" * member.size))
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(plain.getvalue()))
    with pytest.raises(DataError, match="unpacks to more than 100 times"):
        load_corpus(str(tmp_path / "a.tar.gz"))


def test_endless_article(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LONGEST_LINE", 2**16)
    source = folder({"wiki_00": '<doc id="1">\n' + "line\n" * 2**14})
    with pytest.raises(DataError, match="an article is longer than"):
        load_corpus(source)


@pytest.mark.parametrize("copies", [3, 100])
def test_parquet_bomb(tmp_path: Path, copies: int) -> None:
    """Copies of one text that is too long, or a page of gigabytes in a file of some thousand bytes."""
    cell = "x" * ((LONGEST_LINE + 1) if copies == 3 else 2**20)
    rows = pa.table({"text": pa.DictionaryArray.from_arrays([0] * copies, [cell]), "label": [1] * copies})
    options = {"compression": "zstd", "dictionary_pagesize_limit": 2**30, "store_schema": False}
    pq.write_table(rows, tmp_path / "train.parquet", use_dictionary=copies == 3, **options)
    assert (tmp_path / "train.parquet").stat().st_size < 2**20
    with pytest.raises(DataError, match=r"a cell of .* bytes|unpacks to more than 100 times"):
        load_task(str(tmp_path))


def test_shared_parquet_texts_use_little_memory(tmp_path: Path) -> None:
    """In a process that may have 3 GB: 1,000 rows of 4 MB would be 4."""
    rows = pa.table({"text": pa.DictionaryArray.from_arrays([0] * 1000, ["x" * 2**22]), "label": [0, 1] * 500})
    pq.write_table(rows, tmp_path / "train.parquet", dictionary_pagesize_limit=2**30, store_schema=False)
    code = (
        "import itertools, pathlib, sys; from compress.data.table_files import open_file\n"
        "rows = open_file(pathlib.Path(sys.argv[1]))\n"
        "print(max(batch.num_rows for batch in itertools.islice(rows.read(('text', 'label')), 3)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "train.parquet")],
        check=False,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30)),
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 20


@pytest.mark.parametrize("cut", [0.3, 0.6, 0.95])
def test_damaged_parquet(tmp_path: Path, cut: float) -> None:
    rows = pa.table({"text": [f"text {n}" for n in range(5000)], "label": [0, 1] * 2500})
    pq.write_table(rows, tmp_path / "train.parquet")
    whole = bytearray((tmp_path / "train.parquet").read_bytes())
    at = int(len(whole) * cut)
    whole[at : at + 200] = b"\xff" * 200
    (tmp_path / "train.parquet").write_bytes(whole)
    with pytest.raises(DataError, match=r"train\.parquet"):
        load_task(str(tmp_path))


def test_invalid_parquet(tmp_path: Path) -> None:
    from datasets import ClassLabel, Features, Value

    features = Features({"text": Value("string"), "label": ClassLabel(names=["a", "b"])})
    schema = features.arrow_schema
    pq.write_table(pa.table({"text": ["x", "y", "z"], "label": [0, 1, 7]}, schema), tmp_path / "train.parquet")
    with pytest.raises(DataError, match=r"column 'label': cannot be read"):
        load_task(str(tmp_path))
    pq.write_table(pa.table([["x"], ["y"]], names=["text", "text"]), tmp_path / "train.parquet")
    with pytest.raises(DataError, match="several columns of the same name"):
        load_task(str(tmp_path))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_encodings_and_line_ends(folder: Folder, encoding: str, end: str) -> None:
    content = (GOOD + "ein schöner Film, 映画\tpos\n").replace("\n", end).encode(encoding)
    data = load_task(folder({"train.tsv": content, "dev.tsv": GOOD}))
    assert data.train["text"][:] == ["a fine film", "a dull film", "ein schöner Film, 映画"]
    corpus = load_corpus(folder({"a.txt": f"Schön.{end}{end}Gut.".encode(encoding)}) + "/a.txt")
    assert [each.strip() for each in corpus.documents()] == ["Schön.", "Gut."]


@pytest.mark.parametrize("times", [1, 20_000])
def test_joined_files_keep_no_byte_order_marks(folder: Folder, times: int) -> None:
    """`cat a.tsv b.tsv`, of files that an editor saved with a mark each; long ones are read by another parser."""
    marked = (GOOD.split("\n", 1)[1] * times).encode("utf-8-sig")
    data = load_task(folder({"train.tsv": GOOD.encode("utf-8-sig") + marked, "dev.tsv": GOOD}))
    assert set(data.train["text"][:]) == {"a fine film", "a dull film"}
    with pytest.raises(DataError, match="line 4: repeats the header"):
        load_task(folder({"train.tsv": GOOD + "\ufeff" + GOOD * times, "dev.tsv": GOOD}))
    corpus = load_corpus(folder({"a.txt": 2 * "Schön.\n".encode("utf-8-sig")}) + "/a.txt")
    assert [each.strip() for each in corpus.documents()] == ["Schön.\nSchön."]


def test_unpacked_file_with_packed_name(folder: Folder) -> None:
    assert list(load_corpus(folder({"a.txt.gz": "Some text."})).documents()) == ["Some text."]


def test_pieces_of_a_long_line() -> None:
    line = "é" * 1000 + "\r\n" + "b" * 5
    for longest in (7, 1000, 1002, 5000):
        stream = io.BufferedReader(io.BytesIO(line.encode()))  # type: ignore[arg-type]
        pieces = list(decode_lines(stream, "here", longest=longest, cut=True))
        assert "".join(pieces) == line
        assert max(map(len, pieces)) <= longest
    stream = io.BufferedReader(io.BytesIO(b"a" * 10 + b"\xff"))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="here, line 1, byte 11: 0xff"):
        list(decode_lines(stream, "here", longest=3, cut=True))
