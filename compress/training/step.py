"""A step turns a batch into named losses: the only interface that a training loop
needs."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.arguments import check_arguments
from compress.config.term import Term
from compress.data.constants import IGNORE_INDEX, MISSING_TAG
from compress.models.memory import is_dispatched
from compress.models.signals import (
    ATTENTION,
    Signals,
    check_next_tokens,
    feed_decoder,
    has_lm_head,
    open_attention,
    read,
)
from compress.slicing.shape import Shape
from compress.tensors import TensorDict, Tensors
from compress.training.objective import Objective
from compress.training.teacher_cache import TeacherCache
from compress.values import LikeCheck

Score = Callable[[PreTrainedModel], Mapping[str, float]]
"""student -> {"score": higher is better, ...} on the validation split."""


class Step(nn.Module):
    """Turn a batch into {"loss": ..., part: detached, ...} by `forward`, which is all
    that a training loop needs. The other methods have defaults.

    student     the model that is kept
    ready       False while its weights must not be kept as the best
    only_rows   True if it sees only tokens of its rows
                (`embedding_rows.only_tokens_in_use`)
    dropout     whether the student's dropout is on during training
    in_turn     True if what it trains changes with the step, over a number of steps
                that must be known from the start
    """

    # tells a transformers.Trainer that `loss` is a mean, to be divided by accumulation
    accepts_loss_kwargs = False
    only_rows = False
    dropout: ClassVar[bool] = True
    in_turn: ClassVar[bool] = False

    if TYPE_CHECKING:

        @property
        def student(self) -> PreTrainedModel: ...

    @property
    def ready(self) -> bool:
        return True

    @property
    def unit(self) -> float:
        """Return the number that a regression's labels are divided by."""
        return 1.0

    def items(self, batch: Tensors) -> TensorDict:
        """Count the items that the step's means run over, which keeps means exact if a
        batch is split. Empty: all parts of a batch have the same weight."""
        return {}

    def begin(self, step: int, total: int) -> None:
        """Prepare for an optimiser step."""

    def groups(self) -> Mapping[str, Sequence[nn.Parameter]]:
        """Return the trained parameters in named groups."""
        return {"all": list(self.parameters())}

    def factors(self, step: int, total: int) -> Mapping[str, float]:
        """Return learning rate multipliers at this step, by group."""
        return {}

    def rates(self, step: int, total: int) -> Mapping[str, float]:
        """Return the learning rates at this step of groups that do not follow the
        stage's schedule."""
        return {}

    def clip_groups(self) -> Sequence[Sequence[nn.Parameter]]:
        """Return lists of parameters; gradients are clipped for each list separately.
        Empty: clip all gradients together."""
        return ()

    def finish(self) -> str | None:
        """Give the student its final form after training; may return a warning."""
        return None

    def wrap_score(self, score: Score) -> Score:
        """Return a function that scores the student, given one that scores a model."""
        return score

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """Let a `transformers.Trainer` save memory in the student."""
        self.student.activation_checkpointing_enable(**options)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if not self.dropout:
            self.student.eval()
        return self


StoredTeacher = Annotated[
    TeacherCache, LikeCheck("stored outputs of a teacher", ("signals",))
]


