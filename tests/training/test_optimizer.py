"""A stage's optimiser is the paper's formula, over the groups that the paper has."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForPreTraining, Trainer

from compress.models.ibbert import IBBertConfig, IBBertForPreTraining
from compress.training.optimizer import Lamb, choose_optimizer, group_parameters
from tests import learning, tiny

Matrix = list[list[float]]
GRADIENTS: list[Matrix] = [[[0.3, -0.2], [0.0, 1.0]], [[-0.1, 0.4], [0.5, 0.25]]]


def stepped(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Matrix:
    """Return the parameter after a step with each of the gradients, as rows of numbers."""
    for gradient in GRADIENTS:
        parameter.grad = torch.tensor(gradient).reshape(parameter.shape)
        optimizer.step()
    return parameter.detach().reshape(2, 2).tolist()


def norm(rows: Matrix) -> float:
    return math.sqrt(sum(value**2 for row in rows for value in row))


def lamb(x: Matrix, *, lr: float, decay: float, adapt: bool) -> Matrix:
    """You et al. 2020, Algorithm 2, without the correction of the bias; ratio 1 where `adapt` is false."""
    m, v = [[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]
    for g in GRADIENTS:
        u = [[0.0, 0.0], [0.0, 0.0]]
        for i in range(2):
            for j in range(2):
                m[i][j] = 0.8 * m[i][j] + 0.2 * g[i][j]
                v[i][j] = 0.9 * v[i][j] + 0.1 * g[i][j] ** 2
                u[i][j] = m[i][j] / (math.sqrt(v[i][j]) + 1e-3) + decay * x[i][j]
        ratio = norm(x) / norm(u) if adapt and norm(x) and norm(u) else 1.0
        x = [[x[i][j] - lr * ratio * u[i][j] for j in range(2)] for i in range(2)]
    return x


@pytest.mark.parametrize("adapt", [True, False])
@pytest.mark.parametrize("begin", [[[1.0, -2.0], [0.5, 3.0]], [[0.0, 0.0], [0.0, 0.0]]])
def test_two_steps_of_lamb_by_hand(begin: Matrix, adapt: bool) -> None:
    parameter = nn.Parameter(torch.tensor(begin))
    group = {"params": [parameter], "weight_decay": 0.1 if adapt else 0.0, "adapt": adapt}
    found = stepped(Lamb([group], lr=0.05, betas=(0.8, 0.9), eps=1e-3), parameter)
    expected = lamb(begin, lr=0.05, decay=0.1 if adapt else 0.0, adapt=adapt)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))


def test_a_step_of_lamb_is_as_long_as_its_share_of_the_weights_and_waits_for_gradients() -> None:
    moved, still = nn.Parameter(torch.full((4, 4), 2.0)), nn.Parameter(torch.ones(3))
    moved.grad = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)) * 1e4
    before, optimizer = moved.detach().clone(), Lamb([moved, still], lr=0.01)
    loss = optimizer.step(lambda: 7.0)
    assert loss == 7.0
    assert float((moved.detach() - before).norm()) == pytest.approx(0.01 * float(before.norm()), rel=1e-5)
    assert torch.equal(still.detach(), torch.ones(3))
    assert still not in optimizer.state


def adafactor(x: Matrix, *, lr: float) -> Matrix:
    """Shazeer & Stern 2018, arXiv:1804.04235, Algorithm 4 with a given rate: Sec. 8's relative step, d = 1."""
    rows, columns = [0.0, 0.0], [0.0, 0.0]
    for t, g in enumerate(GRADIENTS, 1):
        keep = 1 - t**-0.8
        for i in range(2):
            rows[i] = keep * rows[i] + (1 - keep) * sum(g[i][j] ** 2 + 1e-30 for j in range(2)) / 2
            columns[i] = keep * columns[i] + (1 - keep) * sum(g[j][i] ** 2 + 1e-30 for j in range(2)) / 2
        mean = sum(rows) / 2
        u = [[g[i][j] / math.sqrt(rows[i] * columns[j] / mean) for j in range(2)] for i in range(2)]
        clip = max(1.0, norm(u) / 2)
        scale = lr * max(1e-3, norm(x) / 2)
        x = [[x[i][j] - scale * u[i][j] / clip for j in range(2)] for i in range(2)]
    return x


def test_two_steps_of_adafactor_by_hand() -> None:
    begin = [[1.0, -2.0], [0.5, 3.0]]
    chosen = choose_optimizer(learning.stage(optimizer="adafactor", lr=0.05))
    assert chosen is not None
    parameter = nn.Parameter(torch.tensor(begin))
    found = stepped(chosen[0]([parameter], **chosen[1]), parameter)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(adafactor(begin, lr=0.05)))


def test_biases_and_norms_neither_decay_nor_adapt() -> None:
    """Of a step that names no groups."""
    step = learning.step()
    decayed = {name for name, each in step.named_parameters() if each.dim() == 2}
    groups = group_parameters(step, decayed, 0.02)
    assert [(group["weight_decay"], group["adapt"]) for group in groups] == [(0.02, True), (0.0, False)]
    found = {id(each) for group in groups if group["adapt"] for each in group["params"]}
    assert found == {id(each) for name, each in step.named_parameters() if name in decayed}
    assert sum(len(group["params"]) for group in groups) == len(list(step.parameters()))


@pytest.mark.parametrize("family", ["bert", "albert", "mobilebert", "ib-bert"])
def test_the_trainer_knows_the_norms_of_the_families_that_lamb_trains(family: str) -> None:
    """ALBERT's and MobileBERT's code leave out what is called LayerNorm, FakeLayerNorm or bias."""
    config = IBBertConfig(embedding_size=8, hidden_size=16, intra_bottleneck_size=32, num_hidden_layers=1)
    made: Any = IBBertForPreTraining(config) if family == "ib-bert" else None
    model = made or tiny.model(family, head=AutoModelForPreTraining)
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]  # it reads no self
    assert decayed == {name for name, each in model.named_parameters(remove_duplicate=False) if each.dim() > 1}
