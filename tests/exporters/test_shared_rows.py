"""Several processes answer the rows of a file as one does, whoever of them is missing."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from compress.data.answers import AnswerColumns
from compress.data.encoder import Text
from compress.data.task import Task
from compress.errors import DataError
from compress.exporters.artifact import Bundle
from compress.exporters.predictor import ROWS_PER_BATCH, Predictor
from compress.exporters.row_files import predict_file
from compress.exporters.shared_rows import RowShare
from compress.models.sentence_encoder import AutoModelForSentenceEmbedding
from compress.models.sentence_settings import SentenceSettings, set_settings
from tests import tiny

BATCH = 4 * ROWS_PER_BATCH
ROWS = 4 * BATCH + 9


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return tiny.bundle(tmp_path_factory.mktemp("shared") / "bundle")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    lines = [json.dumps({"sentence": f"{'good ' * (n % 7)}film", "n": n}) for n in range(ROWS)]
    lines[300] = '{"sent'
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path / "rows.jsonl"


@pytest.fixture
def share(tmp_path: Path) -> RowShare:
    return RowShare(0, 3, tmp_path / ".answers", "digest", patience=0.1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the texts of every call."""
    counts = list[int]()
    answer = Predictor.answer_columns

    def count(self: Predictor, texts: Sequence[Text]) -> AnswerColumns:
        counts.append(len(texts))
        return answer(self, texts)

    monkeypatch.setattr(Predictor, "answer_columns", count)
    return counts


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_the_output_is_that_of_one_process(
    bundle: Bundle, source: Path, share: RowShare, asked: list[int], suffix: str
) -> None:
    one, several = source.with_name(f"one{suffix}"), source.with_name(f"several{suffix}")
    opened = bundle.open()
    assert predict_file(opened, source, one, on_error="skip") == (ROWS, 1)
    asked.clear()
    found = [
        predict_file(opened, source, several, on_error="skip", share=replace(share, rank=rank)) for rank in (1, 2, 0)
    ]
    assert found == [(BATCH + 9, 0), (BATCH, 0), (ROWS, 1)]
    assert sum(asked) == ROWS - 1, "each row once"
    if suffix == ".parquet":
        assert pq.read_table(several).equals(pq.read_table(one))
    else:
        assert several.read_bytes() == one.read_bytes()
    assert not share.folder.exists()


@pytest.mark.parametrize("form", ["float32", "binary"])
def test_vectors_are_shared(tmp_path: Path, share: RowShare, form: Any) -> None:
    config = tiny.config("bert")
    set_settings(config, SentenceSettings.pooled(32))
    model = AutoModelForSentenceEmbedding.from_config(config).eval()
    task = Task("embedding", ("text",), "similarity", (), "spearman", width=32)
    opened = tiny.bundle(tmp_path / "vectors", model=model, task=task).open()
    (tmp_path / "rows.txt").write_text("".join(f"{'good ' * (n % 7)}film\n" for n in range(BATCH + 5)))
    one, several = tmp_path / "one.npy", tmp_path / "several.npy"
    predict_file(opened, tmp_path / "rows.txt", one, vectors=form)
    for rank in (1, 2, 0):
        predict_file(opened, tmp_path / "rows.txt", several, vectors=form, share=replace(share, rank=rank))
    assert several.read_bytes() == one.read_bytes()


def test_rows_of_a_missing_process_are_answered(
    bundle: Bundle, source: Path, share: RowShare, asked: list[int]
) -> None:
    one, several = source.with_name("one.jsonl"), source.with_name("several.jsonl")
    opened = bundle.open()
    predict_file(opened, source, one, on_error="skip")
    predict_file(opened, source, several, on_error="skip", share=replace(share, rank=2))
    assert not several.exists()
    assert predict_file(opened, source, several, on_error="skip", share=share) == (ROWS, 1)
    assert several.read_bytes() == one.read_bytes()


def test_a_missing_process_is_waited_for_once(share: RowShare, monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[float]()
    wait = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: slept.append(seconds) or wait(seconds))
    assert share.collect(1) is None and slept
    slept.clear()
    assert share.collect(4) is None
    assert len(slept) <= 1, "of the same process"
    replace(share, rank=1).leave(7, pa.table({"prediction": ["good"]}))
    found = share.collect(7)
    assert found is not None and not share.missing, "it has come back"


def test_answers_of_an_interrupted_process_are_kept(
    bundle: Bundle, source: Path, share: RowShare, asked: list[int]
) -> None:
    opened, target = bundle.open(), source.with_name("several.jsonl")
    for _ in range(2):
        predict_file(opened, source, target, on_error="skip", share=replace(share, rank=1))
    assert asked == [BATCH, 9], "the second time nothing is asked"


def test_processes_with_other_files_are_refused(bundle: Bundle, source: Path, share: RowShare) -> None:
    opened, target = bundle.open(), source.with_name("several.jsonl")
    other = replace(share, rank=1, digest="another")
    predict_file(opened, source, target, on_error="skip", share=other)
    with pytest.raises(DataError, match="process 1 has another input, bundle or options than process 0"):
        predict_file(opened, source, target, on_error="skip", share=share)
    assert not target.exists()


def test_the_digest_is_of_input_and_options(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    target = source.with_name("a.jsonl")
    first = RowShare.from_environment(source, target, {"precision": "int8"})
    assert (first.rank, first.count, first.writes) == (1, 2, False)
    assert RowShare.from_environment(source, target, {"precision": "int8"}) == first
    assert RowShare.from_environment(source, target, {"precision": "fp32"}).digest != first.digest
    source.write_text(source.read_text(encoding="utf-8").replace('"n": 7', '"n": 8', 1), encoding="utf-8")
    assert RowShare.from_environment(source, target, {"precision": "int8"}).digest != first.digest


def test_the_command_shares_rows(bundle: Bundle, source: Path) -> None:
    one, several = source.with_name("one.jsonl"), source.with_name("several.jsonl")
    words = [
        sys.executable,
        "-m",
        "compress",
        "predict",
        str(bundle.path),
        "--on-error",
        "skip",
        "--input",
        str(source),
    ]
    running = [
        subprocess.Popen(
            [*words, "--output", str(several)],
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert f"{ROWS:,} rows, 1 skipped" in outputs[0][0]
    assert outputs[1][0] == ""
    predict_file(bundle.open(), source, one, on_error="skip")
    assert several.read_bytes() == one.read_bytes()
    assert not source.with_name(".several.jsonl.answers").exists()
