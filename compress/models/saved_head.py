"""Find out which head a checkpoint was saved with, from its config and the tensors of
its files."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

import compress.models.own_classes  # noqa: F401  # registers our models with transformers
from compress import kinds
from compress.errors import TeacherError
from compress.kinds import Kind
from compress.models import heads
from compress.models.folder import ModelFolder, explain_load_errors
from compress.models.tensors import (
    SavedTensors,
    ShapePair,
    TensorFit,
    build_on_meta,
    compare,
    list_unread,
)

LANGUAGE_CLASSES: Final = tuple(heads.OTHER_HEADS[head] for head in heads.LANGUAGE)
"""The Auto classes of heads that predict tokens."""


def _task_classes() -> list[str]:
    """List transformers' Auto classes of the heads of all kinds of task."""
    found = dict.fromkeys(kinds.find(kind).head for kind in kinds.names())
    return [auto for auto in found if hasattr(transformers, auto)]


@dataclass(frozen=True)
class SavedHead:
    """The head that a checkpoint was saved with.

    name    the class that was saved, or whose tensors the files have exactly
    part    encoder: no head; language: a head that predicts tokens; task: one for a
            kind of task; other: any other class of transformers; unknown: none of them
    autos   the Auto classes that the head belongs to
    tensors for an unknown head, the tensors that the family's encoder does not have
    nearest for an unknown head, the class with the most similar tensors, and what
            differs
    """

    name: str
    part: Literal["encoder", "language", "task", "other", "unknown"]
    autos: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    nearest: str = ""

    def serves(self, kind: Kind) -> bool:
        """Check whether this may be the head of a kind of task."""
        return kinds.find(kind).head in self.autos


def find_head(
    source: ModelFolder, config: Any, *, allow_pickle: bool = False
) -> SavedHead:
    """Find out which head a checkpoint was saved with.

    `architectures` in config.json decides, if it names a class of transformers. If it
    is null, missing or names another class, the head is the one whose tensors the files
    have exactly. Raises TeacherError for damaged files.
    """
    name = source.architecture
    named = tuple(
        auto
        for auto in (*_task_classes(), *LANGUAGE_CLASSES, "AutoModel")
        if name and name in _class_names(auto, config)
    )
    if named:
        return SavedHead(name, _part_of(named), named)
    if isinstance(getattr(transformers, name or "?", None), type):
        return SavedHead(name, "other")
    with explain_load_errors(source.path):
        return _fit_head(
            source, config, SavedTensors(source.weights(allow_pickle=allow_pickle))
        )


def _part_of(autos: Collection[str]) -> Literal["encoder", "language", "task"]:
    if set(_task_classes()) & set(autos):
        return "task"
    return "encoder" if "AutoModel" in autos else "language"


def _class_names(auto: str, config: PreTrainedConfig) -> set[str]:
    """List the classes of an Auto class, of any family of transformers, and ours for
    this config."""
    auto_class = getattr(transformers, auto)
    names = set[str]()
    # by the names of configs, since importing the classes takes seconds
    for each in auto_class._model_mapping._model_mapping.values():
        names.update([each] if isinstance(each, str) else each)
    own = heads.find_class(auto_class, config)
    return names if own is None else names | {own.__name__}


def _fit_head(source: ModelFolder, config: Any, saved: SavedTensors) -> SavedHead:
    """Find the class of the family whose tensors the files have exactly: all of them,
    and no others."""
    found = dict[str, str]()
    misfits = dict[str, int]()
    tasks = _task_classes()
    for auto in ("AutoModel", *tasks, *_language_classes(config)):
        model_class = heads.find_class(getattr(transformers, auto), config)
        if model_class is None:
            continue
        extra, fit = _compare_class(model_class, config, saved)
        wrong = len(extra) + len(fit.missing) + len(fit.mismatched)
        misfits[f"{model_class.__name__} {_describe_misfit(extra, fit)}"] = wrong
        if wrong == 0:
            found[auto] = model_class.__name__
    if "AutoModel" in found:
        return SavedHead(found["AutoModel"], "encoder", ("AutoModel",))
    others = tuple(auto for auto in found if auto in tasks) or tuple(found)
    if others:
        return SavedHead(
            " or ".join(dict.fromkeys(found[auto] for auto in others)),
            _part_of(others),
            others,
        )
    base_class = heads.model_class(config, "encoder", None)
    extra, _ = _compare_class(base_class, config, saved)
    left = drop_pretraining(extra, config, saved)
    if left:
        nearest = min(misfits, key=lambda each: misfits[each])
        return SavedHead(source.architecture, "unknown", (), tuple(left), nearest)
    return SavedHead(base_class.__name__, "language", ("AutoModelForPreTraining",))


def _compare_class(
    model_class: type[PreTrainedModel], config: Any, saved: SavedTensors
) -> tuple[list[str], TensorFit]:
    """Compare a class with the files; also return the tensors that it has no use
    for."""
    model = build_on_meta(model_class, config)
    fit = compare(model, saved.infos)
    return list_unread(fit, saved, model), fit


def _describe_misfit(extra: Collection[str], fit: TensorFit) -> str:
    parts = list[str]()
    if extra:
        parts.append(f"does not have {write_names(extra)}")
    if fit.missing:
        parts.append(f"also has {write_names(sorted(fit.missing))}")
    if fit.mismatched:
        parts.append(
            "has other shapes: "
            f"{write_names(map(write_shapes, sorted(fit.mismatched.items())))}"
        )
    return ", and ".join(parts)


