"""Checkpoints that are damaged, mixed up or hostile are refused before anything is trained, and mending is enough."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.data.task import Task
from compress.errors import TeacherError
from compress.models import teacher as teachers
from compress.models.folder import identify
from tests import command, tiny
from tests.command import Shelf, accepted, refused

pytestmark = pytest.mark.usefixtures("hastened")

TASK = Task("classification", ("text",), "label", ("negative", "positive"), "accuracy")


def _empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def _without_a_layer(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if "layer.1." not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def _of_another_width(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))


def _pickled(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")


def _without_tokenizer(folder: Path) -> None:
    for path in [*folder.glob("tokenizer*"), *folder.glob("vocab*")]:
        path.unlink()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_empty, "its weights are damaged or cut short"),
        (_without_a_layer, "16 of its tensors are missing, such as bert.encoder.layer.1."),
        (_of_another_width, "weights and config do not belong together"),
        (_without_tokenizer, "has no tokenizer"),
    ],
)
def test_teachers(shelf: Shelf, tmp_path: Path, spoil: Callable[[Path], None], said: str) -> None:
    teacher, out = Path(shutil.copytree(shelf.teacher, tmp_path / "teacher")), tmp_path / "run"
    spoil(teacher)
    words = shelf.distill(out, teacher=str(teacher))
    assert refused(command.run(*words), out, str(teacher), said)
    shutil.copytree(shelf.teacher, teacher, dirs_exist_ok=True)
    assert accepted(*words)


def test_a_teacher_that_knows_nothing(shelf: Shelf, tmp_path: Path) -> None:
    told = command.run(*shelf.distill(tmp_path / "run", "--set", "teacher.steps=1", "--set", "teacher.lr=1e-9"))
    assert refused(
        told, tmp_path / "run", "cannot teach this task", "always giving the most frequent answer gets 0.500"
    )


def test_pickled_tensors_are_loaded_with_permission(shelf: Shelf, tmp_path: Path) -> None:
    """Every time the teacher is loaded: to teach, and to be measured."""
    teacher = Path(tiny.checkpoint(tmp_path / "teacher", tiny.bert()))
    _pickled(teacher)
    more = ["--allow-pickle", "--gate", "warn", "--set", "stages.0.steps=1", "--set", "stages.1.steps=1"]
    told = command.run(*shelf.distill(tmp_path / "run", *more, teacher=str(teacher)))
    assert told.code == 0, told.err


class Touches:
    """What a hostile pickle does when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.path,)


def test_pickled_code_never_runs(shelf: Shelf, tmp_path: Path) -> None:
    teacher = Path(shutil.copytree(shelf.teacher, tmp_path / "teacher"))
    _pickled(teacher)
    torch.save({"weight": Touches(tmp_path / "touched")}, teacher / "pytorch_model.bin")
    told = command.run(*shelf.distill(tmp_path / "run", "--allow-pickle", teacher=str(teacher)))
    assert refused(told, tmp_path / "run", "hold more than tensors")
    assert not (tmp_path / "touched").exists()


# Configs that choose code, and files that are none


DEEP = "[" * 20_000


def _configured(shelf: Shelf, folder: Path, **changes: Any) -> Path:
    shutil.copytree(shelf.teacher, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize("implementation", ["kernels-community/x", "flash_attention_2", 3])
@pytest.mark.parametrize("name", ["_attn_implementation", "attn_implementation", "experts_implementation"])
def test_a_config_chooses_no_kernels(shelf: Shelf, tmp_path: Path, name: str, implementation: str | int) -> None:
    folder = _configured(shelf, tmp_path / "chosen", **{name: implementation})
    model = teachers.load("chosen", folder, TASK).model
    assert model.config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
        {"quantization_config": 5},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 10**9},
        {"num_labels": 10**9},
        {"architectures": 3},
        {"id2label": 3},
        {"hidden_act": []},
        {"model_type": []},
        {"dtype": "x"},
    ],
    ids=str,
)
def test_an_impossible_config_is_refused(shelf: Shelf, tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = _configured(shelf, tmp_path / "odd", **changes)
    with pytest.raises(TeacherError, match=str(folder)):
        teachers.load("odd", folder, TASK)


def test_custom_code_is_not_run(shelf: Shelf, tmp_path: Path) -> None:
    own = {"auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}, "model_type": "evil"}
    folder = _configured(shelf, tmp_path / "odd", **own)
    with pytest.raises(TeacherError, match="its own code") as error:
        teachers.load("odd", folder, TASK)
    assert "download them again" not in str(error.value)


@pytest.mark.parametrize(
    "content", [DEEP, "null", "[]", "3", "\0\0\0", '{"model_max_length": "x"}'], ids=lambda c: c[:20]
)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_invalid_files_are_refused(shelf: Shelf, tmp_path: Path, name: str, content: str) -> None:
    folder = _configured(shelf, tmp_path / "none")
    (folder / name).write_text(content)
    with pytest.raises(TeacherError, match=str(folder)):
        teachers.load("none", folder, TASK)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "merges.txt", "special_tokens_map.json"])
def test_a_teachers_digest_is_of_the_contents(shelf: Shelf, tmp_path: Path, name: str) -> None:
    folder = _configured(shelf, tmp_path / "teacher")
    (folder / name).touch()
    before = identify(folder)
    with (folder / name).open("ab") as file:
        file.write(b"x")
    assert identify(folder) != before
