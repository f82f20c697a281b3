"""Read the vectors of texts from a file or from an endpoint, in place of a teacher
model.

    vectors.npy       (N, E) numbers, for the N lines of vectors.txt next to it
    vectors.parquet   a column of texts and one of lists of E numbers
    endpoint.yaml     an OpenAI-compatible endpoint, `mode: embeddings` (see
                      `prompting.http_model`)

Shapes: N texts, E width of the vectors.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from compress import io as digest
from compress.arrays import Array
from compress.data.cache import explained, home, locked
from compress.data.text_files import stripped_lines
from compress.data.vector_index import load_array, load_texts
from compress.errors import TeacherError
from compress.io import atomic_file, name_disk_errors
from compress.progress import Progress, note
from compress.terminal import one_line

if TYPE_CHECKING:
    from compress.prompting.http_model import RemoteEncoder

VECTOR_FILES: Final = (".npy", ".parquet")
TEXT_SHOWN: Final = 60
"""Maximum characters of a text that a message quotes."""

Vectors = NDArray[np.float16]


def gives_vectors(teacher: str, *, prompted: bool = False) -> bool:
    """Return True if a teacher is a file of vectors, or an endpoint that is not
    prompted."""
    suffix = Path(teacher).suffix.lower()
    return suffix in VECTOR_FILES or (suffix in (".yaml", ".yml") and not prompted)


def open_source(teacher: str) -> VectorFile | CachedVectors:
    """Open a file of vectors or the .yaml file of an endpoint. Raises TeacherError,
    PromptError."""
    if not Path(teacher).is_file():
        raise TeacherError(
            f"{teacher}: no such file; expected vectors (.npy, .parquet) or an "
            "endpoint (.yaml)"
        )
    if Path(teacher).suffix.lower() not in VECTOR_FILES:
        # importing httpx2 takes half a second
        from compress.prompting.http_model import open_encoder

        return CachedVectors(open_encoder(teacher))
    return VectorFile(Path(teacher))


@dataclass(frozen=True)
class VectorFile:
    """A file of vectors, looked up by their texts."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def digest(self) -> str:
        return digest.hash_files(
            {self.path, *([self._texts_path] if self._is_array else [])}
        )

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
                f"{self.path}: has no vector for {len(missing):,} of {len(texts):,} "
                f"texts, such as {one_line(missing[0], TEXT_SHOWN)!r}; expected one "
                "for "
                "every text of every split. Add them, or remove those texts; without a "
                "validation split some texts are held out for it"
            )
        chosen = np.array([rows[text.strip()] for text in texts])
        vectors = np.asarray(self._array[chosen], dtype=np.float32)
        if broken := np.flatnonzero(~np.isfinite(vectors).all(axis=1)).tolist():
            raise TeacherError(
                f"{self.path}: {len(broken):,} of the {len(texts):,} requested vectors "
                f"are not finite, such as row {chosen[broken[0]] + 1:,}, of "
                f"{one_line(texts[broken[0]], TEXT_SHOWN)!r}: compute them again, or "
                "remove their texts"
            )
        return _to_float16(vectors, str(self.path))

    @cached_property
    def _rows(self) -> Mapping[str, int]:
        """Map each text to its first row."""
        rows: dict[str, int] = {}
        for row, text in enumerate(self._texts):
            rows.setdefault(text.strip(), row)
        return rows

    @cached_property
    def _texts(self) -> Sequence[str]:
        if not self._is_array:
            return [text or "" for text in self._column("texts").to_pylist()]
        return load_texts(self.path, len(self._array), self._texts_path, stripped_lines)

    @cached_property
    def _array(self) -> Array:
        if self._is_array:
            array = load_array(self.path)
        else:
            column = self._column("vectors")
            widths = {len(vector) if vector.is_valid else 0 for vector in column}
            if len(widths) != 1 or not all(widths):
                raise TeacherError(
                    f"{self.path}: its vectors have "
                    f"{', '.join(map(str, sorted(widths)))} numbers; expected the same "
                    "length everywhere"
                )
            flat = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
            array = flat.reshape(len(column), -1)
        if array.ndim != 2 or not array.size or array.dtype.kind != "f":
            raise TeacherError(
                f"{self.path}: holds {array.dtype} of shape {array.shape}; expected a "
                "row of floating-point numbers for each text"
            )
        return array

    def _column(self, kind: Literal["texts", "vectors"]) -> Any:
        """Read the only parquet column of this kind."""
        import pyarrow as pa
        from pyarrow import parquet

        def fits(dtype: Any) -> bool:
            if kind == "texts":
                return bool(
                    pa.types.is_string(dtype) or pa.types.is_large_string(dtype)
                )
            lists = (
                pa.types.is_list,
                pa.types.is_large_list,
                pa.types.is_fixed_size_list,
            )
            return any(is_kind(dtype) for is_kind in lists) and bool(
                pa.types.is_floating(dtype.value_type)
            )

        try:
            schema = parquet.read_schema(self.path)
            names = [column.name for column in schema if fits(column.type)]
            if len(names) == 1:
                return parquet.read_table(self.path, columns=names).column(0)
        except (pa.ArrowException, OSError) as error:
            raise TeacherError(
                f"{self.path}: cannot be read as parquet ({error})"
            ) from None
        raise TeacherError(
            f"{self.path}: {len(names)} of its columns ({', '.join(schema.names)}) "
            f"hold {kind}; expected one with the texts and one with lists of "
            "floating-point numbers"
        )


