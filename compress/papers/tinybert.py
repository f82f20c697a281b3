"""Jiao et al. 2020, "TinyBERT: Distilling BERT for Natural Language Understanding",
arXiv:1909.10351.

Eq. 7   attention   MSE of the unnormalised attention scores
Eq. 8   hidden      MSE of the hidden states, the student's projected by a learned W_h
Eq. 9   embeddings  MSE of the embedding outputs, the student's projected by a learned
                    W_e
Eq. 10  prediction  soft cross entropy of the logits
        regression  squared error to the gold score, which replaces Eq. 10 on STS-B
                    (authors' code)
Alg. 1  augment     words replaced by the candidates of a masked language model, or of
                    word vectors; see its deviations in compress/training/augment.py
        near_words  the same by word vectors alone, which is ours

Shapes: B examples, L tokens, D hidden, H heads, V classes.

Deviations from the authors' code, which these formulas reproduce up to the stated
factor:
- means run over real tokens (pairs of real tokens for Eq. 7); theirs over all
  positions, pads included, with the masked key columns set to 0. Where nothing is
  padded both agree.
- Eq. 10 sums over the classes, as written; theirs also averages over them, 1/V of it.
- W_e and W_h are two matrices without bias, as in the paper; theirs is one shared
  `fit_dense` with bias (`project: fit_dense` on both terms shares one).
- Eq. 7 where student and teacher have different numbers of heads, which theirs refuses,
  is ours: see `attention`.
- the teacher is in eval mode; theirs has dropout, as their scripts never call eval().
- logits are the classifier's of the pooled output, tanh(W h), after the student's
  dropout, as in transformers' BERT; theirs are of relu(tanh(W h)) without dropout, for
  teacher and student, so that the same teacher answers differently.
- AdamW, gradients clipped together, eps 1e-8 in the task stages; their BertAdam does
  not correct its bias, clips each tensor's gradient by itself, and has eps 1e-6
  everywhere.
"""

import math

from torch import Tensor

from compress.papers import bert
from compress.papers.hinton import mean_over, seen_pairs
from compress.training.augment import augment, near_words
from compress.training.reads import Temperature, reads

__all__ = [
    "attention",
    "augment",
    "embeddings",
    "hidden",
    "near_words",
    "prediction",
    "regression",
]


@reads("scores", per="pair", bridges=("heads",), windows=True)
def attention(student_BHLL: Tensor, teacher_BHLL: Tensor, mask: Tensor) -> Tensor:
    """Eq. 7: 1/h sum_i MSE(A_i^S, A_i^T), over pairs of real tokens.

    If h_S and h_T heads differ in number, the A_i are means over h_S / h and h_T / h
    neighbouring heads, h the greatest common divisor: a teacher's 12 heads in threes
    for a student's 4, or all heads if h is 1. TextBrewer's `attention_mse_sum` and
    `attention_ce_mean` always join all heads.

    If attention is local, pairs that do not see each other are left out of an example's
    mean, whose weight stays the same.
    """
    seen_BLL, real_BL = seen_pairs(mask)
    pair_BLL = seen_BLL * real_BL[:, :, None].float()
    pairs_B = real_BL.float().sum(1).square()
    pair_BLL = pair_BLL * (pairs_B / pair_BLL.sum((1, 2)).clamp_min(1))[:, None, None]
    h = math.gcd(student_BHLL.shape[1], teacher_BHLL.shape[1])
    student_BHLL = student_BHLL.float().unflatten(1, (h, -1)).mean(2)
    teacher_BHLL = teacher_BHLL.float().unflatten(1, (h, -1)).mean(2)
    error_BLL = (student_BHLL - teacher_BHLL).pow(2).mean(1)
    return (error_BLL * pair_BLL).sum() / pairs_B.sum().clamp_min(1)


@reads("layers", per="token")
def hidden(student_BLD: Tensor, teacher_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """Eq. 8: MSE(H^S W_h, H^T), over real tokens. The caller has applied W_h."""
    return mean_over(
        (student_BLD.float() - teacher_BLD.float()).pow(2).mean(-1), mask_BL
    )


@reads("embeddings", per="token")
def embeddings(student_BLD: Tensor, teacher_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """Eq. 9: MSE(E^S W_e, E^T), Eq. 8 one level lower."""
    return hidden(student_BLD, teacher_BLD, mask_BL)


@reads("logits", per="example")
def prediction(
    student_BV: Tensor,
    teacher_BV: Tensor,
    mask_BL: Tensor | None,
    *,
    temperature: Temperature = 1.0,
) -> Tensor:
    """Eq. 10: CE(z^T / t, z^S / t), mean over examples. Its minimum is the teacher's
    entropy, not 0."""
    p_BV = (teacher_BV.float() / temperature).softmax(-1)
    return mean_over(
        -(p_BV * (student_BV.float() / temperature).log_softmax(-1)).sum(-1), mask_BL
    )


@reads("logits", against="labels", per="example")
def regression(student_B1: Tensor, labels_B1: Tensor, mask_BL: Tensor | None) -> Tensor:
    """(z^S - y)^2, mean over examples: the prediction stage of STS-B, which leaves the
    teacher out."""
    return bert.labels(student_B1, labels_B1, mask_BL)
