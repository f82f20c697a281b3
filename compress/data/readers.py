"""Open files and tables as splits that are not yet read: named columns of cells, streamed as Arrow batches.

A cell is a string, a list of strings, or None: labels keep the source's spelling until every split is known, so that
"1", 1 and 1.0 can be told from a word in every file format. The fields of an object are columns: `answers.text`.

Stated rules. A csv file is quoted as in RFC 4180. A tsv or txt file is read without quoting unless all quotation marks
of its first rows wrap whole fields, and it or a sibling needs quoting: a field contains a doubled mark, a tab or a line
end, or every row has a wrapped field. A first row is a header if it has the name of a requested column; or if none of
its cells recurs in its column and a sibling starts with the same row; or if a usual column name in it never recurs; or
if a column below a word has only numbers, or only values that recur. Lines of a txt file without tabs are split if all
start with fastText's `__label__`, or if each ends in a recurring value after its only semicolon. A file without a
header takes the column names of a sibling of the same width; else its columns are numbered from 1.
"""

from __future__ import annotations

import csv
import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from compress.data.schema import is_known, number
from compress.data.sources import class_folders
from compress.data.text_files import (
    LONGEST,
    TOO_EXPANSIVE,
    head,
    json_object,
    json_objects,
    limit_unpacked,
    lines,
    parse_json,
    reading,
    refuse_special,
    whole,
)
from compress.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

Cell = str | list[str | None] | None
Item = TypeVar("Item")

SHOWN: Final = 40
"""Columns listed in a message."""
SAMPLE_ROWS: Final = 1000
SAMPLE_CHARACTERS: Final = 4_000_000
BATCH_ROWS: Final = 10_000
BATCH_CHARACTERS: Final = 16_000_000
LARGEST_LIST: Final = 64 * 2**20
"""Bytes of a json list, which is read as a whole and takes up to twenty times as much memory."""


