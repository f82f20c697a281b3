"""Pruning by learned gates, end to end at tiny size: a student that ships, and one that was interrupted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, BertForSequenceClassification

import compress
from compress.commands.prune import prune
from compress.config.recipe import Recipe
from compress.config.stages import Stage
from compress.exporters.artifact import Bundle
from compress.exporters.onnx import parity
from compress.models.flops import count_parameters
from compress.papers import cofi
from compress.records.run_report import Report
from compress.slicing.sizes import Sizes
from compress.training.trainer import StepTrainer
from tests import tiny

SHORT = {"steps": 8, "batch": 8, "micro_batch": 4, "max_length": 32, "evaluate": 1, "lr": 1e-3, "checkpoint": 1}


def short() -> Recipe:
    recipe = Recipe.load("prune-cofi")
    stages = tuple(each.model_copy(update=SHORT) for each in recipe.stages)
    return recipe.model_copy(update={"stages": stages, "teacher": recipe.teacher.model_copy(update={"steps": 24})})


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("given")
    teacher = tiny.checkpoint(folder / "teacher", tiny.bert(layers=3))
    return {"data": tiny.reviews(folder / "data"), "model": teacher, "gate": "warn", "precision": "fp32"}


def texts(bundle: Bundle) -> Any:
    return bundle.predict(["good film", "bad plot"], precision="fp32")


@pytest.mark.usefixtures("hastened")
def test_sizes_leave_a_plain_model(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cofi, "NEAR_TARGET", -1.0)  # what the gates have closed is always told
    bundle = tiny.call(prune, **given, recipe=short(), out=tmp_path / "run", heads=0.5, hidden=16, ffn=0.5, layers=2)
    student = AutoModelForSequenceClassification.from_pretrained(bundle.path)
    assert type(student) is BertForSequenceClassification
    assert Sizes.from_config(student.config) == Sizes(layers=2, hidden=16, heads=2, head_size=8, ffn=32)
    assert bundle.manifest.parameters == count_parameters(student)
    batch = tiny.batch() | {"token_type_ids": torch.zeros(3, 7, dtype=torch.long)}
    assert parity(student, bundle.files()["fp32"], [batch]) < 1e-4
    assert len(texts(bundle)) == 2
    notes = Report.from_json(bundle.path / "report.json").notes
    assert any(note.startswith("gates: ") and "of hidden instead of 0.50" in note for note in notes)
    gates = tmp_path / "run" / "stages" / "gates" / "model"
    assert not [name for name in load_file(gates / "model.safetensors") if "gates" in name]


@pytest.mark.slow
@pytest.mark.usefixtures("hastened")
def test_an_interrupted_run_ends_with_the_same_weights(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"teacher": given["model"], **{name: given[name] for name in ("data", "gate", "precision")}}
    compute, calls = StepTrainer.compute_loss, []

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self.stage.name)
        if calls.count("gates") == 11:
            raise KeyboardInterrupt
        return compute(self, *args, **kwargs)

    tiny.call(compress.distill, **asked, recipe=short(), out=tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(StepTrainer, "compute_loss", interrupted)
        tiny.call(compress.distill, **asked, recipe=short(), out=tmp_path / "again")
    tiny.call(compress.distill, **asked, recipe=short(), out=tmp_path / "again", resume=True)
    for stage in ("gates", "recover"):
        one, other = (
            load_file(tmp_path / run / "stages" / stage / "model" / "model.safetensors") for run in ("whole", "again")
        )
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_recipe_keeps_the_papers_numbers() -> None:
    gates, recover = Recipe.load("prune-cofi").stages
    assert isinstance(gates, Stage)
    assert isinstance(recover, Stage)
    assert (gates.epochs, gates.batch, gates.lr, gates.weight_decay, recover.epochs) == (20, 32, 2e-5, 0, 20)
    assert gates.step is not None
    assert gates.step.options["gate_rate"] == 0.01
