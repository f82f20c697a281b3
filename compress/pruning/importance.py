"""Compute the importance of a model's units over rows, by all processes together;
results are cached and shared.

Gradient-based importance multiplies every unit by a gate of 1, and asks how each
example's loss changes with it. With a gate g_u on all activations of unit u
(`hooks.taps`), d loss / d g_u is the sum of activation times gradient over these
activations and the example's real tokens. As no example reads another, one backward
pass over the sum of a batch's losses gives it for every example. A head's gate is that
of all its rows. A layer's gate leads from its input to its output, x + g (f(x) - x): at
0 the layer is skipped.

Shapes: B batch, L tokens, R answers, D any width, V outputs, U units of a group, H
heads, K head size.
"""

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import reduce
from datasets import Dataset
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress import io
from compress.arrays import whole_numbers
from compress.config.reference import Call, check, find
from compress.data.cache import home, is_whole, load_or_create
from compress.data.collate import Batching
from compress.data.constants import IGNORE_INDEX, MASKED
from compress.errors import PruneError, RecipeError, did_you_mean
from compress.models.sentence_encoder import SentenceEncoder
from compress.models.signals import Signals, evaluating, read
from compress.models.teacher import Teacher
from compress.progress import show_progress
from compress.pruning.hooks import KEY_AXIS, Tap, over_tokens, watching, watching_layers
from compress.slicing.plan import LAYERS, Group, SlicePlan
from compress.slicing.select import Importance, Kept, counts
from compress.tensors import TensorDict, Tensors
from compress.training.processes import from_first, gather, wait_for_all

Targets = Literal["labels", "teacher", "drawn"]


def answer_loss(
    student: PreTrainedModel,
    batch: Tensors,
    targets: Targets,
    teacher: nn.Module | None,
) -> Tensor:
    """Sum the losses of a batch's answers, float32. Raises PruneError if the batch or
    the teacher is missing something.

    Embeddings have no labels, so for them `labels` means `drawn`.
    """
    if targets == "labels" and isinstance(student, SentenceEncoder):
        targets = "drawn"
    if targets not in get_args(Targets):
        raise PruneError(
            f"targets: {targets!r}.{did_you_mean(targets, get_args(Targets))}"
        )
    if targets == "teacher" and teacher is None:
        raise PruneError(
            "targets: teacher: no teacher was given; use labels, or drawn if there are "
            "none"
        )
    labels = batch.get("labels")
    if targets == "labels" and labels is None:
        raise PruneError(
            "targets: labels: these rows have no labels; use targets: drawn, or teacher"
        )
    signals = read(student, batch, answer_signal(student))
    logits = signals.logits
    if logits is None and targets == "labels":
        raise PruneError(
            f"targets: labels: {type(student).__name__} has no head for them; use "
            "targets: drawn"
        )
    per_token = _is_per_token(student, signals)
    chosen_BL = signals.mask_BL.bool()
    if (
        per_token
        and labels is not None
        and logits is not None
        and labels.shape == logits.shape[:2]
    ):
        chosen_BL = labels != IGNORE_INDEX
    student_RV = _answers(student, signals, chosen_BL)
    if targets == "labels":
        assert labels is not None
        if per_token:
            labels = labels[chosen_BL]
        elif logits is not None and logits.dim() == 3:
            labels = labels.flatten()  # starts and ends of spans
        # a batch may hold parts of queries
        own = "monobert.relevance" if "query" in batch else "bert.labels"
        return find(own)(student_RV, labels, None) * len(student_RV)
    problem = getattr(student.config, "problem_type", None)
    is_multilabel = problem == "multi_label_classification"
    is_number = (
        problem == "regression"
        or isinstance(student, SentenceEncoder)
        or logits is None
        or student_RV.shape[-1] == 1
    )
    if targets == "teacher":
        assert teacher is not None
        with torch.no_grad():
            teacher_RV = _answers(
                student, read(teacher, batch, answer_signal(student)), chosen_BL
            )
        soft = "soft_labels" if is_multilabel else "soft_targets"
        loss = find("hinton.matched_logits" if is_number else f"hinton.{soft}")
        return loss(student_RV, teacher_RV, None) * len(student_RV)
    per_row = len(student_RV) // len(chosen_BL)
    counts = chosen_BL.sum(-1).tolist() if per_token else [per_row] * len(chosen_BL)
    if is_number:
        # 1/2 (z - y)^2 of y ~ N(z, 1)
        noise_RV = _random(torch.randn, batch, counts, student_RV.shape[-1])
        return 0.5 * (student_RV - student_RV.detach() - noise_RV).pow(2).sum()
    # -log p(y) of one y per answer, drawn from p
    width = student_RV.shape[-1]
    drawn_RV = _random(torch.rand, batch, counts, width if is_multilabel else 1)
    targets_R = _draw_answers(student_RV.detach(), drawn_RV, multilabel=is_multilabel)
    return find("bert.labels")(student_RV, targets_R, None) * len(student_RV)


