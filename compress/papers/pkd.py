"""Sun et al. 2019, "Patient Knowledge Distillation for BERT Model Compression", arXiv:1908.09355.

Eq. 7  patience  squared distance of the normalised [CLS] states of intermediate layers

PKD-Skip compares every k-th teacher layer (`layers: skip`), PKD-Last the last ones but the final (explicit pairs); the
final layer is left out of both, the logits speak for it (Sec. 3.2).

Shapes: B examples, L tokens, D hidden.

Deviations: none. The sum over layers is the objective's; the mean over B is the authors' code, the paper sums.
"""

from torch import Tensor
from torch.nn.functional import normalize

from compress.training.reads import reads


@reads("layers", per="example")
def patience(student_BLD: Tensor, teacher_BLD: Tensor, mask_BL: Tensor | None) -> Tensor:
    """Eq. 7: || h^S / ||h^S|| - h^T / ||h^T|| ||^2 of the first token, mean over examples."""
    s_BD, t_BD = normalize(student_BLD[:, 0].float(), dim=-1), normalize(teacher_BLD[:, 0].float(), dim=-1)
    return (s_BD - t_BD).pow(2).sum(-1).mean()
