"""A step turns a batch into named losses. It is the only thing a training loop needs to know."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from compress.objective import Objective
from compress.shape import Shape
from compress.signals import ATTENTION, Signals, open_attention, read
from compress.term import Term


class Shows(Protocol):
    """Anything that can play the teacher: a model is read as it is, a cache of its outputs answers for it."""

    def signals(self, batch: Mapping[str, Tensor], wants: frozenset[str]) -> Signals: ...


class Distillation(nn.Module):
    """step(**batch) -> {"loss": what to minimise, term name: its weighted part, detached, ...}.

    The student is trained, and the objective's projections with it. The teacher is frozen, in eval mode, follows
    `.to(device)`, and is neither in `parameters()` nor in `state_dict()`. `objective` may be a list of terms; the
    shapes of both models then build it. For a `transformers.Trainer` pass the step as `model`; batches are
    dictionaries of input_ids, attention_mask, ..., and labels where a term reads them.

        step = Distillation(student, teacher, [Term("tinybert.hidden", project=True)])
        step(**batch)["loss"].backward()
    """

    accepts_loss_kwargs = False  # tells transformers.Trainer that `loss` is a mean, to be divided by accumulation

    def __init__(
        self, student: nn.Module, teacher: nn.Module | Shows | None, objective: Objective | Sequence[Term]
    ) -> None:
        super().__init__()
        if not isinstance(objective, Objective):
            shown = Shape.of(teacher.config) if isinstance(teacher, nn.Module) else None
            objective = Objective(objective, Shape.of(student.config), shown)
        self.student, self.objective = student, objective
        if objective.student_wants & ATTENTION:
            open_attention(student)
        if isinstance(teacher, nn.Module):
            teacher.eval().requires_grad_(False)
            if objective.teacher_wants & ATTENTION:
                open_attention(teacher)
        self._teacher = [teacher]  # in a list: not a submodule, so not saved, not trained, not wrapped

    @property
    def teacher(self) -> nn.Module | Shows | None:
        return self._teacher[0]

    def forward(self, **batch: Any) -> dict[str, Tensor]:
        items = batch.pop("items", None)
        shown = self._shown(batch) if self.objective.teacher_wants else None
        student = read(self.student, batch, self.objective.student_wants)
        parts = self.objective(student, shown, batch.get("labels"), items)
        return {"loss": parts.pop("total")} | {name: part.detach() for name, part in parts.items()}

    @torch.no_grad()
    def _shown(self, batch: Mapping[str, Tensor]) -> Signals:
        """no_grad rather than inference_mode: losses save the teacher's tensors for their backward pass."""
        teacher = self.teacher
        if isinstance(teacher, nn.Module):
            return read(teacher, batch, self.objective.teacher_wants)
        if teacher is None:
            raise ValueError("an objective that reads a teacher was built without one")
        return teacher.signals(batch, self.objective.teacher_wants)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Distillation":
        """`.to(device)` and `.half()` reach the teacher too."""
        super()._apply(fn, recurse)
        if isinstance(self.teacher, nn.Module):
            self.teacher._apply(fn)
        return self
