"""Agarwal et al. 2024, "On-Policy Distillation of Language Models", arXiv:2306.13649
(GKD).

Eq. 1    divergence  generalised Jensen-Shannon divergence of the next-token
                     distributions; 0 < beta < 1
         (ends)      beta 0: forward KL, which is `distilbert.masked_soft_targets`
                     without T^2; beta 1: reverse KL, which is `minillm.reverse_kl`
Alg. 1   OnPolicy    with probability lambda a batch consists of the student's own
                     continuations

Shapes: B examples, L tokens, V vocabulary.

Deviations:
- the ends are the paper's KL divergences, and there JSD is not continuous: JSD(beta) ->
  0 as beta -> 0 or 1, divided by beta (or 1 - beta) it tends to KL. The authors have no
  code; TRL, by one of them, special-cases the ends alike.
- no T^2: TRL has none; paper and TRL keep T = 1 for the loss, and TRL's temperature of
  0.9 is that of the sampling.
- only sampled tokens count, up to and including the end token; the mean is over them,
  as in TRL.
- the student's dropout is off, when it samples and when it learns, as in TRL: it stays
  in eval mode.
- lambda decides per batch, as in Alg. 1 and TRL; a teacher's own sampled texts
  (supervised KD) are the rows themselves.
"""

import math
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.data.masking import Words
from compress.errors import ObjectiveError
from compress.papers.hinton import kl_of_logs, mean_over
from compress.training.generation import sample_continuations
from compress.training.objective import Objective
from compress.training.reads import Fraction, Temperature, reads
from compress.training.step import Distillation, WrappedStep


@reads("logits", per="label", mask="labels")
def divergence(
    student_BLV: Tensor,
    teacher_BLV: Tensor,
    mask_BL: Tensor,
    *,
    beta: Fraction = 0.5,
    temperature: Temperature = 1.0,
) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q, of
    teacher p and student q at T.

    Mean over the labelled positions. beta 0: KL(p || q); beta 1: KL(q || p).
    """
    log_p_BLV = (teacher_BLV.float() / temperature).log_softmax(-1)
    log_q_BLV = (student_BLV.float() / temperature).log_softmax(-1)
    if beta == 0:
        values_BL = kl_of_logs(log_p_BLV, log_q_BLV)
    elif beta == 1:
        values_BL = kl_of_logs(log_q_BLV, log_p_BLV)
    else:
        log_m_BLV = torch.logaddexp(
            log_p_BLV + math.log(beta), log_q_BLV + math.log(1 - beta)
        )
        values_BL = beta * kl_of_logs(log_p_BLV, log_m_BLV)
        values_BL = values_BL + (1 - beta) * kl_of_logs(log_q_BLV, log_m_BLV)
    return mean_over(values_BL, mask_BL)


class OnPolicy(WrappedStep):
    """Alg. 1: with probability `share` the objective is minimised over the student's
    own continuations of the prompts.

    share        lambda, the probability that a batch is sampled from the student
    temperature  of the sampling; the objective's terms have their own
    prompt       length of the prompt, in rows without one (see
                 `generation.sample_continuations`)
    new_tokens   the most tokens that are sampled

    No gradient flows through the sampling. The number of sampled tokens is not known in
    advance, so sampled parts of a batch that is accumulated, or split over processes,
    have the same weight. For causal models and encoder-decoders. Raises ObjectiveError
    without an objective, or without a model as teacher."""

    dropout = False

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: nn.Module | None,
        objective: Objective | None,
        *,
        words: Words,
        share: Fraction = 0.5,
        temperature: Temperature = 0.9,
        prompt: PositiveInt = 32,
        new_tokens: PositiveInt = 128,
    ) -> None:
        super().__init__()
        if objective is None or not isinstance(teacher, nn.Module):
            raise ObjectiveError(
                "gkd.OnPolicy needs an `objective` for the sampled texts, such as "
                "{loss: gkd.divergence}, and a teacher that can read them, whose "
                "outputs are not cached (cache_teacher: false)"
            )
        self.distillation = Distillation(student, teacher, objective)
        self.share = share
        self.pad = words.pad
        self.temperature = temperature
        self.prompt = prompt
        self.new_tokens = new_tokens

    def forward(self, **batch: Any) -> dict[str, Tensor]:
        if torch.rand(()).item() < self.share:
            # without `items`, which counts the batch's own tokens, not the sampled ones
            batch = sample_continuations(
                self.student,
                batch,
                prompt=self.prompt,
                new_tokens=self.new_tokens,
                pad=self.pad,
                temperature=self.temperature,
            )
        return self.distillation(**batch)
