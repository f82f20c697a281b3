"""Xia, Zhong & Chen 2022, "Structured Pruning Learns Compact and Accurate Models"
(CoFi), arXiv:2204.00408. Xia, Gao, Zeng & Chen 2023, "Sheared LLaMA", arXiv:2310.06694,
for `sizes`.

CoFi, Sec. 3.1          Gated     masks z of layers, heads, neurons and the stream, held
                                  to their target by a Lagrangian (`wang`), with hard
                                  concrete noise (`louizos`)
CoFi, Sec. 3.2, Eq. 4   layers    sum over teacher layers of MSE(W H_S^m(i), H_T^i)
CoFi, Sec. 3.2, Eq. 5   matched   m(i): the nearest layer that is not pruned yet
Sheared LLaMA, Sec. 2.1 Gated     one constraint per mask, so that every layer keeps the
                                  same number of units

The soft targets of the unpruned teacher (CoFi, Eq. 3) are terms of the stage's
objective.

Shapes: B examples, L tokens, D hidden, N the student's layers, T the teacher's layers
that are matched.

Deviations:
- from CoFi: one target size per axis instead of a sparsity of the whole (Eq. 2): every
  layer keeps the same number of units, so that the result is a plain transformers
  model. Masks of whole blocks (z_MHA, z_FFN) are therefore left out. Rows within heads
  are gated if heads shrink, which stock encoders need; these gates begin open.
- from CoFi: m(i) skips layers whose single gate is closed. Eq. 5 looks at z_FFN; the
  authors' code at z_MHA if it is `ordered` (version 4; it looks gates up in the order
  of the distances, so that they belong to other layers), and at no gate if it is not
  (version 3).
- from CoFi's code: the final sizes are exact: the units with the highest P(z > 0) stay,
  as many as `sizes` says; theirs rounds each mask's expected number of zeros. If the
  gates are far from their target at the end, `finish` says so.
- from CoFi's code: evaluations during training score the student as if training ended
  there. As in theirs, no weights are kept before the target is reached.
- from CoFi's code: a gate without noise is Louizos et al.'s Eq. 13; theirs is
  sigmoid(0.8 log alpha / beta), unstretched.
- from CoFi's code: the stream's gate is applied to what is written to the stream;
  theirs also to the output of each norm, which cannot be multiplied into the weights.
- from CoFi's code: means run over real tokens; theirs also over padding. W has no bias;
  theirs has one.
- from CoFi's code: in a stage of few steps the gates learn faster than at the constant
  `gate_rate`, so that they can reach their target (see `Gated.rates`).
- from CoFi's code: gradients are clipped together; theirs clips those of the model
  alone. Theirs starts a new optimiser and schedule when the masks begin.
- from Sheared LLaMA: its gate on a layer scales what the layer writes. After a norm
  that cannot be absorbed: here it interpolates between the layer's input and its
  output.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.config.reference import OptionGroup
from compress.errors import ObjectiveError
from compress.models.signals import Signals
from compress.papers.hinton import mean_over
from compress.papers.wang import Multipliers, wanted
from compress.pruning.l0 import Gates, TargetSizes, fold
from compress.slicing.cut import slice_model
from compress.slicing.plan import HIDDEN, SlicePlan
from compress.slicing.shape import Shape
from compress.tensors import TensorDict, Tensors
from compress.training.objective import Objective, weigh_part
from compress.training.step import Distillation, WrappedStep

LOG_ALPHA_LIMIT = math.log(100)
"""log alpha stays within +-LOG_ALPHA_LIMIT (authors' code), so that every gate can open
and close again."""
CROSSINGS = 4
"""Times that log alpha can cross its range in a stage. Measured in 600 steps
(docs/LOG.md): the stream's gates reach their target at the end with 2, halfway with
4."""
NEAR_TARGET = 0.1
"""The gates have reached their target if they miss it by at most this share of the
units to be cut."""
_FROZEN = ("words", "positions", "types", "tasks")


def distances(
    student_NBLD: Sequence[Tensor],
    teacher_TBLD: Sequence[Tensor],
    mask_BL: Tensor,
) -> Tensor:
    """(T, N): MSE of every student layer, W applied, and every teacher layer, over real
    tokens."""
    rows = [
        torch.stack(
            [
                mean_over((s_BLD.float() - t_BLD.float()).square().mean(-1), mask_BL)
                for s_BLD in student_NBLD
            ]
        )
        for t_BLD in teacher_TBLD
    ]
    return torch.stack(rows)


def matched(
    distance_TN: Tensor,
    alive_N: Tensor,
    *,
    ordered: bool = False,
) -> list[int]:
    """Find for each teacher layer the nearest student layer that is alive (Eq. 5), or
    the last if none is.

    ordered: from the top down, each below the previous one, or the same one if none is
    left (authors' code, version 4).
    """
    count = distance_TN.shape[1]
    found = list[int]()
    above = distance_TN.shape[1]
    for distance_N in distance_TN.detach().cpu().flip(0):
        places = [n for n in range(above if ordered else count) if alive_N[n]]
        nearest = min(
            places, key=lambda n: float(distance_N[n]), default=min(above, count - 1)
        )
        found = [nearest, *found]
        above = nearest
    return found


def layers(
    student_NBLD: Sequence[Tensor],
    teacher_TBLD: Sequence[Tensor],
    mask_BL: Tensor,
    alive_N: Tensor,
    *,
    ordered: bool = False,
) -> Tensor:
    """Eq. 4: sum over i of MSE(W H_S^m(i), H_T^i), m by `matched`. The caller has
    applied W."""
    distance_TN = distances(student_NBLD, teacher_TBLD, mask_BL)
    return distance_TN[
        torch.arange(len(distance_TN)),
        matched(distance_TN, alive_N.cpu(), ordered=ordered),
    ].sum()


@dataclass(frozen=True, kw_only=True)
class MatchOptions(OptionGroup):
    """Choose how layers of the student are matched with layers of the teacher.

    matched_layers   0-based layers of the teacher; by default four evenly spread ones
                     with the last (2 5 8 11 of 12)
    ordered          see `matched`
    """

    layer_weight: float = 0.9
    matched_layers: Sequence[int] | None = None
    ordered: bool = False


class Matched(Distillation):
    """step(**batch) -> `objective` + layer_weight * L_layer, with layers of the student
    matched dynamically.

    W begins as the identity or, for a student that was cut from its teacher, as the map
    to the dimensions that it kept. Raises ObjectiveError if the teacher has no such
    layers.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: nn.Module | None,
        objective: Objective,
        *,
        match: MatchOptions,
    ) -> None:
        if teacher is None or objective is None:
            raise ObjectiveError(
                "cofi: needs a teacher whose layers are matched, and the terms of its "
                "soft targets"
            )
        objective.student_wants |= {"layers"}
        objective.teacher_wants |= {"layers"}
        super().__init__(student, teacher, objective)
        count = Shape.from_config(teacher.config).layers
        matched_layers = match.matched_layers
        if matched_layers is None:
            matched_layers = sorted({(n + 1) * count // 4 - 1 for n in range(4)} - {-1})
        if not matched_layers or not all(
            0 <= layer < count for layer in matched_layers
        ):
            raise ObjectiveError(
                f"cofi: matched_layers {list(matched_layers)}; the teacher's are 0 to "
                f"{count - 1}"
            )
        self.match = match
        self.matched_layers = list(matched_layers)
        self.W = _map_back(student.config, teacher.config)
        whole_N = torch.ones(Shape.from_config(student.config).layers, dtype=torch.bool)
        self.alive: Callable[[], Tensor] = lambda: whole_N

    def compute_losses(
        self,
        student: Signals,
        teacher: Signals | None,
        batch: Tensors,
        items: Tensors | None,
    ) -> TensorDict:
        assert teacher is not None, "its layers are read"
        parts = super().compute_losses(student, teacher, batch, items)
        layerwise = self.match.layer_weight * layers(
            [self.W(layer_BLD) for layer_BLD in student.layers],
            [teacher.layers[layer] for layer in self.matched_layers],
            student.mask_BL,
            self.alive(),
            ordered=self.match.ordered,
        )
        if items is not None:
            layerwise = weigh_part(
                layerwise, self.items(batch)["token"], items["token"]
            )
        total = parts["total"] + layerwise
        return parts | {"total": total, "cofi.layers": layerwise}


class Gated(WrappedStep):
    """step(**batch) -> `Matched` under learned masks + the Lagrangian that holds them
    to their target.

    sizes       the target, counts or shares below 1: {hidden: 0.75, heads: 6, ...}
    wait, warm  shares of the steps: first without masks, then approaching the target
                linearly
    gate_rate   the least learning rate of gates and multipliers, see `rates`
    drop_rate   the initial guess for neurons (Louizos et al.); all other gates begin
                open (authors' code)

    Embeddings are not trained (authors' code). `finish` replaces `student` by the small
    model. Give the stage `weight_decay: 0`: it would close gates. Raises PruneError if
    the target cannot be reached, ObjectiveError if options contradict each other."""

    wraps = "minimise"

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: nn.Module | None,
        objective: Objective,
        *,
        sizes: Mapping[str, float],
        wait: float = 0.05,
        warm: float = 0.1,
        gate_rate: float = 0.01,
        drop_rate: float = 0.5,
        match: MatchOptions,
    ) -> None:
        super().__init__()
        if not (wait >= 0 and warm >= 0 and wait + warm <= 1 and 0 < drop_rate < 1):
            raise ObjectiveError(
                f"cofi.Gated: wait {wait} and warm {warm} are shares of the steps, "
                f"together at most 1; drop_rate {drop_rate} lies between 0 and 1"
            )
        self.plan = SlicePlan.from_model(student)
        self.target = TargetSizes.from_request(student, self.plan, sizes)
        self.minimise = Matched(student, teacher, objective, match=match)
        gates = Gates(
            self.plan, self.target, begin=math.log(1 - drop_rate) - math.log(drop_rate)
        )
        gates.attach(student)
        # in a list: a submodule of the student, whose best weights are saved with their
        # gates
        self._gates = [gates]
        self.multipliers = Multipliers(len(self.target.excess(gates.active(), 0.0)))
        self.wait = wait
        self.warm = warm
        self.gate_rate = gate_rate
        self.share = 0.0
        self.minimise.alive = self._alive
        cuts = self.plan.cuts
        embeddings = [
            each
            for name, each in student.named_parameters()
            if name in cuts and cuts[name].role in _FROZEN
        ]
        self._frozen = [each for each in embeddings if each.requires_grad]
        for parameter in self._frozen:
            parameter.requires_grad_(False)

    @property
    def gates(self) -> Gates:
        return self._gates[0]

    @property
    def ready(self) -> bool:
        """True if the gates have reached their target: only then the best weights are
        kept (authors' code)."""
        return not self._list_far_axes()

    def begin(self, step: int, total: int) -> None:
        """Set the target of this step."""
        self.gates.waiting = step < self.wait * total
        self.share = wanted(step, self.wait * total, self.warm * total)
        for log_alpha in self.gates.log_alpha.values():
            log_alpha.data.clamp_(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)

    def forward(self, **batch: Any) -> TensorDict:
        parts: TensorDict = self.minimise(**batch)
        excess_C = self.target.excess(self.gates.active(), self.share)
        lagrangian = self.multipliers(excess_C) * (0.0 if self.gates.waiting else 1.0)
        logged = {
            "lagrangian": lagrangian.detach(),
            "excess": excess_C.detach().abs().max(),
        }
        return {**parts, "loss": parts["loss"] + lagrangian, **logged}

    def groups(self) -> dict[str, list[nn.Parameter]]:
        gates = list(self.gates.parameters())
        gate_ids = {id(gate) for gate in gates}
        model = [
            parameter
            for parameter in self.minimise.parameters()
            if id(parameter) not in gate_ids
        ]
        return {
            "model": model,
            "gates": gates,
            "multipliers": list(self.multipliers.parameters()),
        }

    def rates(self, step: int, total: int) -> dict[str, float]:
        """Compute the learning rate of gates and multipliers: 0 until the masks begin,
        then constant.

        That is `gate_rate`, or in a stage of few steps the rate at which log alpha can
        cross its range `CROSSINGS` times: Adam moves it by about its rate in a step.
        """
        waiting = self.wait * total
        rate = (
            max(
                self.gate_rate,
                CROSSINGS * 2 * LOG_ALPHA_LIMIT / max(1.0, total - waiting),
            )
            if step >= waiting
            else 0.0
        )
        return {"gates": rate, "multipliers": rate}

    def finish(self) -> str | None:
        """Cut the student to the target, and multiply the gates of the remaining units
        into its weights.

        Returns a warning if the gates are far from the target, so that only their order
        decided.
        """
        far = self._list_far_axes()
        student = self.student.eval()
        kept = self.target.kept(self.gates.active())
        values = self.gates.settled(kept)
        self.gates.detach()
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        fold(student, self.plan, values)
        small = slice_model(student, kept)
        if HIDDEN in kept.indices:
            small.config.hidden_of_teacher = kept.indices[HIDDEN].tolist()
        self.minimise.student = small
        if not far:
            return None
        return (
            "the gates had not reached their target when training ended: they had "
            f"closed {', '.join(far)}. The least open units were cut: give the stage "
            "more steps, or a higher gate_rate"
        )

    def _list_far_axes(self) -> list[str]:
        """Describe the share that is closed for each axis whose gates are far from the
        target."""
        far = []
        for axis, active in self.gates.active().items():
            closed = 1 - float(active.detach().mean())
            target = 1 - self.target.left[axis]
            if abs(closed - target) > NEAR_TARGET * target:
                far.append(f"{closed:.2f} of {axis} instead of {target:.2f}")
        return far

    def _alive(self) -> Tensor:
        """Mark the layers that can be matched (Eq. 5): those that are not skipped."""
        return self.gates.values.get("layers", torch.ones(self.plan.sizes.layers)) > 0


def _map_back(student: Any, teacher: Any) -> nn.Linear:
    """Make W, D_S -> D_T, without a bias."""
    D_S = Shape.from_config(student).hidden
    D_T = Shape.from_config(teacher).hidden
    W = nn.Linear(D_S, D_T, bias=False)
    kept = getattr(student, "hidden_of_teacher", None)
    if D_S == D_T:
        nn.init.eye_(W.weight)
    elif kept is not None and len(kept) == D_S and max(kept) < D_T:
        W.weight.data = torch.eye(D_T)[:, kept].contiguous()
    return W
