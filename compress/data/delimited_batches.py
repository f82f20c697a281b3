"""Read delimited files as Arrow batches with pyarrow's parser, many times faster than
row by row, as far as their rows can be read in only one way.

A file is plain if its quotation marks wrap whole cells and are doubled inside, its
lines end in \\n or \\r\\n, and it has no NUL. From the first block that is not, rows
are read one by one, by the rules and with the messages of `dialects`.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from compress.data.tables import BATCH_CHARACTERS, BATCH_ROWS, NotPlainError
from compress.data.text_files import Position, encoding_of, first_bytes, reading

if TYPE_CHECKING:
    from compress.arrays import Array
    from compress.data.dialects import Dialect

BatchStream = Iterator[pa.RecordBatch]
BLOCK_BYTES: Final = 4 * 2**20
"""Bytes that are parsed at a time; from the first longer row on, rows are read one by
one."""


def read_batches(
    path: Path,
    dialect: Dialect,
    names: Sequence[str],
    header: Sequence[str] | None,
    wanted: Sequence[str],
    *,
    position: Position | None = None,
) -> BatchStream:
    """Yield the wanted columns as batches of BATCH_ROWS rows of strings.

    names     of all columns of the file
    header    the cells of its first row, if that is a header; no other row may repeat
              it
    position  is told how much of the file has been read

    Raises NotPlainError at rows that must be read one by one, and DataError for a file
    that cannot be read.
    """
    encoding = encoding_of(first_bytes(path))
    if not (dialect.is_plain and encoding.startswith("utf-8")):
        raise NotPlainError
    with reading(path), path.open("rb") as file:
        if position is not None:
            size = path.stat().st_size
            position.tell = lambda: file.tell() / size
        file.seek(len(codecs.BOM_UTF8) if encoding == "utf-8-sig" else 0)
        for _ in range(dialect.skipped):
            file.readline()
        batches = _parse(file, dialect, names)
        if header is not None:
            batches = _without(header, batches)
        yield from _collect(each.select(list(wanted)) for each in batches)
        if position is not None:
            position.tell = lambda: 1.0


def _parse(file: IO[bytes], dialect: Dialect, names: Sequence[str]) -> BatchStream:
    naming = pyarrow.csv.ReadOptions(column_names=list(names))
    parsing = pyarrow.csv.ParseOptions(
        delimiter=dialect.delimiter,
        quote_char=dialect.mark or False,
        newlines_in_values=bool(dialect.mark),
    )
    converting = pyarrow.csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
    )
    # whole rows at a time: given a Python file, pyarrow's stream reads it from threads
    # and may then hang
    for rows in _plain_rows(file, dialect):
        try:
            table = pyarrow.csv.read_csv(
                pa.BufferReader(rows), naming, parsing, converting
            )
        except pa.ArrowInvalid as error:
            raise NotPlainError from error
        yield from table.to_batches()


def _plain_rows(file: IO[bytes], dialect: Dialect) -> Iterator[bytes]:
    """Yield whole rows, about a block at a time. Raises NotPlainError at the first rows
    that are not plain."""
    rest = b""
    while block := file.read(BLOCK_BYTES):
        rest += block
        end = _find_end(rest, dialect)
        rows = rest[:end]
        _check(rows, dialect)
        yield rows
        rest = rest[end:]
    if rest:
        _check(rest + b"\n", dialect)
        yield rest


def _find_end(text: bytes, dialect: Dialect) -> int:
    """Return where the last whole row ends. Raises NotPlainError if there is none."""
    codes = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(codes == ord("\n"))
    if dialect.mark:
        marks = np.flatnonzero(codes == ord(dialect.mark))
        marks_before = np.searchsorted(marks, ends)
        ends = ends[marks_before % 2 == 0]
    if not len(ends):
        raise NotPlainError
    return int(ends[-1]) + 1


def _check(rows: bytes, dialect: Dialect) -> None:
    """Raise NotPlainError for rows that are not plain; the last ends in \\n."""
    codes = np.frombuffer(b"\n" + rows, np.uint8)
    plain = b"\0" not in rows
    plain &= rows.count(b"\r") == rows.count(b"\r\n")
    # of joined files, which have a second header
    plain &= b"\n" + codecs.BOM_UTF8 not in b"\n" + rows
    if dialect.mark:
        plain &= _are_paired(codes, dialect)
    if not plain:
        raise NotPlainError


def _are_paired(codes: Array, dialect: Dialect) -> bool:
    """Check that each quotation mark opens a cell, closes it, or is doubled inside
    it."""
    places = np.flatnonzero(codes == ord(dialect.mark))
    ends = np.zeros(256, bool)
    ends[[ord(each) for each in (dialect.mark, dialect.delimiter, "\n")]] = True
    before = codes[places[::2] - 1]
    opened = bool(ends[before].all())
    ends[ord("\r")] = True
    after = codes[places[1::2] + 1]
    closed = bool(ends[after].all())
    return opened and closed and len(places) % 2 == 0


def _without(header: Sequence[str], batches: BatchStream) -> BatchStream:
    """Leave out the header row. Raises NotPlainError if a later row repeats all of its
    cells, unless it has only one."""
    starts = (batch.slice(1) for batch in islice(batches, 1))
    for batch in chain(starts, batches):
        repeats = np.ones(len(batch), bool)
        for column, cell in zip(batch.columns, header, strict=True):
            repeats &= pc.equal(column, cell).to_numpy(zero_copy_only=False)
        if len(header) > 1 and repeats.any():
            raise NotPlainError
        yield batch


def _collect(batches: Iterable[pa.RecordBatch]) -> BatchStream:
    """Regroup rows into batches of BATCH_ROWS, as other readers yield them."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        full = sum(each.nbytes for each in waiting) >= BATCH_CHARACTERS
        rows = sum(map(len, waiting))
        if full or rows >= BATCH_ROWS:
            divided = _divide(waiting)
            waiting = [] if full else [divided.pop()]
            yield from divided
    if waiting:
        yield from _divide(waiting)


def _divide(batches: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
    joined = pa.Table.from_batches(batches)
    whole = joined.combine_chunks()
    return whole.to_batches(max_chunksize=BATCH_ROWS)
