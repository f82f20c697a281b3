"""Initialise a student from its teacher: with the teacher's largest units, in the teacher's order."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.errors import StudentError
from compress.slicing.cut import cut
from compress.slicing.plan import SlicePlan, parameters_of
from compress.slicing.rules import GROUPED, ROTARY, place
from compress.slicing.select import Importance, Kept, choose, magnitude
from compress.slicing.shape import Shape
from compress.slicing.sizes import Sizes, fits_rotary, select_layers

KNOWN = ("bert", "distilbert", "roberta", "xlm-roberta", "electra", "ernie", "deberta-v2")
"""Families whose blocks are the same, whatever their weights are called."""
APART = ("modernbert",)
"""Families whose blocks are like no other's: what is cut out of a teacher is a student of the same family."""


@dataclass(frozen=True)
class Weight:
    """Name the same weight alike in every family, so that weights can be carried between them.

    role as in `slicing.rules`; layer is None outside the encoder layers; part is `weight` or `bias`.
    """

    role: str
    layer: int | None
    part: str


def weight_of(name: str, family: str = "bert") -> Weight | None:
    """Read `bert.encoder.layer.3.attention.self.query.weight` as Weight("query", 3, "weight"); None when unknown."""
    found = place(family if family in APART else "bert", name)
    return None if found is None else Weight(found.role, found.layer, name.rpartition(".")[2])


def cuts(teacher: str, student: str) -> bool:
    """Check that a student of one family can be cut out of a teacher of another."""
    return {teacher, student} <= set(KNOWN) or (teacher == student and student in (*APART, *SLICED))


def keep_units(
    teacher: PreTrainedModel, student: Shape, layers: Sequence[int], importance: Importance | None = None
) -> Kept:
    """Choose the units of these teacher layers that a student of this shape begins with: the most important ones.

    importance: of every group of the teacher's units; None: the norms of their weights tell. Raises StudentError when
    the student is wider than its teacher.
    """
    theirs, plan = Shape.from_config(teacher.config), SlicePlan.from_model(teacher)
    for size in ("hidden", "embedding", "heads", "head_size", "ffn"):
        if getattr(student, size) > getattr(theirs, size):
            raise StudentError(
                f"student: init: teacher can only narrow, but {size} {getattr(student, size)} is more than the "
                f"teacher's {getattr(theirs, size)}; make it smaller (hidden = heads x head size) or use init: scratch"
            )
    if theirs.family in ROTARY and not fits_rotary(teacher.config, student.head_size):
        raise StudentError(
            f"student: init: teacher cannot make heads of {student.head_size} out of {theirs.family}'s heads of "
            f"{theirs.head_size}, which turn by the tokens' places: they keep their size, or it goes by a whole "
            "factor; choose hidden and heads so (hidden = heads x head size), or use init: scratch"
        )
    sizes = Sizes(
        layers=len(layers),
        hidden=student.hidden,
        heads=student.heads,
        head_size=student.head_size,
        ffn=student.ffn,
        embedding=None if plan.sizes.embedding is None else student.embedding,
    )
    if teacher.device.type == "meta":  # a listing builds students for their sizes alone
        return Kept(sizes, tuple(layers), {})
    return choose(plan, importance or magnitude(teacher, plan), sizes, layers=layers)


def narrow_weights(teacher: PreTrainedModel, kept: Kept) -> dict[Weight, Tensor]:
    """Cut what is kept out of the teacher's weights; layers are numbered as the student's are.

    A teacher on the meta device gives no weights.
    """
    if teacher.device.type == "meta":
        return {}
    weights = cut(SlicePlan.from_model(teacher), parameters_of(teacher), kept)
    named = ((weight_of(name, teacher.config.model_type), tensor) for name, tensor in weights.items())
    return {weight: tensor.detach() for weight, tensor in named if weight is not None}


SLICED = ("gpt2", *GROUPED)
"""Families whose students are cut out of a teacher of the same family, weight by weight (`copy_units`)."""


