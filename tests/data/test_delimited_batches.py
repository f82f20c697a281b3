"""Delimited files that are parsed in batches have the rows that are read one by one, and the same errors."""

import random
from pathlib import Path

import pyarrow as pa
import pytest

from compress.data import delimited_batches
from compress.data.table_files import open_table
from compress.data.tables import BATCH_ROWS, NotPlainError, Table
from compress.errors import DataError

CELLS = [
    "a",
    "two words",
    "é",
    "日本",
    "",
    " x",
    "x ",
    "1.5",
    "O'Brien",
    "l\\n",
    "null",
    "NA",
    "\u2028",
    "\x1c",
    "\ufeff",
]
ODD = ['"', 'a"b', '"a"b', "a,b", '"open', "\r", "x\ry", "\0", '"a\nb"', '"a\r\nb"', '""', '""""', ' "s"', "\udce9"]


def rows(table: Table, columns: list[str]) -> tuple[list[str], str]:
    """The rows that a table gives, and its error."""
    found = list[str]()
    try:
        for batch in table.read(columns):
            found += map(repr, zip(*(column.to_pylist() for column in batch.columns), strict=True))
    except DataError as error:
        return found, str(error)
    return found, ""


def one_by_one(table: Table, columns: list[str]) -> tuple[list[str], str]:
    found = list[str]()
    for row in table.rows(columns, None):
        if row.error:
            return found, row.error
        found.append(repr(tuple(row.cells)))
    return found, ""


def parses(table: Table, columns: list[str]) -> bool:
    """Whether all of a table is read in batches."""
    try:
        return bool(list(table.batches(columns)))
    except NotPlainError:
        return False


def write_any(folder: Path, draw: random.Random) -> Path:
    """Write a file with some odd cells, some rows of another width, and blank lines."""
    suffix, between = draw.choice([(".csv", ","), (".csv", ";"), (".tsv", "\t")])
    end = draw.choice(["\n", "\n", "\r\n"])
    names = ["text", "label", "other"][: draw.choice([1, 2, 3])]
    risk, quotes = draw.choice([0, 0, 0.02, 0.1]), draw.choice([0, 0.3, 1])

    def cell() -> str:
        if draw.random() < risk:
            return draw.choice(ODD)
        written = draw.choice(CELLS)
        if draw.random() >= quotes:
            return written
        inside = draw.choice(["", '""', between, end])
        return f'"{written}{inside}"'

    lines = list[str]()
    for _ in range(draw.choice([3, 40])):
        width = len(names) + draw.choices([0, 1, -1], [1, risk / 4, risk / 4])[0]
        lines.append(between.join(cell() for _ in range(width)))
        if draw.random() < risk / 4:
            lines.append(draw.choice(["", between.join(names)]))
    text = between.join(names) + end + end.join(lines) + draw.choice(["", end])
    mark = draw.choice([b"", b"", b"\xef\xbb\xbf"])
    path = folder / f"rows{suffix}"
    path.write_bytes(mark + text.encode("utf-8", "surrogateescape"))
    return path


@pytest.mark.parametrize("block", [40, 300, 4 * 2**20])
def test_batches_have_the_rows_and_errors_of_the_reader_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(delimited_batches, "BLOCK_BYTES", block)
    draw = random.Random(block)
    whole = 0
    for _ in range(150):
        try:
            table = open_table(write_any(tmp_path, draw))
        except DataError:
            continue
        columns = draw.sample(table.columns, draw.randint(1, len(table.columns)))
        expected, error = one_by_one(table, columns)
        found = rows(table, columns)
        assert found[1] == error
        assert found[0] == (expected if not error else expected[: len(found[0])])
        whole += parses(table, columns)
    assert whole > 15


@pytest.mark.parametrize(
    ("odd", "parsed"),
    [
        (b'"a ""quoted"" text, with\na line end",good\n', True),
        (b'a 5" screen,good\n', False),
        (b'"a"b,good\n', False),
        (b"one\rtwo,good\n", False),
        (b"sch\xf6n,good\n", False),
        (b"text,label\n", False),
        (b"too,many,cells\n", False),
        (b"nul\0,good\n", False),
        (b'"never closed,good\n', False),
    ],
)
def test_rows_that_are_not_plain_are_left_to_the_reader_of_rows(tmp_path: Path, odd: bytes, parsed: bool) -> None:
    path = tmp_path / "rows.csv"
    usual = b"".join(b"a text %d,good\n" % n for n in range(2000))
    path.write_bytes(b"text,label\n" + usual + odd + usual)
    table = open_table(path)
    assert parses(table, ["text", "label"]) is parsed
    expected, error = one_by_one(table, ["text", "label"])
    found, said = rows(table, ["text", "label"])
    assert (found, said) == (expected[: len(found)], error)


def test_batches_are_divided_as_other_readers_do(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text,label\n" + "".join(f"text {n},{n % 2}\n" for n in range(25_000)))
    batches = list(open_table(path).read(["label", "text"]))
    assert [len(batch) for batch in batches] == [BATCH_ROWS, BATCH_ROWS, 5000]
    assert batches[0].schema == pa.schema([("label", pa.string()), ("text", pa.string())])
    assert batches[2][1][-1].as_py() == "text 24999"


def test_rows_of_many_characters_are_not_kept_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited_batches, "BLOCK_BYTES", 10_000)
    monkeypatch.setattr(delimited_batches, "BATCH_CHARACTERS", 20_000)
    path = tmp_path / "rows.csv"
    path.write_text("text,label\n" + "".join(f"{'x' * 2000} {n},{n % 2}\n" for n in range(100)))
    batches = list(open_table(path).read(["text"]))
    assert max(batch.nbytes for batch in batches) < 40_000
    assert sum(map(len, batches)) == 100


def test_a_file_that_cannot_be_read_any_more_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text,label\n" + "".join(f"text {n},{n % 2}\n" for n in range(20)))
    table = open_table(path)
    path.unlink()
    with pytest.raises(DataError, match=r"rows.csv: cannot be read: No such file"):
        list(table.read(["text"]))
