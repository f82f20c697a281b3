"""Layers are compiled where a stage repays it, give the same losses, and are themselves again afterwards."""

from functools import partial

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from compress.config.term import Term
from compress.training import compiled
from compress.training.compiled import compiled_layers
from compress.training.step import Distillation
from tests import learning, tiny

TRIPLE = [Term("hinton.soft_targets"), Term("bert.labels"), Term("distilbert.cosine", layers="last")]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this machine has a GPU with a compiler; dynamo traces the layers, and torch runs what it traced."""
    monkeypatch.setattr(compiled, "can_compile", lambda: True)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


def make_step(terms: list[Term]) -> Distillation:
    torch.manual_seed(0)
    return Distillation(tiny.model("bert").eval(), tiny.model("bert"), terms)


def is_compiled(step: Distillation) -> list[bool]:
    models = (step.student, step.teacher)
    layers = [each for model in models for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]  # type: ignore[union-attr]
    return ["forward" in vars(layer) for layer in layers]


@pytest.mark.usefixtures("gpu")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at each input
def test_losses_and_gradients_are_those_of_the_layers_as_they_are() -> None:
    step, collate, rows = make_step(TRIPLE), learning.collate(), learning.rows()
    batches = [collate([rows[i] for i in chosen]) for chosen in ([0, 1, 2], [3, 4], [5, 0, 1, 2, 3])]

    def losses() -> list[torch.Tensor]:
        step.zero_grad()
        found = [step(**batch)["loss"] for batch in batches]
        torch.stack(found).sum().backward()
        gradients = [parameter.grad.norm() for parameter in step.student.parameters() if parameter.grad is not None]
        return [*found, *gradients]

    expected = losses()
    with compiled_layers(step, compiled.LEAST_STEPS):
        assert all(is_compiled(step))
        torch.testing.assert_close(losses(), expected)
    assert not any(is_compiled(step))
    torch.testing.assert_close(losses(), expected)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("terms", "steps"),
    [(TRIPLE, compiled.LEAST_STEPS - 1), ([Term("tinybert.attention")], compiled.LEAST_STEPS)],
    ids=["short", "reads attention"],
)
def test_stages_that_do_not_repay_it_are_not_compiled(terms: list[Term], steps: int) -> None:
    step = make_step(terms)
    with compiled_layers(step, steps):
        assert not any(is_compiled(step))


@pytest.mark.parametrize("gpu", [False, True], ids=["no GPU", "a compiler that fails"])
def test_without_gpu_or_compiler_nothing_is_compiled(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled.can_compile.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)  # this torch then fails to compile for it
    step = make_step(TRIPLE)
    with compiled_layers(step, compiled.LEAST_STEPS):
        assert not any(is_compiled(step))
