"""Layers are compiled where a stage repays it, give the same losses, and are themselves again afterwards."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from compress.config.term import Term
from compress.training import compilation
from compress.training.compilation import compile_layers
from compress.training.step import Distillation
from tests import learning, tiny

TRIPLE = [Term("hinton.soft_targets"), Term("bert.labels"), Term("distilbert.cosine", layers="last")]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this machine has a GPU with a compiler; dynamo traces the layers, and torch runs what it traced."""
    monkeypatch.setattr(compilation, "can_compile", lambda: True)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


def make_step(terms: list[Term]) -> Distillation:
    torch.manual_seed(0)
    return Distillation(tiny.model("bert").eval(), tiny.model("bert"), terms)


def is_compiled(step: Distillation) -> list[bool]:
    modules = [*step.student.modules(), *(step.teacher.modules() if isinstance(step.teacher, nn.Module) else ())]
    return ["forward" in vars(each) for each in modules if isinstance(each, GradientCheckpointingLayer)]


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
    with compile_layers(step, compilation.LEAST_COMPILED):
        assert all(is_compiled(step))
        torch.testing.assert_close(losses(), expected)
    assert not any(is_compiled(step))
    torch.testing.assert_close(losses(), expected)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("terms", "steps"),
    [(TRIPLE, compilation.LEAST_COMPILED - 1), ([Term("tinybert.attention")], compilation.LEAST_COMPILED)],
    ids=["short", "reads attention"],
)
def test_stages_that_do_not_repay_it_are_not_compiled(terms: list[Term], steps: int) -> None:
    step = make_step(terms)
    with compile_layers(step, steps):
        assert not any(is_compiled(step))


@pytest.mark.parametrize("gpu", [False, True], ids=["no GPU", "a compiler that fails"])
def test_without_gpu_or_compiler_nothing_is_compiled(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(torch, "compile", fail)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    compilation.can_compile.cache_clear()
    step = make_step(TRIPLE)
    try:
        with compile_layers(step, compilation.LEAST_COMPILED):
            assert not any(is_compiled(step))
    finally:
        compilation.can_compile.cache_clear()
