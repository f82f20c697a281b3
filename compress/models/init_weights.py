"""Initialise a student with weights of its teacher: chosen layers, and the most
important units of each."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress import families
from compress.errors import StudentError
from compress.families.family import Family
from compress.slicing.cut import cut, has_own_head
from compress.slicing.plan import HIDDEN, SlicePlan, parameters_of
from compress.slicing.select import Kept
from compress.slicing.sizes import select_layers
from compress.tensors import TensorDict, Tensors

HEAD_PREFIXES = ("score.", "classifier.", "qa_outputs.")
"""Prefixes of the weights of task heads, which depend on the number of labels."""

_LAYER_PATTERN = re.compile(
    r"((?:.*?\.)?(?:h|block|layer|layers|attentions|layer_norm1|ffns|layer_norm2))\.(\d+)\.(.*)"
)
"""A weight of a layer: its stack, its index there, and its name; the last four stacks
are XLM's."""

_NUMBERED = re.compile(r"\.\d+\.")
"""A weight of a module in a list, such as a layer."""


@dataclass(frozen=True)
class LayerWeight:
    """The name of a weight that is the same in every family.

    role as in `families`; layer is None outside the encoder layers; part is `weight` or
    `bias`.
    """

    role: str
    layer: int | None
    part: str


def weight_of(name: str, family: Family) -> LayerWeight | None:
    """Parse `bert.encoder.layer.3.attention.self.query.weight` as Weight("query", 3,
    "weight"); None if unknown."""
    found = family.place(name)
    return (
        None
        if found is None
        else LayerWeight(found.role, found.layer, name.rpartition(".")[2])
    )


def weights_by_role(model: PreTrainedModel) -> dict[LayerWeight, Tensor]:
    """Return the weights of a model under names that are the same in every family."""
    named = model.named_parameters(remove_duplicate=False)  # layers may share weights
    return _by_role(
        {name: parameter.data for name, parameter in named}, model.config.model_type
    )


def _by_role(weights: Tensors, model_type: str) -> dict[LayerWeight, Tensor]:
    family = families.find(model_type)
    return {
        weight: tensor
        for name, tensor in weights.items()
        if (weight := weight_of(name, family)) is not None
    }


def strip_prefix(model: PreTrainedModel, weights: Tensors) -> TensorDict:
    """Rename a model's weights as in the model without a head."""
    return {
        name.removeprefix(f"{model.base_model_prefix}."): tensor
        for name, tensor in weights.items()
    }


def first_position(config: Any) -> int:
    """Return the first row of positions in use."""
    return families.find(config.model_type).first_position(config)


@torch.no_grad()
def copy_from_teacher(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    rule: str | Sequence[int],
    kept: Kept | None,
) -> None:
    """Copy every weight that both models have; all others are unchanged.

    rule   the layers to copy whole, see `select_layers`
    kept   the units of the teacher that the student consists of; None if layers of its
           family are copied whole

    The student's head over the vocabulary gets weights of its own if the teacher's has,
    whatever its config ties. A teacher on the meta device has no weights to cut. Raises
    StudentError.
    """
    head: Any = student.get_output_embeddings()
    if head is not None and has_own_head(teacher):
        head.weight = nn.Parameter(head.weight.clone())
    if kept is None:
        mine = student.config.model_type
        theirs = teacher.config.model_type
        if mine != theirs:
            found = families.find(theirs)
            kin = [each.name for each in families.known() if each.is_cut_from(found)]
            raise StudentError(
                f"student.init: teacher: a {mine} model cannot begin as a {theirs} "
                f"model; expected {', '.join(kin) or theirs}. Use family: teacher, "
                "init: scratch, or the folder of a checkpoint"
            )
        copy_whole(student, teacher, rule)
        return
    if teacher.device.type != "meta":
        weights = cut(SlicePlan.from_model(teacher), parameters_of(teacher), kept)
        if families.find(student.config.model_type).copied_by_name:
            _copy_by_name(
                strip_prefix(student, dict(student.named_parameters())),
                strip_prefix(teacher, weights),
                optional=HEAD_PREFIXES,
                remedy="heads keep their size, and the number that share keys and "
                "values; leave head_dim and num_key_value_heads out of "
                "student.config, or use init: scratch",
            )
        else:
            _copy_by_role(
                student, teacher, _by_role(weights, teacher.config.model_type)
            )
    projection: Any = getattr(student, "projection", None)
    # vectors keep the teacher's order
    if projection is not None and getattr(teacher, "projection", None) is None:
        units = kept.indices.get(HIDDEN, torch.arange(student.config.hidden_size))
        # poolings, whose vectors are concatenated
        joined = projection.in_features // len(units)
        places = torch.cat(
            [units + teacher.config.hidden_size * part for part in range(joined)]
        )
        projection.weight.copy_(torch.eye(projection.out_features)[:, places])


