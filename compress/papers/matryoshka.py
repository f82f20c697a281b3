"""Matryoshka: Kusupati et al. 2022, "Matryoshka Representation Learning", NeurIPS,
arXiv:2205.13147.

Eq. 1    nested    sum_m c_m L(first m dimensions) of another loss L

Shapes: B examples, D dimensions of a sentence vector.

Deviations: the paper's L is the cross-entropy of a classifier of each size; here it is
any loss of sentence vectors, as in sentence-transformers' `MatryoshkaLoss`, and c_m = 1
as in both. Cut vectors of student and teacher are normalised again;
sentence-transformers normalises only the student's, so that the error of cut vectors is
never 0.

What it can teach depends on L. Losses that compare dimension by dimension (reimers.mse,
leaf.l2, seed.similarities, oord.infonce) get the first m dimensions of both: those of
the student become as good as those of the teacher, which should therefore be a
Matryoshka model itself. Losses that accept different widths (seed.own_similarities,
rkd.distances, rkd.angles) get the student's first m and all of the teacher's: the first
dimensions learn from all of any teacher's, but in a space that is not the teacher's.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError
from torch import Tensor

from compress.config.reference import Call, check, find, parse
from compress.errors import ObjectiveError
from compress.papers.reimers import check_widths, unit
from compress.training.reads import Reading, reads

KIND = "embedding"


def _find_inner(of: str | Mapping[str, Any]) -> Call:
    """Return the nested loss. Raises ObjectiveError if `of` is not a loss of vectors
    that can be cut."""
    try:
        call = parse(of)
    except ValueError as error:
        raise ObjectiveError(str(error)) from error
    reading: Reading = find(call.by, called="loss", mark="reading").reading
    if (
        reading.against != "teacher"
        or KIND not in reading.kinds
        or call.by == "matryoshka.nested"
    ):
        raise ObjectiveError(
            f"{call.by} is not a loss of sentence vectors that can be cut to their "
            "first dimensions; expected one of reimers.mse, leaf.l2, "
            "seed.similarities, seed.own_similarities, rkd.distances, rkd.angles, "
            "oord.infonce"
        )
    if problems := check(call, "of"):
        raise ObjectiveError("; ".join(problems))
    return call


def _checked(of: Any) -> Any:
    try:
        _find_inner(of)
    except ObjectiveError as error:
        raise PydanticCustomError(
            "loss", "{problem}", {"problem": str(error)}
        ) from error
    return of


Inner = Annotated[str | dict[str, Any], AfterValidator(_checked)]
Size = Annotated[float, Field(gt=0, allow_inf_nan=False)]
DimensionWeight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@reads("logits", per="example", kinds=(KIND,), bridges=("width",))
def nested(
    student_BD: Tensor,
    teacher_BD: Tensor,
    *,
    of: Inner,
    sizes: Sequence[Size],
    weights: Sequence[DimensionWeight] | None = None,
) -> Tensor:
    """Sum the weighted loss `of` over vectors that are cut to their first dimensions
    and normalised again (Eq. 1).

        {loss: matryoshka.nested, of: leaf.l2, sizes: [384, 192, 96]}
        {loss: matryoshka.nested, of: {by: seed.own_similarities, temperature: 0.1},
            sizes: [1.0, 0.5, 0.25]}

    of       a loss of sentence vectors, with its options
    sizes    numbers of dimensions, or shares up to 1 of the student's; whole vectors
             are not normalised again
    weights  one for each size; by default 1

    Raises ObjectiveError for a size that the student's vectors do not have, and for
    another number of weights."""
    call = _find_inner(of)
    weights = [1.0] * len(sizes) if weights is None else weights
    if not sizes or len(weights) != len(sizes):
        raise ObjectiveError(
            f"matryoshka.nested: {len(sizes)} sizes and {len(weights)} weights; "
            "expected one for each"
        )
    whole = "width" in call.function.reading.bridges  # type: ignore[attr-defined]  # `_find_inner` has checked it
    if not whole:
        check_widths(student_BD, teacher_BD, f"matryoshka.nested of {call.by}")
    D = student_BD.shape[-1]
    total = student_BD.new_zeros((), dtype=torch.float32)
    for size, weight in zip(sizes, weights, strict=True):
        m = round(size * D) if size <= 1 else size
        if m != int(m) or not 1 <= m <= D:
            raise ObjectiveError(
                f"matryoshka.nested: sizes: {size:g} of the student's {D} dimensions; "
                f"expected whole numbers up to {D}, or shares up to 1"
            )
        student_BM = student_BD if m == D else unit(student_BD[:, : int(m)])
        teacher_BM = teacher_BD if whole or m == D else unit(teacher_BD[:, : int(m)])
        total = total + weight * call(student_BM, teacher_BM)
    return total
