"""Reimers & Gurevych 2020, "Making Monolingual Sentence Embeddings Multilingual using
Knowledge Distillation", EMNLP, arXiv:2004.09813.

Eq. 1    mse       squared error of a text's vector, student against teacher
Eq. 1    parallel  the same of a text and of its translation, both against the teacher's
                   vector of the text

Shapes: B examples, D dimensions of a sentence vector.

Deviations: the paper writes the sum over a text and its translation of the squared
distance, divided by the batch; the authors' code (sentence-transformers, `MSELoss`)
takes the mean over texts, translations and dimensions, and so do these: the paper's
number is 2 D times `parallel`. The gradient's direction is the same.

Parallel texts need no separate loss in a run: the authors' training files are rows of
(text, vector), in which a translation has the teacher's vector of its source. Over such
rows `mse` is `parallel` of the pairs. `parallel` is for custom training loops."""

from torch import Tensor

from compress.errors import ObjectiveError
from compress.training.float32 import multiply
from compress.training.reads import reads


def unit(vectors_BD: Tensor) -> Tensor:
    """Divide each vector by its length, in float32; a vector of zeros does not change,
    and has a finite gradient."""
    vectors_BD = vectors_BD.float()
    lengths_B1 = vectors_BD.norm(dim=-1, keepdim=True)
    return vectors_BD / lengths_B1.where(lengths_B1 > 0, 1)


def cosines(vectors_BD: Tensor) -> Tensor:
    """Return the cosines of all pairs of vectors, (B, B)."""
    vectors_BD = unit(vectors_BD)
    return multiply(vectors_BD, vectors_BD.T)


def check_widths(student_BD: Tensor, teacher_BD: Tensor, loss: str) -> None:
    """Raise ObjectiveError if the vectors of student and teacher differ in their number
    of dimensions."""
    D_S = student_BD.shape[-1]
    D_T = teacher_BD.shape[-1]
    if D_S != D_T:
        raise ObjectiveError(
            f"{loss} compares vectors dimension by dimension, but the student's have "
            f"{D_S} and the teacher's {D_T}: give the student a projection to the "
            "teacher's width, or use a loss that accepts different widths: "
            "seed.own_similarities, rkd.distances, rkd.angles"
        )


@reads("logits", per="example", kinds=("embedding",))
def mse(student_BD: Tensor, teacher_BD: Tensor) -> Tensor:
    """Average (s - t)^2 over dimensions and examples (Eq. 1, for one text)."""
    check_widths(student_BD, teacher_BD, "reimers.mse")
    return (student_BD.float() - teacher_BD.float()).pow(2).mean()


def parallel(
    student_source_BD: Tensor, student_target_BD: Tensor, teacher_BD: Tensor
) -> Tensor:
    """Average the error of texts and of their translations, both against the teacher's
    vectors of the texts (Eq. 1)."""
    return (mse(student_source_BD, teacher_BD) + mse(student_target_BD, teacher_BD)) / 2