def _language_classes(config: Any) -> list[str]:
    """List the Auto classes of the heads that the family is pre-trained with.

    Classes that let masked language models generate have the same tensors and are left
    out.
    """
    if heads.find_class(transformers.AutoModelForMaskedLM, config) is None:
        return list(LANGUAGE_CLASSES)
    return [auto for auto in LANGUAGE_CLASSES if auto != "AutoModelForCausalLM"]


def drop_pretraining(
    names: Collection[str], config: Any, saved: SavedTensors
) -> list[str]:
    """Return the `names` that belong to no class that the family is pre-trained with.

    A model for a task has no use for poolers and heads of pre-training.
    """
    autos = _language_classes(config)
    return _drop_taken(
        names, config, saved, "AutoModel", *autos, "AutoModelForNextSentencePrediction"
    )


def drop_heads_of_tasks(
    names: Collection[str], config: Any, saved: SavedTensors
) -> list[str]:
    """Return the `names` that belong to no head of the family for another task."""
    return _drop_taken(
        names, config, saved, *_task_classes(), "AutoModelForMultipleChoice"
    )


def _drop_taken(
    names: Collection[str], config: Any, saved: SavedTensors, *autos: str
) -> list[str]:
    """Return the `names` that the family's classes of these Auto classes have no place
    for."""
    left = sorted(names)
    for auto in autos:
        model_class = heads.find_class(getattr(transformers, auto), config)
        if left and model_class is not None:
            infos = {name: saved.infos[name] for name in left}
            taken = compare(build_on_meta(model_class, config), infos).targets
            left = [name for name in left if name not in taken]
    return left


def check_saved_head(
    source: ModelFolder, config: Any, auto: Any, *, allow_pickle: bool = False
) -> None:
    """Raise TeacherError if the head in the files does not have the outputs that
    `config` states.

    config: as it was read; no weights are read.
    """
    model, fit = _compare_head(source, config, auto, allow_pickle=allow_pickle)
    wrong = list_head(model, fit.mismatched)
    if wrong:
        raise TeacherError(
            explain_outputs(source.path, {name: fit.mismatched[name] for name in wrong})
        )


def has_saved_head(
    source: ModelFolder, config: Any, auto: Any, *, allow_pickle: bool = False
) -> bool:
    """Check whether the files have every tensor of a head; no weights are read."""
    model, fit = _compare_head(source, config, auto, allow_pickle=allow_pickle)
    return not list_head(model, fit.missing | fit.mismatched.keys())


def _compare_head(
    source: ModelFolder, config: Any, auto: Any, *, allow_pickle: bool
) -> tuple[PreTrainedModel, TensorFit]:
    saved = SavedTensors(source.weights(allow_pickle=allow_pickle))
    with explain_load_errors(source.path):
        model = build_on_meta(heads.class_for(auto, config), config)
        return model, compare(model, saved.infos)


def list_head(model: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """List the tensors of a model that are in its head, not in the encoder that its
    family shares."""
    base = model.base_model
    if base is not model:
        return {
            name for name in names if not name.startswith(f"{model.base_model_prefix}.")
        }
    base_class = heads.find_class(transformers.AutoModel, model.config)
    names = set(names)
    if base_class is None or isinstance(model, base_class) or not names:
        return set()
    # of T5, without a prefix
    parts = {
        name for name, _ in build_on_meta(base_class, model.config).named_children()
    }
    return {name for name in names if name.partition(".")[0] not in parts}


def explain_unknown_head(source: ModelFolder, head: SavedHead) -> str:
    """Return the error for a head that no class of transformers has."""
    named = "architectures names no class"
    if head.name:
        named = f"architectures names {head.name}, which is not a class of transformers"
    family = source.config.get("model_type")
    return (
        f"{source.where}: {named}, and no class of the {family} family has exactly the "
        f"tensors of the files, such as {write_names(head.tensors)}. The nearest, "
        f"{head.nearest}. Save the model with a class of transformers, and id2label "
        "with a name for each output, or name its class in architectures"
    )


def explain_outputs(folder: Path, wrong: Mapping[str, ShapePair]) -> str:
    shapes = write_names(map(write_shapes, wrong.items()))
    return (
        f"{folder}: the head in its files has other outputs than its config.json "
        f"states: {shapes}. Correct id2label, which needs a name for each output, or "
        "download both again"
    )


def suggest_class(folder: Path, model: PreTrainedModel, saved: SavedTensors) -> str:
    """Name the class that the files belong to, if it is another class of the family."""
    head = _fit_head(ModelFolder(folder), model.config, saved)
    if head.part == "unknown" or head.name == type(model).__name__:
        return ""
    return (
        f"; these are the tensors of a {head.name}: if it is one, name it in "
        "architectures of config.json"
    )


def write_shapes(item: tuple[str, ShapePair]) -> str:
    name, (found, expected) = item
    return f"{name} {found}, expected {expected}"


def write_names(names: Iterable[str]) -> str:
    """List names; of many, only the first three."""
    shown = list(names)
    return ", ".join(shown if len(shown) <= 3 else [*shown[:3], "..."])