@dataclass(frozen=True)
class RawSplit:
    """Describe a split that is not yet read.

    place    its name in messages: a file, or a hub data set and split
    columns  the source's column names; numbers from "1" if it has none
    sample   the cells of the first rows, by column, for detection
    read     streams the given columns as batches of strings, or of lists of strings if the sample has lists
    classes  the class names that the source declares for a column, in the order of their ids
    first    the number of its first row in messages: 2 after a header
    nested   columns of lists of objects or of lists, which cannot be read
    """

    place: str
    columns: tuple[str, ...]
    sample: Mapping[str, Sequence[Cell]]
    read: Callable[[Sequence[str]], Iterator[pa.RecordBatch]]
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    first: int = 1
    headerless: bool = False
    notes: tuple[str, ...] = ()
    nested: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the last part of the place, for notes."""
        return Path(self.place).name

    def examples(self) -> str:
        """List the columns with an example each, one per line, for messages that ask the user to choose."""
        listed = []
        for name in self.columns[:SHOWN]:
            text = repr(next((cell for cell in self.sample[name] if cell), ""))
            listed.append(f"  {name}: {text if len(text) <= 60 else text[:57] + '...'}")
        more = len(self.columns) - SHOWN
        listed += [f"  and {more:,} more"] if more > 0 else []
        return "\n".join([*listed, *(f"  {name}: lists of objects or lists, not read" for name in self.nested[:SHOWN])])

    def has_lists(self, column: str) -> bool:
        return any(isinstance(cell, list) for cell in self.sample[column])


def chunks(
    rows: Iterable[Item], size: Callable[[Item], int], most_rows: int, most_characters: int
) -> Iterator[list[Item]]:
    """Yield lists of rows, bounded in number and in characters; `size` counts the characters of a row."""
    chunk: list[Item] = []
    total = 0
    for row in rows:
        chunk.append(row)
        total += size(row)
        if len(chunk) >= most_rows or total >= most_characters:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


def _first_rows(rows: Iterable[Item], size: Callable[[Item], int]) -> list[Item]:
    return next(chunks(rows, size, SAMPLE_ROWS, SAMPLE_CHARACTERS), [])


def _characters(cells: Iterable[Any]) -> int:
    """Estimate the memory of cells in characters; an empty cell counts as one."""
    total = 0
    for cell in cells:
        total += 1 + len(cell) if isinstance(cell, str) else _characters(cell) if isinstance(cell, list) else 1
    return total


def _batches(
    rows: Iterable[Sequence[Cell]], names: Sequence[str], sample: Mapping[str, Sequence[Cell]], place: str, first: int
) -> Iterator[pa.RecordBatch]:
    """Write rows of the named columns as Arrow batches. DataError for columns that mix texts and lists."""
    wrong = [str if any(isinstance(cell, list) for cell in sample[name]) else list for name in names]
    types = [pa.list_(pa.string()) if refused is str else pa.string() for refused in wrong]
    for chunk in chunks(rows, _characters, BATCH_ROWS, BATCH_CHARACTERS):
        for row in chunk:
            if any(map(isinstance, row, wrong)):
                raise DataError(
                    f"{place}, row {first}: a column has both lists and texts. Write every row of a column the same "
                    "way."
                )
            first += 1
        columns = zip(*chunk, strict=True)
        yield pa.record_batch([pa.array(cells, kind) for cells, kind in zip(columns, types, strict=True)], list(names))


FASTTEXT: Final = "__label__"
SHOWN_LINES: Final = 100
"""Lines from which the delimiter of a txt file is detected."""
HEADER_CELL = 64
RECURRING_ROWS = 20

_FIELD = r'(?:"[^"]*(?:""[^"]*)*"|[^"\t\r\n]*)'
_CLEAN = re.compile(rf"{_FIELD}(?:(?:\t|\r?\n){_FIELD})*")
_WRAPPED = re.compile(r'"([^"]*(?:""[^"]*)*)"')


@dataclass(frozen=True)
class Look:
    """Hold the first rows of a file and how they were read."""

    path: Path
    delimiter: str
    quoted: bool
    rows: Sequence[Sequence[str]]


class Header(NamedTuple):
    names: tuple[str, ...]
    own: bool
    """True if it is the file's first row."""
    note: str | None = None


def open_texts(paths: Sequence[Path], named: Sequence[str]) -> dict[Path, RawSplit]:
    """Open the delimited files of one folder; `named` are the requested columns, if any."""
    heads = {path: _head(path) for path in paths if path.suffix.lower() != ".csv"}
    clean = {path for path, start in heads.items() if _CLEAN.fullmatch(start)}
    proven = any(map(_needs_quoting, (heads[path] for path in clean)))
    looks = [_look(path, quoted=path not in heads or (proven and path in clean)) for path in paths]
    labelled = Header(("text", "label"), own=False)
    headers = {look.path: labelled if look.delimiter == FASTTEXT else _header(look, looks, named) for look in looks}
    return {
        look.path: _read_delimited(look, headers[look.path] or _borrow_header(look, headers), named) for look in looks
    }


def _head(path: Path) -> str:
    """Read the first lines, up to the last complete quoted field."""
    first = _first_rows(lines(path), len)
    odd = sum(line.count('"') for line in first) % 2
    while odd and len(first) > 1:
        odd -= first.pop().count('"') % 2
    return "".join(first)


def _needs_quoting(first_lines: str) -> bool:
    fields = [match[1] for match in _WRAPPED.finditer(first_lines)]
    return any(re.search(r'""|[\t\n]', field) for field in fields) or len(fields) >= first_lines.count("\n") > 1