@check_arguments
class Distillation(Step):
    """Compute an objective: step(**batch) -> {"loss": their sum, term name: its
    weighted value, detached, ...}.

    The student and the objective's projections are trained. The teacher is frozen, in
    eval mode, follows `.to(device)`, and is in neither `parameters()` nor
    `state_dict()`. `objective` may be a list of terms, from which an Objective is built
    for the shapes of both models. Missing labels of examples (-100, or nan) are filled
    in with the teacher's answers if the objective reads its logits. For a
    `transformers.Trainer` pass the step as `model`; batches are dictionaries of
    input_ids, attention_mask, ..., and labels if a term reads them. The labels of a
    causal language model are the next tokens (`gpt2.next_tokens`); a decoder reads the
    labels before, unless the batch has `decoder_input_ids`.

        step = Distillation(student, teacher, [Term("tinybert.hidden", project=True)])
        step(**batch)["loss"].backward()
    """

    student: PreTrainedModel
    only_rows = True

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: nn.Module | StoredTeacher | None,
        objective: Objective | Sequence[Term],
    ) -> None:
        super().__init__()
        if not isinstance(objective, Objective):
            shape = (
                Shape.from_config(teacher.config)
                if isinstance(teacher, nn.Module)
                else None
            )
            objective = Objective(objective, Shape.from_config(student.config), shape)
        self.student = student
        self.objective = objective
        if objective.student_wants & ATTENTION:
            open_attention(student)
        if isinstance(teacher, nn.Module):
            teacher.eval().requires_grad_(False)
            if objective.teacher_wants & ATTENTION:
                open_attention(teacher)
        # in a list: not a submodule, so not saved, not trained, not wrapped
        self._teacher = [teacher]
        self._unchecked = any(
            reading.against == "labels" for reading in objective.readings
        )
        self.register_state_dict_post_hook(_keep_tied_once)
        self.register_load_state_dict_pre_hook(_fill_in_tied)

    @property
    def unit(self) -> float:
        return self.objective.unit

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
        items: Tensors | None = None,
        **more: Any,
    ) -> TensorDict:
        """Return the losses of a batch. A transformers.Trainer keeps only the columns
        that are named here."""
        columns = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "decoder_input_ids": decoder_input_ids,
            "labels": labels,
        }
        batch = {
            name: column for name, column in columns.items() if column is not None
        } | more
        if self._unchecked:
            self._unchecked = False
            check_next_tokens(self.student, batch)
        batch = feed_decoder(self.student, batch)
        teacher = self.read_teacher(batch)
        if labels is not None and teacher is not None and teacher.logits is not None:
            batch["labels"] = fill_labels(
                labels, teacher.logits, tags=self.objective.task.word_labels
            )
        at_BL = self.find_labelled(self.student, batch)
        student = read(self.student, batch, self.objective.student_wants, at_BL=at_BL)
        parts = self.compute_losses(student, teacher, batch, items)
        return {"loss": parts.pop("total")} | {
            name: part.detach() for name, part in parts.items()
        }

    def compute_losses(
        self,
        student: Signals,
        teacher: Signals | None,
        batch: Tensors,
        items: Tensors | None,
    ) -> TensorDict:
        """Compute the weighted losses by name, and their sum as "total"."""
        return self.objective(student, teacher, batch, items)

    def items(self, batch: Tensors) -> TensorDict:
        """Count the items in a batch that losses average over: see
        Objective.forward."""
        return self.objective.items(batch)

    def find_labelled(self, model: nn.Module, batch: Tensors) -> Tensor | None:
        """Mark the positions for which logits of a language model are needed, (B, L);
        None means all."""
        labels = batch.get("labels")
        if (
            labels is None
            or not self.objective.reads_only_labelled
            or not has_lm_head(model)
        ):
            return None
        return labels != IGNORE_INDEX

    @torch.no_grad()
    def read_teacher(self, batch: Tensors) -> Signals | None:
        """Return the teacher's signals, or None if the objective reads none.

        no_grad rather than inference_mode: losses save the teacher's tensors for their
        backward pass.
        """
        teacher = self.teacher
        if not self.objective.teacher_wants:
            return None
        if isinstance(teacher, nn.Module):
            return read(
                teacher,
                batch,
                self.objective.teacher_wants,
                at_BL=self.find_labelled(teacher, batch),
            )
        assert teacher is not None, "the objective was built for a teacher"
        return teacher.signals(batch, self.objective.teacher_wants)

    def _apply(
        self, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> "Distillation":
        """Apply `.to(device)` and `.half()` to the teacher too, unless accelerate has
        placed its layers."""
        super()._apply(fn, recurse)
        if isinstance(self.teacher, nn.Module) and not is_dispatched(self.teacher):
            self.teacher._apply(fn)
        return self


class WrappedStep(Step):
    """Wrap another step, such as a `Distillation`: the base of steps that add a
    mechanism to it.

    wraps     name of the attribute that holds the other step; checkpoints contain it
    """

    wraps: ClassVar[str] = "distillation"

    @property
    def wrapped(self) -> Any:
        return getattr(self, self.wraps)

    @property
    def student(self) -> PreTrainedModel:
        student: PreTrainedModel = self.wrapped.student
        return student

    @property
    def unit(self) -> float:
        unit: float = self.wrapped.unit
        return unit

    def forward(self, **batch: Any) -> TensorDict:
        parts: TensorDict = self.wrapped(**batch)
        return parts

    def items(self, batch: Tensors) -> TensorDict:
        counts: TensorDict = self.wrapped.items(batch)
        return counts


def _tied(step: nn.Module, prefix: str) -> dict[str, str]:
    """Map further names of tied parameters in a state dict to their first one."""
    first = dict[int, str]()
    named = step.named_parameters(prefix.rstrip("."), remove_duplicate=False)
    return {
        name: other
        for name, parameter in named
        if (other := first.setdefault(id(parameter), name)) != name
    }


def _keep_tied_once(step: nn.Module, state: TensorDict, prefix: str, _: Any) -> None:
    """Drop second names of a tensor, which safetensors refuses."""
    for name in _tied(step, prefix):
        state.pop(name, None)


def _fill_in_tied(step: nn.Module, state: TensorDict, prefix: str, *_: Any) -> None:
    for name, other in _tied(step, prefix).items():
        if other in state:
            state[name] = state[other]


def fill_labels(labels: Tensor, teacher_BV: Tensor, *, tags: bool = False) -> Tensor:
    """Fill in missing labels with the teacher's answers: -100 for classes (B,), nan for
    floating labels, and for `tags` (B, L) MISSING_TAG, where the teacher's are (B, L,
    classes).

    Other labels of tokens are unchanged: -100 marks tokens to ignore.
    """
    if tags:
        return torch.where(labels == MISSING_TAG, teacher_BV.argmax(-1), labels)
    if labels.is_floating_point():
        answers = (
            teacher_BV.view_as(labels) if teacher_BV.shape[-1] == 1 else teacher_BV > 0
        )
        return torch.where(labels.isnan(), answers.to(labels.dtype), labels)
    return (
        torch.where(labels == IGNORE_INDEX, teacher_BV.argmax(-1), labels)
        if labels.ndim == 1
        else labels
    )
