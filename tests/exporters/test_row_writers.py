"""Columns are written as the rows that they hold, in every form."""

import csv
import datetime
import json
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from compress.data.answers import label_schema
from compress.errors import DataError
from compress.exporters.artifact import Bundle
from compress.exporters.row_writers import ColumnGroup, open_writer, take
from tests import tiny

COLUMNS: ColumnGroup = {
    "text": ['a "quote" \\ and %s', "two\nlines\u2028", "", None, "映画 😀 \x00\x1f"],
    "one % name": [1, 2.5, True, None, float("inf")],
    "nested": [{"a": [1, 2]}, [], {}, [{"b": None}], "text"],
    "single": [[1], [2], [3], [4], [5]],
    "odd": [datetime.date(2020, 1, 2), b"\xff", Decimal("1.50"), "x", 3],
    "arrow": pa.chunked_array([["a", None], ["b", "c\n", "d"]]),
    "number": np.array([0.1, 1e-300, 1e22, 3.0, -0.0]),
    "vector": np.arange(10, dtype=np.float32).reshape(5, 2) / 3,
    "by label": {'"x" %d': np.array([0.1, 0.2, 0.3, 0.4, 0.5]), "y": np.array([0.9, 0.8, 0.7, 0.6, 0.5])},
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return tiny.bundle(tmp_path_factory.mktemp("writers") / "bundle")


def write(bundle: Bundle, path: Path, batches: Sequence[Sequence[ColumnGroup]], names: Sequence[str]) -> None:
    with open_writer(path, path.suffix, "float32", bundle.open()) as writer:
        for batch in batches:
            writer(batch, names)


def value(column: Any, row: int) -> Any:
    if isinstance(column, dict):
        return {label: values[row].item() for label, values in column.items()}
    found = column[row]
    if isinstance(found, np.ndarray | np.generic):
        return found.tolist()
    return found.as_py() if isinstance(found, pa.Scalar) else found


def test_objects_are_those_of_single_rows(bundle: Bundle, tmp_path: Path) -> None:
    write(bundle, tmp_path / "a.jsonl", [[COLUMNS]], list(COLUMNS))
    rows = [{name: value(column, row) for name, column in COLUMNS.items()} for row in range(5)]

    def spell(each: Any) -> str:
        return each.decode(errors="backslashreplace") if isinstance(each, bytes) else str(each)

    spelled = [json.dumps(row, ensure_ascii=False, default=spell) for row in rows]
    assert "Infinity" in "".join(spelled), "which JSON has not"
    plain = [json.loads(line, parse_constant=lambda _: None) for line in spelled]
    expected = [json.dumps(row, ensure_ascii=False) for row in plain]
    assert (tmp_path / "a.jsonl").read_text(encoding="utf-8") == "".join(f"{line}\n" for line in expected)


def test_cells_are_those_of_single_rows(bundle: Bundle, tmp_path: Path) -> None:
    columns = {name: COLUMNS[name] for name in ("text", "one % name", "single", "number", "by label")}
    columns["by label"] = [value(COLUMNS["by label"], row) for row in range(5)]
    write(bundle, tmp_path / "a.csv", [[columns, {"text": ["last"]}]], list(columns))
    with (tmp_path / "a.csv").open(encoding="utf-8", newline="") as file:
        header, first, *_, last = csv.reader(file)
    assert header == list(columns)
    assert first == [COLUMNS["text"][0], "1", "[1]", "0.1", '{"\\"x\\" %d": 0.1, "y": 0.9}']
    assert last == ["last", "", "", "", ""]


def test_a_part_of_a_column_is_its_rows() -> None:
    for column in COLUMNS.values():
        part = take(column, 1, 3)
        assert [value(part, row) for row in range(2)] == [value(column, row) for row in (1, 2)]


def answers(count: int) -> ColumnGroup:
    scores = np.full(count, 0.5)
    return {
        "prediction": ["negative"] * count,
        "prediction_score": scores,
        "prediction_scores": {"negative": scores, "positive": scores},
    }


NAMES = ["n", "prediction", "prediction_score", "prediction_scores", "prediction_error"]


def test_parquet_joins_groups_and_small_batches(bundle: Bundle, tmp_path: Path) -> None:
    good = {"n": [1, 2], **answers(2)}
    failed = {"prediction_error": ["line 3: no text"]}
    write(bundle, tmp_path / "a.parquet", [[good], [failed, good], [failed]], NAMES)
    file = pq.ParquetFile(tmp_path / "a.parquet")
    assert file.num_row_groups == 1, "of many small batches"
    table = file.read()
    assert table.schema.names == NAMES
    assert table["n"].to_pylist() == [1, 2, None, 1, 2, None]
    assert table["prediction_error"].to_pylist() == [None, None, "line 3: no text", None, None, "line 3: no text"]
    assert table.schema.field("prediction_scores").type == label_schema(["negative", "positive"]).field(2).type


def test_parquet_has_row_groups_of_bounded_size(bundle: Bundle, tmp_path: Path) -> None:
    write(bundle, tmp_path / "a.parquet", [[answers(50_000)]] * 4, NAMES[1:])
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 2


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"n": ["text"], **answers(1)}, "has other types in later rows"),
        ({"n": [1], "more": [1], **answers(1)}, "a later row has the column 'more'"),
        ({"n": [1, "x"], **answers(2)}, "'n' has values of several types"),
    ],
)
def test_parquet_has_one_type_a_column(bundle: Bundle, tmp_path: Path, second: ColumnGroup, message: str) -> None:
    with pytest.raises(DataError, match=message):
        write(bundle, tmp_path / "a.parquet", [[{"n": [1], **answers(1)}], [second]], NAMES)
