"""OpenVINO, ExecuTorch, LiteRT and onnxruntime-web: exported, run in the real runtime, the same answers. Skipped, with
the reason, where the runtime is not installed."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification

from compress.benchmark.browser import device
from compress.benchmark.local import race
from compress.commands import export as commands
from compress.exporters.artifact import FILES, Bundle
from compress.exporters.export import export
from compress.exporters.onnx import to_onnx
from compress.exporters.rewrite.forms import FORM_KEY, SHIPPED, Form
from compress.exporters.session import metadata, read_model
from compress.exporters.writers.context import ExportResult
from compress.records.latency import DeviceError, Setting
from tests import command, tiny
from tests.exporters.test_formats import BESIDE, QA, bundle, names

TEXTS = ("a good film", "this story was never fun !", "a very very very sad and dull plot , but the actor was so warm")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that tests only read."""
    return bundle(tmp_path_factory.mktemp("written") / "bundle").path


def expected(written: Path) -> Any:
    return Bundle.load(written).logits([tiny.tokenizer()(text) for text in TEXTS], precision="fp32")


def ids(text: str, padded: int | None = None, dtype: Any = np.int64) -> dict[str, Any]:
    row = {name: np.array(value, dtype)[None] for name, value in tiny.tokenizer()(text).items()}
    width = padded or row["input_ids"].shape[1]
    return {name: np.pad(value, ((0, 0), (0, width - value.shape[1]))) for name, value in row.items()}


def near(made: ExportResult, **limits: float) -> bool:
    found = {each.precision: each.difference for each in made.files}
    assert found.keys() == limits.keys()
    for precision, limit in limits.items():
        difference = found[precision]
        assert difference is not None and difference.relative < limit, (precision, difference)
    return True


