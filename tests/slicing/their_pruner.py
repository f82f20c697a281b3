"""torch-pruning called as its users have to: what is right in it is our oracle."""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertSelfAttention

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch_pruning


def pruner(model: Any, batch: Mapping[str, Tensor], **changes: Any) -> Any:
    """Half of everything, heads and hidden together, everything in one call."""
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
        return torch_pruning.pruner.BasePruner(model, dict(batch), **(settings | changes))


def pruned(model: Any, batch: Mapping[str, Tensor], **changes: Any) -> Any:
    """`model`, cut in place; the numbers of its heads are set, its config is not."""
    made = pruner(model, batch, **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.step()
    for module in model.modules():
        if isinstance(module, BertSelfAttention):
            module.num_attention_heads = made.num_heads[module.query]
            module.all_head_size = module.query.out_features
            module.attention_head_size = module.all_head_size // module.num_attention_heads
    return model


def with_config(model: Any) -> Any:
    """What its users have to add before the model can be saved."""
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
