"""Gao, Dai & Callan 2021, "Rethink Training of BERT Rerankers in Multi-Stage Retrieval
Pipeline", arXiv:2101.08751.

LCE  relevance  localized contrastive estimation: -log of the relevant passage's share
                among the passages of its query

Shapes: B pairs of a query and a passage, rows of a batch.

Deviations: the paper's groups have one relevant passage each. Here, several are
weighted in proportion to their relevance; queries without a relevant passage add 0."""

from torch import Tensor

from compress.papers.listnet import log_chances, mean_over_queries
from compress.training.reads import reads


@reads("logits", against="labels", per="query", mask="queries")
def relevance(student_B1: Tensor, labels: Tensor, same_BB: Tensor) -> Tensor:
    """-log softmax over a query's passages, at the relevant ones, mean over queries.

    same_BB  1 where two rows are of the same query
    """
    gains_BB = labels.float().view(-1).clamp_min(0) * same_BB
    wanted_BB = gains_BB / gains_BB.sum(-1, keepdim=True).clamp_min(1e-12)
    return mean_over_queries(
        -(wanted_BB * log_chances(student_B1, same_BB)).sum(-1), same_BB
    )
