"""Importance of a model's units: computed over rows by all processes together, kept on disk, equal on every process.

Gradient-based importance puts a factor of 1, a gate, on every unit, and asks how each example's loss changes with it.
With a gate g_u on all that shows of unit u (`hooks.taps`), d loss / d g_u = sum of activation times gradient over the
unit's activations and the example's real tokens. One backward pass over the sum of a batch's losses gives it for every
example apart, as no example reads another. A head's gate is that of all its rows. A layer's gate leads from its input
to its output, x + g (f(x) - x): at 0 the layer is passed over.

Shapes: B batch, L tokens, R answers, D any width, V outputs, U units of a group, H heads, K head size.
"""

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, reduce
from datasets import Dataset
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress import io
from compress.config.reference import Call, check, find
from compress.data.cache import cached, home, is_whole
from compress.data.collate import Batching
from compress.data.constants import IGNORE_INDEX
from compress.errors import PruneError, RecipeError, did_you_mean
from compress.models.embedding import SentenceEncoder
from compress.models.signals import Signals, evaluating, read
from compress.models.teacher import Teacher
from compress.progress import show_progress
from compress.pruning.hooks import KEY, Tap, over_tokens, watching, watching_layers
from compress.slicing.plan import LAYERS, Group, SlicePlan
from compress.slicing.select import Importance, Kept, counts
from compress.training.objective import MASKED

Targets = Literal["labels", "teacher", "drawn"]


def answer_loss(
    student: PreTrainedModel, batch: Mapping[str, Tensor], targets: Targets, teacher: nn.Module | None
) -> Tensor:
    """Sum up the losses of a batch's answers, float32. Raises PruneError where the batch or the teacher is lacking.

    Vectors have no labels: `labels` is `drawn` for them.
    """
    if targets == "labels" and isinstance(student, SentenceEncoder):
        targets = "drawn"
    if targets not in get_args(Targets):
        raise PruneError(f"targets: {targets!r}.{did_you_mean(targets, get_args(Targets))}")
    if targets == "teacher" and teacher is None:
        raise PruneError("targets: teacher: no teacher was given; use labels, or drawn where there are none")
    labels = batch.get("labels")
    if targets == "labels" and labels is None:
        raise PruneError("targets: labels: these rows have no labels; use targets: drawn, or teacher")
    shown = read(student, batch, answer_signal(student))
    if shown.logits is None and targets == "labels":
        raise PruneError(f"targets: labels: {type(student).__name__} has no head for them; use targets: drawn")
    chosen_BL = _mark_answers(student, shown, labels)
    mine_RV = _answers(student, shown, chosen_BL)
    if targets == "labels":
        assert labels is not None
        own = "monobert.relevance" if "query" in batch else "bert.labels"  # a batch may hold parts of queries
        return find(own)(mine_RV, _flat(student, shown, labels), None) * len(mine_RV)
    if targets == "drawn":
        return _of_drawn(student, shown, mine_RV, chosen_BL, batch["input_ids"])
    assert teacher is not None
    with torch.no_grad():
        theirs_RV = _answers(student, read(teacher, batch, answer_signal(student)), chosen_BL)
    return _against(student, shown, mine_RV, theirs_RV) * len(mine_RV)


def answer_signal(student: PreTrainedModel) -> frozenset[str]:
    """Name the signal that a model answers with: logits, or hidden states where it has no head."""
    return frozenset({"layers" if student.base_model is student else "logits"})


def _per_token(student: PreTrainedModel, shown: Signals) -> bool:
    return shown.logits is None or (shown.logits.dim() == 3 and not hasattr(student, "qa_outputs"))


def _mark_answers(student: PreTrainedModel, shown: Signals, labels: Tensor | None) -> Tensor:
    """Mark (B, L) where the answers of a model per token count: at labels, else at real tokens."""
    labelled = labels is not None and shown.logits is not None and labels.shape == shown.logits.shape[:2]
    if labelled and _per_token(student, shown):
        assert labels is not None
        return labels != IGNORE_INDEX
    return shown.mask_BL.bool()


def _answers(student: PreTrainedModel, shown: Signals, chosen_BL: Tensor) -> Tensor:
    """Return (R, V) logits, each row one answer; (R, D) hidden states where there is no head."""
    if shown.logits is None:
        return shown.layers[-1][chosen_BL].float()
    if shown.logits.dim() == 2:
        return shown.logits.float()
    if _per_token(student, shown):
        return shown.logits[chosen_BL].float()
    return shown.logits.float().mT.masked_fill(shown.mask_BL[:, None] == 0, MASKED).flatten(0, 1)


