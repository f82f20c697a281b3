"""Where teachers come from, which are refused and why, and the one that is fine-tuned first."""

import json
import re
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from datasets import Dataset
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel

from compress.config.recipe import FINETUNE
from compress.config.stages import Stage
from compress.data import Task, TaskData, load_task
from compress.data.collate import Collate
from compress.data.tokenize import encode
from compress.errors import TeacherError
from compress.models.checkpoints import check, resolve
from compress.models.teacher import Teacher, load
from compress.training import finetune
from compress.training.context import TrainingContext
from compress.training.finetune import TeacherCheck, check_logits, is_ready, with_head
from compress.training.run import Run
from compress.training.schedule import TimeLimit
from tests import learning, tiny

TASK = Task("classification", ("text",), "label", ("negative", "positive"), "accuracy")


@pytest.fixture(scope="module")
def headless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny.checkpoint(tmp_path_factory.mktemp("headless")))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TaskData:
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESS_HOME", str(folder / "home"))
        return load_task(tiny.reviews(folder / "reviews"))


def stage(**changes: Any) -> Stage:
    kind_and_numbers = {"steps": 24, "batch": 16, "lr": 1e-2, "max_length": 32, "evaluate": 1}
    return Stage.model_validate({**FINETUNE, **kind_and_numbers, **changes})


def tuned(headless: Path, data: TaskData, path: Path) -> Teacher:
    given = load("tiny", headless, data.task)
    return with_head(given, stage(), context(given, data), Run(path, seed=0, main=True))


def context(teacher: Teacher, data: TaskData) -> TrainingContext:
    return TrainingContext(data, None, teacher.tokenizer, Collate(teacher.tokenizer), False, Console(quiet=True))


@pytest.fixture(scope="module")
def trained(headless: Path, data: TaskData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a teacher that gets every validation row right."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESS_HOME", str(folder / "home"))
        return tuned(headless, data, folder / "run").folder


@pytest.mark.parametrize(("count", "held_out", "learned"), [(8, 8, 0), (60, 40, 20), (1000, 40, 96)])
def test_a_sample_begins_with_rows_that_were_not_learned_by_heart(
    count: int, held_out: int, learned: int, headless: Path, data: TaskData
) -> None:
    teacher = load("tiny", headless, data.task)
    rows = context(teacher, data).sample(learning.stage(data="task", max_length=32), count, 0)["input_ids"][:]
    own, others = (encode(each, teacher.tokenizer, 32)["input_ids"][:] for each in (data.validation, data.train))
    assert [row in own for row in rows[:held_out]] == [True] * held_out
    assert [row in others for row in rows[held_out:]] == [True] * learned


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """To be spoilt."""
    return Path(shutil.copytree(trained, tmp_path / "teacher"))


def gated(folder: Path, data: TaskData, *, strict: bool = True) -> TeacherCheck:
    teacher = load("tiny", folder, data.task)
    rows = encode(data.validation, teacher.tokenizer, 32)
    return finetune.check_teacher(teacher, data, rows, Collate(teacher.tokenizer), bf16=False, strict=strict)


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | values), encoding="utf-8")


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )


# Where they come from


def in_hub_cache(cache: Path, name: str, source: Path) -> None:
    """The layout of the hub's cache: a reference to a snapshot."""
    model, commit = cache / f"models--{name.replace('/', '--')}", "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(source, model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit, encoding="utf-8")


