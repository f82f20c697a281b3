"""One command races the files of every format that runs here, and says what it left out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.benchmark.local import race
from compress.benchmark.remote import runner
from compress.commands import bench as benching
from compress.commands.bench import ABSENT, bench, choose_formats
from compress.errors import ExportError
from compress.exporters.artifact import TEXT, Bundle
from compress.exporters.tokenizer.text_model import read_proof, text_model
from compress.records.bench_result import BenchResult
from compress.records.latency import Setting
from tests import command, tiny

QUICK = {"rounds": 2, "runs": 1}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle that tests only read; its matrices are too small for w8."""
    return tiny.bundle(tmp_path_factory.mktemp("formats") / "bundle")


def test_all_formats_are_raced_in_one_table(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = ("executorch", "litert", "openvino")
    monkeypatch.setattr(benching, "find_missing", lambda extra: extra if extra in absent else "")
    out = tmp_path / "all.json"
    told = command.run("bench", str(bundle.path), "--formats", "all", "--rounds", "2", "--runs", "1", "--out", str(out))
    assert told.code == 0, told.err
    result = BenchResult.from_json(out)
    made = {(one.format, one.precision) for one in result.formats.values()}
    assert made == {
        (to, p) for to, ps in (("onnx", ("fp32", "int8", "fp16")), ("ort", ("fp32", "int8"))) for p in ps
    } | {("text", "int8")}
    assert [one.name for one in result.latencies] == list(result.formats) == list(result.sha256)
    assert {one.setting for one in result.latencies} == {Setting(1, 1, 16)}, "the bundle's maximum"
    named = {name.rpartition(":")[2]: one for name, one in result.formats.items()}
    assert named["onnx int8"].bytes == bundle.files()["int8"].stat().st_size
    assert named["onnx fp32"].difference == 0 < named["ort int8"].difference < named["ort int8"].logit
    assert named["text int8"].difference == named["onnx int8"].difference
    assert result.left_out.keys() == {"litert", "web", "coreml", "coreai", "npu", "onnx w8", "executorch", "openvino"}
    assert result.left_out["litert"] == ABSENT
    assert result.install.startswith("pip install") and "litert-torch" in result.install
    assert all(word in told.out for word in ("differs by", "left out: ", "litert-torch"))


@pytest.mark.parametrize("name", ["litert", "executorch"])
def test_formats_that_do_not_run_here_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benching, "find_missing", lambda extra: extra if extra == "litert" else "")
    with pytest.raises(ExportError, match={"litert": "pip install", "executorch": "--batch 1"}[name]):
        choose_formats(f"onnx,{name}", precision="", calibrated=False, rows=2)
    chosen, left_out = choose_formats("openvino, npu", precision="", calibrated=True, rows=1)
    assert (chosen["npu"], chosen["openvino"][-1], left_out) == (["w8a16"], "int8", {})


@pytest.mark.parametrize("pair", [False, True])
def test_texts_of_a_timed_text_file_have_the_requested_tokens(tmp_path: Path, pair: bool) -> None:
    task = replace(tiny.SENTIMENT, text=("one", "other")) if pair else tiny.SENTIMENT
    file = text_model(tiny.bundle(tmp_path / "bundle", task=task)).path / TEXT
    words = read_proof(file).words
    assert len(words) > 10
    assert set(words) < set(tiny.WORDS)
    texts = runner.write_texts(dict.fromkeys(("text", "text_pair")[: 1 + pair], np.object_), 2, 12, list(words))
    for row in zip(*texts.values(), strict=True):
        assert len(tiny.tokenizer()(*row)["input_ids"]) == 12
    (latency,) = race({"text": file}, [Setting(1, 2, 12)], **QUICK)
    assert latency.p50_ms > 0


@pytest.mark.parametrize(("given", "expected"), [((), 16), ((8,), 8)])
def test_texts_are_no_longer_than_the_bundle_takes(
    bundle: Bundle, given: tuple[int, ...], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[Any]()
    monkeypatch.setattr(benching, "measure", lambda _, files, settings, **__: seen.extend(settings))
    monkeypatch.setattr(benching, "replace", lambda result, **_: result)
    bench([str(bundle.path)], seq=given)
    assert [setting.seq for setting in seen] == [expected]


def test_rows_are_padded_to_a_fixed_length() -> None:
    types = {"input_ids": np.int32, "attention_mask": np.int32}
    made = runner.feeds(types, 1, 3, 10, (8, 4))
    assert {name: array.dtype for name, array in made.items()} == types
    assert made["input_ids"].shape == (1, 4)
    assert made["attention_mask"].tolist() == [[1, 1, 1, 0]]
    assert np.array_equal(made["input_ids"][:, :3], runner.feeds(types, 1, 3, 10)["input_ids"])
    with pytest.raises(SystemExit):
        runner.feeds(types, 1, 9, 10, (8, 4))


def test_results_of_earlier_versions_are_read(tmp_path: Path) -> None:
    values = json.loads(BenchResult("local", {}, "", "", ()).to_json())
    for name in ("formats", "left_out", "install"):
        del values[name]
    (tmp_path / "old.json").write_text(json.dumps(values))
    assert BenchResult.from_json(tmp_path / "old.json").formats == {}


def test_what_no_chosen_format_takes_is_refused() -> None:
    with pytest.raises(ExportError, match=r"--formats onnx: writes .*int8.* not int9"):
        choose_formats("onnx", precision="int8,int9", calibrated=False, rows=1)
    with pytest.raises(ExportError, match="--data: no file of onnx is calibrated"):
        choose_formats("onnx", precision="int8", calibrated=True, rows=1)
