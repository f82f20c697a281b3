"""LEAF: Vujanic & Rueckstiess 2025, "LEAF: Knowledge Distillation of Text Embedding
Models with Teacher-Aligned Representations", arXiv:2509.12539.

(loss)    l2    distance of the student's vector from the teacher's

The student is an encoder, the mean of its states, a linear map to the teacher's width,
and a normalisation if the teacher's vectors are normalised. It learns from the
teacher's vectors only, so that either model may be used: texts can be indexed by the
teacher, and queries encoded by the student.

Shapes: B examples, D dimensions of a sentence vector.

Deviations: the authors published models, but no code, and the paper itself was not
available: this follows its abstract and others' summaries. They agree on an L2 error
without naming its power; one gives the square, which is the default here, and `squared:
false` is the distance itself. Both vectors are normalised in the loss, which does not
change vectors that already are, like LEAF's; `normalize: false` compares lengths too.
"""

from torch import Tensor

from compress.papers.reimers import check_widths, unit
from compress.training.reads import reads


@reads("logits", per="example", kinds=("embedding",))
def l2(
    student_BD: Tensor,
    teacher_BD: Tensor,
    *,
    squared: bool = True,
    normalize: bool = True,
) -> Tensor:
    """||s - t||^2 of the normalised vectors, which is 2 - 2 cos(s, t), mean over
    examples.

    squared: false takes ||s - t||. normalize: false takes the vectors as they are.
    """
    check_widths(student_BD, teacher_BD, "leaf.l2")
    if normalize:
        student_BD = unit(student_BD)
        teacher_BD = unit(teacher_BD)
    apart_BD = student_BD.float() - teacher_BD.float()
    return (apart_BD.pow(2).sum(-1) if squared else apart_BD.norm(dim=-1)).mean()
