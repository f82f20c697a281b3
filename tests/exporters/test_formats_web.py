"""What `--for web` and `--for ort` write runs in onnxruntime-web, in node, with our answers."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from compress.benchmark.browser import device
from compress.exporters.artifact import FILES, Bundle
from compress.exporters.formats import export
from compress.records.latency import DeviceError
from tests import tiny
from tests.exporters.test_formats import bundle

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
