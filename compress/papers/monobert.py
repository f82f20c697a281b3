"""Nogueira & Cho 2019, "Passage Re-ranking with BERT", arXiv:1901.04085.

relevance  cross entropy of the probability that a passage is relevant to the query

Shapes: B pairs of a query and a passage.

Deviations: the paper sums over all pairs, here it is their mean. It has two classes;
here one output is the logit of the relevant one, as transformers and
sentence-transformers have a cross-encoder's score. Graded relevance counts as relevant
above 0.
"""

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from compress.training.reads import reads


@reads("logits", against="labels", per="example")
def relevance(student_B1: Tensor, labels: Tensor, mask_BL: Tensor | None) -> Tensor:
    """-log p of the relevant pairs, -log(1 - p) of the others, p = sigmoid(z), mean
    over pairs."""
    relevant_B1 = (labels.view_as(student_B1) > 0).float()
    return binary_cross_entropy_with_logits(student_B1.float(), relevant_B1)
