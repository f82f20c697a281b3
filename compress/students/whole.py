"""Shallower students of the teacher's own family and width: layers are copied whole, whatever they hold inside.

For the families whose weights `naming` has no axes for: GPT-2 with its fused query, key and value, T5 with two stacks.
"""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.errors import StudentError
from compress.slicing.layers import copied_layers

WHOLE = ("gpt2", "t5")
"""The families that are copied so."""

_LAYER = re.compile(r"((?:.*?\.)?(?:h|block|layer|layers))\.(\d+)\.(.*)")
_FIRST_LAYER_ONLY = ("relative_attention_bias",)
"""What a stack has once, in its first layer, for all of them."""


@torch.no_grad()
def copy_whole(student: PreTrainedModel, teacher: PreTrainedModel, rule: str | Sequence[int]) -> None:
    """Fill the student with the teacher's weights, each stack of layers (encoder, decoder) by the same `rule`.

    See `copied_layers`. What the teacher does not have, such as another head, stays as it is. Raises StudentError when
    a weight has another shape than the teacher's.
    """
    source = _named(teacher)
    depths, taught = _depths(_named(student)), _depths(source)
    chosen = {stack: copied_layers(rule, depths[stack], taught[stack]) for stack in depths.keys() & taught.keys()}
    for name, mine in _named(student).items():
        theirs = source.get(_taught_name(name, chosen))
        if theirs is None:
            continue
        if theirs.shape != mine.shape:
            raise StudentError(
                f"student.init: teacher copies the layers of a {teacher.config.model_type} whole, but {name} is "
                f"{tuple(mine.shape)} in the student and {tuple(theirs.shape)} in the teacher: leave out hidden, ffn "
                "and heads, or use init: scratch"
            )
        mine.copy_(theirs)


def _taught_name(name: str, chosen: Mapping[str, Sequence[int]]) -> str:
    """The teacher's name of the weight that a student's weight is copied from."""
    found = _LAYER.fullmatch(name)
    if found is None or found[1] not in chosen or any(each in name for each in _FIRST_LAYER_ONLY):
        return name
    return f"{found[1]}.{chosen[found[1]][int(found[2])]}.{found[3]}"


def _depths(names: Mapping[str, Tensor]) -> dict[str, int]:
    """How many layers each stack has."""
    depths: dict[str, int] = {}
    for found in filter(None, map(_LAYER.fullmatch, names)):
        depths[found[1]] = max(depths.get(found[1], 0), int(found[2]) + 1)
    return depths


def _named(model: PreTrainedModel) -> dict[str, Tensor]:
    """Weights by their names in the model without a head."""
    prefix = f"{model.base_model_prefix}."
    return {name.removeprefix(prefix): each.data for name, each in model.named_parameters()}
