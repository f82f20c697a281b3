"""Importance once: computed over the rows by all processes together, kept on disk, equal on every process."""

import copy
import hashlib
import inspect
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, reduce
from datasets import Dataset
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress import digest
from compress.call import Call, checked
from compress.data.batches import Batching
from compress.data.cache import cached, home, is_whole
from compress.errors import PruneError
from compress.importance.batches import Batches
from compress.slicing import Group, Importance, Kept, SlicePlan, counts
from compress.teachers import Teacher

RATED = "importance.safetensors"
VERSION = "1"
"""Part of every key: raise it when what gates, taps or losses compute changes."""


def of(
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
    """`call` (`molchanov.taylor`, ...) over encoded `rows`: one float32 vector of each group, a mean over rows, on the
    CPU and the same on every process.

    `function(student, batches, plan, *, options)` gives sums over the rows of `batches`, this process's part. Kept
    under COMPRESS_HOME by weights, rows, call and precision. The model is not changed. Raises PruneError where there
    are no rows, or what comes is not finite, lacks a group, or is the same for everything.
    """
    checked(call, "importance")
    if not len(rows):
        raise PruneError(f"{call.by}: importance is told from rows, and there are none")
    if teacher is not None and teacher.asked is not None and call.options.get("targets") == "teacher":
        raise PruneError(f"{call.by}: a teacher that was asked beforehand cannot be asked again; use targets: labels")
    device = next(model.parameters()).device
    tutor = teacher.model if teacher else None
    if tutor is model and call.options.get("targets") == "teacher":
        tutor = copy.deepcopy(tutor)  # what is done to the student must not reach it
    batches = Batches(rows, collate, min(batch, len(rows)), device, bf16, tutor, console)
    entry = home() / "importance" / _key(call, model, rows, batches, teacher)
    kept = _of_first(load_file(entry / RATED) if PartialState().is_main_process and is_whole(entry) else None)
    if kept is None:
        found = call.function(model, batches, plan, **call.options)
        kept = _of_first(_mean(found, plan, len(rows), call))
        if PartialState().is_main_process:
            cached(entry, lambda folder: save_file(kept, folder / RATED))
    return {Group(*_parts(name)): vector for name, vector in kept.items()}


def agreed(kept: Kept) -> Kept:
    """`kept` itself. Raises PruneError where another process keeps other units."""
    told = hashlib.sha256(repr((kept.sizes, kept.layers)).encode())
    for group, indices in sorted(kept.indices.items()):
        told.update(f"{group}{indices.tolist()}".encode())
    if len(set(gather_object([told.hexdigest()]))) > 1:
        raise PruneError("processes keep different units: give all of them the same model, rows and options")
    return kept


def _mean(found: Importance, plan: SlicePlan, rows: int, call: Call) -> dict[str, Tensor]:
    """Over all processes' rows; by the names of groups, in the same order everywhere."""
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
    code = digest.of_files([Path(str(inspect.getsourcefile(call.function)))])
    told: list[Any] = [VERSION, code, call.plain(), _of_weights(model), rows._fingerprint, len(rows), batches.size]
    return digest.of_value([*told, batches.bf16, teacher and teacher.digest])[:24]


def _of_weights(model: nn.Module) -> str:
    total = hashlib.sha256(type(model).__name__.encode())
    for name, tensor in model.state_dict().items():
        total.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return total.hexdigest()


Value = TypeVar("Value")


def _of_first(value: Value) -> Value:
    """What the first process has, on all of them: a disk may be its alone, a sum may end in other bits."""
    found = [value]
    broadcast_object_list(found)
    return found[0]


def _parts(name: str) -> tuple[str, str]:
    axis, _, block = name.partition(".")
    return axis, block