def _draw_answers(logits_RV: Tensor, drawn_RV: Tensor, *, multilabel: bool) -> Tensor:
    """Choose the labels, or the class, of each answer by numbers drawn from 0 to 1."""
    if multilabel:
        return (drawn_RV < logits_RV.sigmoid()).float()
    below_RV = logits_RV.softmax(-1).cumsum(-1) < drawn_RV
    return below_RV.sum(-1).clamp_max(logits_RV.shape[-1] - 1)


def answer_signal(student: PreTrainedModel) -> frozenset[str]:
    """Return the signal that a model answers with: logits, or hidden states if it has
    no head."""
    return frozenset({"layers" if student.base_model is student else "logits"})


def _is_per_token(student: PreTrainedModel, signals: Signals) -> bool:
    return signals.logits is None or (
        signals.logits.dim() == 3 and not hasattr(student, "qa_outputs")
    )


def _answers(student: PreTrainedModel, signals: Signals, chosen_BL: Tensor) -> Tensor:
    """Return (R, V) logits, one answer per row; (R, D) hidden states if there is no
    head."""
    if signals.logits is None:
        return signals.layers[-1][chosen_BL].float()
    if signals.logits.dim() == 2:
        return signals.logits.float()
    if _is_per_token(student, signals):
        return signals.logits[chosen_BL].float()
    return (
        signals.logits.float()
        .mT.masked_fill(signals.mask_BL[:, None] == 0, MASKED)
        .flatten(0, 1)
    )


def _random(
    draw: Callable[..., Tensor],
    batch: Tensors,
    counts: Sequence[int],
    width: int,
) -> Tensor:
    """Draw (R, width) numbers, `counts` rows for each example, seeded by the example's
    tokens alone."""
    rows = []
    ids_BL = batch["input_ids"]
    mask_BL = batch["attention_mask"].bool()
    for ids_L, mask_L, count in zip(ids_BL.cpu(), mask_BL.cpu(), counts, strict=True):
        # of integers: the same in every process
        seed = hash(tuple(ids_L[mask_L].tolist())) % 2**63
        rows.append(draw(count, width, generator=torch.Generator().manual_seed(seed)))
    return torch.cat(rows).to(ids_BL.device)


