"""The code in the card of an export: whole for every format and kind of task; run, where the platform is here."""

import ast
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compress.commands.export import export
from compress.data.answers import Prediction
from compress.data.task import Task
from compress.data.text_preparation import TextPreparation
from compress.exporters import formats
from compress.exporters.artifact import Bundle
from compress.exporters.interface import Interface, Port, read_interface
from compress.exporters.snippets import PLATFORMS, Snippet, write_snippets
from compress.exporters.tokenizer.text_model import text_file
from tests import tiny
from tests.commands.test_demo import TASKS, write
from tests.exporters.test_formats_runtimes import runtime

__all__ = ["runtime"]  # a fixture
TEXT = "a text"
NAMES = sorted({name for format in formats.known() for name in format.snippets})
TOKENS = tuple(Port(name, "int64", (1, 16)) for name in ("input_ids", "attention_mask", "token_type_ids"))


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Caches of all tests here, so that a tokenizer is taken apart once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESS_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    folder = tmp_path_factory.mktemp("bundles")
    return {kind: write(folder, task) for kind, task in TASKS.items()}


def snippets(bundle: Bundle, names: list[str], interface: Interface) -> list[Snippet]:
    settings: dict[str, Any] = {"max_length": 16, "dtype": "q8", "function": "main"}
    tokenizer = bundle.path / "tokenizer.json"
    return write_snippets(names, Path("onnx/model.onnx"), interface, bundle.task, tokenizer, **settings)


def check_whole(snippet: Snippet) -> None:
    """Python parses; in the other languages, each bracket is closed outside of strings and comments."""
    if snippet.language == "python":
        ast.parse(snippet.code)
        return
    open_brackets = []
    for line in snippet.code.splitlines():
        quoted = False
        before = ""
        for at, character in enumerate(line):
            if character == '"' and before != "\\":
                quoted = not quoted
            if not quoted and line[at : at + 2] == "//":
                break
            before = "" if before == "\\" else character
            if not quoted and character in "([{":
                open_brackets.append(")]}"["([{".index(character)])
            if not quoted and character in ")]}":
                assert open_brackets.pop() == character, line
        assert not quoted, line
    assert not open_brackets


