"""From likelihoods of answers to probabilities of labels.

Brown et al. 2020, "Language Models are Few-Shot Learners", arXiv:2005.14165, Sec. 2.4: likelihood of an answer per
token, or divided by its likelihood after a context that asks nothing, P(answer | prompt) / P(answer | "Answer:").
Zhao et al. 2021, "Calibrate Before Use", arXiv:2102.09690, Sec. 5: q = softmax(W p), W = diag(p_cf)^-1, where p_cf are
the label probabilities for texts without content, averaged over several and normalised.

Everything is in logarithms, float64. Shapes: N rows, A answers, C labels, M texts without content.

Deviations: the paper's softmax of W p is replaced by dividing W p by its sum: the order of the labels is the same, and
p_cf uniform then leaves p as it is, where softmax would flatten it (the authors' code takes the argmax only, so
neither shows in their scores). Several answers for one label count with their mean; the authors' code sums them, which
favours the label with more words.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax, logsumexp

Array = NDArray[np.float64]


def normalised(
    log_p_NA: Array,
    tokens_NA: NDArray[np.int64],
    how: Literal["length", "none", "unconditional"],
    unconditional_A: Array | None = None,
) -> Array:
    """Scores (N, A) that compare answers of different length; `unconditional_A`: log P(answer | a context like
    "Answer:"), for `how` of that name.
    """
    if how == "length":
        return log_p_NA / tokens_NA
    if how == "none":
        return log_p_NA
    assert unconditional_A is not None
    return log_p_NA - unconditional_A


def by_label(scores_NA: Array, owners: Sequence[int]) -> Array:
    """(N, C): the logarithm of the mean of exp(score) over each label's answers. `owners`: the label of each answer."""
    groups = [np.flatnonzero(np.asarray(owners) == label) for label in range(max(owners) + 1)]
    return np.stack([logsumexp(scores_NA[:, group], axis=1) - np.log(len(group)) for group in groups], axis=1)


def content_free(scores_MC: Array) -> Array:
    """log p_cf (C,): probabilities averaged over the M texts without content, then normalised over the labels."""
    mean_C: Array = logsumexp(scores_MC, axis=0)
    return np.asarray(log_softmax(mean_C))


def calibrated(scores_NC: Array, log_p_cf_C: Array | None) -> Array:
    """log q (N, C), q proportional to p / p_cf; None: q = p."""
    return np.asarray(log_softmax(scores_NC if log_p_cf_C is None else scores_NC - log_p_cf_C, axis=1))
