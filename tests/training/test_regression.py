"""Numbers of any size are learned alike: labels of 0 to 1, and of 0 to 1,000,000."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor

from compress.config.term import Term
from compress.data import load_task
from compress.models.heads import fit_new_output, output_layer
from compress.slicing.shape import Shape
from compress.training.objective import Objective
from compress.training.optimizer import scale_rate
from compress.training.step import Distillation
from tests import learning, tiny

TERMS = (Term("bert.labels"), Term("hinton.matched_logits", 2.0), Term("tinybert.hidden", 0.5))


def regressor(seed: int, family: str = "bert") -> Any:
    return tiny.model(family, labels=1, seed=seed, **(learning.NO_DROPOUT if family == "bert" else {}))


def learn(path: Path, scale: float, shift: float) -> Tensor:
    """Train on labels scale * y + shift with a teacher in the same unit; return the predictions."""
    rows = learning.rows()
    labels = scale * np.random.default_rng(1).normal(3.0, 1.5, len(rows)) + shift
    rows = rows.remove_columns("labels").add_column("labels", labels.tolist())
    student, teacher = regressor(1), regressor(2)
    for model in (student, teacher):
        fit_new_output(model, float(labels.mean()), float(labels.std()))
    objective = Objective(
        TERMS, Shape.from_config(student.config), Shape.from_config(teacher.config), kind="regression",
        unit=float(labels.std()),
    )  # fmt: skip
    stage = learning.stage(TERMS, clip=0.0, steps=12, eps=1e-6)
    learning.train(Distillation(student, teacher, objective), stage, path, data=rows)
    with torch.inference_mode():
        return student.eval()(**tiny.batch()).logits[:, 0]


@pytest.mark.parametrize(("scale", "shift"), [(20.0, 0.0), (0.01, 0.0), (1000.0, -5e3), (1e5, 0.0)])
def test_labels_in_another_unit_are_learned_alike(scale: float, shift: float, tmp_path: Path) -> None:
    plain = learn(tmp_path / "plain", 1.0, 0.0)
    other = learn(tmp_path / "other", scale, shift)
    torch.testing.assert_close((other - shift) / scale, plain, atol=2e-3, rtol=1e-3)


def test_without_a_unit_they_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = learn(tmp_path / "plain", 1.0, 0.0)
    monkeypatch.setattr("compress.training.trainer.output_layer", lambda student: None)
    other = learn(tmp_path / "other", 1000.0, 0.0)
    assert not torch.allclose(other / 1000, plain, atol=1e-2)


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "electra", "albert", "deberta-v2", "modernbert"])
def test_a_new_head_begins_at_the_mean(family: str) -> None:
    model = regressor(0, family)
    layer = output_layer(model)
    assert layer is not None and layer.bias is not None
    before = layer.weight.detach().clone()
    fit_new_output(model, 50.0, 7.0)
    assert layer.bias.tolist() == [50.0]
    torch.testing.assert_close(layer.weight, 7.0 * before)
    with torch.inference_mode():
        assert abs(model.eval()(**tiny.batch()).logits.mean() - 50) < 25
    fit_new_output(model, 1.0, 1.0)
    assert layer.bias.tolist() == [50.0], "it is not new any more"


def test_only_the_head_has_another_rate() -> None:
    model = regressor(0)
    layer = output_layer(model)
    assert layer is not None
    groups = [
        {"params": [each for each in model.parameters() if each.ndim > 1], "weight_decay": 0.01},
        {"params": [each for each in model.parameters() if each.ndim == 1], "weight_decay": 0.0},
    ]
    made = scale_rate(groups, layer, lr=1e-4, eps=1e-8, by=20.0)
    assert sum(len(group["params"]) for group in made) == len(list(model.parameters()))
    own = [(group["lr"], group["eps"], group["weight_decay"]) for group in made if "lr" in group]
    assert own == [(2e-3, 5e-10, 0.0005), (2e-3, 5e-10, 0.0)]


def test_the_unit_is_that_of_the_training_rows(tmp_path: Path) -> None:
    for split, numbers in (("train", [10, 20, 30, 40]), ("dev", [1000, 2000])):
        lines = ["text\tscore", *(f"a film {number}\t{number}" for number in numbers)]
        (tmp_path / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    data = load_task(str(tmp_path), kind="regression")
    assert data.label_scale == (25.0, pytest.approx(np.std([10, 20, 30, 40])))
    constant = Dataset.from_dict({"text": ["a", "b"], "label": [3.0, 3.0]})
    assert replace(data, train=constant).label_scale == (3.0, 1.0)
