"""Models larger than the free memory: their layers are read from the files in each pass, to the same numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from compress import machine
from compress.config.recipe import StudentSpec
from compress.data import load_task
from compress.errors import ExportError, StudentError
from compress.evaluation import metrics
from compress.exporters.onnx import to_onnx
from compress.models import memory
from compress.models import teacher as teachers
from compress.models.loader import load_model
from compress.models.student import build
from compress.training.teacher_cache import teacher_cache
from tests import children, learning, tiny

LAYERS = 6


@pytest.fixture
def halved(tmp_path: Path) -> Path:
    """A teacher whose files are in bfloat16: in float32 it takes twice their bytes."""
    model = tiny.bert(layers=LAYERS, initializer_range=0.1, id2label={0: "negative", 1: "positive"})
    folder = Path(tiny.checkpoint(tmp_path / "teacher", model))
    file = folder / "model.safetensors"
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def scarce(patch: pytest.MonkeyPatch, free: int) -> None:
    patch.setattr(memory, "measure_memory", lambda: (free, free))


def layers_on_disk(model: Any) -> int:
    return sum(place == "disk" for name, place in model.hf_device_map.items() if ".layer." in name)


def test_what_fits_is_loaded_whole(halved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_model(halved, AutoModelForSequenceClassification, frozen=True).model
    assert not memory.is_dispatched(whole)
    scarce(monkeypatch, 1000)
    trained = load_model(halved, AutoModelForSequenceClassification).model
    assert not memory.is_dispatched(trained), "it has gradients"
    scarce(monkeypatch, 0)  # unknown
    assert memory.plan_placement(10**15) == {}


def test_layers_that_do_not_fit_answer_alike(halved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In passes, in scores and in cached answers; and it is not moved."""
    whole = load_model(halved, AutoModelForSequenceClassification, frozen=True).model
    size = 4 * sum(weight.numel() for weight in whole.parameters())
    scarce(monkeypatch, size)
    assert memory.plan_placement(size) == {}
    scarce(monkeypatch, size - 1)
    parts = load_model(halved, AutoModelForSequenceClassification, frozen=True).model
    assert memory.is_dispatched(parts)
    assert 0 < layers_on_disk(parts) < LAYERS
    assert parts.dtype == torch.float32
    memory.to_device(parts, "cpu")
    rows = learning.rows(12)
    expected = metrics.logits(whole, rows, learning.collate())
    assert np.array_equal(metrics.logits(parts, rows, learning.collate()), expected)
    folder = halved.parent / "cache"
    cache = teacher_cache(parts, rows, learning.collate(), folder, wants=frozenset({"logits"}), layers=())
    assert np.allclose(np.concatenate(cache.logits), expected, atol=1e-6)


def test_it_is_neither_cut_nor_exported(halved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scarce(monkeypatch, 100_000)
    parts = load_model(halved, AutoModelForSequenceClassification, frozen=True).model
    spec = StudentSpec.model_validate({"layers": 1, "init": "teacher"})
    with pytest.raises(StudentError, match=r"copies weights of the teacher.*expected scratch"):
        build(spec, parts)
    with pytest.raises(ExportError, match="memory cannot hold it"):
        to_onnx(parts, halved.parent / "model.onnx")
    assert build(spec.model_copy(update={"init": "scratch"}), parts).num_labels == 2


def has_little_memory() -> None:
    memory.measure_memory = lambda: (100_000, 100_000)
    children.does_not_ship()


def test_a_student_of_a_teacher_that_does_not_fit(halved: Path, tmp_path: Path) -> None:
    """Distilled to the same weights as of the whole teacher."""
    arguments = ["distill", "--teacher", str(halved), "--recipe", tiny.recipe(tmp_path), "--gate", "warn"]
    arguments += ["--data", tiny.reviews(tmp_path / "data"), "--precision", "fp32", "--set=student.init=scratch"]
    runs = [tmp_path / "parts", tmp_path / "whole"]
    for out, accident in zip(runs, (has_little_memory, children.does_not_ship), strict=True):
        assert children.run(arguments, out, accident) == 0, children.said(out)
    ours, theirs = (load_file(run / "stages" / "prediction" / "model" / "model.safetensors") for run in runs)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs)


def test_limits_of_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of version 2 and of version 1, and in a container that sees its own group at the root."""
    places = {"proc/self/cgroup": "0::/mine\n4:memory:/of/the/host\n"}
    places |= {"sys/fs/cgroup/mine/memory.max": "900\n", "sys/fs/cgroup/mine/memory.stat": "anon 100\nfile 700\n"}
    places |= {"sys/fs/cgroup/memory/memory.limit_in_bytes": "500\n"}
    places |= {"sys/fs/cgroup/memory/memory.stat": "rss 1\ntotal_rss 200\n"}
    for place, text in places.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text, encoding="utf-8")
    read = machine._read_text
    monkeypatch.setattr(machine, "_read_text", lambda path: read(tmp_path / path.relative_to("/")))
    assert list(machine._list_limits()) == [(900, 100), (500, 200)]
    assert machine.measure_memory() == (500, 300)


def test_labels_in_another_order_are_turned_around_on_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.bert(layers=LAYERS, initializer_range=0.1, id2label={0: "positive", 1: "negative"})
    folder = Path(tiny.checkpoint(tmp_path / "teacher", model))
    task = load_task(tiny.reviews(tmp_path / "data")).task
    assert task.labels == ("negative", "positive")
    whole = teachers.load("tiny", folder, task).model
    monkeypatch.setattr(memory, "measure_memory", lambda: (100_000, 100_000))
    away = teachers.load("tiny", folder, task).model
    assert away.hf_device_map["classifier"] == "disk"
    torch.testing.assert_close(away(**tiny.batch()).logits, whole(**tiny.batch()).logits)
