"""Turn a trained BERT into an ALBERT by factorising its embedding and sharing its
layers, without training.

Embedding. BERT's is LN_W(x) with x = word + position + type in R^W, ALBERT's is M
LN_E(x') + b with x' in R^E. With the centring C = I - 11'/W, gain gamma, shift beta and
per-row deviation sigma(x),

    LN_W(x) = diag(gamma) C x / sigma(x) + beta

is linear in x except for sigma, which depends only on the length of C x. So take U, W x
(E - 1) with orthonormal columns, and Q, E x (E - 1) with orthonormal columns that each
sum to zero, and let

    x' = sqrt(E/W) Q U' C x,    LN_E without gain and shift,
    M = g sqrt(W/E) diag(gamma) U Q',    b = beta

x' is centred already, and LN_E divides it by the deviation of U U' C x. Hence the
result is the teacher's embedding of the projected row, U U' C x, times g: **exact where
U spans the tables**, which it does from E = W on (W - 1 columns suffice, as C x has no
component along 1): it costs nothing that the norm is applied in E before the
up-projection instead of in W after the sum. **Not exact below**: U has the E - 1
leading directions of the normalised rows C x / sigma(x) over all words, each at a
position and type in turn (their truncated SVD, by the eigenvectors of the second
moment); the rest is lost, and g, the mean cosine between a row and its projection,
scales what remains to the least-squares length. If the teacher's embedding is
factorised too (ELECTRA), W is its narrower width, and its own up-projection is folded
into M and b.

Layers. ALBERT's layer i uses group int(i / N groups) (Lan et al. 2020,
arXiv:1909.11942; authors' code), so a group replaces several teacher layers: by their
mean, or by one of them. With a group per layer it is exactly the teacher's encoder.

Shapes: V vocabulary, W width of the teacher's embedding, E of the student's, D hidden,
R directions kept, N rows."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from compress import families
from compress.errors import StudentError, did_you_mean
from compress.models.init_weights import (
    LayerWeight,
    directions,
    tables,
    weights_by_role,
)
from compress.slicing.shape import Shape

_LAYER = {
    "query": "attention.query",
    "key": "attention.key",
    "value": "attention.value",
    "attention_out": "attention.dense",
    "attention_norm": "attention.LayerNorm",
    "ffn_in": "ffn",
    "ffn_out": "ffn_output",
    "ffn_norm": "full_layer_layer_norm",
}


@torch.no_grad()
def from_bert(
    student: PreTrainedModel, teacher: PreTrainedModel, *, layer: str | int = "average"
) -> None:
    """Fill an ALBERT of the teacher's width, heads and FFN with the teacher's weights;
    its number of layers and E may differ.

    layer: what a shared group takes from the teacher layers that it replaces: their
    `average`, the `first`, `middle` or `last` of them, or one by its number among them
    (negative: from the end).

    The student adopts the teacher's activation and the epsilon of its norms. Pooler and
    classifier are copied; ELECTRA and DistilBERT have another activation than tanh
    there, so their heads are only close at first. A masked-LM head stays as drawn: no
    part of a BERT fits behind an activation in E. Raises StudentError.
    """
    _check_shapes(student, teacher)
    albert: Any = student.base_model
    source = {
        weight: tensor.to(albert.device)
        for weight, tensor in weights_by_role(teacher).items()
    }
    norm = next(
        module for module in teacher.modules() if isinstance(module, nn.LayerNorm)
    )
    activation = getattr(teacher.config, "hidden_act", None) or getattr(
        teacher.config, "activation", "gelu"
    )
    student.config.hidden_act = activation
    student.config.layer_norm_eps = norm.eps
    module: Any
    for module in student.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = norm.eps
        elif hasattr(module, "full_layer_layer_norm"):
            module.activation = ACT2FN[activation]
    _fill_embeddings(albert, teacher, source)
    for group, numbers in enumerate(
        _group_layers(student, Shape.from_config(teacher.config).layers)
    ):
        chosen = _choose(numbers, layer)
        (inner,) = albert.encoder.albert_layer_groups[group].albert_layers
        for role, name in _LAYER.items():
            for part, parameter in inner.get_submodule(name).named_parameters():
                parameter.copy_(
                    torch.stack(
                        [source[LayerWeight(role, n, part)].double() for n in chosen]
                    ).mean(0)
                )
    for role, module in (
        ("pooler", albert.pooler),
        ("classifier", getattr(student, "classifier", None)),
    ):
        for part, parameter in (
            module.named_parameters() if isinstance(module, nn.Linear) else ()
        ):
            tensor = source.get(LayerWeight(role, None, part))
            if tensor is not None and tensor.shape == parameter.shape:
                parameter.copy_(tensor)


def _check_shapes(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    mine = Shape.from_config(student.config)
    theirs = Shape.from_config(teacher.config)
    if mine.family != "albert" or not families.find(theirs.family).bert_embedding:
        known = families.names("bert_embedding")
        raise StudentError(
            f"albert.from_bert makes an albert of {known}, not {mine.family} of "
            f"{theirs.family}"
        )
    for size in ("hidden", "heads", "ffn", "vocabulary"):
        if getattr(mine, size) != getattr(theirs, size):
            raise StudentError(
                f"albert.from_bert: the student's {size} is {getattr(mine, size)}, the "
                f"teacher's {getattr(theirs, size)}: it factorises the embedding and "
                f"shares layers, it does not narrow; leave student.{size} out"
            )
    if mine.embedding < 2:
        raise StudentError(
            "albert.from_bert: the norm of an embedding of width 1 removes everything; "
            "expected 2 or more"
        )
    if student.config.inner_group_num != 1:
        raise StudentError(
            f"albert.from_bert: inner_group_num is {student.config.inner_group_num}; "
            "set more layers instead"
        )


def _group_layers(student: PreTrainedModel, teachers: int) -> list[list[int]]:
    """List the teacher layers that each group replaces, in ascending order."""
    layers = student.config.num_hidden_layers
    groups = student.config.num_hidden_groups
    members: list[list[int]] = [[] for _ in range(groups)]
    for number in range(teachers):
        members[int(number * layers // teachers / (layers / groups))].append(number)
    if not all(members):
        raise StudentError(
            f"albert.from_bert: {groups} groups over {layers} layers leave some "
            f"without any of the teacher's {teachers} layers; expected at most "
            f"{min(layers, teachers)}"
        )
    return members


def _choose(members: Sequence[int], layer: str | int) -> Sequence[int]:
    if layer == "average":
        return members
    places: Mapping[str | int, int] = {
        "first": 0,
        "middle": (len(members) - 1) // 2,
        "last": -1,
    }
    place = places.get(layer, layer)
    if isinstance(place, str | bool):
        raise StudentError(
            "albert.from_bert: no layer "
            f"{layer!r}.{did_you_mean(str(layer), ['average', *map(str, places)])}"
        )
    if not -len(members) <= place < len(members):
        raise StudentError(
            f"albert.from_bert: layer {place}: a group replaces {len(members)} of the "
            "teacher's layers, numbered from 0"
        )
    return [members[place]]


def _fill_embeddings(
    albert: Any, teacher: PreTrainedModel, source: Mapping[LayerWeight, Tensor]
) -> None:
    mine = albert.embeddings
    E = albert.config.embedding_size
    parts = tables(teacher, source)
    W = parts[0].shape[1]
    gamma_W = source[LayerWeight("embedding_norm", None, "weight")].double()
    beta_W = source[LayerWeight("embedding_norm", None, "bias")].double()
    if (up := LayerWeight("embedding_up", None, "weight")) in source:
        up_DW = source[up].double()
        shift_D = (
            up_DW @ beta_W + source[LayerWeight("embedding_up", None, "bias")].double()
        )
    else:
        up_DW = torch.eye(W).to(gamma_W)
        shift_D = up_DW @ beta_W
    basis_WR, gain = directions(*parts, keep=min(E, W) - 1, eps=mine.LayerNorm.eps)
    spread_ER = _zero_sums(E).to(basis_WR)[:, : basis_WR.shape[1]]
    for table, module in zip(
        parts,
        (mine.word_embeddings, mine.position_embeddings, mine.token_type_embeddings),
        strict=True,
    ):
        rows = torch.arange(len(module.weight), device=table.device)
        rows = rows.clamp(max=len(table) - 1)  # a RoBERTa has one token type
        module.weight.copy_(math.sqrt(E / W) * (table @ basis_WR @ spread_ER.T)[rows])
    mine.LayerNorm.weight.fill_(1.0)
    mine.LayerNorm.bias.zero_()
    mapping = albert.encoder.embedding_hidden_mapping_in
    mapping.weight.copy_(
        gain * math.sqrt(W / E) * (up_DW * gamma_W) @ basis_WR @ spread_ER.T
    )
    mapping.bias.copy_(shift_D)


def _zero_sums(E: int) -> Tensor:
    """Return (E, E - 1) orthonormal columns that sum to zero: a reflection that maps
    the first axis to 1 / sqrt E."""
    ones_E = torch.full((E,), 1 / math.sqrt(E), dtype=torch.float64)
    normal_E = ones_E - torch.eye(E, dtype=torch.float64)[0]
    return (
        torch.eye(E).double()
        - 2 * torch.outer(normal_E, normal_E) / normal_E.dot(normal_E)
    )[:, 1:]
