"""Counting operations works on every family and leaves the model as it was."""

import pytest

from compress.flops import flops_per_token
from tests import tiny


@pytest.mark.parametrize("family", ["bert", "electra", "albert", "distilbert", "deberta", "deberta-v2"])
def test_operations_are_counted(family: str) -> None:
    """Above the matrix products of the layers: 4 D^2 and 2 D F multiply-adds each."""
    model = tiny.model(family).train()
    model.base_model.requires_grad_(False)
    wanted = [each.requires_grad for each in model.parameters()]
    counted = flops_per_token(model, 16)
    products = 2 * 2 * (4 * 32 * 32 + 2 * 32 * 64)
    assert products < counted < 3 * products
    assert [each.requires_grad for each in model.parameters()] == wanted
    assert model.training


def test_a_model_that_learns_is_counted_like_a_frozen_one() -> None:
    learning, frozen = tiny.model("deberta-v2"), tiny.model("deberta-v2").requires_grad_(False)
    assert flops_per_token(learning, 16) == flops_per_token(frozen, 16)
