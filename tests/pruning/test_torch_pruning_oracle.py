"""torch-pruning as an oracle: with the units it keeps, our slice computes what its model does.

With a head per token, because torch-pruning cuts a pooler's outputs apart from the hidden width, and we together.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification
from transformers.models.bert.modeling_bert import BertSelfAttention

from compress.slicing.cut import slice_model
from compress.slicing.plan import HIDDEN, Group, SlicePlan
from compress.slicing.select import Kept
from compress.slicing.sizes import Sizes
from tests import tiny
from tests.slicing import families

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch_pruning


def prune(model: Any, batch: Mapping[str, Tensor], **changes: Any) -> Any:
    """Cut half of everything in place, and set the numbers of heads as the library asks its users to."""
    attentions = [module for module in model.modules() if isinstance(module, BertSelfAttention)]
    heads = {each: a.num_attention_heads for a in attentions for each in (a.query, a.key, a.value)}
    last = [model.classifier] if hasattr(model, "classifier") else []
    settings: dict[str, Any] = {
        "importance": torch_pruning.importance.GroupMagnitudeImportance(),
        "pruning_ratio": 0.5,
        "head_pruning_ratio": 0.5,
        "num_heads": heads,
        "prune_num_heads": True,
        "prune_head_dims": False,
        "ignored_layers": last,
        "output_transform": lambda out: out.logits,
        "in_channel_groups": {},
        "out_channel_groups": {},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = torch_pruning.pruner.BasePruner(model, dict(batch), **(settings | changes))
        made.step()
    for module in model.modules():
        if isinstance(module, BertSelfAttention):
            module.num_attention_heads = made.num_heads[module.query]
            module.all_head_size = module.query.out_features
            module.attention_head_size = module.all_head_size // module.num_attention_heads
    return model


def with_config(model: Any) -> Any:
    """Update the config, as the library's users must before they save the model."""
    layer = model.bert.encoder.layer[0]
    model.config.update(
        {
            "hidden_size": layer.attention.self.query.in_features,
            "num_attention_heads": layer.attention.self.num_attention_heads,
            "intermediate_size": layer.intermediate.dense.out_features,
        }
    )
    return model


def sizes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


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


@pytest.mark.parametrize(("ratio", "importance"), [(0.25, "taylor"), (0.5, "magnitude"), (0.75, "magnitude")])
def test_our_slice_computes_the_same_with_its_units(ratio: float, importance: str) -> None:
    """Heads, neurons, hidden width and embeddings at once, at one ratio."""
    whole, theirs, batch = model(), model(), tiny.batch((6, 6))
    changes: dict[str, Any] = {"pruning_ratio": ratio, "head_pruning_ratio": ratio}
    if importance == "taylor":
        theirs(**batch, labels=batch["input_ids"] % 3).loss.backward()
        changes["importance"] = torch_pruning.importance.GroupTaylorImportance()
    prune(theirs, batch, **changes)
    plan = SlicePlan.from_model(whole)
    kept = kept_by(theirs, whole, plan)
    assert (kept.sizes.hidden, kept.sizes.heads) == (32 * (1 - ratio), 4 * (1 - ratio))
    ours = slice_model(whole, kept)
    assert sizes(ours) == sizes(theirs)
    expected = families.logits(theirs, tiny.batch())
    torch.testing.assert_close(families.logits(ours, tiny.batch()), expected, rtol=1e-5, atol=1e-6)
    assert (expected - families.logits(whole, tiny.batch())).abs().max() > 0.1


def test_its_model_loads_with_an_updated_config(tmp_path: Path) -> None:
    theirs = with_config(prune(families.model("bert"), tiny.batch((6, 6))))
    theirs.save_pretrained(tmp_path)
    again = type(theirs).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(families.logits(again), families.logits(theirs), rtol=0, atol=0)
