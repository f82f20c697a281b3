"""A table of words on a codebook: rounded before training, a byte for four numbers in int8 files."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from datasets import Dataset

from compress.arrays import Array
from compress.exporters.int8 import quantize_dynamic, quantize_static
from compress.exporters.onnx import to_onnx
from compress.exporters.rewrite.graph import products
from compress.exporters.session import open_session, read_model, token_tables
from compress.models.codebook import CODES, PART, find_codebook, round_table, saved_bytes
from compress.training.codebook import rounded_table
from compress.trimming import trim_file
from tests import tiny

VOCABULARY = 1200


def draw_table(rows: int = VOCABULARY, width: int = 32) -> Array:
    return np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32)


def test_every_place_has_at_most_as_many_parts_as_a_byte_has_values() -> None:
    table_VD = draw_table()
    counts_V = np.zeros(VOCABULARY, np.int64)
    rounded_VD = round_table(table_VD, counts_V)
    for place in range(0, 32, PART):
        assert len(np.unique(rounded_VD[:, place : place + PART], axis=0)) <= CODES
    error = np.square(rounded_VD - table_VD).mean()
    assert 0.01 < error < 0.25, "two bits a number keep most of a normal distribution"
    assert np.array_equal(round_table(rounded_VD, counts_V), rounded_VD), "once is enough"


def test_frequent_tokens_are_rounded_the_least() -> None:
    table_VD = draw_table()
    counts_V = np.zeros(VOCABULARY, np.int64)
    counts_V[:100] = 400
    error_V = np.square(round_table(table_VD, counts_V) - table_VD).mean(-1)
    assert error_V[:100].mean() < error_V[100:].mean() / 3


def test_a_codebook_gives_the_rows_back() -> None:
    rounded_VD = np.random.default_rng(0).integers(0, 256, (CODES, 8), np.uint8)
    table_VD = np.concatenate([rounded_VD, rounded_VD[::-1], rounded_VD[::2]])
    found = find_codebook(table_VD)
    assert found is not None
    codes_VP, book_PCN = found
    parts = [book_PCN[place, codes_VP[:, place]] for place in range(2)]
    assert np.array_equal(np.concatenate(parts, -1), table_VD)


@pytest.mark.parametrize("shape", [(300, 32), (VOCABULARY, 30)])
def test_a_table_that_would_not_be_smaller_stays(shape: tuple[int, int]) -> None:
    assert not saved_bytes(*shape)
    assert find_codebook(np.zeros(shape, np.uint8)) is None


def test_a_table_with_more_parts_stays() -> None:
    table_VD = np.random.default_rng(0).integers(0, 256, (VOCABULARY, 8), np.uint8)
    assert find_codebook(table_VD) is None


def test_only_the_table_is_frozen_and_only_meanwhile() -> None:
    model = tiny.bert(vocab_size=VOCABULARY)
    table = model.get_input_embeddings().weight
    before = table.detach().clone()
    rows = Dataset.from_dict({"input_ids": [[5, 6, 7]]})
    with rounded_table(model, rows):
        frozen = [name for name, each in model.named_parameters() if not each.requires_grad]
        assert frozen == ["bert.embeddings.word_embeddings.weight"]
        assert not torch.equal(table, before)
    assert all(each.requires_grad for each in model.parameters())


@pytest.mark.parametrize("method", ["dynamic", "static", "qdq"])
def test_int8_files_answer_as_with_a_whole_table_and_are_smaller(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.bert(vocab_size=VOCABULARY)
    with rounded_table(model, Dataset.from_dict({"input_ids": [[5, 6, 7]]})):
        to_onnx(model, tmp_path / "fp32.onnx")

    def write(name: str) -> Path:
        file = tmp_path / name
        if method == "dynamic":
            quantize_dynamic(tmp_path / "fp32.onnx", file)
            return file
        reads = {each.reads: (-4.0, 4.0) for each in products(read_model(tmp_path / "fp32.onnx").graph)}
        form = "qdq" if method == "qdq" else "fused"
        quantize_static(tmp_path / "fp32.onnx", file, reads, form=form)
        return file

    small = write("small.onnx")
    monkeypatch.setattr("compress.exporters.int8.pack_tables", lambda graph: None)
    whole = write("whole.onnx")
    saved = whole.stat().st_size - small.stat().st_size
    assert saved == pytest.approx(saved_bytes(VOCABULARY, 32), abs=1_500)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (3, 11))
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    answers = [open_session(file, threads=1).run(None, inputs)[0] for file in (small, whole)]
    assert np.array_equal(*answers)
    # trimming such a file leaves rows of codes out
    kept = [*range(0, VOCABULARY, 3)]
    trim_file(small, tmp_path / "trimmed.onnx", kept)
    inputs["input_ids"] = ids - ids % 3
    expected = open_session(small, threads=1).run(None, inputs)[0]
    inputs["input_ids"] = inputs["input_ids"] // 3
    assert np.array_equal(open_session(tmp_path / "trimmed.onnx", threads=1).run(None, inputs)[0], expected)
    assert token_tables(onnx.load(tmp_path / "trimmed.onnx").graph)
