"""A student ships with the tokens of the user's texts, unless that costs answers, or is not wanted."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from datasets import Dataset
from safetensors.numpy import load_file

import compress
from compress.config.options import RunOptions
from compress.data.encoder import TextEncoder
from compress.data.task import Task
from compress.errors import CompressError
from compress.evaluation.evaluator import Evaluator
from compress.exporters.artifact import TEXT, Bundle
from compress.exporters.session import open_session, read_model, token_tables
from compress.exporters.tokenizer.text_model import text_model
from compress.jobs import shipping
from compress.jobs.measure import ScoredModel, measure_agreement
from compress.quantization.certify import ScoreDrop
from tests import tiny, unshipped

WHOLE = len(tiny.SPECIAL) + len(tiny.WORDS)
USED = {*tiny.SPECIAL, *tiny.WORDS[:12], "good", "bad", "a", "!", ".", ",", "?", "##s"}
"""The tokens of `tiny.reviews`, and those that are always kept."""
Distil = Callable[..., Bundle]


@pytest.fixture
def distil(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Distil:
    unshipped.hasten(monkeypatch)
    monkeypatch.setattr(shipping, "FREQUENT", 0)
    given: dict[str, Any] = {
        "teacher": tiny.checkpoint(tmp_path / "teacher"), "data": tiny.reviews(tmp_path / "data"),
        "recipe": tiny.recipe(tmp_path / "recipe"), "out": tmp_path / "run",
    }  # fmt: skip
    return lambda **more: compress.distill(**{**given, **more})


def tokens(bundle: Bundle) -> set[str]:
    return set(TextEncoder.from_folder(bundle.path).backend.get_vocab(with_added_tokens=True))


def rows(file: Path) -> set[int]:
    graph = read_model(file).graph
    return {each.dims[0] for each in graph.initializer if each.name in token_tables(graph)}


def remarks(bundle: Bundle) -> list[str]:
    return [note for note in bundle.report().notes if note.startswith("vocabulary: ")]


def test_all_files_have_the_tokens_of_the_texts(distil: Distil) -> None:
    bundle = distil()
    kept = len(tokens(bundle))
    assert tokens(bundle) == USED
    weights = load_file(bundle.path / "model.safetensors")
    assert weights["bert.embeddings.word_embeddings.weight"].shape[0] == kept < WHOLE
    assert all(rows(file) == {kept} for file in bundle.files().values())
    (note,) = remarks(bundle)
    assert (f"{WHOLE} to {kept} tokens" in note, "100.0 %" in note) == (True, True)
    assert note in (bundle.path / "README.md").read_text()
    assert note in (bundle.path.parent / "report.html").read_text()
    student = bundle.report().of_role("student")[0]
    assert student.agreement is not None and 0.5 < student.agreement <= 1
    texts = ["the film was good", "a sharp and unknown zebra", ""]
    session = open_session(text_model(bundle).path / TEXT)
    (labels,) = session.run(["label"], {"text": np.array(texts)})
    assert np.asarray(labels).tolist() == [getattr(each, "label", None) for each in bundle.predict(texts)]
    onnx.checker.check_model(onnx.load_model(bundle.path / TEXT))


def test_full_keeps_everything(distil: Distil) -> None:
    bundle = distil(vocabulary="full")
    assert (len(tokens(bundle)), remarks(bundle)) == (WHOLE, [])


def test_everything_stays_if_answers_would_change(distil: Distil, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = ScoreDrop(0.9, 0.85, agreement=0.9, difference=1.0, changed=4)
    monkeypatch.setattr(shipping, "compare_answers", lambda *_: lost)
    bundle = distil()
    (note,) = remarks(bundle)
    assert len(tokens(bundle)) == WHOLE
    assert all(part in note for part in (f"{WHOLE} tokens", f"; {len(USED)} tokens", "5.00", "10.00", "0.2"))


def test_everything_stays_if_it_cannot_be_trimmed(distil: Distil, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise CompressError("for this reason")

    monkeypatch.setattr(shipping, "trim_copy", refuse)
    bundle = distil()
    (note,) = remarks(bundle)
    assert (len(tokens(bundle)), note.endswith("for this reason")) == (WHOLE, True)


def test_frequent_tokens_stay(distil: Distil, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "FREQUENT", 20)
    assert tokens(distil()) == USED | set([word for word in tiny.WORDS if len(word) > 1][:20])


def test_a_resumed_run_ships_the_same_bytes(distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = distil()
    with monkeypatch.context() as patch:
        patch.setattr(shipping.Export, "run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            distil(out=tmp_path / "again")
    again = distil(out=tmp_path / "again", options=RunOptions(resume=True))
    names = {
        name for name in once.manifest.files if name not in ("report.json", "README.md", "onnx/model_quantized.onnx")
    }
    assert {"tokenizer.json", "tokenizer_config.json", "model.safetensors", "onnx/model.onnx", "config.json"} <= names
    assert {name: once.manifest.files[name] for name in names} == {name: again.manifest.files[name] for name in names}


def test_tags_are_compared_by_word() -> None:
    """A student that splits a word reads more tokens than its teacher."""
    task = Task("tagging", ("words",), "tags", ("O", "B-x"), "f1")
    split = Dataset.from_dict({"words": [["film", "was"], ["films"]], "tags": [[1, 0], [1]]})
    whole = Evaluator.from_split(task, split, tiny.tokenizer(), 16)
    plural = Evaluator.from_split(task, split, tiny.tokenizer(("films", *tiny.WORDS)), 16)
    first_is_x = [np.array([[0.0, place == 0] for length in exam.lengths for place in range(1, length + 1)])
                  for exam in (whole, plural)]  # fmt: skip
    for exam, logits in zip((whole, plural), first_is_x, strict=True):
        logits[:, 1] = exam.rows.with_format("numpy")["labels"][0].max()
    student = ScoredModel("student", whole, first_is_x[0])
    teacher = ScoredModel("teacher", plural, first_is_x[1])
    assert len(student.logits) != len(teacher.logits)
    assert measure_agreement(student, teacher) == 1.0
    other = replace(teacher, logits=-teacher.logits)
    assert measure_agreement(student, other) == 0.0
