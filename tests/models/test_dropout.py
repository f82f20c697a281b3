"""Dropout by bits has the same probability, independence and scale as torch's, and uses torch's generator."""

import copy

import pytest
import torch

from compress.models.dropout import BitDropout, draw_faster, drop
from tests import tiny


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_probability_and_scale(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.ones(501, 1001, dtype=dtype)
    out = drop(x, p)
    assert out.dtype == dtype
    kept = out != 0
    assert float(kept.float().mean()) == pytest.approx(1 - p, abs=0.003)
    scale = torch.tensor(1 / (1 - p), dtype=dtype)
    torch.testing.assert_close(
        out[kept], scale.expand(int(kept.sum())), rtol=1e-2 if dtype != torch.float32 else 2e-4, atol=0
    )


def test_neighbours_are_independent() -> None:
    """Four elements share one draw of 64 bits."""
    torch.manual_seed(0)
    dropped = (drop(torch.ones(200_000, 4), 0.5) == 0).float()
    together = torch.corrcoef(dropped.T) - torch.eye(4)
    assert float(together.abs().max()) < 0.01
    assert dropped.mean(0).tolist() == pytest.approx([0.5] * 4, abs=0.005)


def test_the_gradient() -> None:
    x = torch.ones(7, 13, requires_grad=True)
    out = drop(x, 0.3)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient, out.detach())


def test_torchs_generator() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second = drop(torch.ones(33), 0.5), drop(torch.ones(33), 0.5)
    torch.set_rng_state(state)
    assert torch.equal(drop(torch.ones(33), 0.5), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_nothing_is_drawn_without_chance(p: float) -> None:
    state = torch.get_rng_state()
    assert torch.equal(drop(torch.ones(5), p), torch.full((5,), 1 - p))
    assert p or torch.equal(torch.get_rng_state(), state)


def test_a_model_keeps_its_weights_and_outputs() -> None:
    model, plain = tiny.model("bert"), tiny.model("bert")
    draw_faster(model)
    assert sum(type(module) is BitDropout for module in model.modules()) > 4
    assert not any(type(module) is torch.nn.Dropout for module in model.modules())
    assert model.state_dict().keys() == plain.state_dict().keys()
    batch = tiny.batch()
    assert torch.equal(copy.deepcopy(model).eval()(**batch).logits, plain.eval()(**batch).logits)
    assert not torch.equal(model.train()(**batch).logits, model(**batch).logits)
