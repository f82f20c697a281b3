"""LEAF: Vujanic & Rueckstiess 2025, "LEAF: Knowledge Distillation of Text Embedding Models with Teacher-Aligned
Representations", arXiv:2509.12539.

(loss)    l2    distance of the student's vector from the teacher's

The student is an encoder, the mean of its states, a linear map to the teacher's width, and a normalisation where the
teacher's vectors are normalised. Nothing of the teacher is seen but its vectors, so that they may be asked of the
student and of the teacher in turn: texts indexed by the teacher, queries by the student.

Shapes: B examples, D dimensions of a sentence vector.

Deviations: the authors published models, but no code, and the paper itself was not at hand: what is said of it here
is what its abstract and others' summaries of it say. They agree on an L2 error without naming its power; one
gives the square, which is taken here, `squared: false` is the distance itself. Both vectors are normalised in the loss,
which changes nothing where they already are, as LEAF's then are; `normalize: false` compares lengths too.
"""

from torch import Tensor

from compress.papers.reimers import check_widths, unit
from compress.training.reads import reads


@reads("logits", per="example", kinds=("embedding",))
def l2(student_BD: Tensor, teacher_BD: Tensor, *, squared: bool = True, normalize: bool = True) -> Tensor:
    """||s - t||^2 of the normalised vectors, which is 2 - 2 cos(s, t), mean over examples.

    squared: false takes ||s - t||. normalize: false takes the vectors as they are.
    """
    check_widths(student_BD, teacher_BD, "leaf.l2")
    if normalize:
        student_BD, teacher_BD = unit(student_BD), unit(teacher_BD)
    apart_BD = student_BD.float() - teacher_BD.float()
    return (apart_BD.pow(2).sum(-1) if squared else apart_BD.norm(dim=-1)).mean()