def _copy_by_role(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    source: Mapping[LayerWeight, Tensor],
) -> None:
    own = weights_by_role(student)
    for weight, parameter in own.items():
        tensor = source.get(weight)
        if tensor is None or (
            weight.role == "classifier" and len(tensor) != len(parameter)
        ):
            continue
        # RoBERTa has one, BERT two: the last one stands for the rest
        if weight.role == "types":
            tensor = tensor[torch.arange(len(parameter)).clamp(max=len(tensor) - 1)]
        if weight.role == "positions":
            mine = parameter[first_position(student.config) :]
            theirs = tensor[first_position(teacher.config) :]
            mine[: len(theirs)].copy_(theirs[: len(mine)])
        elif tensor.shape == parameter.shape:
            parameter.copy_(tensor)
    types = LayerWeight("types", None, "weight")
    # DistilBERT gets type 0 with its positions, so that it embeds as before
    if types in source and types not in own:
        positions = own[LayerWeight("positions", None, "weight")]
        positions.add_(source[types][0].to(positions.device))


@torch.no_grad()
def copy_whole(
    student: PreTrainedModel, teacher: PreTrainedModel, rule: str | Sequence[int]
) -> None:
    """Copy the teacher's weights, choosing the layers of each stack (encoder, decoder)
    by the same `rule`.

    See `select_layers`. Weights that the teacher does not have, such as another head,
    are unchanged. Raises StudentError if a weight has another shape than the teacher's,
    or if no stack of layers is known.
    """
    own = strip_prefix(student, dict(student.named_parameters()))
    source = strip_prefix(teacher, dict(teacher.named_parameters()))
    depths = _count_layers(own)
    teacher_depths = _count_layers(source)
    chosen = {
        stack: select_layers(rule, depths[stack], teacher_depths[stack])
        for stack in depths.keys() & teacher_depths
    }
    lost = [name for name in source.keys() - own.keys() if _NUMBERED.search(name)]
    if lost and not chosen:
        raise StudentError(
            f"student.init: teacher: layers of {teacher.config.model_type} models "
            f"cannot be recognised by the names of their weights, such as {min(lost)}: "
            "leave out layers, or use init: scratch"
        )

    def name_in_teacher(name: str) -> str:
        found = _LAYER_PATTERN.fullmatch(name)
        # which only a first layer has
        if found is None or found[1] not in chosen or "relative_attention_bias" in name:
            return name
        return f"{found[1]}.{chosen[found[1]][int(found[2])]}.{found[3]}"

    _copy_by_name(
        own,
        {
            name: source[there]
            for name in own
            if (there := name_in_teacher(name)) in source
        },
        remedy=f"layers of {teacher.config.model_type} models are copied whole: leave "
        "out every size but layers, or use init: scratch",
    )


def _copy_by_name(
    own: Tensors,
    source: Tensors,
    *,
    remedy: str,
    optional: tuple[str, ...] = (),
) -> None:
    """Copy the weights of the same name. Raises StudentError for other shapes, unless a
    name begins with `optional`."""
    for name in [name for name in own if name in source]:
        if own[name].shape == source[name].shape:
            own[name].copy_(source[name])
        elif not name.startswith(optional):
            raise StudentError(
                f"student.init: teacher: {name} is {tuple(own[name].shape)} in the "
                f"student, and {tuple(source[name].shape)} in the copy of the teacher: "
                f"{remedy}"
            )


def _count_layers(names: Tensors) -> dict[str, int]:
    """Count the layers of each stack."""
    depths = dict[str, int]()
    for found in filter(None, map(_LAYER_PATTERN.fullmatch, names)):
        depths[found[1]] = max(depths.get(found[1], 0), int(found[2]) + 1)
    return depths


def tables(
    teacher: PreTrainedModel, source: Mapping[LayerWeight, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the teacher's words, positions in use and types in float64, each row minus
    its mean."""
    words = source[LayerWeight("words", None, "weight")].double()
    positions = source[LayerWeight("positions", None, "weight")].double()
    kept = source.get(LayerWeight("types", None, "weight"))
    types = torch.zeros_like(words[:1]) if kept is None else kept.double()
    positions = positions[first_position(teacher.config) :]
    for name, module in teacher.named_modules():
        if name.endswith("task_type_embeddings"):
            # ERNIE's is 0 unless the caller says otherwise
            types = types + module.weight.data[0].to(types)
    words = words - words.mean(-1, keepdim=True)
    positions = positions - positions.mean(-1, keepdim=True)
    types = types - types.mean(-1, keepdim=True)
    return words, positions, types


def directions(
    words_VW: Tensor, positions_PW: Tensor, types_TW: Tensor, *, keep: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute orthonormal (W, R) leading directions of the normalised rows, and their
    mean cosine with the rows."""
    n = torch.arange(len(words_VW), device=words_VW.device)
    rows_NW = (
        words_VW
        + positions_PW[n % len(positions_PW)]
        + types_TW[n // len(positions_PW) % len(types_TW)]
    )
    rows_NW = rows_NW / (rows_NW.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    moment_WW = rows_NW.T @ rows_NW
    W = len(moment_WW)
    # no row has a component along 1: make it the last direction
    moment_WW = moment_WW - (moment_WW.trace() + 1) / W
    basis_WR = torch.linalg.eigh(moment_WW).eigenvectors.flip(1)[:, :keep]
    cosine_N = (rows_NW @ basis_WR).norm(dim=-1) / rows_NW.norm(dim=-1)
    return basis_WR, cosine_N.mean()
