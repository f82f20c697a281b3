"""InfoNCE: van den Oord, Li & Vinyals 2018, "Representation Learning with Contrastive
Predictive Coding", arXiv:1807.03748. In-batch negatives after Henderson et al. 2017,
"Efficient Natural Language Response Suggestion for Smart Reply", arXiv:1705.00652
(multiple negatives ranking). Negatives that the teacher considers positives are left
out after Solatorio 2024, "GISTEmbed", arXiv:2402.16829.

Eq. 4    infonce    the student's vector of a text must be nearer to the teacher's of
                    that text than of the others

Shapes: B examples, D dimensions of a sentence vector.

Deviations: the papers contrast two views of one model; here the student is contrasted
with the teacher, as in Tian et al. 2020, "Contrastive Representation Distillation",
arXiv:1910.10699, which has a critic of its own and a memory. The temperature of 0.05 is
1 / `scale` of sentence-transformers' `MultipleNegativesRankingLoss`. GISTEmbed leaves
out texts that the guide considers nearer than the positive; the positive here is the
text itself, and nothing is nearer, hence a threshold. `hardest` is ours: the teacher
chooses the negatives out of the batch. The negatives are those of one batch; one that
is split over processes or accumulated (`micro_batch`) uses those of its parts only."""

from typing import Annotated

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from compress.papers.reimers import check_widths, unit
from compress.training.float32 import multiply
from compress.training.reads import Temperature, reads


@reads("logits", per="example", kinds=("embedding",))
def infonce(
    student_BD: Tensor,
    teacher_BD: Tensor,
    *,
    temperature: Temperature = 0.05,
    hardest: PositiveInt | None = None,
    same_above: Annotated[float, Field(gt=-1, le=1)] | None = None,
) -> Tensor:
    """-log softmax(cos(s_i, t_j) / T) at j = i over the texts j of the batch, mean over
    texts i (Eq. 4).

    hardest     number of negatives of each text, the nearest according to the teacher;
                by default all
    same_above  texts whose teacher's vectors have a cosine above this mean the same and
                are not negatives
    """
    check_widths(student_BD, teacher_BD, "oord.infonce")
    student_BD = unit(student_BD)
    teacher_BD = unit(teacher_BD)
    scores_BB = multiply(student_BD, teacher_BD.T) / temperature
    B = len(scores_BB)
    own_BB = torch.eye(B, dtype=torch.bool, device=scores_BB.device)
    seen_BB = multiply(teacher_BD, teacher_BD.T).masked_fill(own_BB, -torch.inf)
    left_out_BB = (
        torch.zeros_like(own_BB) if same_above is None else seen_BB > same_above
    )
    if hardest is not None and hardest < B - 1:
        chosen_BK = (
            seen_BB.masked_fill(left_out_BB, -torch.inf).topk(hardest, -1).indices
        )
        left_out_BB = left_out_BB | torch.ones_like(own_BB).scatter(
            -1, chosen_BK, False
        )
    scores_BB = scores_BB.masked_fill(left_out_BB & ~own_BB, -torch.inf)
    return -scores_BB.log_softmax(-1).diagonal().mean()