@dataclass(frozen=True)
class Batches:
    """Iterates over this process's part of each batch of `size` rows, on `device`.

    teacher: the model for `targets: teacher`. bf16: forward passes in `computing` run
    under autocast.
    """

    rows: Dataset
    collate: Batching
    size: int = 32
    device: torch.device = torch.device("cpu")  # noqa: RUF009  # a constant
    bf16: bool = False
    teacher: nn.Module | None = None
    console: Console | None = None

    def __iter__(self) -> Iterator[TensorDict]:
        order = np.argsort(whole_numbers(self.rows, "length"), kind="stable")
        state = PartialState()
        begins = range(0, len(order), self.size)
        for at in show_progress(
            begins, "importance", len(begins), "batches", console=self.console
        ):
            part = order[at : at + self.size][
                state.process_index :: state.num_processes
            ]
            if len(part):
                yield self._batch(part)

    def turns(self, steps: int, *, seed: int = 0) -> Iterator[TensorDict]:
        """Yield `steps` batches of `size` rows in random order, each split evenly over
        the processes.

        Raises PruneError if a batch cannot be split evenly.
        """
        state = PartialState()
        if self.size % state.num_processes:
            raise PruneError(
                f"batch {self.size} cannot be split evenly over {state.num_processes} "
                "processes"
            )
        draw = np.random.default_rng(seed)
        order = np.concatenate(
            [
                draw.permutation(len(self.rows))
                for _ in range(-(-steps * self.size // len(self.rows)))
            ]
        )
        for step in range(steps):
            whole = order[step * self.size : (step + 1) * self.size]
            yield self._batch(whole[state.process_index :: state.num_processes])

    def computing(self) -> torch.autocast:
        """Return the autocast context of forward passes."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    def loss(
        self, student: PreTrainedModel, batch: TensorDict, targets: Targets
    ) -> Tensor:
        """Sum the losses of a batch's examples: see `answer_loss`."""
        return answer_loss(student, batch, targets, self.teacher)

    def _batch(self, chosen: np.ndarray) -> TensorDict:
        batch = self.collate([self.rows[int(row)] for row in chosen])
        return {name: tensor.to(self.device) for name, tensor in batch.items()}


RATED = "importance.safetensors"
IMPORTANCE_VERSION = "1"
"""Part of every cache key: increase it when gates, taps or losses change what they
compute."""


def compute_importance(
    call: Call,
    model: PreTrainedModel,
    plan: SlicePlan,
    rows: Dataset,
    collate: Batching,
    *,
    batch: int = 32,
    teacher: Teacher | None = None,
    bf16: bool = False,
    console: Console | None = None,
) -> Importance:
    """Compute importance by `call` (`molchanov.taylor`, ...) over encoded `rows`.

    The result has a float32 vector for each group, a mean over rows, on the CPU and the
    same on every process.

    `function(student, batches, plan, *, options)` returns sums over the rows of
    `batches`, this process's part. Results are cached under COMPRESS_HOME by weights,
    rows, call and precision. The model is not changed. Raises PruneError if there are
    no rows, or the result is not finite, lacks a group, or is zero everywhere.
    """
    if problems := check(call, "importance"):
        raise RecipeError(problems)
    if not len(rows):
        raise PruneError(
            f"{call.by}: importance is computed from rows, and there are none"
        )
    if (
        teacher is not None
        and not teacher.answers_any_rows
        and call.options.get("targets") == "teacher"
    ):
        raise PruneError(
            f"{call.by}: a teacher with recorded answers cannot answer these rows; use "
            "targets: labels"
        )
    device = next(model.parameters()).device
    teacher_model = teacher.model if teacher else None
    if teacher_model is model and call.options.get("targets") == "teacher":
        # gates on the student must not affect it
        teacher_model = copy.deepcopy(teacher_model)
    batches = Batches(
        rows, collate, min(batch, len(rows)), device, bf16, teacher_model, console
    )
    entry = home() / "importance" / _key(call, model, rows, batches, teacher)
    # other processes may use another disk, or round sums differently
    means = from_first(lambda: load_file(entry / RATED) if is_whole(entry) else None)
    if means is None:
        sums = call.function(model, batches, plan, **call.options)
        own = _mean(sums, plan, len(rows), call)
        means = from_first(lambda: own)
        if PartialState().is_main_process:
            load_or_create(entry, lambda folder: save_file(means, folder / RATED))
    return {Group(*name.partition(".")[::2]): vector for name, vector in means.items()}


def check_agreement(kept: Kept) -> Kept:
    """Return `kept`. Raises PruneError if another process keeps other units."""
    digest = hashlib.sha256(repr((kept.sizes, kept.layers)).encode())
    for group, indices in sorted(kept.indices.items()):
        digest.update(f"{group}{indices.tolist()}".encode())
    if len(set(gather(digest.hexdigest()))) > 1:
        raise PruneError(
            "processes keep different units: give all of them the same model, rows and "
            "options"
        )
    return kept


def _mean(sums: Importance, plan: SlicePlan, rows: int, call: Call) -> TensorDict:
    """Average over the rows of all processes, by group name, in the same order
    everywhere."""
    if missing := [
        str(group)
        for group in [*counts(plan, plan.sizes), *plan.heads]
        if group not in sums
    ]:
        raise PruneError(
            f"{call.by}: does not rate {', '.join(missing)}; it must rate every group "
            "of the plan"
        )
    wait_for_all()
    means: TensorDict = {}
    for group, total in sorted(sums.items()):
        # on a device where processes can add tensors up
        here = total.detach().float().contiguous().to(PartialState().device)
        means[str(group)] = (reduce(here, "sum") / rows).cpu()
        if not bool(means[str(group)].isfinite().all()):
            raise PruneError(
                f"{call.by}: the importance of {group} is not finite; try fp32, or "
                "check the model"
            )
    if not any(bool(vector.any()) for vector in means.values()):
        raise PruneError(
            f"{call.by}: the importance of everything is 0: no unit affects the loss "
            "on these rows"
        )
    return means


def _key(
    call: Call,
    model: nn.Module,
    rows: Dataset,
    batches: Batches,
    teacher: Teacher | None,
) -> str:
    code = io.hash_files([Path(str(inspect.getsourcefile(call.function)))])
    weights = hashlib.sha256(type(model).__name__.encode())
    for name, tensor in model.state_dict().items():
        weights.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        weights.update(
            tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        )
    key: list[Any] = [
        IMPORTANCE_VERSION,
        code,
        call.plain(),
        weights.hexdigest(),
        rows._fingerprint,
        len(rows),
        batches.size,
    ]
    return io.hash_value([*key, batches.bf16, teacher and teacher.digest])[:24]


SAME = 1e-6
"""The mean loss against the teacher, in nats, below which both count as equal."""
Gradients = dict[Group, Tensor]
"""(B, U) for each group: the derivative of each example's loss by each unit's gate,
float32."""


def gradients(
    student: PreTrainedModel, batches: Batches, plan: SlicePlan, *, targets: Targets
) -> Iterator[Gradients]:
    """Yield the gates' gradients of every batch. The student is not changed, and runs
    in eval mode.

    Raises PruneError if the student answers as its teacher does: such gradients are
    only rounding errors.
    """
    recorder = _GateGradients(plan)
    total = 0.0
    rows = 0
    with (
        _frozen(student, plan),
        watching(student, plan, recorder.add_units),
        watching_layers(student, plan, recorder.add_layer),
    ):
        for batch in batches:
            recorder.mask_BL = batch["attention_mask"]
            recorder.sums = {}
            with batches.computing():
                loss = batches.loss(student, batch, targets)
            loss.backward()
            total += float(loss.detach())
            rows += len(recorder.mask_BL)
            yield recorder.collect()
    if targets == "teacher" and rows and total / rows < SAME:
        raise PruneError(
            "targets: teacher: the student answers as its teacher does, so importance "
            "cannot be computed from the difference; use targets: labels, or drawn"
        )


@dataclass
class _GateGradients:
    """Gathers the gates' gradients in the backward pass of one batch."""

    plan: SlicePlan
    mask_BL: Tensor = field(default_factory=lambda: torch.empty(0))
    sums: Gradients = field(default_factory=dict)

    def collect(self) -> Gradients:
        """Return the batch's gradients; those of heads are sums over their rows,
        possibly in several blocks."""
        for rows, heads in self.plan.heads.items():
            if rows.axis == "value":
                shape = len(self.mask_BL), self.plan.sizes.heads, -1
                self._add(heads, self.sums[rows].view(shape).sum(-1))
        return self.sums

    def add_units(self, tap: Tap, activation: Tensor) -> None:
        groups = [
            None if group is None or group.axis == KEY_AXIS else group
            for group in tap.groups
        ]
        if not any(groups) or not activation.requires_grad:
            return
        # the hook must not hold the tensor that holds the hook
        value = activation.detach()

        def add(gradient: Tensor) -> None:
            product_BD = over_tokens(value.float() * gradient.float(), self.mask_BL)
            for group, part_BU in zip(
                groups, product_BD.chunk(len(groups), -1), strict=True
            ):
                if group is not None:
                    self._add(
                        group,
                        part_BU.unflatten(-1, (self.plan.groups[group], -1)).sum(-1),
                    )

        activation.register_hook(add)

    def add_layer(self, number: int, before_BLD: Tensor, after_BLD: Tensor) -> None:
        if not after_BLD.requires_grad:
            return
        change_BLD = (after_BLD - before_BLD).detach()

        def add(gradient_BLD: Tensor) -> None:
            product_BD = over_tokens(
                change_BLD.float() * gradient_BLD.float(), self.mask_BL
            )
            of_BN = product_BD.new_zeros(len(product_BD), self.plan.groups[LAYERS])
            of_BN[:, number] = product_BD.sum(-1)
            self._add(LAYERS, of_BN)

        after_BLD.register_hook(add)

    def _add(self, group: Group, of_BU: Tensor) -> None:
        self.sums[group] = self.sums[group] + of_BU if group in self.sums else of_BU


@contextmanager
def _frozen(student: PreTrainedModel, plan: SlicePlan) -> Iterator[None]:
    """Keep the student in eval mode with gradients from its embeddings on, so that none
    are computed for weights."""
    wanted = [
        parameter for parameter in student.parameters() if parameter.requires_grad
    ]
    with ExitStack() as restored:
        restored.enter_context(evaluating(student))
        for parameter in wanted:
            restored.callback(parameter.requires_grad_, True)
        student.requires_grad_(False)
        for name in plan.modules("words"):
            table = student.get_submodule(name)
            if isinstance(table, nn.Embedding):
                hook = table.register_forward_hook(
                    lambda module, args, out: out.requires_grad_()
                )
                restored.callback(hook.remove)
        yield