@dataclass(frozen=True)
class CachedVectors:
    """An endpoint with a cache: each vector is appended at once to a file under
    $COMPRESS_HOME/vectors, by the hash of its text, in float16, so that no text is paid
    for twice."""

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
        """Return a vector for each text. Raises TeacherError if the endpoint does not
        answer, or with vectors of another width than before."""
        keys = list(map(_key, texts))
        with explained(home()):
            self._folder.mkdir(parents=True, exist_ok=True)
            # another process with the same texts waits, then finds them
            with locked(self._folder / "vectors"):
                known = self._read_cache()
                new = {
                    key: text
                    for key, text in zip(keys, texts, strict=True)
                    if key not in known
                }
                if new:
                    self._ask(new, known)
        return np.stack([known[key] for key in keys])

    def list_missing(self, texts: Sequence[str]) -> list[str]:
        """List the texts, once each, whose vectors are not in the cache."""
        with explained(home()):
            known = self._read_cache()
        return [text for text in dict.fromkeys(texts) if _key(text) not in known]

    def _ask(self, new: Mapping[bytes, str], known: dict[bytes, Vectors]) -> None:
        """Ask the endpoint for the new texts; append each vector to the cache, and add
        it to `known`."""
        keys = list(new)
        with Progress(f"asking {self.name}", len(new), "texts") as bar:
            for first, answer in self.encoder.vectors(list(new.values())):
                width = len(next(iter(known.values()))) if known else answer.shape[1]
                if answer.shape[1] != width:
                    raise TeacherError(
                        f"teacher {self.name}: a vector has {answer.shape[1]} numbers, "
                        f"earlier ones have {width}: the model has changed. Earlier "
                        f"answers are cached in {self._folder}; to start again, put "
                        "another model name into the endpoint file, or remove that "
                        "folder"
                    )
                batch = keys[first : first + len(answer)]
                records = np.empty(len(answer), dtype=_record_type(width))
                records["mark"] = batch
                records["vector"] = _to_float16(answer, f"teacher {self.name}")
                records["check"] = [_checksum(record) for record in records]
                path = self._folder / f"{width}.bin"
                with name_disk_errors(path), path.open("ab") as file:
                    file.write(records.tobytes())
                known.update(zip(batch, records["vector"], strict=True))
                bar.advance(len(batch))

    def _read_cache(self) -> dict[bytes, Vectors]:
        """Read the cached vectors, and remove the damaged ones."""
        known: dict[bytes, Vectors] = {}
        for path in self._folder.glob("*.bin"):
            dtype = _record_type(int(path.stem))
            size = path.stat().st_size
            records = np.fromfile(path, dtype=dtype, count=size // dtype.itemsize)
            intact = records["check"] == [_checksum(record) for record in records]
            if damaged := int((~intact).sum()) + bool(size % dtype.itemsize):
                note(
                    f"{path}: {damaged:,} of the cached vectors are damaged; asking "
                    "for them again"
                )
                with name_disk_errors(path), atomic_file(path) as repaired:
                    records[intact].tofile(repaired)
            known |= {
                bytes(record["mark"]): record["vector"] for record in records[intact]
            }
        return known


def _key(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _record_type(width: int) -> np.dtype[Any]:
    return np.dtype([("mark", "V16"), ("check", "<u4"), ("vector", "<f2", width)])


def _checksum(record: Any) -> int:
    return zlib.crc32(record["mark"].tobytes() + record["vector"].tobytes())


def _to_float16(vectors: Array, where: str) -> Vectors:
    if np.abs(vectors).max(initial=0) > np.finfo(np.float16).max:
        raise TeacherError(
            f"{where}: its vectors exceed 65,504, the largest number of float16: scale "
            "them down"
        )
    return vectors.astype(np.float16)
