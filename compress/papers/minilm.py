"""MiniLM v1: Wang et al. 2020, "Deep Self-Attention Distillation", arXiv:2002.10957.
MiniLM v2: Wang et al. 2021, "Multi-Head Self-Attention Relation Distillation",
arXiv:2012.15828.

v1 Eq. 6    attention        KL of the attention distributions of one layer (the last),
                             equal head counts
v1 Eq. 7-8  value_relation   KL of softmax(V V^T / sqrt d_k), equal head counts, any
                             head size
v2 Eq. 3-5  query_relations, key_relations, value_relations
                             KL of softmax(X X^T / sqrt d_r) over A_r relation heads:
                             any width, any head counts

Shapes: B examples, L tokens, H heads, K head size, R relation heads.

Deviations: the authors never published the distillation code. Each sequence is averaged
over its own heads and tokens, then sequences are averaged, as both papers' 1/(A |x|)
says and as the Bloomberg re-implementation does, so long sequences do not outweigh
short ones. Pads are neither keys nor queries in any relation. Where attention is local
(ModernBERT), pairs that do not see each other are in no relation, which is ours."""

import math

from pydantic import PositiveInt
from torch import Tensor

from compress.papers.hinton import kl_of_logs, log_attention, seen_pairs
from compress.training.float32 import multiply
from compress.training.reads import reads


def relation_kl(student_BHLL: Tensor, teacher_BHLL: Tensor, mask: Tensor) -> Tensor:
    """1/(H |x|) sum_{h,t} KL(softmax(teacher)[h,t] || softmax(student)[h,t]) over real
    tokens, mean over examples.

    Where attention is local, the softmax of a token runs over the tokens that it sees.
    """
    seen_BLL, real_BL = seen_pairs(mask)
    real_BL = real_BL.float()
    log_p_BHLL = log_attention(teacher_BHLL, seen_BLL)
    log_q_BHLL = log_attention(student_BHLL, seen_BLL)
    kl_BL = kl_of_logs(log_p_BHLL, log_q_BHLL).mean(1)
    return ((kl_BL * real_BL).sum(-1) / real_BL.sum(-1).clamp_min(1)).mean()


def relation_heads(x_BHLK: Tensor, heads: int) -> Tensor:
    """Concatenate the attention heads and split the width anew: (B, H, L, K) -> (B, R,
    L, H K / R)."""
    B, H, L, K = x_BHLK.shape
    if heads == H:
        return x_BHLK
    return x_BHLK.transpose(1, 2).reshape(B, L, heads, H * K // heads).transpose(1, 2)


def relation(x_BRLK: Tensor) -> Tensor:
    """Compute X X^T / sqrt d_r, before the softmax."""
    return multiply(x_BRLK, x_BRLK.mT) / math.sqrt(x_BRLK.shape[-1])


def _relations(
    student_BHLK: Tensor, teacher_BHLK: Tensor, mask: Tensor, heads: int
) -> Tensor:
    s_BRLK = relation_heads(student_BHLK, heads)
    t_BRLK = relation_heads(teacher_BHLK, heads)
    return relation_kl(relation(s_BRLK), relation(t_BRLK), mask)


@reads("scores", per="example", windows=True)
def attention(student_BHLL: Tensor, teacher_BHLL: Tensor, mask: Tensor) -> Tensor:
    """v1 Eq. 6: 1/(A_h |x|) sum KL(A^T || A^S) of the attention distributions."""
    return relation_kl(student_BHLL, teacher_BHLL, mask)


@reads("values", per="example", bridges=("head_size",), windows=True)
def value_relation(student_BHLK: Tensor, teacher_BHLK: Tensor, mask: Tensor) -> Tensor:
    """v1 Eq. 7-8: KL of the value relations softmax(V V^T / sqrt d_k), head by head."""
    return relation_kl(relation(student_BHLK), relation(teacher_BHLK), mask)


@reads("queries", per="example", bridges=("heads", "head_size"), windows=True)
def query_relations(
    student_BHLK: Tensor, teacher_BHLK: Tensor, mask: Tensor, *, heads: PositiveInt = 48
) -> Tensor:
    """v2 Eq. 3-5: KL of the Q-Q relations over `heads` relation heads (48 for base
    models, Sec. 4.1)."""
    return _relations(student_BHLK, teacher_BHLK, mask, heads)


@reads("keys", per="example", bridges=("heads", "head_size"), windows=True)
def key_relations(
    student_BHLK: Tensor, teacher_BHLK: Tensor, mask: Tensor, *, heads: PositiveInt = 48
) -> Tensor:
    """v2 Eq. 3-5: KL of the K-K relations over `heads` relation heads."""
    return _relations(student_BHLK, teacher_BHLK, mask, heads)


@reads("values", per="example", bridges=("heads", "head_size"), windows=True)
def value_relations(
    student_BHLK: Tensor, teacher_BHLK: Tensor, mask: Tensor, *, heads: PositiveInt = 48
) -> Tensor:
    """v2 Eq. 3-5: KL of the V-V relations over `heads` relation heads."""
    return _relations(student_BHLK, teacher_BHLK, mask, heads)
