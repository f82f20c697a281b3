"""Sun et al. 2019, "Patient Knowledge Distillation for BERT Model Compression",
arXiv:1908.09355.

Eq. 4  soft_targets  KL of the softened class distributions
Eq. 7  patience      squared distance of the normalised [CLS] states of intermediate
                     layers

PKD-Skip compares every k-th teacher layer (`layers: skip`), PKD-Last the last ones but
the final (explicit pairs); the final layer is left out of both, as the logits represent
it (Sec. 3.2).

Shapes: B examples, L tokens, D hidden, V classes.

Deviations:
- from the paper: `patience` is the mean over examples, compared layers and width, as in
  the authors' code (src/KD_loss.py, `F.mse_loss`), whose weights act on that scale; Eq.
  7 sums over all three. A sum over 5 layers of 768 dimensions is 3,840 times as much.
- from the paper: `soft_targets` is T^2 KL, the mean over examples and classes, as in
  the authors' code (`nn.KLDivLoss("mean")`); Eq. 4 is the cross entropy, summed over
  the classes.
- from the authors' code: `patience` is computed in float32; theirs is rounded to
  float16 in the end.
- from the authors' code: states are always normalised, as in Eq. 7; theirs tries both
  and reports the better one.
- from the authors' code: rows are shuffled; theirs come in the order of the file that
  contains the teacher's outputs.
- from the authors' code: AdamW; their Adam (apex's FusedAdam, or BertAdam) does not
  correct its bias.
- from the authors' code: the student is initialised with the first layers of its
  stage's fine-tuned teacher; theirs with those of the pre-trained BERT.
"""

from torch import Tensor
from torch.nn.functional import mse_loss, normalize

from compress.models.padding import first_token
from compress.papers import hinton
from compress.training.reads import Temperature, reads


@reads("logits", per="example")
def soft_targets(
    student_BV: Tensor,
    teacher_BV: Tensor,
    mask_BL: Tensor | None,
    *,
    temperature: Temperature = 1.0,
) -> Tensor:
    """Eq. 4: T^2 KL(softmax(z^T / T) || softmax(z^S / T)) / V, mean over examples."""
    return (
        hinton.soft_targets(student_BV, teacher_BV, mask_BL, temperature=temperature)
        / student_BV.shape[-1]
    )


@reads("layers", per="example", layers="mean")
def patience(
    student_BLD: Tensor, teacher_BLD: Tensor, mask_BL: Tensor | None
) -> Tensor:
    """Eq. 7: || h^S / ||h^S|| - h^T / ||h^T|| ||^2 / D of the first token, mean over
    examples (and layers)."""
    s_BD = normalize(first_token(student_BLD, mask_BL).float(), dim=-1)
    t_BD = normalize(first_token(teacher_BLD, mask_BL).float(), dim=-1)
    return mse_loss(s_BD, t_BD)
