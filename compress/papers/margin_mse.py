"""Hofstätter et al. 2020, "Improving Efficient Neural Ranking Models with Cross-Architecture Knowledge Distillation",
arXiv:2010.02666.

Margin-MSE  margins  ((s(q, p+) - s(q, p-)) - (t(q, p+) - t(q, p-)))^2, mean over the pairs of passages

Shapes: B pairs of a query and a passage, rows of a batch.

Deviations: the paper has one pair of passages for each query, of which the first is relevant and the other is not. Here
all pairs of passages of a query in a batch count of which one is more relevant than the other, so that the teacher
scores each passage once.
"""

import torch
from torch import Tensor

from compress.training.reads import reads


@reads("logits", per="preference", mask="preferences")
def margins(student_B1: Tensor, teacher_B1: Tensor, preferred_BB: Tensor) -> Tensor:
    """Compare the margins of the more relevant passages, mean over pairs; 0 if there is no pair.

    preferred_BB  1 where the row of the first axis is more relevant than the other, for the same query
    """
    apart_B = (student_B1.float() - teacher_B1.float()).view(-1)
    pairs_BB = preferred_BB.to(apart_B.dtype)
    # the difference of two margins is the margin of the differences
    return (torch.square(apart_B[:, None] - apart_B) * pairs_BB).sum() / pairs_BB.sum().clamp_min(1)
