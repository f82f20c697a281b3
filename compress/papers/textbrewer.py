"""Yang et al. 2020, "TextBrewer: An Open-Source Knowledge Distillation Toolkit",
arXiv:2002.12620.

Two losses that it takes over from vision, on relations within a layer rather than on
its vectors.

Huang & Wang 2017, arXiv:1707.01219, Sec. 3.3   token_grams
        how alike the tokens are to each other, H H^T / D
Yim et al. 2017, CVPR, Eq. 1-2                  feature_grams
        how features go together over the tokens, H^T H / L

Shapes: B examples, L tokens, D hidden.

Deviations
- Both papers compare products of two layers (feature_grams: the flow from one to the
  next); TextBrewer takes any two, here both are the same layer, so that a term's layer
  map is enough. With the same layer twice its values are ours.
- Huang & Wang normalise each neuron's map over the positions and train on a maximum
  mean discrepancy, of which the squared difference of these products is the part that
  depends on the student; TextBrewer and ours leave both out.
- Means run over pairs of real tokens (token_grams) and over examples (feature_grams),
  as in TextBrewer with a mask.

Its attention cross entropy is `mobilebert.attention`, but for the student's mass on
padding, which it counts."""

from torch import Tensor

from compress.training.float32 import multiply
from compress.training.reads import reads


@reads("layers", per="pair", bridges=("width",))
def token_grams(student_BLD: Tensor, teacher_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """MSE(H^S H^S^T / D_S, H^T H^T^T / D_T) over pairs of real tokens. Any two widths;
    nothing is projected."""
    difference_BLL = _token_gram(student_BLD, mask_BL) - _token_gram(
        teacher_BLD, mask_BL
    )
    return difference_BLL.pow(2).sum() / mask_BL.sum(-1).float().pow(2).sum().clamp_min(
        1
    )


@reads("layers", per="example")
def feature_grams(student_BLD: Tensor, teacher_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """MSE(H^S^T H^S / L, H^T^T H^T / L) over pairs of features, mean over examples; L
    counts real tokens."""
    return (
        (_feature_gram(student_BLD, mask_BL) - _feature_gram(teacher_BLD, mask_BL))
        .pow(2)
        .mean()
    )


def _real(hidden_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    return hidden_BLD.float().masked_fill(~mask_BL[..., None].bool(), 0.0)


def _token_gram(hidden_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    real_BLD = _real(hidden_BLD, mask_BL)
    return multiply(real_BLD, real_BLD.mT) / real_BLD.shape[-1]


def _feature_gram(hidden_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    real_BLD = _real(hidden_BLD, mask_BL)
    lengths_B = mask_BL.sum(-1).float().clamp_min(1)
    return multiply(real_BLD.mT, real_BLD) / lengths_B[:, None, None]
