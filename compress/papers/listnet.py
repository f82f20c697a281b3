"""Cao et al. 2007, "Learning to Rank: From Pairwise Approach to Listwise Approach",
ICML, ListNet.

top one probability  P(j) = exp(s_j) / sum over k of exp(s_k): the chance of passage j
                     to be the first
listwise loss        top_one    the cross entropy of these chances by a teacher's scores
                                and by the student's
                     relevance  the same, with the relevance in the data in place of the
                                teacher's scores

Shapes: B pairs of a query and a passage, rows of a batch.

Deviations: top_one subtracts the entropy of the teacher's chances, so that it is
KL(teacher || student) and ends at 0; its gradient is the paper's. The temperature is
Hinton's (arXiv:1503.02531, Sec. 2), with T^2 as there; the paper has none. A list
consists of the passages of a query in the batch."""

import torch
from torch import Tensor

from compress.training.reads import Temperature, reads


def log_chances(scores: Tensor, same_BB: Tensor, temperature: float = 1.0) -> Tensor:
    """log P of each passage of a row's query, (B, B); 0 at passages of other queries,
    whose P is 0."""
    scores_BB = (scores.float().view(-1) / temperature).expand_as(same_BB)
    return (
        scores_BB.masked_fill(~same_BB.bool(), -torch.inf)
        .log_softmax(-1)
        .masked_fill(~same_BB.bool(), 0)
    )


def mean_over_queries(values_B: Tensor, same_BB: Tensor) -> Tensor:
    """Average a value that is the same at all rows of a query: each query counts
    once."""
    weights_B = 1 / same_BB.sum(-1).to(values_B.dtype)
    return (values_B * weights_B).sum() / weights_B.sum()


@reads("logits", per="query", mask="queries")
def top_one(
    student_B1: Tensor,
    teacher_B1: Tensor,
    same_BB: Tensor,
    *,
    temperature: Temperature = 1.0,
) -> Tensor:
    """T^2 KL(teacher || student) of the chances to be first among a query's passages,
    mean over queries.

    same_BB  1 where two rows are of the same query
    """
    log_p_BB = log_chances(teacher_B1, same_BB, temperature)
    log_q_BB = log_chances(student_B1, same_BB, temperature)
    kl_B = (log_p_BB.exp() * same_BB * (log_p_BB - log_q_BB)).sum(-1)
    return temperature**2 * mean_over_queries(kl_B, same_BB)


@reads("logits", against="labels", per="query", mask="queries")
def relevance(student_B1: Tensor, labels: Tensor, same_BB: Tensor) -> Tensor:
    """Cross entropy of the chances by the data's relevance and the student's chances,
    mean over queries."""
    p_BB = log_chances(labels, same_BB).exp() * same_BB
    return mean_over_queries(
        -(p_BB * log_chances(student_B1, same_BB)).sum(-1), same_BB
    )
