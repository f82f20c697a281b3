"""A step turns a batch into named losses. It is the only thing a training loop needs to know."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.config.term import Term
from compress.data.constants import IGNORE_INDEX
from compress.models.signals import ATTENTION, Signals, has_lm_head, open_attention, read
from compress.slicing.shape import Shape
from compress.training.objective import Objective
from compress.training.teacher_cache import TeacherCache


class Step(Protocol):
    """The module that a training loop needs: it turns a batch into {"loss": ..., part: detached, ...}.

    `student` is what is kept. A step may also have
        items(batch)           what its means run over, so that they stay exact when a batch is spread out
        begin(step, total)     called before each optimiser step
        groups()               named groups of the parameters that are trained
        factors(step, total)   multipliers of the learning rate at this step, by group
        rates(step, total)     learning rates of groups that do not follow the stage's, by group
        clipped_apart()        lists of parameters whose gradients are clipped list by list, instead of all together
        finish()               called when training is over: the student becomes what is kept; what it returns, if
                               anything, is a sentence that the user is told
        ready                  false while none of its weights are to be kept as the best
        only_rows              true where it meets only tokens of its rows (`embedding_rows.only_tokens_in_use`)
    """

    @property
    def student(self) -> PreTrainedModel: ...

    def __call__(self, **batch: Any) -> dict[str, Tensor]: ...


class Distillation(nn.Module):
    """step(**batch) -> {"loss": what to minimise, term name: its weighted part, detached, ...}.

    The student is trained, and the objective's projections with it. The teacher is frozen, in eval mode, follows
    `.to(device)`, and is neither in `parameters()` nor in `state_dict()`. `objective` may be a list of terms; the
    shapes of both models then build it. Where an example's label is missing (-100, or nan), and the objective reads
    the teacher's logits, the teacher's answer takes its place. For a `transformers.Trainer` pass the step as `model`;
    batches are dictionaries of input_ids, attention_mask, ..., and labels where a term reads them.

        step = Distillation(student, teacher, [Term("tinybert.hidden", project=True)])
        step(**batch)["loss"].backward()
    """

    accepts_loss_kwargs = False  # tells a transformers.Trainer that `loss` is a mean, to be divided by accumulation
    only_rows = True

    def __init__(
        self, student: PreTrainedModel, teacher: nn.Module | TeacherCache | None, objective: Objective | Sequence[Term]
    ) -> None:
        super().__init__()
        if not isinstance(objective, Objective):
            shown = Shape.from_config(teacher.config) if isinstance(teacher, nn.Module) else None
            objective = Objective(objective, Shape.from_config(student.config), shown)
        self.student, self.objective = student, objective
        if objective.student_wants & ATTENTION:
            open_attention(student)
        if isinstance(teacher, nn.Module):
            teacher.eval().requires_grad_(False)
            if objective.teacher_wants & ATTENTION:
                open_attention(teacher)
        self._teacher = [teacher]  # in a list: not a submodule, so not saved, not trained, not wrapped

    @property
    def teacher(self) -> nn.Module | TeacherCache | None:
        return self._teacher[0]

    def forward(
        self,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        items: Mapping[str, Tensor] | None = None,
        **more: Any,
    ) -> dict[str, Tensor]:
        """Return the losses of a batch. A transformers.Trainer keeps the columns that stand here by name."""
        usual = {
            "input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids,
            "decoder_input_ids": decoder_input_ids, "labels": labels,
        }  # fmt: skip
        batch = {name: column for name, column in usual.items() if column is not None} | more
        shown = self.shown(batch)
        if labels is not None and shown is not None and shown.logits is not None:
            batch["labels"] = fill_labels(labels, shown.logits)
        student = read(self.student, batch, self.objective.student_wants, at_BL=self.labelled(self.student, batch))
        parts = self.objective(student, shown, batch, items)
        return {"loss": parts.pop("total")} | {name: part.detach() for name, part in parts.items()}

    def items(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Count what its losses average over in a batch: see Objective.forward."""
        return self.objective.items(batch)

    def labelled(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor | None:
        """Return where a language model's head must answer; None: everywhere."""
        labels = batch.get("labels")
        if labels is None or not self.objective.reads_only_labelled or not has_lm_head(model):
            return None
        return labels != IGNORE_INDEX

    @torch.no_grad()
    def shown(self, batch: Mapping[str, Tensor]) -> Signals | None:
        """Return the teacher's signals; None where the objective reads none.

        no_grad rather than inference_mode: losses save the teacher's tensors for their backward pass.
        """
        teacher = self.teacher
        if not self.objective.teacher_wants:
            return None
        if isinstance(teacher, nn.Module):
            return read(teacher, batch, self.objective.teacher_wants, at_BL=self.labelled(teacher, batch))
        if teacher is None:
            raise ValueError("an objective that reads a teacher was built without one")
        return teacher.signals(batch, self.objective.teacher_wants)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Distillation":
        """Let `.to(device)` and `.half()` reach the teacher too."""
        super()._apply(fn, recurse)
        if isinstance(self.teacher, nn.Module):
            self.teacher._apply(fn)
        return self


class WrappedStep(nn.Module):
    """Provide what steps share that put a mechanism around another step, such as a `Distillation`.

    wraps     name of the attribute that holds the other step; checkpoints contain it
    dropout   whether the student's dropout is on during training
    """

    accepts_loss_kwargs = False
    wraps: ClassVar[str] = "distillation"
    dropout: ClassVar[bool] = True

    @property
    def wrapped(self) -> Any:
        return getattr(self, self.wraps)

    @property
    def student(self) -> PreTrainedModel:
        student: PreTrainedModel = self.wrapped.student
        return student

    def forward(self, **batch: Any) -> dict[str, Tensor]:
        parts: dict[str, Tensor] = self.wrapped(**batch)
        return parts

    def items(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        counts: dict[str, Tensor] = self.wrapped.items(batch)
        return counts

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if not self.dropout:
            self.student.eval()
        return self


def fill_labels(labels: Tensor, teacher_BV: Tensor) -> Tensor:
    """Put the teacher's answers where labels of examples are missing: classes -100 (B,), numbers or memberships nan.

    Labels of tokens, of which -100 are to be passed over, stay as they are.
    """
    if labels.is_floating_point():
        answers = teacher_BV.view_as(labels) if teacher_BV.shape[-1] == 1 else teacher_BV > 0
        return torch.where(labels.isnan(), answers.to(labels.dtype), labels)
    return torch.where(labels == IGNORE_INDEX, teacher_BV.argmax(-1), labels) if labels.ndim == 1 else labels
