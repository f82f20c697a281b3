"""A bundle answers Arrow batches in any process, or says what is wrong with them."""

import multiprocessing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from compress.data.task import Task
from compress.errors import BundleError, DataError
from compress.exporters.artifact import Bundle
from tests import tiny

TEXTS = ["a good film", "the plot is bad", None, "never dull"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return tiny.bundle(tmp_path_factory.mktemp("arrow") / "bundle")


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]
)
def test_texts_of_every_type_are_read(bundle: Bundle, kind: pa.DataType) -> None:
    table = pa.table({"id": [1, 2, 3, 4], "sentence": pa.array(TEXTS).cast(kind)})
    found = bundle.arrow()(table)
    assert found.select(["id", "sentence"]).equals(table)
    expected = bundle.predict([text or "" for text in TEXTS])
    assert found["prediction_score"].to_pylist() == [each.score for each in expected]  # type: ignore[union-attr]


def test_columns_are_named_as_in_a_file(bundle: Bundle) -> None:
    nested = pa.table({"meta": [{"body": text} for text in TEXTS], "stars": [1, 2, 3, 4]})
    plain = pa.table({"sentence": TEXTS})
    found = bundle.arrow(text=["meta.body"])(nested)
    assert found["prediction"].equals(bundle.arrow()(plain)["prediction"])
    assert found.column_names[:2] == ["meta", "stars"], "structs stay structs"
    corpus = pa.table({"_id": ["1"], "title": ["a good"], "text": ["film"]})
    expected = bundle.predict(["a good film"])[0].label  # type: ignore[union-attr]
    assert bundle.arrow()(corpus)["prediction"].to_pylist() == [expected]


@pytest.mark.parametrize(
    ("columns", "text", "message"),
    [
        ({"a": TEXTS, "b": TEXTS}, None, "the batch: has the columns a, b; expected sentence"),
        ({"sentense": TEXTS, "b": TEXTS}, None, "Did you mean 'sentense'"),
        ({"sentence": TEXTS, "prediction": TEXTS}, None, "'prediction', which the answers would overwrite"),
        ({"sentence": [["a"], ["b"], [], None]}, None, "is not a text"),
        ({"sentence": TEXTS}, ["other"], "expected other"),
    ],
)
def test_wrong_columns_are_refused(bundle: Bundle, columns: Any, text: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        bundle.arrow(text=text)(pa.table(columns))


def test_another_bundle_in_its_place_is_refused(tmp_path: Path) -> None:
    answer = tiny.bundle(tmp_path / "bundle").arrow()
    tiny.bundle(tmp_path / "bundle", model=tiny.bert(seed=1))
    with pytest.raises(BundleError, match="is another bundle on this machine"):
        answer(pa.table({"sentence": ["a film"]}))


def test_a_bundle_without_this_file_is_refused_at_once(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match="has no q4 file"):
        bundle.arrow("q4")
    with pytest.raises(BundleError, match="expected one for embedding"):
        bundle.arrow(prompt_name="query")


def test_other_processes_open_the_bundle_themselves(bundle: Bundle) -> None:
    tables = [pa.table({"sentence": [text or "" for text in TEXTS[n:]]}) for n in range(3)]
    answer = bundle.arrow()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(answer, tables) == [answer(table) for table in tables]


def test_pairs_take_two_columns(tmp_path: Path) -> None:
    task = Task("classification", ("premise", "claim"), "label", ("a", "b"), "accuracy")
    bundle = tiny.bundle(tmp_path / "bundle", task=task)
    table = pa.table({"claim": ["a film", "a plot"], "premise": ["bad", "good"]})
    expected = bundle.predict([("bad", "a film"), ("good", "a plot")])
    found = bundle.arrow()(table)
    assert found["prediction_score"].to_pylist() == [each.score for each in expected]  # type: ignore[union-attr]
