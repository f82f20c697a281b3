"""A bundle for another runtime: the files are what that runtime loads, their answers are ours, the folder is whole."""

import hashlib
import json
import shutil
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from transformers import AutoModelForQuestionAnswering, AutoModelForTokenClassification

from compress.commands import quantize as pipeline
from compress.commands.quantize import quantize
from compress.config.options import DeviceOptions
from compress.data import load_task
from compress.data.task import Task
from compress.errors import BundleError, CompressError, ExportError
from compress.exporters import export as exporting
from compress.exporters.artifact import Bundle
from compress.exporters.checkpoint import load_source
from compress.exporters.export import OPSETS, export
from compress.exporters.manifest import BUNDLE_FILES
from compress.exporters.session import read_model
from compress.exporters.tokenizer.text_model import read_proof, run_text
from compress.exporters.writers.context import ExportOptions, import_extra
from compress.records.certificate import Certificate
from tests import command, generative, marked, tiny
from tests.quantization.graphs import Rule

TAGGING = Task("tagging", ("words",), "tags", ("O", "B-X", "I-X"), "f1")
QA = Task("qa", ("question", "context"), "answers", (), "f1")
LENGTH = 48
BESIDE = {"config.json", "tokenizer.json", "tokenizer_config.json", "export.json", "README.md"}


