"""A bundle is whole or not there, says what is in it, loads elsewhere, and proves that nobody touched it."""

import json
import resource
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertTokenizer

from compress.data.task import Task
from compress.errors import BundleError, ExportError
from compress.exporters.artifact import Bundle
from compress.exporters.bundle_files import check_parts
from compress.exporters.manifest import Manifest
from compress.models.checkpoints import save_checkpoint
from tests import tiny
from tests.tiny import SENTIMENT

CARD = {"name": "A <b>tiny</b> student"}


write = partial(tiny.bundle, card=CARD)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that tests only read; the model was training, in bf16, when it was written."""
    return write(tmp_path_factory.mktemp("written") / "bundle", model=tiny.bert().to(torch.bfloat16).train()).path


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "bundle"))


def test_layout_is_the_hubs(written: Path) -> None:
    names = {path.relative_to(written).as_posix() for path in written.rglob("*") if path.is_file()}
    onnx = {"onnx/model.onnx", "onnx/model_quantized.onnx"}
    words = {"tokenizer.json", "tokenizer_config.json"}
    assert names == {"config.json", "model.safetensors", "README.md", "recipe.yaml", "manifest.json"} | onnx | words
    assert (written / "recipe.yaml").read_text() == "stages: []\n"
    assert [path.name for path in written.parent.iterdir()] == ["bundle"]
    bundle = Bundle.load(written)
    assert bundle.files() == {"fp32": written / "onnx/model.onnx", "int8": written / "onnx/model_quantized.onnx"}
    assert set(bundle.manifest.files) == names - {"manifest.json"}
    assert bundle.task == SENTIMENT
    assert (bundle.manifest.max_length, bundle.manifest.model_type) == (16, "bert")
    assert bundle.manifest.parameters == sum(parameter.numel() for parameter in tiny.bert().parameters())


def test_transformers_loads_it_with_labels_length_and_weights(written: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(written)
    tokenizer = AutoTokenizer.from_pretrained(written)
    assert model.config.id2label == {0: "negative", 1: "positive"}
    assert model.config.label2id == {"negative": 0, "positive": 1}
    assert model.config.problem_type == "single_label_classification"
    assert len(tokenizer("good " * 50, truncation=True)["input_ids"]) == 16
    weights = tiny.bert().to(torch.bfloat16).float().state_dict()
    stored = load_file(written / "model.safetensors")
    assert stored.keys() == weights.keys()
    assert all(torch.equal(stored[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("task", "problem", "labels"),
    [
        (Task("regression", ("a", "b"), "score", (), "pearson"), "regression", {0: "score"}),
        (Task("multilabel", ("a",), "labels", ("x",), "f1"), "multi_label_classification", {0: "x"}),
    ],
)
def test_config_says_the_kind_of_task(task: Task, problem: str, labels: dict[int, str], tmp_path: Path) -> None:
    bundle = write(tmp_path / "bundle", model=tiny.bert(1), task=task)
    assert Bundle.load(bundle.path).task == task
    config = AutoModelForSequenceClassification.from_pretrained(bundle.path).config
    assert (config.problem_type, config.id2label) == (problem, labels)


def test_the_tokenizer_is_not_changed(tmp_path: Path) -> None:
    given = tiny.tokenizer()
    write(tmp_path / "bundle", tokenizer=given)
    assert given.backend_tokenizer.truncation is None and given.backend_tokenizer.padding is None


def test_tokenizer_file_carries_no_state_of_its_last_call(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer(["good", "bad film"], padding="max_length", truncation=True, max_length=5)
    save_checkpoint(tmp_path, tiny.bert(), tokenizer, 16)
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    assert (stored["truncation"], stored["padding"]) == (None, None)
    assert tokenizer.model_max_length > 16  # ours stays as it was


def test_tokenizer_words_that_transformers_4_cannot_read_are_not_written(tmp_path: Path) -> None:
    vocabulary = {word: index for index, word in enumerate((*tiny.SPECIAL, "good"))}
    tokenizer = BertTokenizer(vocab=vocabulary, extra_special_tokens=["[E1]"])
    save_checkpoint(tmp_path, tiny.bert(), tokenizer, 16)
    stored = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert stored["additional_special_tokens"] == ["[E1]"]
    assert "extra_special_tokens" not in stored  # a list there is what 4.x fails on
    assert AutoTokenizer.from_pretrained(tmp_path)("[E1]")["input_ids"] == tokenizer("[E1]")["input_ids"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "onnx/model_quantized.onnx"])
def test_missing_truncated_and_changed_files_are_named_with_both_hashes(name: str, copied: Path) -> None:
    good, expected = (copied / name).read_bytes(), Manifest.read(copied).files[name]
    for damaged in (good[:-1], good[:-1] + bytes([good[-1] ^ 1])):
        (copied / name).write_bytes(damaged)
        with pytest.raises(BundleError) as error:
            Bundle.load(copied)
        assert f"{name}: {len(damaged)} bytes, sha256 " in str(error.value)
        assert f"expected {len(good)} bytes, sha256 {expected.sha256}" in str(error.value)
    (copied / name).unlink()
    with pytest.raises(BundleError, match=rf"{name}: missing; expected {len(good)} bytes"):
        Bundle.load(copied)


@pytest.mark.parametrize("text", [None, "", "[" * 20_000, '{"format": 1'])
def test_a_manifest_that_is_missing_or_cannot_be_read_is_refused(text: str | None, copied: Path) -> None:
    (copied / "manifest.json").unlink()
    if text is not None:
        (copied / "manifest.json").write_text(text)
    with pytest.raises(BundleError, match=r"manifest\.json"):
        Bundle.load(copied)


def test_a_write_that_fails_leaves_nothing_and_keeps_what_was_there(copied: Path) -> None:
    earlier = Manifest.read(copied)
    broken = tiny.bert()
    broken.classifier.weight.data[0, 0] = float("inf")
    for path in (copied, copied.parent / "new"):
        with pytest.raises(ExportError):  # after weights, config and tokenizer were written
            write(path, model=broken)
        assert [left.name for left in copied.parent.iterdir()] == ["bundle"]
    assert Bundle.load(copied).manifest == earlier


@pytest.mark.parametrize("room", [500, 50_000, 110_000])
def test_a_full_disk_is_a_clear_error_at_any_moment(room: int, tmp_path: Path) -> None:
    model, tokenizer = tiny.bert(), tiny.tokenizer()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(BundleError, match=r"cannot be written .* too large"):
            write(tmp_path / "bundle", model=model, tokenizer=tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_a_bundle_is_replaced_and_anything_else_is_not(copied: Path, tmp_path: Path) -> None:
    (copied / "report.json").write_text("of the bundle before")
    stale = tmp_path / ".bundle.partial"
    stale.mkdir()
    (stale / "half").write_text("of a run that was killed")
    assert write(copied, max_length=8).manifest.max_length == 8
    assert not (copied / "report.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]

    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    with pytest.raises(BundleError, match="exists and is not a bundle"):
        write(tmp_path / "notes")
    assert (tmp_path / "notes" / "mine.txt").read_text() == "keep"


def test_parts_that_do_not_belong_together_are_refused() -> None:
    model, words = tiny.bert(), tiny.tokenizer()
    check_parts(model, words, SENTIMENT, 64)
    with pytest.raises(BundleError, match="3 outputs; the task has 2"):
        check_parts(tiny.bert(3), words, SENTIMENT, 16)
    with pytest.raises(BundleError, match="embeds 45 tokens, the tokenizer has 46"):
        check_parts(model, tiny.tokenizer((*tiny.WORDS, "more")), SENTIMENT, 16)
    with pytest.raises(BundleError, match="max_length 65; this model has 64 positions"):
        check_parts(model, words, SENTIMENT, 65)
    with pytest.raises(BundleError, match=r"cannot be saved as tokenizer\.json"):
        check_parts(model, object(), SENTIMENT, 16)


def test_attach_adds_and_replaces_files_that_are_then_checked(copied: Path) -> None:
    bundle = Bundle.load(copied).attach("report.json", "{}")
    bundle = bundle.attach("README.md", bundle.card({**CARD, "rows": [{"model": "student", "accuracy": 0.5}]}))
    assert Bundle.load(copied) == bundle
    assert "| student | 0.5 |" in (copied / "README.md").read_text()
    (copied / "report.json").write_text("[]")
    with pytest.raises(BundleError, match=r"report\.json: 2 bytes"):
        Bundle.load(copied)
    for name in ("../report.json", "onnx/model.onnx", "model.safetensors", "manifest.json"):
        with pytest.raises(BundleError, match="cannot be attached"):
            bundle.attach(name, "")


def test_a_bundle_killed_at_any_write_still_loads(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    real = Path.replace
    for survived in range(3):
        renames = iter([real] * survived)

        def rename(path: Path, target: Path, renames: Any = renames) -> Path:
            done = next(renames, None)
            if done is None:
                raise Killed
            return Path(done(path, target))

        monkeypatch.setattr(Path, "replace", rename)
        with pytest.raises(Killed):
            Bundle.load(copied).attach("README.md", "another")
        Bundle.load(copied)
    monkeypatch.undo()
    assert Bundle.load(copied).attach("README.md", "another") == Bundle.load(copied)


def test_a_file_put_into_a_bundle_is_listed_opened_and_replaced(copied: Path) -> None:
    bundle = Bundle.load(copied)
    with pytest.raises(BundleError, match="has no fp16 file; it has fp32, int8"):
        bundle.open("fp16")
    bundle = bundle.put("fp16", copied / "onnx/model.onnx")
    assert Bundle.load(copied) == bundle
    assert list(bundle.files()) == ["fp32", "int8", "fp16"]
    assert bundle.predict(["a good film"], precision="fp16") == bundle.predict(["a good film"], precision="fp32")
    bundle = bundle.put("fp16", copied / "onnx/model_quantized.onnx")
    assert Bundle.load(copied).predict(["a film"], precision="fp16") == bundle.predict(["a film"])
    assert "text" not in bundle.put("text", copied / "onnx/model.onnx").files(), "it reads no token ids"
    assert (copied / "onnx/model_text.onnx").is_file()


def test_a_copy_has_the_same_manifest_and_is_independent(written: Path, tmp_path: Path) -> None:
    copy = Bundle.load(written).copy_to(tmp_path / "copy")
    assert copy.manifest == Bundle.load(written).manifest
    assert copy.attach("README.md", "another").manifest != Bundle.load(written).manifest


def test_loading_and_predicting_import_neither_torch_nor_transformers(written: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from compress.exporters.artifact import Bundle;"
        f"print(Bundle.load(Path({str(written)!r})).predict(['a good film'])[0].label);"
        "import compress.exporters.text_generator;"
        "print(sorted({'torch', 'transformers', 'datasets', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    label, imported = done.stdout.split("\n")[:2]
    assert label in SENTIMENT.labels
    assert imported == "[]"
    assert done.stderr == ""


def test_card_snippets_run_as_printed(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(written)
    blocks = (written / "README.md").read_text().split("```python\n")[1:]
    names: dict[str, Any] = {}
    logits = []
    for block in blocks:
        if "from optimum" in block:  # which is not installed here: benchmarks/interop_optimum.py
            continue
        exec(block.split("```")[0], names)
        logits.append(np.asarray(names["logits"].tolist()))
    assert len(logits) == 3
    assert names["answer"] == Bundle.load(written).predict(["a text"])[0]
    assert abs(logits[0] - Bundle.load(written).logits([tiny.tokenizer()("a text")], precision="fp32")).max() < 1e-5
    assert (logits[1] == Bundle.load(written).logits([tiny.tokenizer()("a text")])).all()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), 2),
        (("task", "kind"), "clustering"),
        (("files", "../README.md"), {"bytes": 1, "sha256": ""}),
        (("files", "config.json"), {"bytes": 1}),
        (("max_length",), -1),
        (("max_length",), 0),
        (("max_length",), 10**30),
        (("max_length",), "16"),
        (("parameters",), -5),
        (("threshold",), float("nan")),
        (("task", "labels"), []),
        (("task", "text"), []),
        (("task", "text"), ["a", "b", "c"]),
        (("files", "config.json", "bytes"), True),
    ],
    ids=str,
)
def test_a_manifest_of_nonsense_is_refused(copied: Path, path: tuple[str, ...], value: object) -> None:
    file = copied / "manifest.json"
    manifest = json.loads(file.read_text())
    inner = manifest
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file.write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"manifest\.json"):
        Bundle.load(copied)
