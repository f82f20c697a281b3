"""Take the vectors of texts from a file that was made elsewhere, or from an endpoint, in the place of a teacher's own.

    vectors.npy       (N, E) numbers, for the N lines of vectors.txt beside it
    vectors.parquet   a column of texts, and one of lists of E numbers
    endpoint.yaml     an OpenAI-compatible endpoint, `mode: embeddings` (see `prompting.http_model`)

Shapes: N texts, E width of the vectors.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from compress import io as digest
from compress.data import text_files
from compress.data.cache import explained, home, locked, note
from compress.errors import TeacherError
from compress.io import atomic_file, name_disk_errors
from compress.progress import Progress
from compress.terminal import one_line

if TYPE_CHECKING:
    from compress.prompting.http_model import RemoteEncoder

FILES: Final = (".npy", ".parquet")
SHOWN: Final = 60
"""Characters of a text that a message repeats."""

Vectors = NDArray[np.float16]


def gives_vectors(teacher: str, *, prompted: bool = False) -> bool:
    """Tell whether a teacher is a file of vectors, or an endpoint that is not prompted."""
    suffix = Path(teacher).suffix.lower()
    return suffix in FILES or (suffix in (".yaml", ".yml") and not prompted)


def open_source(teacher: str) -> VectorFile | KeptVectors:
    """Open a file of vectors or an endpoint's file. Raises TeacherError, PromptError."""
    if not Path(teacher).is_file():
        raise TeacherError(f"{teacher}: no such file; expected vectors (.npy, .parquet) or an endpoint (.yaml)")
    if Path(teacher).suffix.lower() not in FILES:
        from compress.prompting.http_model import open_encoder  # half a second: httpx2

        return KeptVectors(open_encoder(teacher))
    return VectorFile(Path(teacher))


