"""Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers", arXiv:1810.04805.

Sec. 3.1  masked_lm      cross entropy at the masked positions
Sec. 3.1  next_sentence  cross entropy of the two-class pooled output
Sec. 4    labels         the fine-tuning loss of the task

Shapes: B examples, L tokens, V classes or vocabulary.

Deviations: none in the formulas. The official code divides masked_lm by (count + 1e-5); we divide by the count, and
return 0 where nothing is masked.
"""

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from compress.papers.reading import reads

IGNORED = -100
"""The label of a position that is not predicted (the convention of transformers and torch)."""


@reads("logits", against="labels", per="label")
def masked_lm(student_BLV: Tensor, labels_BL: Tensor, mask_BL: Tensor | None) -> Tensor:
    """-log softmax(z)[label], mean over the positions whose label is not -100."""
    flat = student_BLV.float().flatten(0, -2)
    total = cross_entropy(flat, labels_BL.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (labels_BL != IGNORED).sum().clamp_min(1)


@reads("logits", against="labels", per="example")
def next_sentence(student_B2: Tensor, labels_B: Tensor, mask_BL: Tensor | None) -> Tensor:
    """-log softmax(z)[label], mean over examples; 0: B follows A, 1: B is random."""
    return cross_entropy(student_B2.float(), labels_B)


@reads("logits", against="labels", per="example")
def labels(student_BV: Tensor, labels: Tensor, mask_BL: Tensor | None) -> Tensor:
    """The task's own loss, mean over examples; what the task is shows in the labels.

    class ids (B,), integer        cross entropy over V classes
    numbers (B,) or (B, 1)         squared error of the one output
    memberships (B, V), floating   binary cross entropy, mean over V
    """
    if not labels.is_floating_point():
        return cross_entropy(student_BV.float(), labels)
    if student_BV.shape[-1] == 1:
        return mse_loss(student_BV.float(), labels.float().view_as(student_BV))
    return binary_cross_entropy_with_logits(student_BV.float(), labels.float())
