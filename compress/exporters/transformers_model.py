"""Checkpoints as they were saved: nothing made up that is missing, no code of theirs run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import transformers
from transformers import AutoModel, AutoTokenizer

import compress.models.families  # noqa: F401 the Auto classes know ours
from compress.data.task import METRICS, Kind, Task
from compress.errors import ExportError, TeacherError
from compress.exporters.embeddings import UNLIMITED
from compress.models import teacher as teachers
from compress.models.teacher import explained, load_config, same_vocabulary
from compress.slicing.shape import positions

LONGEST: Final = 512
"""Tokens a text is cut to where neither model nor tokenizer knows a limit."""

Parts = tuple[Any, Any]
"""A model in eval mode, and its tokenizer."""


def task(folder: Path, kind: Kind, *, pair: bool) -> Task:
    """What the config says of a head: the number and names of its outputs, and what they mean."""
    config = load_config(folder)
    names = tuple(str(config.id2label[index]) for index in range(config.num_labels))
    if kind == "qa":
        return Task("qa", ("question", "context"), "answers", (), METRICS["qa"][0])
    if kind == "tagging":
        return Task("tagging", ("words",), "tags", names, METRICS["tagging"][0])
    text = ("text", "text_pair") if pair else ("text",)
    if config.problem_type == "multi_label_classification":
        return Task("multilabel", text, "labels", names, METRICS["multilabel"][0])
    if config.problem_type == "regression" or len(names) == 1:
        if len(names) != 1:
            raise ExportError(f"{folder}: a regression of {len(names)} numbers; expected one")
        label = "score" if names[0].startswith("LABEL_") else names[0]
        return Task("regression", text, label, (), METRICS["regression"][0])
    return Task(kind, text, "label", names, METRICS[kind][0])


def headed(name: str, folder: Path, task: Task, *, allow_pickle: bool) -> Parts:
    """A model with the head that it was saved with. Raises TeacherError when that is not in the file."""
    teacher = teachers.load(name, folder, task, allow_pickle=allow_pickle)
    if not teacher.trained:
        raise TeacherError(
            f"{name}: its config.json names a head, of other outputs than it lists in id2label; correct id2label"
        )
    return teacher.model, teacher.tokenizer


def encoder(name: str, folder: Path, *, allow_pickle: bool) -> Parts:
    """An encoder without its language model's head, and without a pooler where none was trained."""
    with explained(folder):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        model, found = AutoModel.from_pretrained(
            folder,
            config=load_config(folder),
            use_safetensors=None if allow_pickle else True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    missing = [key for key in found["missing_keys"] if not key.startswith("pooler.")]
    _whole(name, missing, found["mismatched_keys"])
    if len(missing) < len(found["missing_keys"]):  # filled with random numbers, that nothing here reads
        model.pooler = None
    same_vocabulary(folder, tokenizer, model)
    return model.eval().requires_grad_(False), tokenizer


def writer(name: str, folder: Path, architecture: str, *, allow_pickle: bool) -> Parts:
    """A model that writes text, of this class of transformers."""
    with explained(folder):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        model, found = getattr(transformers, architecture).from_pretrained(
            folder,
            config=load_config(folder),
            use_safetensors=None if allow_pickle else True,
            output_loading_info=True,
        )
    _whole(name, found["missing_keys"], found["mismatched_keys"])
    same_vocabulary(folder, tokenizer, model)
    return model.eval().requires_grad_(False), tokenizer


def length(name: str, model: Any, tokenizer: Any, asked: int | None) -> int:
    """The most tokens of a text. Raises ExportError when more are asked for than the model has positions."""
    limit = positions(model)
    if asked is not None:
        if limit is not None and not 0 < asked <= limit:
            raise ExportError(f"{name}: max_length {asked}; this model has {limit} positions")
        return asked
    known = [tokenizer.model_max_length] if tokenizer.model_max_length < UNLIMITED else []
    return min([*known, *([limit] if limit else [])], default=LONGEST)


def _whole(name: str, missing: Sequence[str], mismatched: Sequence[Any]) -> None:
    if absent := sorted([*missing, *(key for key, *_ in mismatched)]):
        raise TeacherError(
            f"{name}: {len(absent)} of its tensors are missing, or not of the shape its config.json says, such as "
            f"{absent[0]}: weights and config do not belong together, or the file is not whole; fetch both again"
        )