def test_openvino(written: Path, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino", reason="the extra openvino is not installed")
    data = tiny.reviews(tmp_path / "reviews", train=32, dev=8)
    words = ["export", str(written), "--for", "openvino", "--precision", "fp32,fp16,w8,int8", "--data", data]
    result = command.run(*words, "--out", str(tmp_path / "out"))
    assert result.code == 0, result.err
    stems = [f"openvino_model{suffix}" for suffix in ("", "_fp16", "_w8", "_int8")]
    assert names(tmp_path / "out") == {*BESIDE, *(f"{stem}.{end}" for stem in stems for end in ("xml", "bin"))}
    record = json.loads((tmp_path / "out" / "export.json").read_text())
    assert [each["file"] for each in record["files"]][:3] == [f"{stems[0]}.xml", f"{stems[0]}.bin", f"{stems[1]}.xml"]
    assert "openvino" in record["versions"]
    for stem, limit in zip(stems, (1e-4, 0.05, 0.2, 0.4), strict=True):
        model = openvino.Core().compile_model(
            tmp_path / "out" / f"{stem}.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
        )
        found = np.concatenate([model(ids(text))[0] for text in TEXTS])
        assert abs(found - expected(written)).max() < limit * abs(expected(written)).max(), stem
    sizes = [(tmp_path / "out" / f"{stem}.bin").stat().st_size for stem in stems]
    assert sizes[1] < 0.6 * sizes[0]
    assert sizes[2] < 0.4 * sizes[0]
    assert sizes[3] < 0.4 * sizes[0]


def test_openvino_files_are_made_of_the_shipped_form(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openvino = pytest.importorskip("openvino", reason="the extra openvino is not installed")
    own = Bundle.load(written).copy_to(tmp_path / "bundle")
    to_onnx(AutoModelForSequenceClassification.from_pretrained(written), tmp_path / "turned.onnx", form=Form())
    tuned, seen, convert = own.put("fp32", tmp_path / "turned.onnx"), list[str](), openvino.convert_model

    def converted(source: Path) -> Any:
        seen.append(metadata(read_model(source))[FORM_KEY])
        return convert(source)

    monkeypatch.setattr(openvino, "convert_model", converted)
    data = tiny.reviews(tmp_path / "reviews", train=16, dev=8)
    made = commands.export(str(tuned.path), tmp_path / "out", to="openvino", precisions=("fp32", "int8"), data=data)
    assert seen == [str(SHIPPED)] * 2
    assert near(made, fp32=1e-4, int8=0.4)


def test_openvino_answers_questions(tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    model = tiny.model("bert", head=AutoModelForQuestionAnswering, labels=2, hidden=64)
    made = export(bundle(tmp_path / "bundle", model, QA), tmp_path / "out", to="openvino", precisions=("w8",))
    assert near(made, w8=0.2)


@pytest.mark.slow
def test_executorch(written: Path, tmp_path: Path) -> None:
    pytest.importorskip("executorch", reason="the extra executorch is not installed")
    made = export(Bundle.load(written), tmp_path / "out", to="executorch")
    assert near(made, fp32=1e-4, int8=0.2)
    assert names(tmp_path / "out") == {"model.pte", "model_quantized.pte", *BESIDE}
    assert made.sizes["model_quantized.pte"] < 0.6 * made.sizes["model.pte"], "tables too"
    message = next(verdict for verdict in made.verdicts if verdict.startswith("fp32:"))
    assert "native_layer_norm" in message
    for name, limit in (("model.pte", 1e-4), ("model_quantized.pte", 0.2)):
        found = _in_executorch(tmp_path / "out" / name, TEXTS)
        assert abs(found - expected(written)).max() < limit * abs(expected(written)).max()
    files = {name: tmp_path / "out" / name for name in ("model.pte", "model_quantized.pte")}
    assert [each.name for each in race(files, [Setting(1, 1, 9)], rounds=2, runs=1)] == list(files)


def _in_executorch(path: Path, texts: Sequence[str]) -> Any:
    from executorch.runtime import Runtime  # type: ignore[import-not-found,unused-ignore]

    method = Runtime.get().load_program(path).load_method("forward")
    rows = [[torch.from_numpy(value) for value in ids(text).values()] for text in texts]
    names = list(ids(texts[0]))
    assert names == ["input_ids", "token_type_ids", "attention_mask"]
    return np.concatenate([method.execute([row[0], row[2], row[1]])[0].numpy() for row in rows])


@pytest.mark.slow
def test_litert(written: Path, tmp_path: Path) -> None:
    pytest.importorskip("litert_torch", reason="the extra litert is not installed")
    made = export(Bundle.load(written), tmp_path / "out", to="litert", precisions=("fp32", "int8", "w8"))
    assert near(made, fp32=1e-4, int8=0.2, w8=0.1)
    assert names(tmp_path / "out") == {"model.tflite", "model_quantized.tflite", "model_w8.tflite", *BESIDE}
    assert made.sizes["model_quantized.tflite"] < 0.6 * made.sizes["model.tflite"]

    from ai_edge_litert.interpreter import Interpreter  # type: ignore[import-not-found,unused-ignore]

    interpreter = Interpreter(str(tmp_path / "out" / "model.tflite"))
    assert list(interpreter.get_signature_list()) == ["tokens_32", "tokens_48"]
    for length in (32, 48):
        run = interpreter.get_signature_runner(f"tokens_{length}")
        found = np.concatenate([next(iter(run(**ids(text, length, np.int32)).values())) for text in TEXTS])
        assert abs(found - expected(written)).max() < 1e-4
    settings = [Setting(1, 1, 9), Setting(1, 1, 33)]
    assert [
        each.setting for each in race({"x": tmp_path / "out" / "model.tflite"}, settings, rounds=2, runs=1)
    ] == settings


@pytest.mark.slow
@pytest.mark.parametrize(("extra", "module"), [("executorch", "executorch"), ("litert", "litert_torch")])
@pytest.mark.parametrize("family", ["mobilebert", "deberta-v2"])
def test_families_on_phones(extra: Any, module: str, family: str, tmp_path: Path) -> None:
    pytest.importorskip(module, reason=f"the extra {extra} is not installed")
    model = tiny.model(family, labels=2, hidden=64)
    source = bundle(tmp_path / "bundle", model)
    assert near(export(source, tmp_path / "out", to=extra, precisions=("fp32",)), fp32=1e-3)


TEXT = "a very good film !"
SCRIPT = """
import * as fs from 'node:fs';
const [entry, row, ...files] = process.argv.slice(2);
const ort = await import(entry);
ort.env.wasm.numThreads = 1;
const feeds = Object.fromEntries(Object.entries(JSON.parse(row)).map(([name, ids]) =>
  [name, new ort.Tensor('int64', BigInt64Array.from(ids, BigInt), [1, ids.length])]));
for (const file of files) {
  const session = await ort.InferenceSession.create(fs.readFileSync(file), {executionProviders: ['wasm']});
  console.log(JSON.stringify(Array.from((await session.run(feeds)).logits.data)));
}
"""


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for program in ("node", "npm"):
        if not shutil.which(program):
            pytest.skip(f"needs {program}")
    try:
        return device.load_runtime(device.fetch_tarball(tmp_path_factory.mktemp("npm")))[0]
    except DeviceError as error:
        pytest.skip(f"needs {device.PACKAGE}: {error}")


@pytest.mark.slow
def test_every_precision_answers_in_wasm_as_natively(runtime: Path, tmp_path: Path) -> None:
    path = bundle(tmp_path / "bundle").path
    precisions = ("fp32", "int8", "fp16", "w8", "q4")
    export(Bundle.load(path), tmp_path / "onnx", precisions=precisions)
    export(Bundle.load(path), tmp_path / "web", to="web", precisions=precisions)
    export(Bundle.load(path), tmp_path / "ort", to="ort")
    files = [tmp_path / "web" / FILES[each] for each in precisions]  # type: ignore[index]
    files += [tmp_path / "ort" / "model.ort", tmp_path / "ort" / "model_quantized.ort"]
    (tmp_path / "run.mjs").write_text(SCRIPT)
    row = {name: list(ids) for name, ids in tiny.tokenizer()(TEXT).items()}
    words = ["node", str(tmp_path / "run.mjs"), runtime.as_uri(), json.dumps(row), *map(str, files)]
    result = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    found = [np.array(json.loads(line)) for line in result.stdout.splitlines()]
    ours = Bundle.load(tmp_path / "onnx")
    native = [ours.logits([row], precision=each)[0] for each in (*precisions, "fp32", "int8")]  # type: ignore[arg-type]
    limits = [1e-5, 0.02, 0.02, 0.02, 1e-4, 1e-5, 0.02]
    apart = [abs(one - other).max() for one, other in zip(found, native, strict=True)]
    assert all(each < limit for each, limit in zip(apart, limits, strict=True)), apart