def _flat(student: PreTrainedModel, shown: Signals, labels: Tensor) -> Tensor:
    """Return the labels that belong to the rows of `_answers`."""
    if shown.logits is None or shown.logits.dim() == 2:
        return labels
    return labels[labels != IGNORE_INDEX] if _per_token(student, shown) else labels.flatten()


def _against(student: PreTrainedModel, shown: Signals, mine_RV: Tensor, theirs_RV: Tensor) -> Tensor:
    if shown.logits is None or _is_number(student, mine_RV):
        return find("hinton.matched_logits")(mine_RV, theirs_RV, None)
    if _has_several(student):
        return find("hinton.soft_labels")(mine_RV, theirs_RV, None)
    return find("hinton.soft_targets")(mine_RV, theirs_RV, None)


def _is_number(student: PreTrainedModel, answers_RV: Tensor) -> bool:
    numbers = getattr(student.config, "problem_type", None) == "regression" or isinstance(student, SentenceEncoder)
    return answers_RV.shape[-1] == 1 or numbers


def _has_several(student: PreTrainedModel) -> bool:
    return getattr(student.config, "problem_type", None) == "multi_label_classification"


def _of_drawn(student: PreTrainedModel, shown: Signals, mine_RV: Tensor, chosen_BL: Tensor, ids_BL: Tensor) -> Tensor:
    """Sum up -log p(y) of one y per answer, drawn from p; of numbers and hidden states 1/2 (z - y)^2, y ~ N(z, 1)."""
    counts = chosen_BL.sum(-1).tolist() if _per_token(student, shown) else [len(mine_RV) // len(ids_BL)] * len(ids_BL)
    said_RV, width = mine_RV.detach(), mine_RV.shape[-1]
    if shown.logits is None or _is_number(student, mine_RV):
        noise_RV = _random(torch.randn, ids_BL, shown.mask_BL, counts, width)
        return 0.5 * (mine_RV - said_RV - noise_RV).pow(2).sum()
    if _has_several(student):
        drawn_RV = (_random(torch.rand, ids_BL, shown.mask_BL, counts, width) < said_RV.sigmoid()).float()
        return find("bert.labels")(mine_RV, drawn_RV, None) * len(mine_RV)
    level_R1 = _random(torch.rand, ids_BL, shown.mask_BL, counts, 1)
    drawn_R = (said_RV.softmax(-1).cumsum(-1) < level_R1).sum(-1).clamp_max(width - 1)
    return find("bert.labels")(mine_RV, drawn_R, None) * len(mine_RV)


def _random(draw: Callable[..., Tensor], ids_BL: Tensor, mask_BL: Tensor, counts: Sequence[int], width: int) -> Tensor:
    """Draw (R, width) numbers, `counts` rows for each example, decided by the example's tokens alone."""
    rows = []
    for ids_L, mask_L, count in zip(ids_BL.cpu(), mask_BL.bool().cpu(), counts, strict=True):
        seed = hash(tuple(ids_L[mask_L].tolist())) % 2**63  # of integers: the same in every process
        rows.append(draw(count, width, generator=torch.Generator().manual_seed(seed)))
    return torch.cat(rows).to(ids_BL.device)


@dataclass(frozen=True)
class Batches:
    """Iterates over this process's part of each batch of `size` rows, on `device`.

    teacher: the model that `targets: teacher` compares with. bf16: forward passes in `computing` run under autocast.
    """

    rows: Dataset
    collate: Batching
    size: int = 32
    device: torch.device = torch.device("cpu")  # noqa: RUF009  # a constant
    bf16: bool = False
    teacher: nn.Module | None = None
    console: Console | None = None

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        order = np.argsort(np.asarray(self.rows["length"][:]), kind="stable")
        state = PartialState()
        begins = range(0, len(order), self.size)
        for at in show_progress(begins, "importance", len(begins), "batches", console=self.console):
            mine = order[at : at + self.size][state.process_index :: state.num_processes]
            if len(mine):
                yield self._batch(mine)

    def turns(self, steps: int, *, seed: int = 0) -> Iterator[dict[str, Tensor]]:
        """Yield `steps` batches of `size` rows in random order, each split evenly over the processes.

        Raises PruneError where a batch cannot be split evenly.
        """
        state = PartialState()
        if self.size % state.num_processes:
            raise PruneError(f"batch {self.size} cannot be split evenly over {state.num_processes} processes")
        draw = np.random.default_rng(seed)
        order = np.concatenate(
            [draw.permutation(len(self.rows)) for _ in range(-(-steps * self.size // len(self.rows)))]
        )
        for step in range(steps):
            whole = order[step * self.size : (step + 1) * self.size]
            yield self._batch(whole[state.process_index :: state.num_processes])

    def computing(self) -> torch.autocast:
        """Return the context in which forward passes run."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    def loss(self, student: PreTrainedModel, batch: dict[str, Tensor], targets: Targets) -> Tensor:
        """Sum up the losses of a batch's examples: see `answer_loss`."""
        return answer_loss(student, batch, targets, self.teacher)

    def _batch(self, chosen: np.ndarray) -> dict[str, Tensor]:
        found = self.collate([self.rows[int(row)] for row in chosen])
        return {name: tensor.to(self.device) for name, tensor in found.items()}


RATED = "importance.safetensors"
VERSION = "1"
"""Part of every key: raise it when what gates, taps or losses compute changes."""


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

    The result has one float32 vector for each group, a mean over rows, on the CPU and the same on every process.

    `function(student, batches, plan, *, options)` gives sums over the rows of `batches`, this process's part. Kept
    under COMPRESS_HOME by weights, rows, call and precision. The model is not changed. Raises PruneError where there
    are no rows, or what comes is not finite, lacks a group, or is the same for everything.
    """
    if problems := check(call, "importance"):
        raise RecipeError(problems)
    if not len(rows):
        raise PruneError(f"{call.by}: importance is told from rows, and there are none")
    if teacher is not None and teacher.recorded is not None and call.options.get("targets") == "teacher":
        raise PruneError(f"{call.by}: a teacher that was asked beforehand cannot be asked again; use targets: labels")
    device = next(model.parameters()).device
    asked = teacher.model if teacher else None
    if asked is model and call.options.get("targets") == "teacher":
        asked = copy.deepcopy(asked)  # what is done to the student must not reach it
    batches = Batches(rows, collate, min(batch, len(rows)), device, bf16, asked, console)
    entry = home() / "importance" / _key(call, model, rows, batches, teacher)
    kept = _of_first(load_file(entry / RATED) if PartialState().is_main_process and is_whole(entry) else None)
    if kept is None:
        found = call.function(model, batches, plan, **call.options)
        kept = _of_first(_mean(found, plan, len(rows), call))
        if PartialState().is_main_process:
            cached(entry, lambda folder: save_file(kept, folder / RATED))
    return {Group(*name.partition(".")[::2]): vector for name, vector in kept.items()}


def check_agreement(kept: Kept) -> Kept:
    """Return `kept`. Raises PruneError where another process keeps other units."""
    digest = hashlib.sha256(repr((kept.sizes, kept.layers)).encode())
    for group, indices in sorted(kept.indices.items()):
        digest.update(f"{group}{indices.tolist()}".encode())
    if len(set(gather_object([digest.hexdigest()]))) > 1:
        raise PruneError("processes keep different units: give all of them the same model, rows and options")
    return kept


def _mean(found: Importance, plan: SlicePlan, rows: int, call: Call) -> dict[str, Tensor]:
    """Average over all processes' rows; by the names of groups, in the same order everywhere."""
    needed = [*counts(plan, plan.sizes), *plan.heads]
    if lacking := [str(group) for group in needed if group not in found]:
        raise PruneError(f"{call.by}: says nothing of {', '.join(lacking)}; it must rate every group of the plan")
    means: dict[str, Tensor] = {}
    for group, total in sorted(found.items()):
        here = total.detach().float().contiguous().to(PartialState().device)  # where processes can add up
        means[str(group)] = (reduce(here, "sum") / rows).cpu()
        if not bool(means[str(group)].isfinite().all()):
            raise PruneError(f"{call.by}: the importance of {group} is not finite; try fp32, or look at the model")
    if not any(bool(vector.any()) for vector in means.values()):
        raise PruneError(f"{call.by}: everything is of importance 0: these rows ask nothing of this model")
    return means


def _key(call: Call, model: nn.Module, rows: Dataset, batches: Batches, teacher: Teacher | None) -> str:
    code = io.hash_files([Path(str(inspect.getsourcefile(call.function)))])
    weights = hashlib.sha256(type(model).__name__.encode())
    for name, tensor in model.state_dict().items():
        weights.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        weights.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    key: list[Any] = [VERSION, code, call.plain(), weights.hexdigest(), rows._fingerprint, len(rows), batches.size]
    return io.hash_value([*key, batches.bf16, teacher and teacher.digest])[:24]


Value = TypeVar("Value")


def _of_first(value: Value) -> Value:
    """Give every process what the first one has: a disk may be its alone, a sum may end in other bits."""
    found = [value]
    broadcast_object_list(found)
    return found[0]


SAME = 1e-6
"""A mean loss against the teacher, in nats, below which both answer the same."""
Gradients = dict[Group, Tensor]
"""(B, U) of each group: the derivative of each example's loss by each unit's gate, float32."""


def gradients(student: PreTrainedModel, batches: Batches, plan: SlicePlan, *, targets: Targets) -> Iterator[Gradients]:
    """Yield the gates' gradients of every batch. The student is not changed, and runs in eval mode.

    Raises PruneError where the student answers as its teacher does: what is left of the gradient is rounding.
    """
    noted, total, rows = _Noted(plan), 0.0, 0
    with _frozen(student, plan), noted.on(student):
        for batch in batches:
            noted.begin(batch["attention_mask"])
            with batches.computing():
                loss = batches.loss(student, batch, targets)
            loss.backward()
            total, rows = total + float(loss.detach()), rows + len(batch["attention_mask"])
            yield noted.found()
    if targets == "teacher" and rows and total / rows < SAME:
        raise PruneError(
            "targets: teacher: the student answers as its teacher does, so there is nothing to tell importance from; "
            "use targets: labels, or drawn"
        )


@dataclass
class _Noted:
    """Gathers what the backward pass of one batch shows."""

    plan: SlicePlan
    mask_BL: Tensor = field(default_factory=lambda: torch.empty(0))
    sums: Gradients = field(default_factory=dict)

    def on(self, student: PreTrainedModel) -> ExitStack:
        """Note forward and backward passes while open."""
        hooks = ExitStack()
        hooks.enter_context(watching(student, self.plan, self._see))
        hooks.enter_context(watching_layers(student, self.plan, self._see_layer))
        return hooks

    def begin(self, mask_BL: Tensor) -> None:
        self.mask_BL, self.sums = mask_BL, {}

    def found(self) -> Gradients:
        """Sum up heads from their rows; a head may be in several blocks."""
        sums, self.sums = self.sums, {}
        for rows, heads in self.plan.heads.items():
            if rows.axis == "value":
                of_BH = sums[rows].view(len(self.mask_BL), self.plan.sizes.heads, -1).sum(-1)
                sums[heads] = sums[heads] + of_BH if heads in sums else of_BH
        return sums

    def _see(self, tap: Tap, activation: Tensor) -> None:
        groups = [None if group is None or group.axis == KEY else group for group in tap.groups]
        if not any(groups) or not activation.requires_grad:
            return
        value = activation.detach()  # the hook must not hold what it hangs on

        def note(gradient: Tensor) -> None:
            product_BD = over_tokens(value.float() * gradient.float(), self.mask_BL)
            for group, part_BU in zip(groups, product_BD.chunk(len(groups), -1), strict=True):
                if group is not None:
                    self._add(group, part_BU.unflatten(-1, (self.plan.groups[group], -1)).sum(-1))

        activation.register_hook(note)

    def _see_layer(self, number: int, before_BLD: Tensor, after_BLD: Tensor) -> None:
        if not after_BLD.requires_grad:
            return
        change_BLD = (after_BLD - before_BLD).detach()

        def note(gradient_BLD: Tensor) -> None:
            product_BD = over_tokens(change_BLD.float() * gradient_BLD.float(), self.mask_BL)
            of_BN = product_BD.new_zeros(len(product_BD), self.plan.groups[LAYERS])
            of_BN[:, number] = product_BD.sum(-1)
            self._add(LAYERS, of_BN)

        after_BLD.register_hook(note)

    def _add(self, group: Group, of_BU: Tensor) -> None:
        self.sums[group] = self.sums[group] + of_BU if group in self.sums else of_BU


@contextmanager
def _frozen(student: PreTrainedModel, plan: SlicePlan) -> Iterator[None]:
    """Keep the student in eval mode and let gradients begin at its embeddings, so that none of weights are computed."""
    wanted = [parameter for parameter in student.parameters() if parameter.requires_grad]
    words = [student.get_submodule(name) for name in plan.modules("words")]
    with ExitStack() as restored:
        restored.enter_context(evaluating(student))
        for parameter in wanted:
            restored.callback(parameter.requires_grad_, True)
        student.requires_grad_(False)
        for table in words:
            if isinstance(table, nn.Embedding):
                hook = table.register_forward_hook(lambda module, args, out: out.requires_grad_())
                restored.callback(hook.remove)
        yield
