"""Sun et al. 2020, "MobileBERT: a Compact Task-Agnostic BERT for Resource-Limited
Devices", arXiv:2004.02984.

Sec. 3.6  feature_maps      feature map transfer: MSE of the block outputs, normalised
          attention         attention transfer: cross entropy of the attention
                            distributions
          masked_lm         the distillation part of pre-training distillation, L_PD = a
                            L_MLM + (1 - a) L_KD + L_NSP; bert.masked_lm and
                            bert.next_sentence are the others
          WithoutDropout    the student of that stage has no dropout (authors' code)
(theirs)  mean, variance    the two moments to which `feature_maps` is invariant, in the
                            authors' code only
Sec. 3.7  Progressive       progressive knowledge transfer: one layer at a time, bottom
                            to top
          from_teacher      embeddings, pooler and heads are the teacher's
(ours)    from_bert         a student of an ordinary BERT, which has no 512-wide feature
                            maps

The teacher is `compress.models.ibbert`; the student is transformers' MobileBERT.
Shapes: B examples, L tokens, D hidden, H heads, V vocabulary.

Deviations from the authors' code (mobilebert/run_pretraining.py, distill_util.py,
lamb_optimizer.py):
- padding is neither query nor key, nor token of a feature map; theirs counts it as
  queries and as tokens.
- `variance` and `mean` compare a layer with the same layer; theirs compares it with all
  layers of the teacher at once, so that a student equal to its teacher has a loss above
  0. As there, means have a squared and variances an absolute error.
- `masked_lm` is one of the two halves of their label q = a onehot + (1 - a)
  softmax(z_T): cross entropy is linear in q, so `bert.masked_lm` with weight a and
  `masked_lm` with 1 - a are their loss. The denominators lack their 1e-5.
- the layer-wise factors multiply the rate of any optimiser; theirs only that of LAMB,
  which the recipes use.
- a layer's base factor ends at 0.9; theirs falls to 0 in its last step (see
  `base_factor`), in which it also resets LAMB's moments of all layers: here the layers
  below keep theirs.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import sqrt
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import layer_norm
from transformers import PreTrainedModel

from compress.config.term import LAYERED
from compress.errors import ObjectiveError
from compress.models.to_mobilebert import (
    from_bert,  # noqa: F401 recipes call them mobilebert.from_...
    from_teacher,  # noqa: F401 recipes call them mobilebert.from_...
)
from compress.papers.hinton import log_attention, mean_over, seen_pairs
from compress.training.objective import Objective
from compress.training.reads import reads
from compress.training.step import Distillation, WrappedStep

EPSILON = 1e-12
"""The epsilon of the parameter-free normalisation, as in the authors' layer norm."""


