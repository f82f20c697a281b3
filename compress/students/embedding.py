"""What the tables of a teacher's embedding hold, and in which directions.

Shapes: V vocabulary, P positions, T types, W width, R directions kept, N rows.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.students.naming import Weight


def tables(teacher: PreTrainedModel, source: Mapping[Weight, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Words, positions (those that are used) and types of the teacher, in float64, each row's mean taken off."""
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
    """Orthonormal (W, R) leading directions of the normalised rows, and the mean cosine of rows and projections."""
    n = torch.arange(len(words_VW), device=words_VW.device)
    rows_NW = words_VW + positions_PW[n % len(positions_PW)] + types_TW[n // len(positions_PW) % len(types_TW)]
    rows_NW = rows_NW / (rows_NW.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    moment_WW = rows_NW.T @ rows_NW
    W = len(moment_WW)
    moment_WW = moment_WW - (moment_WW.trace() + 1) / W  # no row has a part along 1: the last of all directions
    basis_WR = torch.linalg.eigh(moment_WW).eigenvectors.flip(1)[:, :keep]
    cosine_N = (rows_NW @ basis_WR).norm(dim=-1) / rows_NW.norm(dim=-1)
    return basis_WR, cosine_N.mean()
