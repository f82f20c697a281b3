"""Gu et al. 2024, "MiniLLM: Knowledge Distillation of Large Language Models",
arXiv:2306.08543.

Eq. 1    L = KL(q || p) of whole sequences: student q, teacher p; y is sampled, r_t =
         log p(y_t) / q(y_t)
Eq. 3    reverse_kl       the single-step term, exact over the vocabulary: KL(q(.|y_<t)
                          || p(.|y_<t))
Eq. 4-7  policy_gradient  teacher-mixed sampling with importance weights w_t, the
                          single-step term, and the long term R_{t+1} grad log q(y_t)
                          with the length-normalised return
Alg. 1   PolicyGradient   all of it, PPO's clipping, and language modelling on the
                          corpus (the step's objective)

Shapes: B examples, L tokens, R sampled tokens of all examples in row order, V
vocabulary.

Deviations from the paper:
- one update per sample: their Alg. 1 takes 4 PPO epochs over 256 rollouts. The ratio to
  the sampling policy is then 1 and only its gradient matters; clipping acts on the
  importance weight.
- the student's dropout is off.
Deviations from the authors' code:
- the return starts at t + 1, as Eq. 3 has it; theirs starts at t, which counts the
  single-step term twice.
- the return is not discounted, as the paper's is not; theirs is, by 0.95 a token
  (`gamma`, which no script sets).
- the single-step term is weighted by w_t, as Eq. 7 has it; theirs is not.
- rewards are neither divided by 0.5, which whitening undoes, nor cut at +-100.
- whitening is over the sampled tokens; theirs includes the padding. So does the mean in
  TRL, where padding counts.
- nothing keeps a sample from repeating itself, as in the samples that train theirs:
  `no_repeat_ngram_size`, 6 by default, is read by their evaluation alone
  (evaluate_main.py).
"""

from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel

from compress.data.constants import IGNORE_INDEX
from compress.data.masking import Words
from compress.errors import ObjectiveError
from compress.evaluation.perplexity import logits_at
from compress.models.key_value_cache import with_cache
from compress.papers.hinton import kl_divergence, kl_of_logs, mean_over
from compress.training.generation import sample_continuations
from compress.training.objective import Objective
from compress.training.reads import Fraction, reads
from compress.training.step import Distillation, WrappedStep


@reads("logits", per="label", mask="labels")
def reverse_kl(student_BLV: Tensor, teacher_BLV: Tensor, mask_BL: Tensor) -> Tensor:
    """Eq. 3: KL(q || p) of the next token, student q and teacher p, mean over the
    labelled positions."""
    return mean_over(kl_divergence(teacher_BLV, student_BLV, 1.0), mask_BL)


def later_rewards(
    rewards_BL: Tensor, mask_BL: Tensor, *, normalise: bool = True
) -> Tensor:
    """R_{t+1}: the sum of the rewards after t; normalised, their mean (Eq. 6). 0 at the
    last token.

    `rewards_BL` is 0 where `mask_BL` is; the sampled tokens of a row follow each other.
    """
    mask_BL = mask_BL.to(rewards_BL.dtype)
    sum_BL = rewards_BL.flip(1).cumsum(1).flip(1) - rewards_BL
    count_BL = mask_BL.flip(1).cumsum(1).flip(1) - mask_BL
    return (sum_BL / count_BL.clamp_min(1) if normalise else sum_BL) * mask_BL


def standardise(values_R: Tensor) -> Tensor:
    """Shift and scale to mean 0, variance 1."""
    return (values_R - values_R.mean()) * (values_R.var(correction=0) + 1e-8).rsqrt()


def policy_gradient(
    student_RV: Tensor,
    teacher_RV: Tensor,
    tokens_R: Tensor,
    mask_BL: Tensor,
    *,
    mix: float = 0.2,
    clip: float = 0.2,
    normalise: bool = True,
    whiten: bool = True,
) -> tuple[Tensor, Tensor]:
    """(single-step, long) terms of Eq. 7 for each sampled token, (R,) each, to be
    minimised; float32.

    `tokens_R` were sampled from mix p + (1 - mix) q at the true positions of `mask_BL`,
    in its order. The gradient of the sum over a sequence is, in expectation and with
    mix 0, normalise and whiten off, that of KL(q || p).
    """
    log_q_RV = student_RV.float().log_softmax(-1)
    log_p_RV = teacher_RV.float().log_softmax(-1)
    log_q_R = log_q_RV.gather(1, tokens_R[:, None])[:, 0]
    log_p_R = log_p_RV.gather(1, tokens_R[:, None])[:, 0]
    with torch.no_grad():
        weight_R = log_q_R.exp() / (
            mix * log_p_R.exp() + (1 - mix) * log_q_R.exp()
        ).clamp_min(1e-30)
        rewards_BL = log_q_R.new_zeros(mask_BL.shape).masked_scatter(
            mask_BL.bool(), log_p_R - log_q_R
        )
        advantage_R = later_rewards(rewards_BL, mask_BL, normalise=normalise)[
            mask_BL.bool()
        ]
        if whiten:
            advantage_R = standardise(advantage_R)
    single_R = weight_R * kl_of_logs(log_q_RV, log_p_RV)
    ratio_R = weight_R * (log_q_R - log_q_R.detach()).exp()
    long_R = -torch.minimum(
        advantage_R * ratio_R, advantage_R * ratio_R.clamp(1 - clip, 1 + clip)
    )
    return single_R, long_R