def bundle(folder: Path, model: Any = None, task: Task = tiny.SENTIMENT) -> Bundle:
    made = tiny.bert(hidden=64, vocab_size=300) if model is None else model
    return tiny.bundle(folder, model=made, task=task, max_length=LENGTH)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that tests only read."""
    return bundle(tmp_path_factory.mktemp("written") / "bundle").path


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def record(folder: Path) -> Any:
    return json.loads((folder / "export.json").read_text())


def rows(text: str = "a very good film !") -> Mapping[str, Any]:
    return {name: np.array(value)[None] for name, value in tiny.tokenizer()(text).items()}


def test_onnx_is_the_bundle_with_more_precisions(written: Path, tmp_path: Path) -> None:
    made = export(Bundle.load(written), tmp_path / "out", precisions=("fp16", "w8", "q4"))
    found = Bundle.load(tmp_path / "out")
    assert list(found.files()) == list(BUNDLE_FILES)
    assert found.predict(["a good film"], precision="fp32") == Bundle.load(written).predict(
        ["a good film"], precision="fp32"
    )
    sizes = [made.sizes[BUNDLE_FILES[precision]] for precision in ("fp32", "fp16", "w8", "q4")]
    assert sizes == sorted(sizes, reverse=True)
    apart = {each.precision: each.difference for each in made.files}
    assert apart["fp32"] is not None and apart["fp32"].largest == 0
    assert all(each is not None and each.relative < (0.6 if key == "q4" else 0.1) for key, each in apart.items())
    for precision in BUNDLE_FILES:
        assert len(found.logits([tiny.tokenizer()("a film")], precision=precision)) == 1
    assert any("on an x86 CPU it saves space, not time" in verdict for verdict in made.verdicts)


def test_the_record_describes_every_file(written: Path, tmp_path: Path) -> None:
    export(Bundle.load(written), tmp_path / "out", to="web", options=ExportOptions(command="compress export x"))
    result = record(tmp_path / "out")
    assert (result["format"], result["for"], result["source"], result["command"]) == (
        1,
        "web",
        "bundle",
        "compress export x",
    )
    assert {"compress", "torch", "onnx", "onnxruntime"} <= result["versions"].keys()
    assert [each["file"] for each in result["files"]] == [BUNDLE_FILES["int8"], BUNDLE_FILES["fp16"]]
    for each in result["files"]:
        data = (tmp_path / "out" / each["file"]).read_bytes()
        assert (each["bytes"], each["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        assert each["difference"].keys() == {"largest", "logit", "rows"}
    assert str(written) not in (tmp_path / "out" / "export.json").read_text()


def test_without_out_new_precisions_go_into_the_bundle(written: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(written, tmp_path / "bundle"))
    before = (path / BUNDLE_FILES["int8"]).read_bytes()
    result = command.run("export", str(path), "--precision", "w8")
    assert result.code == 0, result.err
    assert set(Bundle.load(path).files()) == {"fp32", "int8", "w8"}
    assert (path / BUNDLE_FILES["int8"]).read_bytes() == before
    assert record(path)["for"] == "onnx"
    again = command.run("export", str(path), "--precision", "w8,q4", "--json")
    assert [each["precision"] for each in json.loads(again.out)["files"]] == ["fp32", "int8", "w8", "q4"]
    assert command.partial(tmp_path) == []


@pytest.mark.parametrize("opset", [OPSETS[0], 16, OPSETS[-1]])
def test_an_opset_is_exported_anew_from_the_weights(written: Path, tmp_path: Path, opset: int) -> None:
    made = export(Bundle.load(written), tmp_path / "out", precisions=("q4",), opset=opset)
    found = Bundle.load(tmp_path / "out")
    for path in found.files().values():
        assert {each.domain: each.version for each in read_model(path).opset_import}[""] == opset
    given_rows = [tiny.tokenizer()("a very good film !")]
    one, two = (each.logits(given_rows, precision="fp32") for each in (found, Bundle.load(written)))
    assert abs(one - two).max() < 1e-5
    assert any("LayerNormalization" in warning for warning in made.warnings) == (opset < 17)


def test_another_opset_keeps_what_int8_left_in_float_and_drops_its_certificate(tmp_path: Path) -> None:
    product = "/model/bert/encoder/layer.0/output/dense/MatMul"
    path = tiny.bundle(tmp_path / "bundle", keep=[product]).path
    proof = Certificate(
        BUNDLE_FILES["int8"],
        "dynamic int8",
        "accuracy",
        1.0,
        1.0,
        0.01,
        1.0,
        0.0,
        4,
        "dev",
        "x",
        "local",
        "y",
        True,
        "",
        "",
    )
    Bundle.load(path).attach_evidence(certificates=[proof])
    export(Bundle.load(path), tmp_path / "out", opset=18)
    nodes = read_model(tmp_path / "out" / BUNDLE_FILES["int8"]).graph.node
    assert [node.name for node in nodes if node.op_type == "MatMul" and "dense" in node.name] == [product]
    assert Bundle.load(tmp_path / "out").report().certificates == ()
    cards = [(folder / "README.md").read_text(encoding="utf-8") for folder in (path, tmp_path / "out")]
    assert [each.count("certified") for each in cards] == [1, 0]
    assert "## Certificate" not in cards[1]
    assert cards[1].partition("## Use")[2] == cards[0].partition("## Use")[2]


def test_ort_files_run_with_the_same_answers(written: Path, tmp_path: Path) -> None:
    made = export(Bundle.load(written), tmp_path / "out", to="ort")
    models = {f"{name}{style}" for name in ("model", "model_quantized") for style in (".ort", ".with_runtime_opt.ort")}
    assert names(tmp_path / "out") == {*models, "required_operators_and_types.config", *BESIDE}
    for precision, name in (("fp32", "model.ort"), ("int8", "model_quantized.ort")):
        (found,) = onnxruntime.InferenceSession(tmp_path / "out" / name).run(None, dict(rows()))
        expected = Bundle.load(written).logits([tiny.tokenizer()("a very good film !")], precision=precision)  # type: ignore[arg-type]
        assert abs(found - expected).max() < 1e-4
    operators = (tmp_path / "out" / "required_operators_and_types.config").read_text()
    assert "LayerNormalization" in operators
    assert "MatMulInteger" in operators
    assert "SkipLayerNormalization" not in operators, "an optimiser that the file wants off was on"
    assert str(tmp_path) not in operators
    message = [verdict for verdict in made.verdicts if verdict.startswith("int8: NNAPI")]
    assert "MatMulInteger" in message[0] and message[0].endswith("use the CPU provider")


def test_web_is_the_layout_of_transformers_js(written: Path, tmp_path: Path) -> None:
    made = export(Bundle.load(written), tmp_path / "out", to="web", precisions=("int8", "fp16", "q4"))
    assert names(tmp_path / "out") == {BUNDLE_FILES["int8"], BUNDLE_FILES["fp16"], BUNDLE_FILES["q4"], *BESIDE}
    assert [each.note for each in made.files] == [f'transformers.js: dtype "{name}"' for name in ("q8", "fp16", "q4")]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["id2label"] == {"0": "negative", "1": "positive"}


def test_the_certificate_of_a_file_comes_along(written: Path, tmp_path: Path) -> None:
    import onnx

    path = Path(shutil.copytree(written, tmp_path / "bundle"))
    model = read_model(path / BUNDLE_FILES["int8"])
    model.metadata_props.append(onnx.StringStringEntryProto(key="compress.certificate", value='{"certified": true}'))
    onnx.save_model(model, tmp_path / "certified.onnx")
    Bundle.load(path).put("int8", tmp_path / "certified.onnx")
    export(Bundle.load(path), tmp_path / "out", to="ort", precisions=("int8",))
    assert record(tmp_path / "out")["files"][0]["certificate"] == {"certified": True}


@pytest.mark.parametrize(
    ("task", "head"), [(TAGGING, AutoModelForTokenClassification), (QA, AutoModelForQuestionAnswering)]
)
def test_heads_that_answer_per_token(tmp_path: Path, task: Task, head: Any) -> None:
    model = tiny.model("bert", head=head, labels=task.outputs, hidden=64)
    made = export(bundle(tmp_path / "bundle", model, task), tmp_path / "out", to="ort", precisions=("w8",))
    assert made.files[0].difference is not None and made.files[0].difference.relative < 0.2


def test_a_checkpoint_is_exported_without_a_bundle(tmp_path: Path) -> None:
    model = tiny.bert(2, id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1}, hidden=64)
    path = tiny.checkpoint(tmp_path / "checkpoint", model)
    made = export(load_source(path), tmp_path / "out", to="ort", opset=18)
    assert {each.precision for each in made.files} == {"fp32", "int8", ""}
    assert export(load_source(path), tmp_path / "onnx", precisions=("w8",)).sizes[BUNDLE_FILES["w8"]] > 0
    assert Bundle.load(tmp_path / "onnx").task.labels == ("no", "yes")


def test_encoders_and_generative_models(tmp_path: Path) -> None:
    encoder = load_source(tiny.checkpoint(tmp_path / "encoder"), pool="mean", normalise=True)
    made = export(encoder, tmp_path / "embeddings", precisions=("fp16",))
    assert [each.precision for each in made.files] == ["fp32", "int8", "fp16"]
    assert Bundle.load(tmp_path / "embeddings").embed(["a good film"]).shape == (1, 32)
    assert all(each.difference for each in export(encoder, tmp_path / "ort", to="ort").files[:4])

    saved = tiny.checkpoint(tmp_path / "writer", generative.gpt2())
    generative.gpt2_tokenizer().save_pretrained(saved)
    export(load_source(saved), tmp_path / "generative")
    assert {each["file"] for each in record(tmp_path / "generative")["files"]} >= {
        BUNDLE_FILES["fp32"],
        BUNDLE_FILES["int8"],
    }
    with pytest.raises(ExportError, match="is exported as ONNX in fp32 and int8 only"):
        export(load_source(saved), tmp_path / "out", to="ort")


@pytest.mark.slow
def test_a_race_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that measures nothing; tests/exporters/test_tune.py races real files."""
    path = bundle(tmp_path / "bundle", tiny.bert(hidden=64)).path
    words = ["--tune", "--seq", "8", "--data", tiny.reviews(tmp_path / "reviews", train=24, dev=8), "--max-drop", "1"]
    with monkeypatch.context() as patch:
        patch.setattr("compress.commands.export.open_chosen", lambda *_, **__: nullcontext(Rule(lambda *_: 1.0)))
        result = command.run("export", str(path), *words, "--for", "ort", "--out", str(tmp_path / "out"))
        assert result.code == 0, result.err
        assert "chosen" in result.out
        assert record(tmp_path / "out")["source"] == "bundle"
        assert not (path / "report.json").exists(), "with --out the bundle stays as it was"
        assert command.run("export", str(path), *words, "--precision", "fp16").code == 0
    assert Bundle.load(path).report().tuning
    assert "fp16" in Bundle.load(path).files()
    for more, message in ((("--opset", "18"), "--tune and --opset"), (("--device", "toaster"), "toaster")):
        out = str(tmp_path / "other")
        assert command.refused(
            command.run("export", str(path), *words, *more, "--out", out), tmp_path / "other", message
        )