def test_the_row_has_the_prompt_and_the_end_of_the_text_that_the_bundle_reads(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.truncation_side = "left"
    bundle = tiny.bundle(tmp_path / "bundle", tokenizer=tokenizer)
    prompt = TextPreparation({"query": "dull : "}, "query")
    vectors = replace(bundle.task, preparation=prompt)
    reads, answers = Interface(TOKENS, ()), bundle.path / "tokenizer.json"
    (snippet,) = write_snippets(["onnxruntime.python"], Path("a.onnx"), reads, vectors, answers, max_length=8)
    assert 'tokenizer.enable_truncation(16, direction="left")' in snippet.code
    assert 'tokenizer.encode("dull : a text")' in snippet.code


@pytest.mark.parametrize("kind", TASKS)
def test_every_platform_has_code_for_every_kind_of_task(kind: str, bundles: dict[str, Bundle]) -> None:
    bundle = bundles[kind]
    names = [name for name in NAMES if not name.startswith("text.")]
    heads = [each.name for each in read_interface(bundle.files()["fp32"]).outputs]
    given = Interface(TOKENS, tuple(Port(name, "float32", (1, 2)) for name in heads))
    for snippet in snippets(bundle, names, given):
        check_whole(snippet)
        assert "16" in snippet.code or "copyOf" not in snippet.code


def test_every_form_of_answer_is_read_from_texts(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    names = [name for name in NAMES if name.startswith("text.")]
    assert {name.partition(".")[2] for name in names} == set(PLATFORMS)
    for kind, bundle in bundles.items():
        text_file(bundle, tmp_path / f"{kind}.onnx", precision="fp32")
        interface = read_interface(tmp_path / f"{kind}.onnx")
        assert all(isinstance(size, int | str) and size != "open" for each in interface.outputs for size in each.shape)
        for snippet in snippets(bundle, names, interface):
            check_whole(snippet)
            assert all(f"{each.name}" in snippet.code for each in interface.inputs)


@pytest.mark.parametrize("kind", TASKS)
def test_the_code_in_python_answers_as_the_bundle_does(kind: str, bundles: dict[str, Bundle], tmp_path: Path) -> None:
    bundle = bundles[kind]
    expected = bundle.predict([(TEXT, "another") if bundle.task.pair else TEXT], precision="fp32")[0]
    for to in ("text", "ort"):
        made = export(str(bundle.path), tmp_path / to, to=to, precisions=("fp32",))
        record = json.loads((made.path / "export.json").read_text(encoding="utf-8"))
        assert record["labels"] == list(bundle.task.labels)
        assert made.interface is not None
        assert [each["name"] for each in record["inputs"]] == [each.name for each in made.interface.inputs]
        code = (made.path / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
        words = [sys.executable, "-c", code]
        done = subprocess.run(words, cwd=made.path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-1000:]
        if isinstance(expected, Prediction) and bundle.task.form == "label":
            assert done.stdout.startswith(expected.label.replace("\n", "\\n")), to
        if isinstance(expected, Prediction) and bundle.task.form == "number":
            assert float(done.stdout) == pytest.approx(expected.score, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TASKS)
def test_the_code_in_javascript_answers_as_the_bundle_does(
    kind: str, bundles: dict[str, Bundle], runtime: Path, tmp_path: Path
) -> None:
    bundle = bundles[kind]
    (expected,) = bundle.predict([(TEXT, "another") if bundle.task.pair else TEXT], precision="fp32")
    made = export(str(bundle.path), tmp_path / "text", to="text", precisions=("fp32",))
    code = (made.path / "README.md").read_text(encoding="utf-8").split("```js\n")[1].split("```")[0]
    assert 'from "onnxruntime-web"' in code
    own = code.replace('"onnxruntime-web";', f"{json.dumps(runtime.as_uri())};\nort.env.wasm.numThreads = 1;")
    own = own.replace('"model_text_fp32.onnx"', '(await import("node:fs")).readFileSync("model_text_fp32.onnx")')
    (made.path / "run.mjs").write_text(own, encoding="utf-8")
    done = subprocess.run(["node", "run.mjs"], cwd=made.path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-1000:]
    if isinstance(expected, Prediction) and bundle.task.form == "label":
        assert done.stdout.startswith(expected.label)
    if isinstance(expected, Prediction) and bundle.task.form == "number":
        assert float(done.stdout) == pytest.approx(expected.score, abs=1e-4)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize("kind", TASKS)
def test_the_code_for_transformers_js_is_javascript(kind: str, bundles: dict[str, Bundle], tmp_path: Path) -> None:
    heads = tuple(Port(each.name, "float32", (1, 2)) for each in read_interface(bundles[kind].files()["fp32"]).outputs)
    (snippet,) = snippets(bundles[kind], ["transformers.javascript"], Interface(TOKENS, heads))
    (tmp_path / "code.mjs").write_text(snippet.code, encoding="utf-8")
    done = subprocess.run(["node", "--check", tmp_path / "code.mjs"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1000:]


def test_labels_stay_strings_in_every_language(tmp_path: Path) -> None:
    task = Task("classification", ("text",), "label", ('a "b"', "c $d ${e} \\(f)"), "accuracy")
    bundle = tiny.bundle(tmp_path / "bundle", task=task)
    interface = Interface(TOKENS, (Port("logits", "float32", (1, 2)),))
    found = snippets(bundle, ["onnxruntime.python", "onnxruntime.kotlin", "onnxruntime.swift"], interface)
    python, kotlin, swift = (each.code for each in found)
    (labels,) = (line for line in python.splitlines() if line.startswith("labels = "))
    assert ast.literal_eval(labels.removeprefix("labels = ")) == list(task.labels)
    assert 'listOf("a \\"b\\"", "c \\$d \\${e} \\\\(f)")' in kotlin
    assert '["a \\"b\\"", "c $d ${e} \\\\(f)"]' in swift
