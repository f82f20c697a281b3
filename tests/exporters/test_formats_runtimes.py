"""OpenVINO, ExecuTorch, LiteRT and onnxruntime-web: exported, run in the real runtime, the same answers. Skipped, with
the reason, where the runtime is not installed."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification

from compress.benchmark.browser import device
from compress.benchmark.local import race
from compress.commands import export as commands
from compress.exporters.artifact import Bundle
from compress.exporters.export import export
from compress.exporters.manifest import BUNDLE_FILES
from compress.exporters.onnx import to_onnx
from compress.exporters.rewrite.forms import FORM_KEY, SHIPPED_FORM, Form
from compress.exporters.session import metadata, read_model
from compress.exporters.writers.context import ExportResult
from compress.records.latency import DeviceError, Setting
from tests import command, tiny
from tests.exporters.test_formats import BESIDE, QA, bundle, names


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that tests only read."""
    return bundle(tmp_path_factory.mktemp("written") / "bundle").path


def near(made: ExportResult, **limits: float) -> bool:
    found = {each.precision: each.difference for each in made.files}
    assert found.keys() == limits.keys()
    for precision, limit in limits.items():
        difference = found[precision]
        assert difference is not None and difference.relative < limit, (precision, difference)
    return True


def test_openvino(written: Path, tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    data = tiny.reviews(tmp_path / "reviews", train=32, dev=8)
    words = ["export", str(written), "--for", "openvino", "--precision", "fp32,fp16,w8,int8", "--data", data]
    result = command.run(*words, "--out", str(tmp_path / "out"))
    assert result.code == 0, result.err
    stems = [f"openvino_model{suffix}" for suffix in ("", "_fp16", "_w8", "_int8")]
    record = json.loads((tmp_path / "out" / "export.json").read_text())
    assert [each["file"] for each in record["files"]][:3] == [f"{stems[0]}.xml", f"{stems[0]}.bin", f"{stems[1]}.xml"]
    assert "openvino" in record["versions"]
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
    assert seen == [str(SHIPPED_FORM)] * 2
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
    files = {name: tmp_path / "out" / name for name in ("model.pte", "model_quantized.pte")}
    assert [each.name for each in race(files, [Setting(1, 1, 9)], rounds=2, runs=1)] == list(files)


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
        pytest.skip(f"needs {device.WEB_PACKAGE}: {error}")


@pytest.mark.slow
def test_every_precision_answers_in_wasm_as_natively(runtime: Path, tmp_path: Path) -> None:
    path = bundle(tmp_path / "bundle").path
    precisions = ("fp32", "int8", "fp16", "w8", "q4")
    export(Bundle.load(path), tmp_path / "onnx", precisions=precisions)
    export(Bundle.load(path), tmp_path / "web", to="web", precisions=precisions)
    export(Bundle.load(path), tmp_path / "ort", to="ort")
    files = [tmp_path / "web" / BUNDLE_FILES[each] for each in precisions]  # type: ignore[index]
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
