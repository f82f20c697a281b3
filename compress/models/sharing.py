"""Share weights between the layers of a plain transformers model: attention, FFN, or
both, in groups as in ALBERT.

Lan et al. 2020, arXiv:1909.11942, Sec. 3.1 and Table 4 share all parameters of a layer,
or those of its attention or FFN; the appendix's `shared groups` share only among
neighbouring layers. transformers' own ALBERT shares whole layers, in groups. Here one
nn.Parameter serves the layers of a group, in a model of any family that `has_roles`: it
is counted, updated and decayed once, and its gradient is the sum over the layers.

A saved model is an ordinary checkpoint: `state_dict()` of a shared model holds a copy
for each layer, and the config records what was shared (`shared_layers`), so that
`share_again` can tie the copies after loading.

Each of a layer's two norms belongs to the block whose output it normalises. The paper
does not say where they belong; they are less than 0.1 % of a base model's weights.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress import families
from compress.errors import StudentError
from compress.models.init_weights import weight_of
from compress.slicing.shape import Shape

BLOCKS: Mapping[str, frozenset[str]] = {
    "attention": frozenset(
        {"query", "key", "value", "qkv", "attention_out", "attention_norm"}
    ),
    "ffn": frozenset({"ffn_in", "ffn_out", "ffn_norm"}),
}


def share(
    model: PreTrainedModel, *, attention: int | None = None, ffn: int | None = None
) -> None:
    """Share weights so that the layers have only `attention` different attention blocks
    and `ffn` different FFNs.

    1 means a single block for all N layers, None one per layer; with G blocks, layer i
    uses block int(i G / N), as in ALBERT. The layers of a group take the weights of its
    first layer. Raises StudentError.
    """
    layers = Shape.from_config(model.config).layers
    wanted = {
        block: groups
        for block, groups in (("attention", attention), ("ffn", ffn))
        if groups is not None
    }
    # copied from the config of a teacher that shares
    if wanted or hasattr(model.config, "shared_layers"):
        model.config.shared_layers = wanted
    if not wanted:
        return
    for block, groups in wanted.items():
        if not 1 <= groups <= layers:
            raise StudentError(
                f"student.share.{block}: {groups}; the student has {layers} layers, "
                f"expected 1..{layers}"
            )
    family = families.find(model.config.model_type)
    if not family.has_roles:
        hint = f"; {family.sharing}" if family.sharing else ""
        raise StudentError(
            f"student.share: expected one of {families.names('has_roles')}, found "
            f"{family.name}{hint}"
        )
    first = dict[tuple[str, str, int], nn.Parameter]()
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        weight = weight_of(name, family)
        for block, groups in wanted.items():
            if (
                weight is not None
                and weight.layer is not None
                and weight.role in BLOCKS[block]
            ):
                group = weight.layer * groups // layers
                module, _, part = name.rpartition(".")
                setattr(
                    model.get_submodule(module),
                    part,
                    first.setdefault((weight.role, part, group), parameter),
                )
    model.register_state_dict_post_hook(_copy_per_layer)


def share_again(model: PreTrainedModel) -> None:
    """Restore the sharing of a loaded model; models that share nothing are
    unchanged."""
    shared = getattr(model.config, "shared_layers", None)
    if shared:
        share(model, **shared)


def _copy_per_layer(model: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Give every layer its own copy, because safetensors refuses two names for one
    tensor."""
    seen = set[int]()
    for name in [name for name in state if name.startswith(prefix)]:
        weight = weight_of(
            name.removeprefix(prefix), families.find(model.config.model_type)
        )
        tensor = state[name]
        if weight is None or weight.layer is None or not isinstance(tensor, Tensor):
            continue
        if tensor.device != torch.device("meta") and tensor.data_ptr() in seen:
            state[name] = tensor.clone()
        seen.add(tensor.data_ptr())