@torch.no_grad()
def copy_units(student: PreTrainedModel, teacher: PreTrainedModel, kept: Kept) -> None:
    """Fill the student with what is kept of a teacher of its family.

    What the teacher does not have, such as another head, stays as it is. Raises StudentError where a weight has another
    shape than what is kept of the teacher's.
    """
    if teacher.device.type == "meta":
        return
    plan = SlicePlan.from_model(teacher)
    source = _strip_head(teacher, cut(plan, parameters_of(teacher), kept))
    for name, mine in _strip_head(student, dict(student.named_parameters())).items():
        theirs = source.get(name)
        if theirs is None or (theirs.shape != mine.shape and name.startswith(HEADS)):
            continue
        if theirs.shape != mine.shape:
            raise StudentError(
                f"student.init: teacher: {name} is {tuple(mine.shape)} in the student, and what is kept of the "
                f"teacher's {tuple(theirs.shape)}: heads keep their size, and as many share keys and values; leave "
                "head_dim and num_key_value_heads out of student.config, or use init: scratch"
            )
        mine.data.copy_(theirs)


HEADS = ("score.", "classifier.", "qa_outputs.")
"""The beginnings of names of weights that tell a task's labels apart."""

WHOLE = ("t5",)
"""The families that `copy_whole` copies, at whatever depth."""

_LAYER = re.compile(r"((?:.*?\.)?(?:h|block|layer|layers))\.(\d+)\.(.*)")
_FIRST_LAYER_ONLY = ("relative_attention_bias",)
"""Weights that a stack has once, in its first layer, for all of its layers."""


@torch.no_grad()
def copy_whole(student: PreTrainedModel, teacher: PreTrainedModel, rule: str | Sequence[int]) -> None:
    """Fill the student with the teacher's weights, each stack of layers (encoder, decoder) by the same `rule`.

    See `select_layers`. What the teacher does not have, such as another head, stays as it is. Raises StudentError when
    a weight has another shape than the teacher's.
    """
    source = _name_weights(teacher)
    depths, taught = _depths(_name_weights(student)), _depths(source)
    chosen = {stack: select_layers(rule, depths[stack], taught[stack]) for stack in depths.keys() & taught.keys()}
    for name, mine in _name_weights(student).items():
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
    """Name the teacher's weight that a student's weight is copied from."""
    found = _LAYER.fullmatch(name)
    if found is None or found[1] not in chosen or any(each in name for each in _FIRST_LAYER_ONLY):
        return name
    return f"{found[1]}.{chosen[found[1]][int(found[2])]}.{found[3]}"


def _depths(names: Mapping[str, Tensor]) -> dict[str, int]:
    """Count the layers of each stack."""
    depths: dict[str, int] = {}
    for found in filter(None, map(_LAYER.fullmatch, names)):
        depths[found[1]] = max(depths.get(found[1], 0), int(found[2]) + 1)
    return depths


def _name_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """List weights by their names in the model without a head."""
    return _strip_head(model, {name: each.data for name, each in model.named_parameters()})


def _strip_head(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name a model's weights as in the model without a head."""
    return {name.removeprefix(f"{model.base_model_prefix}."): each for name, each in weights.items()}


def tables(teacher: PreTrainedModel, source: Mapping[Weight, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return words, used positions and types of the teacher, in float64, with each row's mean taken off."""
    words, positions = (source[Weight(role, None, "weight")].double() for role in ("words", "positions"))
    kept = source.get(Weight("types", None, "weight"))
    types = torch.zeros_like(words[:1]) if kept is None else kept.double()
    for name, module in teacher.named_modules():
        if name.endswith("position_embeddings") and module.padding_idx is not None:
            positions = positions[module.padding_idx + 1 :]  # RoBERTa counts from behind the padding index
        if name.endswith("task_type_embeddings"):
            types = types + module.weight.data[0].to(types)  # ERNIE's is 0 unless the caller says otherwise
    words, positions, types = (table - table.mean(-1, keepdim=True) for table in (words, positions, types))
    return words, positions, types


def directions(
    words_VW: Tensor, positions_PW: Tensor, types_TW: Tensor, *, keep: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute orthonormal (W, R) leading directions of the normalised rows, and their mean cosine with the rows."""
    n = torch.arange(len(words_VW), device=words_VW.device)
    rows_NW = words_VW + positions_PW[n % len(positions_PW)] + types_TW[n // len(positions_PW) % len(types_TW)]
    rows_NW = rows_NW / (rows_NW.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    moment_WW = rows_NW.T @ rows_NW
    W = len(moment_WW)
    moment_WW = moment_WW - (moment_WW.trace() + 1) / W  # no row has a part along 1: the last of all directions
    basis_WR = torch.linalg.eigh(moment_WW).eigenvectors.flip(1)[:, :keep]
    cosine_N = (rows_NW @ basis_WR).norm(dim=-1) / rows_NW.norm(dim=-1)
    return basis_WR, cosine_N.mean()
