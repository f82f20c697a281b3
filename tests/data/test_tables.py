"""Typed tables and JSON: what is a cell, what is a column, what is refused."""

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from compress.data import load_task
from compress.data.table_files import open_table
from compress.errors import DataError

TEXTS = ["a fine film", "ein schöner Film", "映画"]


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view(),
     pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)  # fmt: skip
def test_every_type_of_text(tmp_path: Path, kind: pa.DataType) -> None:
    column = pa.array(TEXTS)
    texts = column.dictionary_encode() if pa.types.is_dictionary(kind) else column.cast(pa.binary()).cast(kind)
    pq.write_table(pa.table({"text": texts, "label": texts}), tmp_path / "train.parquet")
    table = open_table(tmp_path / "train.parquet")
    assert dict(table.kinds) == {"text": "text", "label": "text"}
    assert [row.cells for row in table.rows(("text", "label"), None)] == [(text, text) for text in TEXTS]
    assert [batch.to_pydict() for batch in table.read(("text",))] == [{"text": TEXTS}]


VALUES: dict[str, tuple[pa.Array, list[str | None]]] = {
    "decimal": (pa.array([decimal.Decimal("1.50"), None]), ["1.50", None]),
    "time": (pa.array([datetime.datetime(2020, 1, 2), None], pa.timestamp("ms")), ["2020-01-02 00:00:00.000", None]),
    "bool": (pa.array([True, None]), ["true", None]),
    "nan": (pa.array([1.5, float("nan")]), ["1.5", None]),
    "half": (pa.array([1.5, None], pa.float16()), ["1.5", None]),
    "fields": (pa.array([{"a": {"b": 3}}, None]), ["3", None]),
}


@pytest.mark.parametrize("name", VALUES)
def test_types_of_values(tmp_path: Path, name: str) -> None:
    column, expected = VALUES[name]
    pq.write_table(pa.table({"text": ["a", "b"], "value": column}), tmp_path / "rows.parquet")
    table = open_table(tmp_path / "rows.parquet")
    read = table.columns[1]
    assert [row.cells[0] for row in table.rows((read,), None)] == expected
    assert [batch.column(0).to_pylist() for batch in table.read((read,))] == [expected]


def test_unreadable_columns_are_named(tmp_path: Path) -> None:
    spans = pa.array([[{"start": 0, "end": 3, "label": "PER"}]] * 2)
    pq.write_table(
        pa.table({"text": ["a b", "c d"], "label": spans, "source": ["web", "app"]}), tmp_path / "train.parquet"
    )
    with pytest.raises(DataError, match="column 'label' cannot be read: list"):
        load_task(str(tmp_path))
    pq.write_table(pa.table({"text": [b"\xff\xfe", b"a"], "label": ["x", "y"]}), tmp_path / "train.parquet")
    with pytest.raises(DataError, match="column 'text' cannot be read: binary, not UTF-8"):
        load_task(str(tmp_path))


RECORDS: list[dict[str, Any]] = [{"text": "a fine film", "label": "pos"}, {"text": "a dull film", "label": "neg"}]
LAYOUTS: dict[str, Any] = {
    "a list": RECORDS,
    "a list in an object": {"version": 2, "data": RECORDS},
    "columns": {"text": ["a fine film", "a dull film"], "label": ["pos", "neg"]},
    "columns of pandas": {"text": {"0": "a fine film", "1": "a dull film"}, "label": {"0": "pos", "1": "neg"}},
    "rows of pandas": {"0": RECORDS[0], "1": RECORDS[1]},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_json(tmp_path: Path, layout: str) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(LAYOUTS[layout]))
    table = open_table(tmp_path / "rows.json")
    assert [row.record for row in table.rows(("text",), None)] == RECORDS


def test_numbers_nulls_and_fields_are_cells(tmp_path: Path) -> None:
    rows = [{"text": 5, "meta": {"at": {"page": 1}}}, {"text": None, "meta": {"at": {"page": 2.5}}}, {"text": True}]
    (tmp_path / "rows.ndjson").write_text("\n".join(map(json.dumps, rows)))
    table = open_table(tmp_path / "rows.ndjson")
    assert table.columns == ("text", "meta.at.page")
    assert [list(row.cells) for row in table.rows(table.columns, None)] == [["5", "1"], [None, "2.5"], ["true", None]]


def test_two_values_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "label": 1, "label": 2}\n')
    with pytest.raises(DataError, match="line 1: an object has 'label' twice"):
        open_table(tmp_path / "rows.jsonl").check()


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"text": "a b", "label": [[0, 1, "PER"]], "source": "web"}, "label"),
        ({"text": "a b", "entities": [{"start": 0}], "source": "web"}, "entities"),
        ({"tokenized_text": ["a", "b"], "ner": [[0, 0, "PER"]]}, "ner"),
        ({"messages": [{"role": "user", "content": "a b"}], "label": "x"}, "messages"),
    ],
)
def test_layouts_of_annotation_tools_are_refused_by_name(tmp_path: Path, row: object, column: str) -> None:
    (tmp_path / "train.jsonl").write_text("\n".join([json.dumps(row)] * 4))
    with pytest.raises(DataError, match=f"column '{column}' cannot be read"):
        load_task(str(tmp_path))
    with pytest.raises(DataError, match=f"'{column}' have lists of lists or objects"):
        load_task(str(tmp_path), kind="tagging")