REFUSED = {
    "--precision int7": "--precision int7: --for onnx writes fp32, int8, fp16, w8, q4",
    "--for executorch --precision q4": "--for executorch writes fp32, int8",
    "--opset 11": "--opset 11: expected 12 to 23",
    "--for openvino --precision int8": "expected --data",
    "--for ort --data intents": "--data: --for ort reads it only with --tune",
}


@pytest.mark.parametrize("words", REFUSED)
def test_unsupported_options_are_refused(written: Path, tmp_path: Path, words: str) -> None:
    if "openvino" in words:
        pytest.importorskip("openvino", reason="the extra is not installed")
    result = command.run("export", str(written), "--out", str(tmp_path / "out"), *words.split())
    assert command.refused(result, tmp_path, REFUSED[words])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [("--for", "ort"), ("--opset", "18")])
def test_only_precisions_go_into_a_bundle(written: Path, tmp_path: Path, words: tuple[str, str]) -> None:
    assert command.refused(command.run("export", str(written), *words), tmp_path, "expected --out with the folder")


def test_a_missing_extra_is_named(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for extra in ("openvino", "executorch", "litert", "coreml", "coreai"):
        with monkeypatch.context() as patched:
            patched.setattr("compress.exporters.export.find_missing", lambda name: f"{name}: not installed")
            result = command.run("export", str(written), "--for", extra, "--out", str(tmp_path / "out"))
        assert command.refused(result, tmp_path, f"--for {extra} needs packages ({extra}: not", "pip install '")
        assert not (tmp_path / "out").exists()


def test_an_extra_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(ExportError, match=r"openvino is not installed, .* pip install 'openvino"):
        import_extra("openvino", "openvino")


def test_a_folder_of_something_else_is_not_replaced(written: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ExportError, match="exists and is not an export"):
        export(Bundle.load(written), tmp_path / "mine", to="web")
    assert names(tmp_path / "mine") == {"thesis.txt"}
    export(Bundle.load(written), tmp_path / "out", to="ort", precisions=("int8",))
    export(Bundle.load(written), tmp_path / "out", to="web", precisions=("int8",))
    assert names(tmp_path / "out") == {BUNDLE_FILES["int8"], *BESIDE}, "an export is replaced as a whole"


def test_a_failure_midway_leaves_nothing(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "copy_tokenizer", full)
    with pytest.raises(OSError, match="No space left"):
        export(Bundle.load(written), tmp_path / "out", to="ort", precisions=("int8",))
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_without_tokenizer_and_a_broken_model_are_refused(written: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(written, tmp_path / "bundle"))
    (path / "tokenizer.json").unlink()
    with pytest.raises(CompressError, match=r"tokenizer.json: missing"):
        Bundle.load(path)
    made = Bundle.load(written)
    unlisted = {name: stamp for name, stamp in made.manifest.files.items() if name != "tokenizer.json"}
    loose = Bundle(path, replace(made.manifest, files=unlisted))
    with pytest.raises(ExportError, match=r"has no tokenizer.json"):
        export(loose, tmp_path / "out", to="ort", precisions=("int8",))
    (path / BUNDLE_FILES["fp32"]).write_bytes(b"\x08\x07broken")
    with pytest.raises(ExportError, match="not an ONNX model"):
        export(loose, tmp_path / "out", to="web", precisions=("fp16",))
    assert [each.name for each in tmp_path.iterdir()] == ["bundle"]


def test_far_answers_are_warned_of(tmp_path: Path) -> None:
    """Four bits for weights of which one in each block is thirty times the others: little is left of the rest."""
    model = tiny.bert(hidden=64)
    import torch

    with torch.no_grad():
        for layer in model.bert.encoder.layer:
            for weight in (layer.intermediate.dense.weight, layer.attention.self.value.weight):
                weight[:, ::32] *= 30
    made = export(bundle(tmp_path / "bundle", model), tmp_path / "out", precisions=("q4",))
    assert any("model_q4.onnx: logits differ from fp32's" in warning for warning in made.warnings)
    assert record(tmp_path / "out")["warnings"] == list(made.warnings)


@pytest.mark.parametrize("kind", ["tagging", "qa"])
def test_a_text_file_of_tokens_is_compared_on_the_data(kind: str, tmp_path: Path) -> None:
    write, name = (marked.questions, "train.json") if kind == "qa" else (marked.sentences, "train.conll")
    data = load_task(str(write(tmp_path / name, count=12)))
    head = AutoModelForQuestionAnswering if kind == "qa" else AutoModelForTokenClassification
    model = tiny.model("bert", head=head, labels=data.task.outputs)
    made = tiny.bundle(tmp_path / "bundle", model=model, task=data.task, max_length=48)
    out = tmp_path / "app"
    result = command.run("export", str(made.path), "--for", "text", "--out", str(out), "--data", str(tmp_path / name))
    assert result.code == 0, result.err
    splits = (data.train, data.validation)
    rows = [row for split in splits for row in (split["words"] if kind == "tagging" else split.to_list())]
    texts = {" ".join(row) if kind == "tagging" else (row["question"], row["context"]) for row in rows}
    assert read_proof(out / "model_text.onnx").given == len(texts) > 3


def test_one_file_takes_texts_and_gives_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "home"))
    task = Task("classification", ("text",), "label", ("negative", "positive"), "accuracy")
    shipped, data = bundle(tmp_path / "bundle", task=task), tiny.reviews(tmp_path / "data")
    out = tmp_path / "app"
    result = command.run("export", str(shipped.path), "--for", "text", "--out", str(out), "--data", data)
    assert result.code == 0
    assert names(out) == {"model_text.onnx", "export.json", "README.md"}
    texts = ["a good film", "Dull!", ""]
    assert [each.label for each in run_text(out / "model_text.onnx", texts)] == [
        each.label for each in shipped.predict(texts)
    ]
    (verdict,) = json.loads((out / "export.json").read_text())["verdicts"]
    assert "texts of the data as the tokenizer does" in verdict
    export(Bundle.load(shipped.path), tmp_path / "both", to="text", precisions=["fp32", "int8"])
    assert names(tmp_path / "both") >= {"model_text.onnx", "model_text_fp32.onnx"}
    with pytest.raises(ExportError, match="expected no --opset"):
        export(Bundle.load(shipped.path), tmp_path / "no", to="text", opset=18)
    assert not (tmp_path / "no").exists()


