"""SEED: Fang et al. 2021, "SEED: Self-supervised Distillation for Visual
Representation", ICLR, arXiv:2101.04731. CompRess: Koohpayegani, Tejankar & Pirsiavash
2020, "CompRess: Self-Supervised Learning by Compressing Representations", NeurIPS,
arXiv:2010.14713.

SEED      similarities      KL of the softmax of similarities to the teacher's vectors,
                            the text's own among them
CompRess  own_similarities  KL of the softmax of similarities to the other texts, each
                            model in its own space

Shapes: B examples, D dimensions of a sentence vector, O the examples compared with.

Deviations: both papers compare with a queue of many thousand earlier vectors, here with
the other texts of the batch: a larger batch is a better estimate, and a batch that is
split over processes or accumulated (`micro_batch`) compares within its parts only. SEED
minimises the cross-entropy, which differs from the KL by the entropy of the teacher's
distribution and has the same gradient. There is no factor T^2 in either paper, and none
here; `DistillKLDivLoss` of sentence-transformers, the KL over a query's listed
candidates, has it. Temperatures: SEED's code uses 0.2 for the student and far less for
the teacher, CompRess 0.04 for both; both are for images."""

import torch
from torch import Tensor

from compress.papers.hinton import kl_of_logs
from compress.papers.reimers import check_widths, cosines, unit
from compress.training.float32 import multiply
from compress.training.reads import Temperature, reads


@reads("logits", per="example", kinds=("embedding",))
def similarities(
    student_BD: Tensor,
    teacher_BD: Tensor,
    *,
    temperature: Temperature = 0.05,
    teacher_temperature: Temperature | None = None,
) -> Tensor:
    """KL(softmax(cos(t_i, t_j) / T) || softmax(cos(s_i, t_j) / T)) over all texts j of
    the batch, mean over texts i.

    The student is compared in the teacher's space, so that their vectors can be mixed
    in one index. The result depends on the size of the batch. `teacher_temperature` is
    the teacher's T, by default the student's.
    """
    check_widths(student_BD, teacher_BD, "seed.similarities")
    student_BD = unit(student_BD)
    teacher_BD = unit(teacher_BD)
    return _kl(
        multiply(student_BD, teacher_BD.T),
        multiply(teacher_BD, teacher_BD.T),
        temperature,
        teacher_temperature,
    )


@reads("logits", per="example", kinds=("embedding",), bridges=("width",))
def own_similarities(
    student_BD: Tensor,
    teacher_BD: Tensor,
    *,
    temperature: Temperature = 0.05,
    teacher_temperature: Temperature | None = None,
) -> Tensor:
    """KL(softmax(cos(t_i, t_j) / T) || softmax(cos(s_i, s_j) / T)) over the other texts
    j != i, mean over texts i.

    Each model is compared in its own space, so that width and rotation do not matter. 0
    for a batch of one text.
    """
    student_BB = _others(student_BD)
    teacher_BB = _others(teacher_BD)
    return _kl(student_BB, teacher_BB, temperature, teacher_temperature)


def _others(vectors_BD: Tensor) -> Tensor:
    """Compute the cosine of each vector and every other one, (B, O): a text itself, at
    1, would dominate the softmax."""
    B = len(vectors_BD)
    other_BB = ~torch.eye(B, dtype=torch.bool, device=vectors_BD.device)
    return cosines(vectors_BD)[other_BB].view(B, B - 1)


def _kl(
    student_BO: Tensor, teacher_BO: Tensor, temperature: float, of_teacher: float | None
) -> Tensor:
    log_p_BO = (teacher_BO / (of_teacher or temperature)).log_softmax(-1)
    log_q_BO = (student_BO / temperature).log_softmax(-1)
    return kl_of_logs(log_p_BO, log_q_BO).mean()
