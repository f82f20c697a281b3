"""DPR: Karpukhin et al. 2020, "Dense Passage Retrieval for Open-Domain Question
Answering", EMNLP, arXiv:2004.04906.

Eq. 2, Sec. 3.2    in_batch    -log of the relevant passage's share among the passages
                               of the batch

Shapes: B texts, rows of a batch, which holds queries and passages; D dimensions of a
sentence vector.

Deviations: the paper compares vectors by their dot product, and has an encoder for
queries and another one for passages. Here one encoder makes both, and vectors are
normalised; the temperature of 0.05 is 1 / `scale` of sentence-transformers'
`MultipleNegativesRankingLoss`. The negatives are those of one batch; one that is split
over processes or accumulated (`micro_batch`) uses those of its parts only."""

import torch
from torch import Tensor

from compress.papers.reimers import cosines
from compress.training.reads import Temperature, reads


@reads("logits", against="relevance", per="query", mask="answers", kinds=("embedding",))
def in_batch(
    student_BD: Tensor,
    relevance_B: Tensor,
    answers_BB: Tensor,
    *,
    temperature: Temperature = 0.05,
) -> Tensor:
    """-log softmax(cos(q, p) / T) at a query's relevant passage, over its own passages
    and those of other queries (Eq. 2).

    relevance_B  the relevance of a passage for its own query
    answers_BB   which passages (last axis) are a query's own (1), another query's (0),
                 or left out (-1)

    Mean over queries with a relevant passage; 0 if there is none.
    """
    scores_BB = (cosines(student_BD) / temperature).masked_fill(
        answers_BB < 0, torch.finfo(torch.float32).min
    )
    right_BB = (answers_BB == 1) & (relevance_B > 0)
    shares_BB = scores_BB.log_softmax(-1).masked_fill(~right_BB, 0)
    return -shares_BB.sum() / right_BB.sum().clamp_min(1)
