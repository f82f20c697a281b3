"""Stream the documents of text files, Wikipedia-extractor dumps, jsonl and parquet
files."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path, PurePath
from typing import IO, Any, Final, Literal

from compress.data.text_files import (
    LONGEST_LINE,
    TOO_EXPANSIVE,
    decode_lines,
    json_objects,
    limit_unpacked,
    lines,
    parse_json,
    reading,
    refuse_special,
)
from compress.errors import DataError, did_you_mean

DocumentKind = Literal["text", "wiki", "jsonl", "parquet", "tar"]

ACCEPTED: Final = (
    ".txt, .jsonl, .ndjson or wiki_NN (Wikipedia-extractor), each also .gz, .xz, "
    ".bz2 or .zst; .parquet; .tar, .tar.gz, .tar.xz, .tar.zst"
)

LONGEST_DOCUMENT: Final = 1_000_000
"""Characters after which plain text without a blank line is cut at a line end, so that
memory stays bounded."""

LONGEST_PIECE: Final = 1 << 20
"""Characters of plain text read at once; a longer line is read in pieces."""

_PACKED: Final = (".gz", ".xz", ".bz2", ".zst")


def _open_zstandard(stream: IO[bytes]) -> Any:
    import pyarrow as pa

    return pa.CompressedInputStream(pa.PythonFile(stream, "r"), "zstd")


_UNPACK: Final[dict[bytes, Callable[[Any], Any]]] = {
    b"\x1f\x8b": gzip.open,
    b"\xfd7zXZ\0": lzma.open,
    b"BZh": bz2.open,
    b"\x28\xb5\x2f\xfd": _open_zstandard,
}
_TAR: Final = (".tar", ".tgz", ".txz", ".tbz2")
_DAMAGE: Final = (
    EOFError,
    lzma.LZMAError,
    zlib.error,
    gzip.BadGzipFile,
    tarfile.TarError,
)


def kind(name: str) -> DocumentKind | None:
    """Return the format of a file by its name, or None if it is not supported."""
    path = PurePath(name)
    if path.suffix in _PACKED:
        path = path.with_suffix("")
    if path.suffix in _TAR:
        return "tar"
    if path.suffix == ".parquet":
        return "parquet" if path.name == PurePath(name).name else None
    if re.fullmatch(r"wiki_\d+", path.name):
        return "wiki"
    kinds: dict[str, DocumentKind] = {
        ".txt": "text",
        ".jsonl": "jsonl",
        ".ndjson": "jsonl",
    }
    return kinds.get(path.suffix)


def find(source: Path) -> list[Path]:
    """List the files of a corpus: the file itself, or the files of a folder and its
    subfolders, sorted by path.

    Of a folder with a dump (wiki_NN files or tar archives), only the dump is read, not
    a note or licence next to it.
    """
    if not source.is_dir():
        refuse_special(source)
        if kind(source.name) is None:
            raise DataError(
                f"{source}: not the name of a text file. Expected {ACCEPTED}."
            )
        return [source]
    walked = (
        Path(folder, name)
        for folder, _, names in os.walk(source, onerror=_fail)
        for name in names
    )
    below = sorted(
        path for path in walked if path.is_file() and not path.name.startswith(".")
    )
    files = [path for path in below if kind(path.name)]
    if not files:
        listed = (
            ", ".join(str(path.relative_to(source)) for path in below[:5]) or "nothing"
        )
        raise DataError(
            f"{source}: a folder without text; it contains {listed}. Expected "
            f"{ACCEPTED}."
        )
    return [path for path in files if kind(path.name) in {"wiki", "tar"}] or files


def _fail(error: OSError) -> None:
    """Stop at a folder that cannot be read, which `os.walk` would skip silently."""
    raise error


def read(files: Sequence[Path]) -> Iterator[str]:
    """Yield the documents of the files. DataError names the file and line that cannot
    be read."""
    for path in files:
        with _reading(path):
            match kind(path.name):
                case "tar":
                    yield from _archive(path)
                case "parquet":
                    from compress.data.table_files import open_file

                    split = open_file(path).check()
                    if "text" not in split.columns:
                        raise DataError(
                            f"{path}: no column "
                            f"'text'.{did_you_mean('text', split.columns)}"
                        )
                    for batch in split.read(("text",)):
                        yield from (
                            text
                            for text in batch.column(0).to_pylist()
                            if text is not None
                        )
                case _:
                    with path.open("rb") as file:
                        yield from _stream(file, path.name, str(path))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        with reading(path):
            refuse_special(path)
            before = path.stat()
            yield
            after = path.stat()
    except (*_DAMAGE, OSError) as error:
        raise DataError(
            f"{path}: damaged or truncated ({error}). Download it again."
        ) from error
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise DataError(
            f"{path}: changed while it was read, from {before.st_size:,} to "
            f"{after.st_size:,} bytes. Run the command again once it is complete."
        )


def _archive(path: Path) -> Iterator[str]:
    with (
        path.open("rb") as file,
        tarfile.open(fileobj=_unpack(file, str(path)), mode="r|") as archive,
    ):
        for member in archive:
            name = PurePath(member.name).name
            if (
                member.isfile()
                and not name.startswith(".")
                and kind(name) in {"text", "wiki", "jsonl"}
            ):
                text = archive.extractfile(member)
                assert text is not None, "tarfile opens regular members"
                yield from _stream(text, name, f"{path}, {member.name}")


def _stream(file: IO[bytes], name: str, where: str) -> Iterator[str]:
    """Yield the documents of a text or jsonl file; a dump is recognised by its first
    bytes, whatever its name."""
    with _unpack(file, where) as stream:
        head = stream.peek(64).removeprefix(codecs.BOM_UTF8).lstrip()
        if kind(name) == "jsonl" or (kind(name) == "wiki" and head.startswith(b"{")):
            for place, row in json_objects(decode_lines(stream, where), where):
                if not isinstance(row.get("text"), str):
                    raise DataError(
                        f"{place}: expected an object with "
                        f'"text".{did_you_mean("text", row)}'
                    )
                yield row["text"]
            return
        lines = decode_lines(stream, where, longest=LONGEST_PIECE, cut=True)
        yield from (
            _articles(lines, where) if head.startswith(b"<doc ") else _plain(lines)
        )


def _unpack(file: IO[bytes], where: str) -> io.BufferedReader[Any]:
    """Unpack a file if its first bytes show that it is compressed."""
    counted = _Counted(file, where)
    packed = io.BufferedReader(counted, 1 << 16)
    start = packed.peek(8)
    unpack = next(
        (opener for magic, opener in _UNPACK.items() if start.startswith(magic)), None
    )
    return (
        packed
        if unpack is None
        else io.BufferedReader(_Counted(unpack(packed), where, counted), 1 << 16)
    )


class _Counted(io.RawIOBase):
    """Count the bytes of a stream. Raises DataError if there are more than any text
    unpacks to from what `packed` has read."""

    def __init__(
        self, stream: IO[bytes], where: str, packed: _Counted | None = None
    ) -> None:
        self.stream = stream
        self.where = where
        self.packed = packed
        self.total = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        read = self.stream.read(len(buffer))
        buffer[: len(read)] = read
        self.total += len(read)
        if self.packed is not None and self.total > limit_unpacked(self.packed.total):
            raise DataError(f"{self.where}: {TOO_EXPANSIVE}")
        return len(read)


def _plain(lines: Iterator[str]) -> Iterator[str]:
    document: list[str] = []
    size = 0
    for line in lines:
        blank = not line.strip()
        if document and (blank or size + len(line) > LONGEST_DOCUMENT):
            yield "".join(document)
            document = []
            size = 0
        if not blank:
            document.append(line)
            size += len(line)
    if document:
        yield "".join(document)


def _articles(lines: Iterator[str], where: str) -> Iterator[str]:
    """Yield the text between `<doc ...>` and `</doc>`; articles with only a title are
    left out."""
    article: list[str] | None = None
    size = 0
    for line in lines:
        if line.startswith("<doc "):
            article = []
            size = 0
        elif line.startswith("</doc>") and article is not None:
            text = "".join(article).strip()
            if "\n" in text:
                yield text
            article = None
        elif article is not None:
            article.append(line)
            size += len(line)
            if size > LONGEST_LINE:
                raise DataError(
                    f"{where}: an article is longer than {LONGEST_LINE:,} characters. "
                    "Remove it."
                )
    if article is not None:
        raise DataError(
            f"{where}: is truncated; it ends inside an article, without its </doc>. "
            "Download it again."
        )


_LANGUAGE_CODE = re.compile(r"(?!tsv$)[a-z]{2,3}(_[A-Z]{2})?")
"""A language code: en, fra, pt_BR."""


def find_parallel(source: Path) -> list[Path]:
    """List the one or two files of parallel text that `source` names, if any."""
    if source.suffix == ".tsv" and source.is_file():
        return [source]
    if source.suffix == ".jsonl" and source.is_file():
        first = next((line for line in lines(source) if line.strip()), "")
        return [source] if _two_texts(first) else []
    if source.exists() or not source.parent.is_dir():
        return []
    sides = [
        path
        for path in source.parent.glob(f"{source.name}.*")
        if kind(path.name) is None
        and _LANGUAGE_CODE.fullmatch(path.name.removeprefix(f"{source.name}."))
    ]
    return sorted(sides) if len(sides) == 2 else []


def find_languages(folder: Path) -> dict[str, Path]:
    """List the sources of a corpus of several languages: language, or pair of languages
    -> what to read.

    A language is a folder named by its code (`en`); a pair is parallel text named by
    two codes (`en-fr.tsv`, `en-fr.jsonl`, or `en-fr.en` and `en-fr.fr`). Empty for a
    folder with other texts, or with fewer than two languages or pairs.
    """
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        source = (
            path
            if path.is_dir() or path.suffix in (".tsv", ".jsonl")
            else path.with_suffix("")
        )
        sides = [] if path.is_dir() else find_parallel(source)
        name = (
            "-".join(side.suffix[1:] for side in sides)
            if len(sides) == 2
            else source.name.partition(".")[0]
        )
        codes = name.split("-")
        if (
            len(codes) == (1 if path.is_dir() else 2)
            and (path.is_dir() or sides)
            and all(map(_LANGUAGE_CODE.fullmatch, codes))
        ):
            found[name] = source
        elif path.is_dir() or kind(path.name):
            return {}
    return found if len(found) > 1 else {}


def read_parallel(files: Sequence[Path]) -> Iterator[str]:
    """Yield each pair as two lines, in the order of the columns or of the language
    codes."""
    for texts in _align(*files) if len(files) == 2 else _rows(files[0]):
        sides = [" ".join(text.split()) for text in texts]
        if all(sides):
            yield "\n".join(sides)


def _align(first: Path, second: Path) -> Iterator[tuple[str, str]]:
    for number, (line, translation) in enumerate(
        zip_longest(lines(first), lines(second)), start=1
    ):
        if line is None or translation is None:
            shorter = first if line is None else second
            raise DataError(
                f"{shorter}: ends before line {number} of the other file. Line n of "
                f"{first.name} and line n of {second.name} must be translations of "
                "each other."
            )
        yield line, translation


def _rows(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(lines(path), start=1):
        if line.strip():
            texts = (
                _two_texts(line)
                if path.suffix == ".jsonl"
                else line.rstrip("\r\n").split("\t")
            )
            if len(texts) != 2:
                raise DataError(
                    f"{path}, line {number}: expected two texts, found "
                    f"{line[:60].strip()!r}."
                )
            yield texts[0], texts[1]


def _two_texts(line: str) -> Sequence[str]:
    """Return the two texts of a JSON line, or () unless it has exactly two, named by
    their languages."""
    try:
        row: Any = parse_json(line, "")
    except DataError:
        return ()
    row = row.get("translation", row) if isinstance(row, dict) else None
    texts = (
        [text for text in row.values() if isinstance(text, str)]
        if isinstance(row, dict)
        else []
    )
    named = len(texts) == 2 and all(map(_LANGUAGE_CODE.fullmatch, row))
    return texts if named else ()