@pytest.mark.parametrize("name", ["bert-base", "google-bert/bert-base-uncased"])
def test_an_alias_or_hub_id_is_found_in_the_hub_cache_without_network(
    name: str, headless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_hub_cache(tmp_path / "hub", "google-bert/bert-base-uncased", headless)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = resolve(name)
    assert folder.parent.name == "snapshots"
    assert load(name, folder, TASK).model.config.hidden_size == 32


@pytest.mark.parametrize("way", ["told so", "refused", "never answered"])
def test_without_network_the_error_names_other_ways(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("compress.data.sources.ANSWER_SECONDS", 0.2)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if way == "never answered":
            server.listen()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", way == "told so")
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        started = time.monotonic()
        with pytest.raises(TeacherError) as caught:
            resolve("roberta-base")
    assert time.monotonic() - started < 30
    message = str(caught.value)
    assert "FacebookAI/roberta-base: no such folder. As a model of the hub: the hub cannot be reached" in message
    assert all(other in message for other in ("folder", "HF_HOME", "--teacher minilm"))


@pytest.mark.parametrize("name", ["org/model@v2", "org/my model", "org/a..b"])
def test_a_name_that_the_hub_cannot_have_is_refused(name: str) -> None:
    with pytest.raises(TeacherError, match=re.escape(f"teacher {name}: no such folder")):
        resolve(name)


@pytest.mark.parametrize(("code", "known"), [("RepoNotFound", False), ("EntryNotFound", True), ("", False)])
def test_the_hub_is_asked_whether_it_has_a_model(
    code: str, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(404)
            self.send_header("X-Error-Code", code)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    (tmp_path / "runs" / "first").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/{filename}")
        try:
            if known:
                check("runs/frist")
                return
            with pytest.raises(TeacherError) as caught:
                check("runs/frist")
        finally:
            server.shutdown()
    assert "teacher runs/frist: no such folder. Did you mean 'first'? As a model of the hub: " in str(caught.value)
    assert "404" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bert-bass", "no teacher 'bert-bass'. Did you mean 'bert-base'?"),
        ("minilmm", "Did you mean 'minilm'?"),
        ("./no/such", "./no/such: no such folder. A teacher is a folder, a hub id, or one of: albert-base,"),
        ("a/b/c", "a/b/c: no such folder"),
    ],
)
def test_unknown_names_are_refused_without_network(name: str, message: str) -> None:
    with pytest.raises(TeacherError) as caught:
        resolve(name)
    assert message in str(caught.value)


# Folders that cannot be teachers


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(TeacherError, match=r"has no config\.json; expected a folder saved by transformers"):
        resolve(str(tmp_path))


def test_a_folder_without_weights(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    with pytest.raises(TeacherError, match=r"has no model\.safetensors"):
        resolve(str(copied))


@pytest.mark.parametrize("left", [0.5, 0.001])
def test_weights_cut_short(copied: Path, left: float) -> None:
    content = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(content[: int(left * len(content))])
    with pytest.raises(TeacherError, match=r"weights are damaged or cut short .* download them again"):
        load("tiny", resolve(str(copied)), TASK)


def test_pickled_weights_are_refused_then_allowed(headless: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(headless, tmp_path / "pickled"))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(TeacherError, match=r"only pickled weights, which can run code .* pass --allow-pickle"):
        resolve(str(folder))
    with pytest.raises(TeacherError):
        load("tiny", folder, TASK)
    allowed = load("tiny", resolve(str(folder), allow_pickle=True), TASK, allow_pickle=True)
    expected = load("tiny", headless, TASK)
    assert torch.equal(allowed.model.get_input_embeddings().weight, expected.model.get_input_embeddings().weight)
    assert allowed.digest != expected.digest


def test_a_tokenizer_of_another_model(copied: Path) -> None:
    tiny.tokenizer((*tiny.WORDS, "more", "words")).save_pretrained(copied)
    with pytest.raises(
        TeacherError, match=r"makes token ids up to 46, the model knows 45: they do not belong together"
    ):
        load("tiny", copied, TASK)


def test_a_tokenizer_with_other_token_types(tmp_path: Path) -> None:
    """BERT's with a RoBERTa, which has one type: it reads pairs without types."""
    folder = Path(tiny.checkpoint(tmp_path, tiny.model("roberta", head=AutoModel)))
    for task in (TASK, replace(TASK, text=("one", "other"))):
        assert "token_type_ids" not in load("tiny", folder, task).tokenizer.model_input_names


# Heads and labels


def test_a_head_for_another_number_of_labels_is_replaced(copied: Path) -> None:
    three = Task("classification", ("text",), "label", ("a", "b", "c"), "accuracy")
    teacher = load("tiny", copied, three)
    assert not teacher.trained
    assert teacher.model.config.id2label == {0: "a", 1: "b", 2: "c"}


def test_regression_takes_a_head_of_one_number(tmp_path: Path) -> None:
    folder = Path(tiny.checkpoint(tmp_path, tiny.bert(labels=1)))
    teacher = load("tiny", folder, Task("regression", ("a", "b"), "score", (), "pearson"))
    assert teacher.trained
    assert teacher.model.config.problem_type == "regression"


def test_a_trained_teacher_passes_the_gate(trained: Path, data: TaskData) -> None:
    seen = gated(trained, data)
    assert (seen.scores["accuracy"], seen.majority["accuracy"], seen.notes) == (1.0, 0.5, ())
    assert seen.logits.shape == (40, 2)


def swap_head(weights: dict[str, Tensor]) -> None:
    for name in ("classifier.weight", "classifier.bias"):
        weights[name] = weights[name].flip(0)


@pytest.mark.parametrize("names", [{"0": "positive", "1": "negative"}, {"0": "POSITIVE", "1": "Negative"}])
def test_outputs_are_put_in_the_order_of_the_datas_labels(copied: Path, data: TaskData, names: dict[str, str]) -> None:
    change_weights(copied, swap_head)
    change_config(copied, id2label=names, label2id={name: int(i) for i, name in names.items()})
    assert gated(copied, data).scores["accuracy"] == 1.0
    teacher = load("tiny", copied, TASK)
    assert teacher.model.config.id2label == {0: "negative", 1: "positive"}


def test_outputs_without_names_are_taken_in_order(copied: Path, data: TaskData) -> None:
    change_config(copied, id2label={"0": "LABEL_0", "1": "LABEL_1"}, label2id={"LABEL_0": 0, "LABEL_1": 1})
    assert gated(copied, data).scores["accuracy"] == 1.0


def test_other_names_are_refused(copied: Path) -> None:
    change_config(copied, id2label={"0": "spam", "1": "ham"}, label2id={"spam": 0, "ham": 1})
    with pytest.raises(TeacherError, match="its labels are spam, ham, the data's are negative, positive"):
        load("tiny", copied, TASK)


# The gate


def test_a_permuted_head_is_refused_and_the_order_named(copied: Path, data: TaskData) -> None:
    change_weights(copied, swap_head)
    expected = (
        r"accuracy 0\.000 on the 40 validation rows.*0\.500\. Its labels are in another order: with output 1 means "
        r"negative, output 0 means positive it scores 1\.000"
    )
    with pytest.raises(TeacherError, match=expected):
        gated(copied, data)


def same_answer(weights: dict[str, Tensor]) -> None:
    """As a head that nobody trained, which favours one label."""
    weights["classifier.bias"] = torch.tensor([100.0, 0.0])


def test_a_teacher_no_better_than_the_majority_is_refused_or_noted(copied: Path, data: TaskData) -> None:
    change_weights(copied, same_answer)
    with pytest.raises(TeacherError, match=r"tiny cannot teach this task: accuracy 0\.500 .*Fine-tune it"):
        gated(copied, data)
    (note,) = gated(copied, data, strict=False).notes
    assert "cannot teach this task" in note


def judged(right: int, *, rows: int, classes: int, kind: str = "classification") -> TeacherCheck:
    """What the gate says of `right` right answers of `rows`, whose classes all come alike often."""
    task = Task("classification", ("text",), "label", tuple(map(str, range(classes))), "accuracy")
    labels = np.arange(rows) % classes
    split = Dataset.from_dict({"text": [f"word{label}" for label in labels], "label": labels})
    order = np.random.default_rng(1).permutation(rows)
    wrong = (labels + 1 + np.arange(rows) // classes % (classes - 1)) % classes
    said = np.where(np.isin(np.arange(rows), order[:right]), labels, wrong)
    return check_logits("weak", np.eye(classes)[said].astype(np.float32), TaskData("d", task, split, split, None, "x"))


@pytest.mark.parametrize(
    ("right", "rows", "classes"), [(87, 400, 6), (26, 120, 6), (21, 40, 2), (26, 40, 2), (1, 1, 2)]
)
def test_a_lead_that_is_chance_or_hardly_any_is_refused(right: int, rows: int, classes: int) -> None:
    with pytest.raises(TeacherError, match=rf"accuracy {right / rows:.3f} on the {rows} validation rows.*Fine-tune"):
        judged(right, rows=rows, classes=classes)


@pytest.mark.parametrize(
    ("right", "rows", "classes"), [(30, 40, 2), (40, 40, 2), (8, 8, 2), (200, 400, 6), (700, 900, 6)]
)
def test_a_significant_lead_passes(right: int, rows: int, classes: int) -> None:
    found = judged(right, rows=rows, classes=classes)
    assert found.scores["accuracy"] == right / rows
    below_half = (right / rows - 1 / classes) / (1 - 1 / classes) < 0.5
    assert ["bag of words" in note for note in found.notes] == ([True] if below_half else [])


def test_weights_that_are_not_numbers_are_refused_always(copied: Path, data: TaskData) -> None:
    change_weights(copied, lambda weights: weights["bert.encoder.layer.0.output.dense.weight"].fill_(float("nan")))
    with pytest.raises(TeacherError, match="its logits are not finite on 40 of 40 validation rows"):
        gated(copied, data, strict=False)


# Fine-tuned first


def test_a_headless_teacher_is_fine_tuned_once(
    headless: Path, data: TaskData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tuned(headless, data, tmp_path / "first")
    assert first.folder.is_relative_to(tmp_path / "home" / "teachers")
    monkeypatch.setattr(finetune, "run_stage", None)
    again = tuned(headless, data, tmp_path / "second")
    assert again.folder == first.folder
    assert again.digest == first.digest
    assert again.trained
    assert not (tmp_path / "second").exists(), "nothing was trained"


def test_a_time_limit_takes_a_teacher_that_was_trained_without_one(
    headless: Path, data: TaskData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tuned(headless, data, tmp_path / "first")
    monkeypatch.setattr(finetune, "run_stage", None)
    given, run = load("tiny", headless, data.task), Run(tmp_path / "second", seed=0, main=True)
    limited = replace(context(given, data), time_limit=TimeLimit(0.0, (), minutes=1.0, began=0.0))
    assert is_ready(given, stage(), limited, run)
    assert with_head(given, stage(), limited, run).folder == whole.folder


@pytest.mark.parametrize("change", ["seed", "stage", "teacher"])
def test_anything_it_depends_on_makes_another(
    change: str, headless: Path, data: TaskData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(headless, data, tmp_path / "first")
    folder = Path(shutil.copytree(headless, tmp_path / "headless"))
    if change == "teacher":
        change_weights(folder, lambda weights: weights["pooler.dense.bias"].add_(1e-3))
    given = load("tiny", folder, data.task)
    run = Run(tmp_path / "second", seed=int(change == "seed"), main=True)

    monkeypatch.setattr(finetune, "run_stage", mock.Mock(side_effect=KeyboardInterrupt))
    needed = stage(lr=2e-2) if change == "stage" else stage()
    assert not is_ready(given, needed, context(given, data), run)
    with pytest.raises(KeyboardInterrupt):
        with_head(given, needed, context(given, data), run)


def test_a_teacher_with_a_head_is_left_alone(trained: Path, data: TaskData, tmp_path: Path) -> None:
    given = load("tiny", trained, data.task)
    assert with_head(given, stage(), context(given, data), Run(tmp_path, seed=0, main=True)) is given