@pytest.fixture
def made(tmp_path: Path) -> Bundle:
    return bundle(tmp_path / "run" / "bundle")


@pytest.mark.parametrize("out", ["run/bundle", "run"])
def test_a_bundle_is_not_replaced_by_its_own_export(made: Bundle, tmp_path: Path, out: str) -> None:
    (tmp_path / "run" / "export.json").write_text("{}")
    for to in ("onnx", "web"):
        with pytest.raises(ExportError, match="contains the model itself"):
            export(made, tmp_path / out, to=to)
    assert Bundle.load(made.path) == made


def test_another_bundle_is_replaced_by_a_bundle_only(made: Bundle, tmp_path: Path) -> None:
    other = made.copy_to(tmp_path / "other")
    with pytest.raises(ExportError, match="is a bundle, which --for web does not write"):
        export(made, other.path, to="web")
    assert Bundle.load(other.path) == other
    export(made, other.path)
    assert (other.path / "export.json").is_file()


def test_quantize_refuses_an_occupied_folder_before_it_reads_data(made: Bundle, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(BundleError, match="exists and is not a bundle"):
        quantize(made, str(tmp_path / "no-data"), out=tmp_path / "mine")


@pytest.mark.parametrize("words", [("--lan",), ("--threads", "2")])
def test_options_of_a_race_are_refused_where_there_is_none(made: Bundle, words: tuple[str, ...]) -> None:
    result = command.run("export", str(made.path), *words)
    assert (result.code, result.out) == (2, "")
    assert f"{words[0]}: only applies to a race" in result.err


def test_the_interpreter_of_a_far_machine_reaches_the_device(made: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    def opened(device: DeviceOptions, **_: object) -> None:
        seen.update(vars(device))
        raise BundleError("seen")

    monkeypatch.setattr(Bundle, "load_data", lambda *_, **__: None)
    monkeypatch.setattr(pipeline, "open_chosen", opened)
    words = ("--device", "ssh:pi", "--python", "/venv/bin/python", "--timeout", "5")
    assert command.run("quantize", str(made.path), "--data", "intents", *words).code == 2
    assert (seen["device"], seen["python"], seen["timeout"]) == ("ssh:pi", "/venv/bin/python", 5.0)


def test_a_disk_that_openvino_finds_full_is_one_message(
    made: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openvino = pytest.importorskip("openvino", reason="the extra openvino is not installed")

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("basic_ios::clear: iostream error")

    monkeypatch.setattr(openvino, "save_model", full)
    result = command.run("export", str(made.path), "--for", "openvino", "--out", str(tmp_path / "ov"))
    assert (result.code, result.out) == (2, "")
    assert (
        "openvino_model_fp16.xml: OpenVINO cannot write it (RuntimeError: basic_ios::clear: iostream error)"
        in result.err
    )
    assert "MB are free" in result.err
    assert not (tmp_path / "ov").exists()
