"""The page on engines runs as it stands there, and answers as `predict` does."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from compress.config.loader import folder
from compress.exporters.artifact import Bundle
from tests import tiny

PAGE = folder().parent / "docs" / "engines.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="the documents are in a checkout only")
ROWS = 100


def code(word: str) -> str:
    """Return the example of the page that contains a word."""
    (found,) = (
        block for block in re.findall("```python\n(.+?)```", PAGE.read_text(encoding="utf-8"), re.S) if word in block
    )
    return str(found)


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """Write a bundle and rows where the page has them."""
    monkeypatch.chdir(tmp_path)
    table = pa.table({"id": range(ROWS), "sentence": [f"{'good ' * (n % 9)}film" for n in range(ROWS)]})
    (tmp_path / "rows").mkdir()
    for number in range(4):
        pq.write_table(table.slice(number * 25, 25), tmp_path / "rows" / f"{number}.parquet")
    (tmp_path / "runs" / "small").mkdir(parents=True)
    return tiny.bundle(tmp_path / "runs" / "small" / "bundle")


def check_answers(bundle: Bundle) -> None:
    given = pq.read_table("rows").sort_by("id")
    found = pq.read_table("answers").sort_by("id")
    assert found["id"].to_pylist() == list(range(ROWS)), "nothing is lost, or there twice"
    assert found.cast(bundle.arrow().schema(given.schema)).equals(bundle.arrow()(given))


def test_arrow(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    exec(code("import pyarrow as pa"), {})
    expected = bundle.predict(["a good film", "the plot is dull"])
    assert re.findall('"(.+)"', capsys.readouterr().out) == [each.label for each in expected]  # type: ignore[union-attr]


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes of an engine find the packages of this one."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder().parent), *sys.path])))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)


@pytest.fixture
def cluster(workers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="ray is not installed")
    ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ray(bundle: Bundle, cluster: None) -> None:
    exec(code("import ray"), {})
    check_answers(bundle)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_spark(bundle: Bundle, workers: None) -> None:
    sql = pytest.importorskip("pyspark.sql", reason="pyspark is not installed")
    spark = sql.SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        exec(code("pyspark"), {})
    finally:
        spark.stop()
    check_answers(bundle)
