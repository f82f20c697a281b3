"""Judge how a loaded model fits its files: which tensors may be new, and which may be
left unread."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from transformers import PreTrainedModel

from compress.errors import TeacherError
from compress.models.saved_head import (
    drop_heads_of_tasks,
    drop_pretraining,
    explain_outputs,
    list_head,
    suggest_class,
    write_names,
    write_shapes,
)
from compress.models.sentence_encoder import SentenceEncoder
from compress.models.tensors import (
    FLOATS,
    SavedTensors,
    TensorFit,
    compare,
    list_unread,
)

New = Literal["nothing", "pooler", "head"]
"""The part of a model that the files may lack; it is then drawn at random."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode, without gradients.

    new      tensors of the model that no file has: a new head, or a pooler
    dropped  tensors of the files that the model has no use for: heads and poolers of
             the family
    """

    model: Any
    new: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()

    @property
    def has_new_head(self) -> bool:
        return bool(list_head(self.model, self.new))

    @property
    def dropped_heads(self) -> list[str]:
        """List the dropped tensors that do not belong to a pooler."""
        return [name for name in self.dropped if not _POOLER.search(name)]

    def remove_new_pooler(self) -> None:
        """Remove the pooler of an encoder if no file has it: it was filled with random
        numbers."""
        if any(_POOLER.search(name) for name in self.new) and hasattr(
            self.model, "pooler"
        ):
            self.model.pooler = None


_POOLER: Final = re.compile(r"(^|\.)pooler\.")
"""Tensors of poolers: layers inside an encoder that only a head reads."""


def check_formats(folder: Path, saved: SavedTensors) -> None:
    """Raise TeacherError for weights in float8 or smaller numbers, which mean nothing
    without their scales."""
    _refuse_quantised(
        folder,
        saved,
        [
            name
            for name, info in saved.infos.items()
            if info.format[0] == "F" and info.format not in FLOATS
        ],
    )


def _refuse_quantised(folder: Path, saved: SavedTensors, names: list[str]) -> None:
    """Raise TeacherError if any tensors are quantised, with the name of one."""
    if names:
        name = min(names)
        raise TeacherError(
            f"{folder}: {len(names)} of its tensors are quantised, such as {name} "
            f"({saved.infos[name].format}); expected float32, float16 or bfloat16. "
            "Give the checkpoint that this one was quantised from"
        )


def account(
    model: PreTrainedModel, saved: SavedTensors, info: Mapping[str, Any]
) -> TensorFit:
    """Compare the loaded model with its files; misfits that only transformers reports
    are included."""
    fit = compare(model, saved.infos)
    missing = fit.missing
    if isinstance(model, SentenceEncoder):  # its other modules have files of their own
        missing = frozenset(
            name for name in missing if name.startswith(f"{model.base_model_prefix}.")
        )
    shapes = {
        name: (tuple(theirs), tuple(ours))
        for name, theirs, ours in info["mismatched_keys"]
    }
    return replace(fit, missing=missing, mismatched={**shapes, **fit.mismatched})


def judge(
    folder: Path,
    model: PreTrainedModel,
    fit: TensorFit,
    saved: SavedTensors,
    *,
    new: New,
    drop_heads: bool,
) -> frozenset[str]:
    """Return the tensors of the files that are dropped without harm. Raises
    TeacherError for any other misfit."""
    unread = list_unread(fit, saved, model)
    extra = drop_pretraining(unread, model.config, saved) if unread else []
    if extra and drop_heads:
        extra = drop_heads_of_tasks(extra, model.config, saved)
    head = list_head(model, fit.missing | fit.mismatched.keys())
    accepted = _list_accepted(fit, head, new)
    missing = sorted(fit.missing - accepted)
    wrong = {
        name: fit.mismatched[name] for name in sorted(fit.mismatched.keys() - accepted)
    }
    twice = [names for names in fit.doubled.values() if not _are_equal(names, saved)]
    _check_quantised(folder, model, fit, saved)
    if not (extra or missing or wrong or twice):
        return frozenset(unread)
    if wrong and not (extra or missing or twice) and wrong.keys() <= head:
        raise TeacherError(explain_outputs(folder, wrong))
    problems = list[str]()
    if extra:
        problems.append(
            f"{len(extra)} tensors of its files have no place in a "
            f"{type(model).__name__}: {write_names(extra)}"
        )
    if missing:
        problems.append(
            f"{len(missing)} of its tensors are missing, such as {write_names(missing)}"
        )
    if wrong:
        shapes = write_names(map(write_shapes, wrong.items()))
        problems.append(
            f"{len(wrong)} have a different shape than config.json describes: {shapes}"
        )
    if twice:
        pairs = write_names(" and ".join(names) for names in twice)
        problems.append(f"{len(twice)} are there twice, with different values: {pairs}")
    remedy = (
        "weights and config do not belong together, or the files are incomplete; "
        "download both again"
    )
    ends = tuple(f".{name}" for name in fit.missing)
    if extra and all(name.endswith(ends) for name in extra):
        remedy = "save the model inside the wrapper (DDP, torch.compile, PEFT) again"
    if extra and not missing:
        remedy = (
            "without them the model would not compute what it was trained to. Choose "
            "a checkpoint whose tensors are those of transformers' "
            f"{model.config.model_type} models{suggest_class(folder, model, saved)}"
        )
    raise TeacherError(f"{folder}: {'; '.join(problems)}: {remedy}")


def _list_accepted(fit: TensorFit, head: set[str], new: New) -> set[str]:
    """List the tensors that may be missing, or of another shape, because they may be
    new."""
    if new == "nothing":
        return set()
    poolers = {name for name in (*fit.missing, *fit.mismatched) if _POOLER.search(name)}
    return poolers | head if new == "head" else poolers


def _are_equal(names: Collection[str], saved: SavedTensors) -> bool:
    first, *others = (saved.read(name) for name in names)
    return all(torch.equal(first, other) for other in others)


def _check_quantised(
    folder: Path, model: PreTrainedModel, fit: TensorFit, saved: SavedTensors
) -> None:
    """Raise TeacherError for weights that are whole numbers."""
    state = model.state_dict()
    whole = [
        name
        for name, targets in fit.targets.items()
        if saved.infos[name].format not in FLOATS
        and state[targets[0]].is_floating_point()
    ]
    _refuse_quantised(folder, saved, whole)