class TeacherMixed(LogitsProcessor):
    """Eq. 4: replace the student's next-token distribution q by mix p + (1 - mix) q,
    with the teacher's p.

    `mask_BL` marks the real tokens of the prompts. The teacher has its own cache, so
    use one instance per generation.
    """

    def __init__(self, teacher: nn.Module, mask_BL: Tensor, mix: float) -> None:
        self.teacher = teacher
        self.mask_BL = mask_BL
        self.mix = mix
        self.cache = DynamicCache()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        seen = self.cache.get_seq_length()
        grown = input_ids.shape[1] - self.mask_BL.shape[1]
        self.mask_BL = torch.cat(
            [self.mask_BL, self.mask_BL.new_ones(len(input_ids), grown)], 1
        )
        position_BL = (self.mask_BL.cumsum(1) - 1).clamp_min(0)
        teacher_BV = self.teacher(
            input_ids=input_ids[:, seen:],
            attention_mask=self.mask_BL,
            position_ids=position_BL[:, seen:],
            **with_cache(self.teacher, self.cache),
        ).logits[:, -1]
        p_BV = teacher_BV.float().softmax(-1)
        q_BV = scores.float().softmax(-1)
        return (self.mix * p_BV + (1 - self.mix) * q_BV).log()


class PolicyGradient(WrappedStep):
    """Alg. 1 for causal models: reverse KL of the student's own continuations, and the
    objective on the batch.

    mix          alpha, the teacher's share in the sampling distribution (Sec. 2.2: 0.2)
    clip         PPO's epsilon
    prompt       length of the prompt, in rows without one (see
                 `generation.sample_continuations`)
    new_tokens   the most tokens that are sampled

    The number of sampled tokens is not known in advance, so the parts of a batch that
    is accumulated, or split over processes, have the same weight. The objective is the
    paper's language-modelling term, such as {loss: bert.masked_lm}. Raises
    ObjectiveError without it, without a model as teacher, or for an encoder-decoder.
    """

    wraps = "corpus"
    dropout = False

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: nn.Module | None,
        objective: Objective | None,
        *,
        words: Words,
        mix: Fraction = 0.2,
        clip: float = 0.2,
        prompt: PositiveInt = 32,
        new_tokens: PositiveInt = 128,
    ) -> None:
        super().__init__()
        if objective is None or not isinstance(teacher, nn.Module):
            raise ObjectiveError(
                "minillm.PolicyGradient needs an `objective` for the corpus, such as "
                "{loss: bert.masked_lm}, and a teacher that can read the sampled "
                "texts, whose outputs are not cached (cache_teacher: false)"
            )
        if student.config.is_encoder_decoder:
            raise ObjectiveError(
                "minillm.PolicyGradient continues texts: it needs causal models; see "
                "gkd.OnPolicy"
            )
        self.corpus = Distillation(student, teacher, objective)
        self.pad = words.pad
        self.mix = mix
        self.clip = clip
        self.prompt = prompt
        self.new_tokens = new_tokens

    def forward(self, **batch: Any) -> dict[str, Tensor]:
        teacher = self.corpus.teacher
        assert isinstance(teacher, nn.Module), "checked when the step was built"
        rows = sample_continuations(
            self.student,
            batch,
            prompt=self.prompt,
            new_tokens=self.new_tokens,
            pad=self.pad,
            processors=lambda mask_BL: (
                [TeacherMixed(teacher, mask_BL, self.mix)] if self.mix else []
            ),
        )
        sampled_BL = rows["labels"] != IGNORE_INDEX
        with torch.no_grad():
            teacher_RV = logits_at(teacher, rows, sampled_BL)
        single_R, long_R = policy_gradient(
            logits_at(self.student, rows, sampled_BL),
            teacher_RV,
            rows["labels"][sampled_BL],
            sampled_BL,
            mix=self.mix,
            clip=self.clip,
        )
        single = single_R.mean()
        long = long_R.mean()
        parts = self.corpus(**batch)
        loss = single + long + parts.pop("loss")
        return {
            "loss": loss,
            "minillm.single": single.detach(),
            "minillm.long": long.detach(),
        } | parts
