"""Dialects of csv files: which are read, and which are refused with the line and the reason."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from compress.data.table_files import open_table
from compress.data.tables import Table
from compress.errors import DataError

ROWS = [("a fine film", "pos"), ("a dull film, long", "neg"), ("so very fine", "pos")]
"""Three rows, the second of which has a comma."""


def opened(folder: Path, content: str | bytes, name: str = "rows.csv", named: Sequence[str] = ()) -> Table:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return open_table(path, named)


def cells(table: Table) -> list[tuple[object, ...]]:
    rows = list(table.rows(table.columns, None))
    if wrong := [row.error for row in rows if row.error]:
        raise DataError(wrong[0])
    return [tuple(row.cells) for row in rows]


READ = {
    "semicolons": "text;label\na fine film;pos\na dull film, long;neg\nso very fine;pos\n",
    "bars": "text|label\na fine film|pos\na dull film, long|neg\nso very fine|pos\n",
    "tabs": "text\tlabel\na fine film\tpos\na dull film, long\tneg\nso very fine\tpos\n",
    "a stated delimiter": "sep=^\r\ntext^label\r\na fine film^pos\r\na dull film, long^neg\r\nso very fine^pos\r\n",
    "spaces after commas": 'text, label\na fine film, pos\n"a dull film, long", "neg"\nso very fine, pos\n',
    "spaces after tabs": 'text\t "label"\na fine film\t "pos"\na dull film, long\t "neg"\nso very fine\t "pos"\n',
    "apostrophes": "text,label\na fine film,pos\n'a dull film, long','neg'\nso very fine,pos\n",
    "blank lines": '\n\ntext,label\n\na fine film,pos\n"a dull film, long",neg\nso very fine,pos\n\n',
    "line ends of old": 'text,label\ra fine film,pos\r"a dull film, long",neg\rso very fine,pos\r',
    "mixed line ends": 'text,label\r\na fine film,pos\n"a dull film, long",neg\r\nso very fine,pos\n',
    "a mark": '\ufefftext,label\na fine film,pos\n"a dull film, long",neg\nso very fine,pos\n',
}


@pytest.mark.parametrize("content", READ.values(), ids=READ)
def test_dialects_that_are_read(tmp_path: Path, content: str) -> None:
    table = opened(tmp_path, content)
    assert table.columns == ("text", "label")
    assert cells(table) == ROWS


def test_marks_after_backslashes(tmp_path: Path) -> None:
    table = opened(tmp_path, 'text,label\n"she said \\"no\\", so",pos\n"C:\\dir\\\\",neg\nplain,pos\n')
    assert [text for text, _ in cells(table)] == ['she said "no", so', "C:\\dir\\\\", "plain"]
    assert "with marks escaped by a backslash" in table.notes[0]


def test_index_and_columns_without_a_name(tmp_path: Path) -> None:
    table = opened(tmp_path, ",text,label,\n0,a fine film,pos,\n1,a dull film,neg,\n")
    assert table.columns == ("1", "text", "label", "4")
    assert cells(table)[0] == ("0", "a fine film", "pos", "")


def test_semicolons_beside_punctuation(tmp_path: Path) -> None:
    table = opened(tmp_path, "".join(f"a film of {n}, yes;{'pos' if n % 2 else 'neg'}\n" for n in range(30)))
    assert cells(table)[0] == ("a film of 0, yes", "neg")
    assert table.notes == ("rows.csv: took semicolons as the delimiter",)
    dates = opened(tmp_path, "01.02.2020;3,5\n02.02.2020;4,5\n")
    assert cells(dates)[0] == ("01.02.2020", "3,5")


def test_a_mark_in_a_quoted_cell(tmp_path: Path) -> None:
    table = opened(tmp_path, 'text,label\n"She said "no", and left, so",pos\n')
    with pytest.raises(DataError, match="line 2"):  # the mark before the comma may end the cell
        cells(table)
    table = opened(tmp_path, 'text,label\n"a 5" screen, too small",neg\n""fine, they say",pos\n')
    assert [text for text, _ in cells(table)] == ['a 5" screen, too small', '"fine, they say']


AMBIGUOUS = "text,label\n'it''s \"\"odd\"\", so',pos\n'b, c',neg\n'd, e',neg\n"
REFUSED = [
    ("text,label\na film,pos\n\"never closed,neg\nmore,pos\n", "line 3: unexpected end of data"),
    ('text,label\n"Great" and "cheap",pos\n', "line 2: ',' expected after '\"'"),
    ('id,price,text\n1,$4"Pillow, soft",fine\n', "line 2: has quotation marks in several cells"),
    ("text,label\na film,pos\nonly one\n", "line 3: 1 cells, not 2"),
    ("text,label\na film,pos,more\n", "line 2: 3 cells, not 2"),
    ("text,label\ntext,label\na film,pos\nb,neg\n", "line 2: repeats the header"),
    ("text,label\na film,pos\ntext,label\nb,neg\n", "line 3: repeats the header"),
    ("one,two,three\none,two,three\na film,1,x\nb,2,y\nc,3,z\n", "line 2: repeats the header"),
    ("TITLE,,\n,,\ntext,label,more\na,b,c\n", "only the first of 3 cells of its first row is filled"),
    ("text,,label\na,b,c\n", "no name for column 2 of 3"),
    ("text,label,text\na,b,c\n", "the header names 'text' more than once"),
    ("text^label\na film^pos\n", r"its only column is named 'text\^label'.*sep=\^"),
    ("a film,x;y\nb film,y;z\n", "commas and semicolons both divide every row.*sep=,"),
    (AMBIGUOUS, r"line 2: has \"\" or .* among cells quoted by '"),
    ("text,label\n'8\\'9 long, so',pos\n'b, c',neg\n'd, e',neg\n", r"line 2: has \"\" or .* among cells quoted by '"),
    ("text,tags\na,\"['x', 'y']\"\nb,['z']\nc,none\n", r"rows 2, 3: the label .* looks like a list"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), REFUSED)
def test_dialects_that_are_refused(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        cells(opened(tmp_path, content, named=("text^label",)).check())
        from compress.data import load_task

        load_task(str(tmp_path / "rows.csv"))


def test_a_row_that_cannot_be_read_takes_no_other_with_it(tmp_path: Path) -> None:
    table = opened(tmp_path, 'text,label\n"never closed,neg\na film,pos\n"b",neg\nc\n"d, e",pos\n')
    found = [(row.number, bool(row.error), list(row.cells)) for row in table.rows(("text",), None)]
    assert found == [(2, True, []), (3, False, ["a film"]), (4, False, ["b"]), (5, True, []), (6, False, ["d, e"])]


def test_lists_written_as_text(tmp_path: Path) -> None:
    table = opened(tmp_path, 'text,tags,flags\na,"[\'x\', \'y\']","[0, 1]"\nb,"[""z""]","[1, 1]"\nc,[],"[0, 0]"\n')
    assert [row.cells[1] for row in table.rows(table.columns, None)] == [["x", "y"], ["z"], []]
    assert dict(table.kinds) == {"tags": "text", "flags": "number"}


def test_lines_of_texts_with_a_stray_tab(tmp_path: Path) -> None:
    table = opened(tmp_path, "a good film\n\nstrange\ttoo\nfine\n", "rows.txt")
    assert table.columns == ("text",)
    assert [text for (text,) in cells(table)] == ["a good film", "", "strange\ttoo", "fine"]