@dataclass(frozen=True)
class VectorFile:
    """Vectors in a file, found by their texts."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def digest(self) -> str:
        return digest.hash_files({self.path, *([self._texts_path] if self._is_array else [])})

    @property
    def _is_array(self) -> bool:
        return self.path.suffix.lower() == ".npy"

    @property
    def _texts_path(self) -> Path:
        return self.path.with_suffix(".txt")

    def vectors(self, texts: Sequence[str]) -> Vectors:
        rows = self._rows
        if missing := [text for text in texts if text.strip() not in rows]:
            raise TeacherError(
                f"{self.path}: has no vector for {len(missing):,} of {len(texts):,} texts, such as "
                f"{one_line(missing[0], SHOWN)!r}; expected one for every text of every split. Add them, or take those "
                "texts out: without a validation split some of the others are held out"
            )
        chosen = np.array([rows[text.strip()] for text in texts])
        found = np.asarray(self._array[chosen], dtype=np.float32)
        if broken := np.flatnonzero(~np.isfinite(found).all(axis=1)).tolist():
            raise TeacherError(
                f"{self.path}: {len(broken):,} of the {len(texts):,} vectors that are wanted hold numbers that are not "
                f"finite, such as row {chosen[broken[0]] + 1:,}, of {one_line(texts[broken[0]], SHOWN)!r}: make those "
                "again, or take their texts out"
            )
        return _halve(found, str(self.path))

    @cached_property
    def _rows(self) -> Mapping[str, int]:
        """Map each text to the first of its rows."""
        found: dict[str, int] = {}
        for row, text in enumerate(self._texts):
            found.setdefault(text.strip(), row)
        return found

    @cached_property
    def _texts(self) -> Sequence[str]:
        if not self._is_array:
            return [text or "" for text in self._column("texts", _is_text).to_pylist()]
        if not self._texts_path.is_file():
            raise TeacherError(
                f"{self.path}: nothing says whose vectors these are; expected {self._texts_path.name} beside it, with "
                f"a line for each of its {len(self._array):,} rows"
            )
        texts = list(text_files.lines(self._texts_path))
        if len(texts) != len(self._array):
            raise TeacherError(
                f"{self.path}: {len(self._array):,} vectors, but {self._texts_path.name} has {len(texts):,} lines; "
                "expected one line for each vector, in the same order"
            )
        return texts

    @cached_property
    def _array(self) -> NDArray[Any]:
        if self._is_array:
            try:
                found = np.load(self.path, mmap_mode="r", allow_pickle=False)
            except (ValueError, OSError) as error:
                raise TeacherError(f"{self.path}: cannot be read as an array of numbers ({error})") from None
        else:
            column = self._column("vectors", _is_vectors)
            widths = {len(each) if each is not None else 0 for each in column}
            if len(widths) != 1:
                raise TeacherError(
                    f"{self.path}: its vectors have {', '.join(map(str, sorted(widths)))} numbers; expected as many in "
                    "each"
                )
            flat = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
            found = flat.reshape(len(column), -1)
        if found.ndim != 2 or not found.size or found.dtype.kind != "f":
            raise TeacherError(
                f"{self.path}: holds {found.dtype} of shape {found.shape}; expected a row of floating-point numbers "
                "for each text"
            )
        return found

    def _column(self, what: str, fits: Any) -> Any:
        import pyarrow as pa
        from pyarrow import parquet

        try:
            schema = parquet.read_schema(self.path)
            names = [each.name for each in schema if fits(each.type)]
            if len(names) == 1:
                return parquet.read_table(self.path, columns=names).column(0)
        except (pa.ArrowException, OSError) as error:
            raise TeacherError(f"{self.path}: cannot be read as parquet ({error})") from None
        raise TeacherError(
            f"{self.path}: {len(names)} of its columns ({', '.join(schema.names)}) hold {what}; expected one with the "
            "texts and one with lists of floating-point numbers"
        )


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_vectors(kind: Any) -> bool:
    import pyarrow as pa

    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(each(kind) for each in lists) and bool(pa.types.is_floating(kind.value_type))


@dataclass(frozen=True)
class KeptVectors:
    """An endpoint's vectors. Each is appended to a file under $COMPRESS_HOME/vectors as soon as it is known, by the
    digest of its text, in float16: what was asked before is not asked again, whatever stopped it."""

    encoder: RemoteEncoder

    @property
    def name(self) -> str:
        return self.encoder.name

    @property
    def digest(self) -> str:
        return self.encoder.digest

    @property
    def _folder(self) -> Path:
        return home() / "vectors" / self.digest[:24]

    def vectors(self, texts: Sequence[str]) -> Vectors:
        """Return a vector for each text. Raises TeacherError for what the endpoint does not answer, and for a width
        that is not that of the vectors it gave before."""
        marks = [_mark(text) for text in texts]
        with explained(home()):
            self._folder.mkdir(parents=True, exist_ok=True)
            with locked(self._folder / "vectors"):  # another that asks the same waits, then finds it answered
                known = self._read()
                new = {mark: text for mark, text in zip(marks, texts, strict=True) if mark not in known}
                if new:
                    self._ask(new, known)
        return np.stack([known[mark] for mark in marks])

    def _ask(self, new: Mapping[bytes, str], known: dict[bytes, Vectors]) -> None:
        marks, asked = list(new), list(new.values())
        with Progress(f"asking {self.name}", len(new), "texts") as bar:
            for first, answer in self.encoder.vectors(asked):
                width = len(next(iter(known.values()))) if known else answer.shape[1]
                if answer.shape[1] != width:
                    raise TeacherError(
                        f"teacher {self.name}: a vector has {answer.shape[1]} numbers, those that it gave before have "
                        f"{width}: it is another model now. What was answered before is kept in {self._folder}; give "
                        "the endpoint file another model name, or remove that folder, to begin anew"
                    )
                halved = _halve(answer, f"teacher {self.name}")
                some = marks[first : first + len(halved)]
                with self._appending(width) as file:
                    file.write(_records(some, halved).tobytes())
                known.update(zip(some, halved, strict=True))
                bar.advance(len(some))

    @contextmanager
    def _appending(self, width: int) -> Iterator[Any]:
        path = self._folder / f"{width}.bin"
        with name_disk_errors(path), path.open("ab") as file:
            yield file

    def _read(self) -> dict[bytes, Vectors]:
        """Read the vectors that are kept; a torn or damaged one is asked for again."""
        known: dict[bytes, Vectors] = {}
        for path in self._folder.glob("*.bin"):
            kind = _record(int(path.stem))
            torn = path.stat().st_size % kind.itemsize
            records = np.fromfile(path, dtype=kind, count=path.stat().st_size // kind.itemsize)
            whole = records["check"] == [_check(each) for each in records]
            if damaged := int((~whole).sum()) + bool(torn):
                note(f"{path}: {damaged:,} of the kept vectors are damaged; asking for them again")
                with name_disk_errors(path), atomic_file(path) as mended:
                    records[whole].tofile(mended)
            known |= {bytes(each["mark"]): each["vector"] for each in records[whole]}
        return known


def _record(width: int) -> np.dtype[Any]:
    return np.dtype([("mark", "V16"), ("check", "<u4"), ("vector", "<f2", width)])


def _records(marks: Iterable[bytes], vectors: Vectors) -> NDArray[Any]:
    made = np.empty(len(vectors), dtype=_record(vectors.shape[1]))
    made["mark"], made["vector"] = list(marks), vectors
    made["check"] = [_check(each) for each in made]
    return made


def _check(record: Any) -> int:
    return zlib.crc32(record["mark"].tobytes() + record["vector"].tobytes())


def _mark(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _halve(vectors: NDArray[Any], where: str) -> Vectors:
    """Return float16, whose largest number is 65,504."""
    if np.abs(vectors).max(initial=0) > np.finfo(np.float16).max:
        raise TeacherError(f"{where}: its vectors hold numbers beyond 65,504, the largest of float16: scale them down")
    return vectors.astype(np.float16)
