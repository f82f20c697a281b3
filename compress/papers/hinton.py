"""Hinton, Vinyals & Dean 2015, "Distilling the Knowledge in a Neural Network",
arXiv:1503.02531.

Sec. 2    soft_targets  T^2 KL of the softened class distributions
(theirs)  soft_labels   the same for independent labels: a Bernoulli per class
Sec. 2.1  matched_logits  1/2 (z_S - z_T)^2, the high-temperature limit; the
                          distillation of a regression

Shapes: B examples, L tokens, V classes. For token logits (B, L, V) see
`distilbert.soft_targets`.

Deviations: soft_labels is ours; the paper has no multi-label task, its Bernoulli case
is the two-class softmax. Other implementations scale differently: TextBrewer has no
T^2, TinyBERT also averages over the classes (`tinybert.prediction`)."""

from torch import Tensor
from torch.nn.functional import logsigmoid

from compress.training.reads import Temperature, reads


def mean_over(values: Tensor, mask_BL: Tensor | None) -> Tensor:
    """Average over B if `values` is (B,), or over real tokens if it is (B, L). 0 if no
    token is real."""
    if values.dim() == 1 or mask_BL is None:
        return values.mean()
    real_BL = mask_BL.to(values.dtype)
    return (values * real_BL).sum() / real_BL.sum().clamp_min(1)


def seen_pairs(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Split a mask of tokens or of pairs into the tokens that each token sees, (B, 1 or
    L, L), and the real tokens, (B, L)."""
    if mask.dim() == 2:
        return mask[:, None, :].bool(), mask
    # in a window each token sees itself
    return mask.bool(), mask.diagonal(dim1=1, dim2=2)


def log_attention(scores_BHLL: Tensor, seen_BLL: Tensor) -> Tensor:
    """log softmax of the scores over the tokens (last axis) that each token sees, in
    float32."""
    unseen_B1LL = ~seen_BLL[:, None]
    return scores_BHLL.float().masked_fill(unseen_B1LL, -1e9).log_softmax(-1)


def kl_divergence(student_BV: Tensor, teacher_BV: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax(z_T / T) || softmax(z_S / T)) over the last axis, one value per
    row."""
    log_p_BV = (teacher_BV.float() / temperature).log_softmax(-1)
    log_q_BV = (student_BV.float() / temperature).log_softmax(-1)
    return temperature**2 * kl_of_logs(log_p_BV, log_q_BV)


def kl_of_logs(log_p_BV: Tensor, log_q_BV: Tensor) -> Tensor:
    """Compute KL(p || q) over the last axis; p = 0, whose log is -inf, adds nothing."""
    finite_BV = log_p_BV.clamp_min(-1e9)
    return (finite_BV.exp() * (finite_BV - log_q_BV)).sum(-1)


def bernoulli_kl(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KL(Bernoulli(sigmoid(z_T / T)) || Bernoulli(sigmoid(z_S / T))) of each logit."""
    t = teacher.float() / temperature
    s = student.float() / temperature
    p = t.sigmoid()
    return p * (logsigmoid(t) - logsigmoid(s)) + (1 - p) * (
        logsigmoid(-t) - logsigmoid(-s)
    )


@reads("logits", per="example")
def soft_targets(
    student_BV: Tensor,
    teacher_BV: Tensor,
    mask_BL: Tensor | None,
    *,
    temperature: Temperature = 1.0,
) -> Tensor:
    """T^2 KL(softmax(z_T / T) || softmax(z_S / T)), mean over examples (Sec. 2: T^2
    keeps gradients of one size)."""
    return mean_over(kl_divergence(student_BV, teacher_BV, temperature), mask_BL)


@reads("logits", per="example")
def soft_labels(
    student_BV: Tensor,
    teacher_BV: Tensor,
    mask_BL: Tensor | None,
    *,
    temperature: Temperature = 1.0,
) -> Tensor:
    """T^2 sum over classes of KL(Bernoulli(sigmoid(z_T / T)) || Bernoulli(sigmoid(z_S /
    T))), mean over examples."""
    kl_BV = bernoulli_kl(student_BV, teacher_BV, temperature)
    return temperature**2 * mean_over(kl_BV.sum(-1), mask_BL)


@reads("logits", per="example")
def matched_logits(
    student_BV: Tensor, teacher_BV: Tensor, mask_BL: Tensor | None
) -> Tensor:
    """1/2 (z_S - z_T)^2 summed over the logits (Sec. 2.1), mean over examples."""
    return 0.5 * mean_over(
        (student_BV.float() - teacher_BV.float()).pow(2).sum(-1), mask_BL
    )
