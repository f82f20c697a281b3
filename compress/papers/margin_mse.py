"""Hofstätter et al. 2020, "Improving Efficient Neural Ranking Models with
Cross-Architecture Knowledge Distillation", arXiv:2010.02666.

Margin-MSE  margins  ((s(q, p+) - s(q, p-)) - (t(q, p+) - t(q, p-)))^2, mean over the
                     pairs of passages
            vectors  the same, where s is `scale` times the cosine of two vectors, and t
                     is a score in the data

Shapes: B pairs of a query and a passage, rows of a batch; for `vectors` B texts; D
dimensions of a sentence vector.

Deviations: the paper has one pair of passages for each query, of which the first is
relevant and the other is not. Here all pairs of passages of a query in a batch count,
for `margins` only pairs in which one passage is more relevant than the other, so that
the teacher scores each passage once. The paper's vectors (BERT-DOT) have any length,
and s is their dot product; those of most sentence encoders have length 1, hence the
scale.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from compress.papers.reimers import cosines
from compress.training.reads import reads


@reads("logits", per="preference", mask="preferences")
def margins(student_B1: Tensor, teacher_B1: Tensor, preferred_BB: Tensor) -> Tensor:
    """Compare the margins of the more relevant passages, mean over pairs; 0 if there is
    no pair.

    preferred_BB  1 where the row of the first axis is more relevant than the other, for
                  the same query
    """
    apart_B = (student_B1.float() - teacher_B1.float()).view(-1)
    pairs_BB = preferred_BB.to(apart_B.dtype)
    # the difference of two margins is the margin of the differences
    return (
        torch.square(apart_B[:, None] - apart_B) * pairs_BB
    ).sum() / pairs_BB.sum().clamp_min(1)


@reads("logits", against="scores", per="query", mask="answers", kinds=("embedding",))
def vectors(
    student_BD: Tensor,
    scores_B: Tensor,
    answers_BB: Tensor,
    *,
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 20.0,
) -> Tensor:
    """Compare the margins of a query's passages with the margins of a teacher's scores:
    mean over pairs, then over queries.

    scores_B    a teacher's score of a passage for its own query
    answers_BB  which passages (last axis) are a query's own: 1
    """
    own_BB = answers_BB == 1
    apart_BB = (scale * cosines(student_BD) - scores_B.float()) * own_BB
    counts_B = own_BB.sum(-1)
    # the sum of (d_j - d_k)^2 over all pairs is 2 n times the sum of d_j^2, minus 2
    # times the square of the sum of d_j
    squares_B = 2 * counts_B * apart_BB.square().sum(-1) - 2 * apart_BB.sum(-1).square()
    means_B = squares_B / (counts_B * (counts_B - 1)).clamp_min(1)
    return means_B.sum() / (counts_B > 0).sum().clamp_min(1)
