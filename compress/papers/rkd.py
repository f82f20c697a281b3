"""RKD: Park et al. 2019, "Relational Knowledge Distillation", CVPR, arXiv:1904.05068.

Eq. 4-6  distances  Huber loss of the distances between two texts, each divided by the
                    mean distance of its model
Eq. 7-8  angles     Huber loss of the cosine of the angle that two texts form at a third

The authors weigh distances by 1 and angles by 2 for embeddings (README of their code).

Shapes: B examples, D dimensions of a sentence vector.

Deviations: the paper sums over pairs and triples; the authors' code averages over all
B^2 pairs and B^3 triples, including those of a text with itself, which are 0, and so do
these, as the weights 1 and 2 belong to the mean. Each pair of different texts counts in
the mean distance, as in their code, but distances come from differences: theirs, from
squared norms and products, are at least 1e-6, so that equal texts are not 0 apart. The
paper gives no rule for texts without a distance; here a mean of 0 divides by 1. The
relations are those of one batch; one that is split over processes or accumulated
(`micro_batch`) has those within its parts only. Angles need B^2 D and B^3 numbers of
memory."""

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from compress.papers.reimers import unit
from compress.training.float32 import multiply
from compress.training.reads import reads


@reads("logits", per="example", kinds=("embedding",), bridges=("width",))
def distances(student_BD: Tensor, teacher_BD: Tensor) -> Tensor:
    """Huber(||s_i - s_j|| / mu_S, ||t_i - t_j|| / mu_T), mean over all pairs (Eq. 4-6):
    scale and rotation are free."""
    return smooth_l1_loss(_distances(student_BD), _distances(teacher_BD))


@reads("logits", per="example", kinds=("embedding",), bridges=("width",))
def angles(student_BD: Tensor, teacher_BD: Tensor) -> Tensor:
    """Huber(cos of the angle at i between j and k, the same of the teacher), mean over
    all triples (Eq. 7-8)."""
    return smooth_l1_loss(_cosines(student_BD), _cosines(teacher_BD))


def _distances(vectors_BD: Tensor) -> Tensor:
    vectors_BD = vectors_BD.float()
    apart_BB = torch.cdist(
        vectors_BD, vectors_BD, compute_mode="donot_use_mm_for_euclid_dist"
    )
    B = len(apart_BB)
    mean = apart_BB.sum() / max(B * (B - 1), 1)
    return apart_BB / mean.where(mean > 0, 1)


def _cosines(vectors_BD: Tensor) -> Tensor:
    """Compute the cosine of the angle at i between j and k, (B, B, B); 0 where j or k
    is i."""
    vectors_BD = vectors_BD.float()
    directions_BBD = unit(vectors_BD[None, :] - vectors_BD[:, None])
    return multiply(directions_BBD, directions_BBD.mT)
