"""Vectors in 4 bytes, 1 byte and 1 bit a number: what is stored, and what is found in it."""

from pathlib import Path

import numpy as np
import pytest

from compress.data import vector_index
from compress.data.text_files import stripped_lines
from compress.data.vector_index import VECTOR_TYPES, StoredForm, find_nearest, load_texts, pack, read_index, unpack
from compress.errors import DataError

WIDTH = 20
VECTORS = np.random.default_rng(0).normal(size=(300, WIDTH)).astype(np.float32)


def test_each_form() -> None:
    small = np.array([[0.5, -0.25, 0.0]], np.float32)
    assert pack(small, "int8").tolist() == [[127, -64, 0]]
    assert pack(np.zeros((1, 3)), "int8").tolist() == [[0, 0, 0]]
    assert pack(small, "binary").tolist() == [[0b10000000]]
    assert unpack(pack(small, "binary"), 3).tolist() == [[1.0, -1.0, -1.0]]
    for form, name in VECTOR_TYPES.items():
        assert pack(VECTORS, form).dtype.str == name
        np.testing.assert_array_equal(pack(VECTORS[5:6], form), pack(VECTORS, form)[5:6])  # each vector alone


def test_binary_is_what_sentence_transformers_stores() -> None:
    library = pytest.importorskip("sentence_transformers.util", reason="sentence-transformers is not installed")
    np.testing.assert_array_equal(pack(VECTORS, "binary"), library.quantize_embeddings(VECTORS, "ubinary"))


@pytest.mark.parametrize("form", list(VECTOR_TYPES))
def test_the_nearest_are_those_of_all_cosines(form: StoredForm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_index, "INDEX_BLOCK", 1000)  # three queries at a time
    monkeypatch.setattr(vector_index, "INDEX_ROWS", 128)
    packed, queries = pack(VECTORS, form), VECTORS[:7] * 3
    wide = unpack(packed, WIDTH).astype(np.float64)
    cosines = queries @ wide.T / np.linalg.norm(wide, axis=1) / np.linalg.norm(queries, axis=1, keepdims=True)
    nearest, found = find_nearest(queries, packed, 4)
    assert nearest.tolist() == np.argsort(-cosines, axis=1, kind="stable")[:, :4].tolist()
    assert nearest[:, 0].tolist() == list(range(7))
    np.testing.assert_allclose(found, np.take_along_axis(cosines, nearest, 1), atol=1e-6)
    assert find_nearest(queries, packed[:2], 4)[0].shape == (7, 2)


def test_equal_texts_keep_their_order() -> None:
    assert find_nearest(VECTORS[:1], np.repeat(VECTORS[:1], 5, axis=0), 3)[0].tolist() == [[0, 1, 2]]


def test_broken_vectors_are_named() -> None:
    broken = VECTORS.copy()
    broken[17, 3] = np.nan
    with pytest.raises(DataError, match="row 18 is not finite"):
        find_nearest(VECTORS[:2], broken, 3)


@pytest.mark.parametrize(
    ("array", "lines", "says"),
    [
        (VECTORS[:, :-1], 300, r"of shape \(300, 19\); expected vectors of 20 numbers"),
        (VECTORS.astype(np.float64), 300, "holds float64"),
        (pack(VECTORS, "binary")[:, :2], 300, r"holds uint8 of shape \(300, 2\)"),
        (VECTORS[0], 1, r"of shape \(20,\)"),
        (VECTORS[:0], 0, r"of shape \(0, 20\)"),
        (VECTORS, 299, "300 vectors, but made.txt has 299 texts"),
        (VECTORS, None, "its texts are missing; expected made.txt next to it"),
        (np.array([None]), 1, "cannot be read as an array of numbers"),
    ],
)
def test_files_that_are_no_index(array: np.ndarray, lines: int | None, says: str, tmp_path: Path) -> None:
    np.save(tmp_path / "made.npy", array, allow_pickle=True)
    if lines is not None:
        (tmp_path / "made.txt").write_text("a text\n" * lines)
    with pytest.raises(DataError, match=says):
        load_texts(
            tmp_path / "made.npy", len(read_index(tmp_path / "made.npy", WIDTH)), tmp_path / "made.txt", stripped_lines
        )