@reads("layers", per="token")
def feature_maps(student_BLD: Tensor, teacher_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """Feature map transfer: MSE(LN(h^S), LN(h^T)) over real tokens; LN has no
    parameters (gamma 1, beta 0)."""
    D = teacher_BLD.shape[-1:]
    student_BLD = layer_norm(student_BLD.float(), D, eps=EPSILON)
    teacher_BLD = layer_norm(teacher_BLD.float(), D, eps=EPSILON)
    return mean_over((student_BLD - teacher_BLD).pow(2).mean(-1), mask_BL)


@reads("scores", per="token", windows=True)
def attention(student_BHLL: Tensor, teacher_BHLL: Tensor, mask: Tensor) -> Tensor:
    """Attention transfer: -sum_k a^T_k log a^S_k, mean over heads and real queries;
    keys are real ones.

    Its minimum is the teacher's entropy, not 0. Needs equal head counts.
    """
    seen_BLL, real_BL = seen_pairs(mask)
    p_BHLL = log_attention(teacher_BHLL, seen_BLL).exp()
    log_q_BHLL = log_attention(student_BHLL, seen_BLL)
    return mean_over(-(p_BHLL * log_q_BHLL).sum(-1).mean(1), real_BL)


@reads("layers", per="token")
def mean(student_BLD: Tensor, teacher_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """(mean_D h^S - mean_D h^T)^2 over real tokens; weight 5,000 in the authors'
    code."""
    return mean_over(
        (student_BLD.float().mean(-1) - teacher_BLD.float().mean(-1)).pow(2), mask_BL
    )


@reads("layers", per="token")
def variance(student_BLD: Tensor, teacher_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """|var_D h^S - var_D h^T| over real tokens; weight 5 in the authors' code."""
    student_BL = student_BLD.float().var(-1, unbiased=False)
    teacher_BL = teacher_BLD.float().var(-1, unbiased=False)
    return mean_over((student_BL - teacher_BL).abs(), mask_BL)


@reads("logits", per="label", mask="labels")
def masked_lm(student_BLV: Tensor, teacher_BLV: Tensor, mask_BL: Tensor) -> Tensor:
    """L_KD: -sum_v p^T_v log p^S_v, mean over the masked positions, which are marked by
    `mask_BL`."""
    p_BLV = teacher_BLV.float().softmax(-1)
    return mean_over(-(p_BLV * student_BLV.float().log_softmax(-1)).sum(-1), mask_BL)


def active_layer(step: int, total: int, layers: int) -> int:
    """Return the layer (from 0) that is learned in optimiser step `step` (from 0):
    `total` / `layers` steps each."""
    return ((step + 1) * layers - 1) // total


def base_factor(step: int, total: int, layers: int) -> float:
    """Compute min(0.9 + 0.1 sqrt(1 - t), 10 t), t in (0, 1] the part of the active
    layer's steps done.

    A warm-up over the first tenth, then 0.9-1. The authors' step s is our step + 1:
    their layer l is active while S l < s <= S (l + 1), but t = (s mod S) / S is 0 at
    the last of these S steps, which trains nothing.
    """
    done = ((step + 1) * layers - active_layer(step, total, layers) * total) / total
    return min(0.9 + 0.1 * sqrt(1 - done), 10 * done)


class Progressive(WrappedStep):
    """Progressive knowledge transfer: in each of N equal parts of the stage, one layer
    learns from the teacher's layer.

    The objective consists of terms on layers; only the terms of the active layer count,
    divided by N; student and teacher run only as far as they are compared. The learning
    rate is multiplied by `active` bg(t) in that layer and by `lower` bg(t) in all
    layers below; layers above are not trained yet, and embeddings, pooler and heads
    never. The student has no dropout. Raises ObjectiveError if a term does not compare
    every layer of the student.
    """

    dropout = False
    in_turn = True

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: PreTrainedModel,
        objective: Objective,
        *,
        active: float = 3.0,
        lower: float = 0.3,
    ) -> None:
        super().__init__()
        if not isinstance(teacher, nn.Module) or objective is None:
            raise ObjectiveError(
                "mobilebert.Progressive needs a teacher and an objective on layers"
            )
        N = len(_layers(student))
        _layers(teacher)
        for name, reading, pairs in zip(
            objective.names, objective.readings, objective.pairs, strict=True
        ):
            if reading.signal not in LAYERED or {m for m, _ in pairs} != set(range(N)):
                raise ObjectiveError(
                    "mobilebert.Progressive trains one layer of the student after the "
                    f"other, so {name} must compare each of them: use losses on "
                    "layers, with `layers: uniform` or explicit pairs"
                )
        self.factor = {"active": active, "lower": lower}
        self.pairs = [list(pairs) for pairs in objective.pairs]
        self.distillation = Distillation(student, teacher, objective)
        self.trained_before = [
            parameter.requires_grad for parameter in student.parameters()
        ]
        student.requires_grad_(False)
        self.layers.requires_grad_(True)
        self.begin(0, N)

    @property
    def layers(self) -> nn.ModuleList:
        return _layers(self.student)

    def begin(self, step: int, total: int) -> None:
        """Activate the layer of this step. Raises ObjectiveError if there are fewer
        steps than layers."""
        if total < len(self.layers):
            raise ObjectiveError(
                f"mobilebert.Progressive: {total} steps cannot teach "
                f"{len(self.layers)} layers in turn"
            )
        self.layer = active_layer(step, total, len(self.layers))
        self.distillation.objective.pairs = [
            [pair for pair in pairs if pair[0] == self.layer] for pairs in self.pairs
        ]

    def forward(self, **batch: Any) -> dict[str, Tensor]:
        depth = 1 + max(
            n for pairs in self.distillation.objective.pairs for _, n in pairs
        )
        with ExitStack() as stack:
            stack.enter_context(_only(self.layers, self.layer + 1))
            stack.enter_context(_only(_layers(self.distillation.teacher), depth))
            parts = self.distillation(**batch)
        return {name: value / len(self.layers) for name, value in parts.items()}

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """Group the parameters: each layer, and the objective's projections if there
        are any."""
        named = {
            f"layer.{n}": list(layer.parameters())
            for n, layer in enumerate(self.layers)
        }
        projections = list(self.distillation.objective.parameters())
        return named | ({"projections": projections} if projections else {})

    def factors(self, step: int, total: int) -> dict[str, float]:
        """Compute each group's multiplier of the learning rate at this step."""
        now = active_layer(step, total, len(self.layers))
        base = base_factor(step, total, len(self.layers))
        active = self.factor["active"] * base
        lower = self.factor["lower"] * base
        factors = dict.fromkeys(self.groups(), active)
        factors |= {f"layer.{n}": lower for n in range(now)}
        return factors | {f"layer.{n}": 0.0 for n in range(now + 1, len(self.layers))}

    def finish(self) -> None:
        """Unfreeze the parameters that were frozen for the transfer, for later
        stages."""
        for parameter, trained in zip(
            self.student.parameters(), self.trained_before, strict=True
        ):
            parameter.requires_grad_(trained)


class WithoutDropout(WrappedStep):
    """Minimise the stage's objective with the student in eval mode: the authors use no
    dropout with a teacher.

    They build the student's graph with `is_training=False` (run_pretraining.py);
    fine-tuning uses dropout again.
    """

    dropout = False

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: nn.Module | None,
        objective: Objective,
    ) -> None:
        super().__init__()
        self.distillation = Distillation(student, teacher, objective)


def _layers(model: Any) -> nn.ModuleList:
    layers = getattr(
        getattr(getattr(model, "base_model", None), "encoder", None), "layer", None
    )
    if not isinstance(layers, nn.ModuleList):
        raise ObjectiveError(
            "mobilebert.Progressive needs models with layers in `encoder.layer`, such "
            f"as mobilebert, ib-bert and bert; {type(model).__name__} has none"
        )
    return layers


@contextmanager
def _only(layers: nn.ModuleList, count: int) -> Iterator[None]:
    """Make the layers from the `count`-th on return their input in this context.

    They are not removed: transformers puts its hooks on the modules that it finds in
    the first forward pass.
    """
    skipped = layers[count:]
    for layer in skipped:
        setattr(layer, "forward", lambda stream_BLD, *_, **__: stream_BLD)  # noqa: B010
    try:
        yield
    finally:
        for layer in skipped:
            delattr(layer, "forward")
