"""Store the vectors of texts in 4 bytes, 1 byte or 1 bit a number, and find those
nearest to a query.

    float32  the numbers as they are
    int8     each vector scaled so that its largest number is 127 or -127, and rounded;
             the cosine ignores the scale
    binary   the signs, eight in a byte, as `numpy.packbits` and faiss's binary indexes
             hold them: 1 is above 0

Each vector is packed alone, so nothing is calibrated, and texts added later fit.
Queries are not packed: a float32 query finds more in packed vectors than a packed one
does.

Shapes: N texts, Q queries, E numbers of a vector, P bytes or numbers of it when packed,
K nearest texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal, TypeVar

import numpy as np

from compress.arrays import Array, Floats, Longs
from compress.errors import DataError

StoredForm = Literal["float32", "int8", "binary"]
Each = TypeVar("Each")

VECTOR_TYPES: Final[Mapping[StoredForm, str]] = {
    "float32": "<f4",
    "int8": "|i1",
    "binary": "|u1",
}
"""numpy's types of packed vectors, from which their form is known."""
INDEX_BLOCK: Final = 2**24
"""Scores of queries and texts in memory at once."""
INDEX_ROWS: Final = 1024
"""Packed vectors that are unpacked at a time, so that they stay in the processor's
cache."""


def pack(vectors_NE: Array, form: StoredForm) -> Array:
    """Pack vectors (N, E) to (N, P)."""
    if form == "binary":
        return np.packbits(vectors_NE > 0, axis=1)
    if form == "int8":
        largest = np.abs(vectors_NE).max(axis=1, keepdims=True)
        return np.rint(vectors_NE * (127 / np.maximum(largest, 1e-12))).astype(
            VECTOR_TYPES[form]
        )
    return np.asarray(vectors_NE, VECTOR_TYPES[form])


def unpack(packed_NP: Array, width: int) -> Floats:
    """Unpack vectors to (N, E) numbers with nearly the cosines of the original vectors;
    signs become 1 and -1."""
    if packed_NP.dtype == VECTOR_TYPES["binary"]:
        return 2 * np.unpackbits(packed_NP, axis=1, count=width).astype(np.float32) - 1
    return packed_NP.astype(np.float32, copy=False)


def find_nearest(
    queries_QE: Array, packed_NP: Array, count: int
) -> tuple[Longs, Floats]:
    """Return the numbers (Q, K) and the cosines of the `count` vectors nearest to each
    query, the nearest first.

    The search is exact. Raises DataError for vectors that are not finite.
    """
    queries_QE = np.asarray(queries_QE, np.float32)
    queries_QE = queries_QE / np.maximum(
        np.linalg.norm(queries_QE, axis=1, keepdims=True), 1e-12
    )
    total = len(packed_NP)
    step = max(1, INDEX_BLOCK // total)
    count = min(count, total)
    nearest = np.empty((len(queries_QE), count), np.int64)
    found = np.empty((len(queries_QE), count), np.float32)
    for start in range(0, len(queries_QE), step):
        some = queries_QE[start : start + step]
        cosines = np.empty((len(some), total), np.float32)
        for at in range(0, total, INDEX_ROWS):
            block = unpack(packed_NP[at : at + INDEX_ROWS], queries_QE.shape[1])
            cosines[:, at : at + INDEX_ROWS] = (
                some @ block.T / np.maximum(np.linalg.norm(block, axis=1), 1e-12)
            )
        if not (finite := np.isfinite(cosines).all(axis=0)).all():
            raise DataError(
                f"the vector in row {int(finite.argmin()) + 1:,} is not finite; "
                "compute the vectors again"
            )
        for query, row in enumerate(cosines, start):
            nearest[query] = take_best(row, count)
            found[query] = row[nearest[query]]
    return nearest, found


def take_best(scores: Array, count: int) -> Longs:
    """Return the places of the `count` highest of at least as many scores, the highest
    first; ties in their order."""
    lowest = np.partition(scores, len(scores) - count)[len(scores) - count]
    candidates = np.flatnonzero(scores >= lowest)
    return np.asarray(
        candidates[np.argsort(-scores[candidates], kind="stable")][:count]
    )


def read_index(path: Path, width: int) -> Array:
    """Read packed vectors of `width` numbers from an .npy file. Raises DataError for
    another width or type."""
    packed = load_array(path)
    numbers = {VECTOR_TYPES["binary"]: -(-width // 8)}.get(packed.dtype.str, width)
    if (
        packed.dtype.str not in VECTOR_TYPES.values()
        or packed.shape[1:] != (numbers,)
        or not len(packed)
    ):
        raise DataError(
            f"{path}: holds {packed.dtype} of shape {packed.shape}; expected vectors "
            f"of {width} numbers as this bundle writes them: float32, int8, or uint8 "
            "with eight signs in a byte. Write them with: compress predict BUNDLE "
            f"--input {path.with_suffix('.txt').name} --output {path.name}"
        )
    return packed


def load_array(path: Path) -> Array:
    """Open an .npy file without reading all of it, and without unpickling. Raises
    DataError."""
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (ValueError, OSError) as error:
        raise DataError(
            f"{path}: cannot be read as an array of numbers ({error})"
        ) from None


def load_texts(
    path: Path, count: int, beside: Path, read: Callable[[Path], list[Each]]
) -> list[Each]:
    """Read the texts of the `count` vectors of an .npy file from a file next to it.
    Raises DataError if there are not as many."""
    if not beside.is_file():
        raise DataError(
            f"{path}: its texts are missing; expected {beside.name} next to it, with a "
            f"line for each of its {count:,} rows"
        )
    texts = read(beside)
    if len(texts) != count:
        raise DataError(
            f"{path}: {count:,} vectors, but {beside.name} has {len(texts):,} texts; "
            "expected one for each vector, in the same order"
        )
    return texts