def _look(path: Path, *, quoted: bool) -> Look:
    delimiter = "\t"
    if path.suffix.lower() == ".txt":
        delimiter = delimiter_of(list(itertools.islice(lines(path), SHOWN_LINES))) or delimiter
    if path.suffix.lower() == ".csv":
        start = next(lines(path), "")
        delimiter = next((mark for mark in ",\t;" if mark in start), ",")
    look = Look(path, delimiter, quoted, ())
    rows = [cells for _, cells in _first_rows(_rows(look), lambda row: _characters(row[1]))]
    if not rows:
        raise _empty(path)
    return replace(look, rows=rows)


def _empty(place: object, what: str = "is empty") -> DataError:
    return DataError(f"{place} {what}; expected rows of a text and a label.")


def delimiter_of(first: Sequence[str]) -> str:
    """Detect the delimiter of a txt file from its first lines: a tab, a semicolon, FASTTEXT, or "" for whole texts."""
    if any("\t" in line for line in first):
        return "\t"
    if first and all(line.startswith(FASTTEXT) for line in first):
        return FASTTEXT
    ends = {line.rpartition(";")[2].strip() for line in first}
    recur = len(first) >= RECURRING_ROWS and 2 * len(ends) <= len(first)
    return ";" if recur and all(line.count(";") == 1 for line in first) else ""


def _split_line(text: str, delimiter: str) -> list[str]:
    """Split a line into its cells; for fastText, into the text and its labels joined by `|`."""
    if delimiter != FASTTEXT:
        return text.split(delimiter)
    words = text.split(" ")
    count = next((at for at, word in enumerate(words) if not word.startswith(FASTTEXT)), len(words))
    return [" ".join(words[count:]), "|".join(word.removeprefix(FASTTEXT) for word in words[:count])]


def _rows(look: Look) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the first line, and the cells, of every row that is not blank."""
    if not look.quoted:
        for number, text in enumerate(lines(look.path), start=1):
            if row := text.rstrip("\r\n"):
                yield number, _split_line(row, look.delimiter)
        return
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST))  # global, so only ever raised
    line, size = 1, 0

    def counted_lines() -> Iterator[str]:
        nonlocal size
        for text in lines(look.path, newline=""):
            size += len(text)
            if size > LONGEST:
                raise csv.Error(f"more than {LONGEST:,} characters")
            yield text

    reader = csv.reader(counted_lines(), delimiter=look.delimiter, strict=True)
    try:
        for cells in reader:
            if cells:
                yield line, cells
            line, size = reader.line_num + 1, 0
    except csv.Error as error:
        raise DataError(
            f"{look.path}: {error}, in the row that starts on line {line}. "
            "Close its quotation mark, or double the marks inside a quoted field."
        ) from error


def _header(look: Look, looks: Sequence[Look], named: Sequence[str]) -> Header | None:
    first, *rest = look.rows
    names = tuple(cell.strip() for cell in first)
    if set(named) & set(names):
        return Header(names, own=True)
    if (named and all(name.isdigit() for name in named)) or any(len(cell) > HEADER_CELL for cell in first):
        return None
    below = [[row[n] for row in rest if n < len(row)] for n in range(len(first))]
    fresh = [cell not in column for cell, column in zip(first, below, strict=True)]
    if all(fresh) and any(other.path != look.path and other.rows[0] == first for other in looks):
        return Header(names, own=True)
    if any(is_known(name) and is_fresh for name, is_fresh in zip(names, fresh, strict=True)):
        return Header(names, own=True)
    if any(_is_title(cell, column) for cell, column in zip(first, below, strict=True)):
        return Header(names, own=True, note=f"{look.path.name}: took the first row for a header ({', '.join(names)})")
    return None


def _is_title(cell: str, below: Sequence[str]) -> bool:
    """Check whether the first cell can only be the column's title: a word above numbers, or above values that recur."""
    if not cell.strip() or number(cell) is not None or len(below) < 3:
        return False
    if all(number(value) is not None for value in below):
        return True
    return len(below) >= RECURRING_ROWS and cell not in below and min(Counter(below).values()) > 1


