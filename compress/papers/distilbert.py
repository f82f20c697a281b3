"""Sanh et al. 2019, "DistilBERT, a distilled version of BERT", arXiv:1910.01108.

Sec. 2  L = 5 L_ce + 2 L_mlm + 1 L_cos; the paper names the three, the weights are the
        authors' README's
        soft_targets         L_ce over every real token, T = 2
        masked_soft_targets  L_ce over the masked positions only (their
                             --restrict_ce_to_mask)
        bert.masked_lm       L_mlm
        cosine               L_cos of the last hidden states
code    mask                 smoothed masking: rare tokens are predicted more often

Shapes: B examples, L tokens, D hidden, V vocabulary.

Deviations: none in the formulas; T^2 KL divided by the number of selected tokens, as
`batchmean` over [tokens, V] does. mask: if a batch has fewer tokens to predict than
wanted, all of them are predicted; theirs assumes that there are enough. Their rows
leave out those of 11 tokens or fewer, and those that are half unknown tokens; ours do
not."""

import math

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from compress.data.masking import Words
from compress.errors import DataError
from compress.papers.bert import conceal, predictable
from compress.papers.hinton import kl_divergence, mean_over
from compress.tensors import TensorDict, Tensors
from compress.training.reads import Fraction, Temperature, reads


@reads("logits", per="token")
def soft_targets(
    student_BLV: Tensor,
    teacher_BLV: Tensor,
    mask_BL: Tensor,
    *,
    temperature: Temperature = 2.0,
) -> Tensor:
    """L_ce: T^2 KL(softmax(z_T / T) || softmax(z_S / T)), mean over the real tokens."""
    return mean_over(kl_divergence(student_BLV, teacher_BLV, temperature), mask_BL)


@reads("logits", per="label", mask="labels")
def masked_soft_targets(
    student_BLV: Tensor,
    teacher_BLV: Tensor,
    mask_BL: Tensor,
    *,
    temperature: Temperature = 2.0,
) -> Tensor:
    """L_ce restricted to the masked positions; here `mask_BL` marks them."""
    return mean_over(kl_divergence(student_BLV, teacher_BLV, temperature), mask_BL)


@reads("layers", per="token")
def cosine(student_BLD: Tensor, teacher_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """L_cos: 1 - cos(h_S, h_T), mean over the real tokens. The paper compares the last
    layer: `layers: last`."""
    return mean_over(
        1 - cosine_similarity(student_BLD.float(), teacher_BLD.float(), dim=-1), mask_BL
    )


def mask(
    batch: Tensors,
    words: Words,
    *,
    rate: Fraction = 0.15,
    smoothing: float = 0.7,
) -> TensorDict:
    """Mask ceil(`rate` * tokens of the batch) positions, 80/10/10, rare tokens more
    often. Needs words.counts_V.

    Drawn without replacement with weight max(count, 1)^-`smoothing` of their token,
    special tokens never (authors' code, after XLM and word2vec).
    """
    if words.counts_V is None:
        raise DataError(
            "distilbert.mask weighs tokens by how often they occur, but the tokens "
            "were not counted"
        )
    weight_V = words.counts_V.clamp_min(1).double().pow(-smoothing)
    weight_BL = weight_V[batch["input_ids"]] * predictable(batch, words)
    wanted = min(
        math.ceil(rate * int(batch["attention_mask"].sum())), int((weight_BL > 0).sum())
    )
    chosen_BL = torch.zeros_like(weight_BL, dtype=torch.bool)
    if wanted:
        chosen_BL.view(-1)[weight_BL.flatten().multinomial(wanted)] = True
    return conceal(batch, chosen_BL, words)
