"""torch-pruning, another way to the same end: with the units it keeps, ours computes what its model does.

On a head per token: what a pooling layer gives is cut apart from the hidden widths there, and together with them here.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification

from compress.slicing.cut import slice_model
from compress.slicing.plan import HIDDEN, Group, SlicePlan
from compress.slicing.select import Kept
from compress.slicing.sizes import Sizes
from tests import tiny
from tests.slicing import families, their_pruner


def model() -> Any:
    return families.model("bert", head=AutoModelForTokenClassification)


def places(small: Tensor, large: Tensor) -> Tensor:
    """Where the numbers of one vector are in the other, all of which differ."""
    assert len(large.unique()) == len(large)
    return (small[:, None] == large[None]).long().argmax(1)


def kept_by(theirs: Any, whole: Any, plan: SlicePlan) -> Kept:
    """The units that are left, told by gains and biases, which nothing but cutting has touched."""
    small, large = (dict(each.named_parameters()) for each in (theirs, whole))
    indices = {HIDDEN: places(small["bert.embeddings.LayerNorm.weight"], large["bert.embeddings.LayerNorm.weight"])}
    for n in range(plan.sizes.layers):
        layer, block = f"bert.encoder.layer.{n}", str(n)
        names = {"ffn": "intermediate.dense.bias", "query": "attention.self.query.bias"}
        names["value"] = "attention.self.value.bias"
        for axis, name in names.items():
            indices[Group(axis, block)] = places(small[f"{layer}.{name}"], large[f"{layer}.{name}"])
        indices[Group("heads", block)] = (indices[Group("query", block)] // plan.sizes.head_size).unique()
    hidden, layer = len(indices[HIDDEN]), theirs.bert.encoder.layer[0]
    sizes = Sizes(
        layers=plan.sizes.layers,
        hidden=hidden,
        heads=layer.attention.self.num_attention_heads,
        head_size=plan.sizes.head_size,
        ffn=layer.intermediate.dense.out_features,
    )
    return Kept(sizes, tuple(range(plan.sizes.layers)), indices)


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("importance", ["magnitude", "taylor"])
def test_ours_is_theirs_with_the_units_they_keep(ratio: float, importance: str) -> None:
    """Heads, neurons, hidden width and embeddings at once, at one ratio."""
    whole, theirs, batch = model(), model(), tiny.batch((6, 6))
    changes: dict[str, Any] = {"pruning_ratio": ratio, "head_pruning_ratio": ratio}
    if importance == "taylor":
        theirs(**batch, labels=batch["input_ids"] % 3).loss.backward()
        changes["importance"] = their_pruner.torch_pruning.importance.GroupTaylorImportance()
    their_pruner.pruned(theirs, batch, **changes)
    plan = SlicePlan.from_model(whole)
    kept = kept_by(theirs, whole, plan)
    assert (kept.sizes.hidden, kept.sizes.heads) == (32 * (1 - ratio), 4 * (1 - ratio))
    ours = slice_model(whole, kept)
    assert their_pruner.sizes(ours) == their_pruner.sizes(theirs)
    expected = families.logits(theirs, tiny.batch())
    torch.testing.assert_close(families.logits(ours, tiny.batch()), expected, rtol=1e-5, atol=1e-6)
    assert (expected - families.logits(whole, tiny.batch())).abs().max() > 0.1


def test_what_is_right_in_theirs_loads_when_its_config_is_set_right(tmp_path: Path) -> None:
    theirs = their_pruner.with_config(their_pruner.pruned(families.model("bert"), tiny.batch((6, 6))))
    theirs.save_pretrained(tmp_path)
    again = type(theirs).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(families.logits(again), families.logits(theirs), rtol=0, atol=0)