def _borrow_header(look: Look, headers: Mapping[Path, Header | None]) -> Header | None:
    """Return the header of a sibling of the same width, if any."""
    for sibling, header in headers.items():
        if header and len(header.names) == len(look.rows[0]):
            note = f"{look.path.name} has no header: its columns are those of {sibling.name}"
            return Header(header.names, own=False, note=note)
    return None


def _read_delimited(look: Look, header: Header | None, named: Sequence[str]) -> RawSplit:
    place = str(look.path)
    names = header.names if header else tuple(str(n + 1) for n in range(min(len(row) for row in look.rows)))
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{place}: the header names {', '.join(map(repr, twice))} more than once; rename one of them.")
    skip = int(header is not None and header.own)
    body = look.rows[skip:]
    if not body:
        raise _empty(place, "has a header but no rows")
    # Users who name columns by number know the file: cells after the last named one are ignored.
    lenient = header is None and bool(named)
    sample = {name: [row[n] if n < len(row) else None for row in body] for n, name in enumerate(names)}

    def read(columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        places = [names.index(column) for column in columns]
        expected = max(places) + 1 if lenient else len(names)

        def rows() -> Iterator[Sequence[Cell]]:
            for line, row in itertools.islice(_rows(look), skip, None):
                if len(row) < expected or (len(row) > expected and not lenient):
                    raise DataError(
                        f"{place}, line {line}: {len(row)} cells, not {'at least ' if lenient else ''}{expected} as "
                        f"expected (separated by {look.delimiter!r}, {'with' if look.quoted else 'without'} quoting). "
                        f"Correct the row that begins {row[0][:40]!r}."
                    )
                yield [row[at] for at in places]

        return _batches(rows(), columns, sample, place, 1 + skip)

    notes = [header.note] if header and header.note else []
    if lenient and any(len(row) > len(names) for row in body):
        notes.append(f"{look.path.name}: some rows have more than {len(names)} cells, the rest is ignored")
    return RawSplit(place, names, sample, read, first=1 + skip, headerless=header is None, notes=tuple(notes))


Record = Mapping[str, Any]


def open_file(path: Path) -> RawSplit:
    """Open a jsonl, json or parquet file, or a folder of classes. All but a json list or table are streamed."""
    place = str(path)
    if path.is_dir():

        def texts() -> Iterator[Record]:
            for folder in class_folders(path):
                for file in sorted(folder.glob("*.txt")):
                    yield {"text": whole(file, "Remove it."), "label": folder.name}

        return from_records(place, texts)
    if path.suffix.lower() == ".parquet":
        return _parquet(path)
    if path.suffix.lower() == ".json" and not _has_object_lines(path):

        def items() -> Iterator[Record]:
            remedy = f"Write one object per line: jq -c '.[]' {shlex.quote(path.name)} > {path.stem}.jsonl"
            value = parse_json(whole(path, remedy, LARGEST_LIST), place)
            rows = value if isinstance(value, list) else _rows_of(json_object(value, place))
            for at, item in enumerate(rows, start=1):
                yield json_object(item, f"{place}, item {at}")

        return from_records(place, items)
    return from_records(place, lambda: (row for _, row in json_objects(lines(path), place)))


def _has_object_lines(path: Path) -> bool:
    """Check whether the first line of a file is an object, and the next one begins another."""
    if not head(path).lstrip().startswith("{"):
        return False
    filled = filter(str.strip, lines(path, longest=LARGEST_LIST))
    first, second = next(filled, ""), next(filled, "")
    try:
        return second.lstrip().startswith("{") and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _rows_of(table: Record) -> Iterable[Any]:
    """Return the rows of an object: its only list of objects; those of its columns, as lists or objects; or itself.

    pandas writes `{"text": {"0": "a text", "1": "another"}, "label": {"0": 1, "1": 0}}`.
    """
    lists = [value for value in table.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if len(lists) == 1:
        return lists[0]
    columns = [list(value.values()) if isinstance(value, dict) else value for value in table.values()]
    if lists or not all(isinstance(column, list) and column for column in columns) or len(set(map(len, columns))) != 1:
        return [table]
    return [dict(zip(table, cells, strict=True)) for cells in zip(*columns, strict=True)]


def from_records(place: str, records: Callable[[], Iterable[Record]]) -> RawSplit:
    """Make a split of mappings from column names to values; every reading calls `records` again."""
    first = _first_rows(map(_flat, records()), lambda record: _characters(record.values()))
    if not first:
        raise _empty(place)
    nested = {name for record in first for name, value in record.items() if _is_nested(value)}
    columns = tuple(dict.fromkeys(name for record in first for name in record if name not in nested))
    sample = {name: [_cell(record.get(name), place) for record in first] for name in columns}

    def read(wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        rows = (
            [_cell(record.get(name), f"{place}, row {at}, column {name!r}") for name in wanted]
            for at, record in enumerate(map(_flat, records()), start=1)
        )
        return _batches(rows, wanted, sample, place, 1)

    return RawSplit(place, columns, sample, read, nested=tuple(sorted(nested)))


def _flat(record: Record) -> Record:
    """Replace objects by their fields: {"a": {"b": 1}} -> {"a.b": 1}."""
    if not any(isinstance(value, dict) for value in record.values()):
        return record
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat |= {f"{name}.{key}": field for key, field in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _is_nested(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, list | dict) for item in value))


def _cell(value: object, place: str) -> Cell:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list) and not _is_nested(value):
        return [None if item is None else str(_cell(item, place)) for item in value]
    raise DataError(f"{place}: expected text, a number or a list of these, found {type(value).__name__}.")


def _parquet(path: Path) -> RawSplit:
    with reading(path):
        refuse_special(path)
    with _decoding(path):
        types = pq.read_schema(path)
        texts = [
            field.name for field in types if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
        ]
        # A text that many rows share stays in memory once, or a small file could take any amount of it.
        file = pq.ParquetFile(path, read_dictionary=texts)
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
        if any(chunk.total_uncompressed_size > limit_unpacked(chunk.total_compressed_size) for chunk in chunks):
            raise DataError(f"{path}: {TOO_EXPANSIVE}")
        mean = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
        rows_at_once = max(1, min(BATCH_ROWS, BATCH_CHARACTERS // max(1, mean)))

    def stream(columns: list[str]) -> Iterator[pa.Table]:
        row = 1
        with _decoding(path):
            for batch in file.iter_batches(rows_at_once, columns=columns):
                batch.validate(full=True)
                yield from _bound(batch, path, row)
                row += len(batch)

    classes: Mapping[str, tuple[str, ...]] = {}
    if b"huggingface" in (file.schema_arrow.metadata or {}):  # written by `datasets`, with class names
        from datasets import Features

        try:
            classes = _classes(Features.from_arrow_schema(file.schema_arrow))
        except Exception as error:  # `datasets` raises anything for damaged JSON
            raise DataError(f"{path}: its metadata is damaged: {type(error).__name__}: {error}") from error
    return _read_typed(str(path), file.schema_arrow, stream, classes)


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: not a parquet file, or a damaged one: {error}. Write or download it again."
        ) from error


def _bound(batch: pa.RecordBatch, path: Path, row: int) -> Iterator[pa.Table]:
    """Slice rows so that they stay small when each has its own copy of its texts. DataError for too long a cell."""
    sizes = np.zeros(len(batch), np.int64)
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_dictionary(column.type) and pa.types.is_string(column.type.value_type):
            lengths = pc.take(pc.binary_length(column.dictionary), column.indices)
            lengths = pc.fill_null(lengths, 0).to_numpy(zero_copy_only=False)
            if lengths.max(initial=0) > LONGEST:
                where = f"{path}, row {row + int(lengths.argmax())}, column {name!r}"
                raise DataError(f"{where}: a cell of {lengths.max():,} bytes; expected at most {LONGEST:,}.")
            sizes += lengths
    cuts = np.flatnonzero(np.diff(np.cumsum(sizes) // BATCH_CHARACTERS)) + 1
    for start, end in pairwise([0, *cuts.tolist(), len(batch)]):
        yield pa.Table.from_batches([batch.slice(start, end - start)])


def from_dataset(place: str, split: Dataset) -> RawSplit:
    """Make a split of a Dataset, read from its memory-mapped table."""

    def stream(columns: list[str]) -> Iterator[pa.Table]:
        yield from split.select_columns(columns).with_format("arrow").iter(BATCH_ROWS)

    return _read_typed(place, split.features.arrow_schema, stream, _classes(split.features))


def _classes(features: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the class names of columns of class ids, or of lists of them."""
    inner = {name: getattr(feature, "feature", feature) for name, feature in features.items()}
    return {name: tuple(feature.names) for name, feature in inner.items() if hasattr(feature, "names")}


def _read_typed(
    place: str,
    schema: pa.Schema,
    stream: Callable[[list[str]], Iterator[pa.Table]],
    classes: Mapping[str, tuple[str, ...]],
) -> RawSplit:
    if len(set(schema.names)) < len(schema.names):
        raise DataError(f"{place}: has several columns of the same name among {', '.join(schema.names)}; rename one.")
    # the fields of objects are named as by `Table.flatten`
    fields = ((f, root.name) for root in schema for f in (root.flatten() if pa.types.is_struct(root.type) else [root]))
    roots = {field.name: root for field, root in fields if _is_readable(field.type)}
    columns = tuple(roots)

    def flat(wanted: Sequence[str]) -> Iterator[pa.Table]:
        return (table.flatten() for table in stream(list(dict.fromkeys(roots[name] for name in wanted))))

    def cells(table: pa.Table, name: str) -> pa.ChunkedArray:
        try:
            return _cells(table[name], classes.get(name))
        except pa.ArrowException as error:
            raise DataError(f"{place}, column {name!r}: cannot be read: {error}") from error

    first = next(flat(columns), None) if columns else None
    if first is None or not first.num_rows:
        raise _empty(place)
    sample = {name: cells(first.slice(0, SAMPLE_ROWS), name).to_pylist() for name in columns}

    def read(wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for table in flat(wanted):
            yield from pa.table({name: cells(table, name) for name in wanted}).to_batches()

    return RawSplit(place, columns, sample, read, classes)


def _is_readable(kind: pa.DataType) -> bool:
    """Check whether a column has text, numbers, or lists of these."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return not pa.types.is_nested(kind.value_type) and _is_readable(kind.value_type)
    if pa.types.is_dictionary(kind):
        return _is_readable(kind.value_type)
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)
    numeric = pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind)
    return text or numeric or pa.types.is_boolean(kind)


def _cells(column: pa.ChunkedArray, names: tuple[str, ...] | None) -> pa.ChunkedArray:
    """Turn a typed Arrow column into cells: class ids become `names` (null for -1, no label), numbers decimals."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not pa.types.is_nested(column.type):
        return column.cast(pa.string()) if names is None else _name_classes(column, names)
    if names is None:
        return column.cast(pa.list_(pa.string()))
    lists = column.cast(pa.list_(column.type.value_type)).combine_chunks()
    lengths = pc.fill_null(pc.list_value_length(lists), 0)
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths).cast(pa.int32())])
    return pa.chunked_array(
        [pa.ListArray.from_arrays(offsets, _name_classes(lists.flatten(), names), mask=lists.is_null())]
    )


def _name_classes(ids: pa.Array | pa.ChunkedArray, names: tuple[str, ...]) -> pa.Array | pa.ChunkedArray:
    ids = ids.cast(pa.int64())
    return pc.take(pa.array(names, pa.string()), pc.if_else(pc.less(ids, 0), None, ids))
