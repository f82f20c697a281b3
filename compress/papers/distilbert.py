"""Sanh et al. 2019, "DistilBERT, a distilled version of BERT", arXiv:1910.01108.

Sec. 2  L = 5 L_ce + 2 L_mlm + 1 L_cos; the paper names the three, the weights are the authors' README's
        soft_targets         L_ce over every real token, T = 2
        masked_soft_targets  L_ce over the masked positions only (their --restrict_ce_to_mask)
        bert.masked_lm       L_mlm
        cosine               L_cos of the last hidden states

Shapes: B examples, L tokens, D hidden, V vocabulary.

Deviations: none; T^2 KL divided by the number of selected tokens, as `batchmean` over [tokens, V] does.
"""

from torch import Tensor
from torch.nn.functional import cosine_similarity

from compress.papers.hinton import kl_divergence, mean_over
from compress.papers.reading import reads


@reads("logits", per="token")
def soft_targets(student_BLV: Tensor, teacher_BLV: Tensor, mask_BL: Tensor, *, temperature: float = 2.0) -> Tensor:
    """L_ce: T^2 KL(softmax(z_T / T) || softmax(z_S / T)), mean over the real tokens."""
    return mean_over(kl_divergence(student_BLV, teacher_BLV, temperature), mask_BL)


@reads("logits", per="label", mask="labels")
def masked_soft_targets(
    student_BLV: Tensor, teacher_BLV: Tensor, mask_BL: Tensor, *, temperature: float = 2.0
) -> Tensor:
    """L_ce restricted to the masked positions; here `mask_BL` marks those."""
    return mean_over(kl_divergence(student_BLV, teacher_BLV, temperature), mask_BL)


@reads("layers", per="token")
def cosine(student_BLD: Tensor, teacher_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """L_cos: 1 - cos(h_S, h_T), mean over the real tokens. The paper compares the last layer: `layers: last`."""
    return mean_over(1 - cosine_similarity(student_BLD.float(), teacher_BLD.float(), dim=-1), mask_BL)
