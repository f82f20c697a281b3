"""Load teachers with their own head, or with a new one for the task."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.arrays import Array
from compress.data.task import Task, TaskData
from compress.errors import TeacherError
from compress.models.checkpoints import describe_origin
from compress.models.fit import New
from compress.models.flops import count_parameters
from compress.models.folder import ModelFolder, identify
from compress.models.loader import (
    check_token_types,
    check_vocabulary,
    load_config,
    load_model,
    load_tokenizer,
    set_labels,
)
from compress.models.padding import hide_padding, reads_last_place
from compress.models.saved_head import (
    SavedHead,
    check_saved_head,
    explain_unknown_head,
    find_head,
)
from compress.models.sentence_encoder import limit_length


@dataclass(frozen=True)
class Teacher:
    """A loaded teacher, which can answer any row.

    digest    the digest of everything that is read of its folder
    trained   whether it came with a head for the task; pickled: whether its weights may
              be pickled
    other_head  the class of a head for another task, which the checkpoint had and which
                is dropped
    """

    name: str
    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    digest: str
    trained: bool
    pickled: bool = False
    other_head: str = ""

    answers_any_rows: ClassVar[bool] = True
    """Whether the model can be asked about rows that it has not answered yet."""

    def known_answers(self, split: Dataset) -> Array | None:
        """Return the logits or vectors of a split if they are known without computing
        them."""
        return None

    def with_first_answers(self, split: Dataset, count: int) -> "Teacher":
        """Return the teacher for a split of which only `count` rows are left."""
        return self

    def count_parameters(self) -> int | None:
        """Count the parameters of the model that answers; None if that is not known."""
        return count_parameters(self.model)

    def evidence(self) -> Mapping[str, str]:
        """Return texts that a bundle keeps of the teacher, such as its prompt, by file
        name."""
        return {}

    def origin(self, base: "Teacher") -> dict[str, Any]:
        """Describe for a model card what the teacher's weights come from; `base` is the
        teacher before it was fine-tuned."""
        return describe_origin(base.name, base.folder)

    def record(
        self,
        name: str,
        digest: str,
        answers: Mapping[str, Array],
        *,
        files: Mapping[str, str] | None = None,
        parameters: int | None = None,
    ) -> "RecordedTeacher":
        """Return a teacher with these answers, whose students are cut out of this
        one."""
        return RecordedTeacher(
            name,
            self.folder,
            self.model,
            self.tokenizer,
            digest,
            trained=True,
            pickled=self.pickled,
            answers=answers,
            files=files or {},
            parameters=parameters,
        )


@dataclass(frozen=True)
class RecordedTeacher(Teacher):
    """A teacher whose answers are recorded: it was prompted, only returns vectors, or
    its scores are in the data. Its model and tokenizer are only what students are
    initialised from.

    answers     logits or vectors, by the fingerprint of the split
    files       the texts of `evidence`
    parameters  the size of the model, if known
    """

    answers: Mapping[str, Array] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    parameters: int | None = None

    answers_any_rows: ClassVar[bool] = False

    def known_answers(self, split: Dataset) -> Array:
        return self.answers[split._fingerprint]

    def with_first_answers(self, split: Dataset, count: int) -> Teacher:
        few = {split._fingerprint: self.known_answers(split)[:count]}
        return replace(self, answers=few)

    def count_parameters(self) -> int | None:
        return self.parameters

    def evidence(self) -> Mapping[str, str]:
        return self.files

    def origin(self, base: Teacher) -> dict[str, Any]:
        return {}  # two licences apply: of the teacher and of the trained model


def with_scores(start: Teacher, data: TaskData) -> Teacher:
    """Return a teacher whose recorded answers are the data's column `teacher`; students
    are cut out of `start`."""
    splits = [
        split for split in (data.train, data.validation, data.test) if split is not None
    ]
    logits = {
        split._fingerprint: np.asarray(split["teacher"][:], np.float32).reshape(
            len(split), -1
        )
        for split in splits
    }
    return start.record(f"the scores in {data.name}", data.fingerprint, logits)


def _serves(
    source: ModelFolder, head: SavedHead, config: Any, task: Task, *, allow_pickle: bool
) -> bool:
    """Check whether a saved head fits this task."""
    if task.vectors:
        if source.kind != "sentence_encoder" and head.part in (
            "task",
            "other",
            "unknown",
        ):
            raise TeacherError(
                f"{source.path}: {head.name or _list_tensors(head)} returns scores, as "
                "a classifier or a cross-encoder does; expected an encoder whose "
                "tokens are pooled into a vector: a folder of sentence-transformers, "
                "or a plain encoder. Vectors learn from a cross-encoder's scores by "
                "--recipe margin-mse-vectors"
            )
        return True
    if head.part == "unknown":
        raise TeacherError(explain_unknown_head(source, head))
    if not head.serves(task.kind):
        return False
    if source.outputs != task.outputs:
        check_saved_head(source, config, task.auto_class(), allow_pickle=allow_pickle)
        return False
    # a head that chooses one label was not trained to choose several
    return task.outputs == 1 or config.problem_type in (None, task.problem)


def _list_tensors(head: SavedHead) -> str:
    return f"a head of the tensors {', '.join(head.tensors[:3])}"


def is_reranker(folder: Path, *, allow_pickle: bool = False) -> bool:
    """Check whether this is a cross-encoder: a checkpoint with a head that scores a
    text, or a pair, with one number."""
    source = ModelFolder(folder)
    if source.kind == "sentence_encoder":
        return False
    head = find_head(source, load_config(folder), allow_pickle=allow_pickle)
    return head.serves("ranking") and source.outputs == 1


def load(name: str, folder: Path, task: Task, *, allow_pickle: bool = False) -> Teacher:
    """Load tokenizer and model, in eval mode, with a head for `task`: its own, or a new
    one to fine-tune.

    Raises TeacherError if the weights cannot be read or do not fit the config, or the
    tokenizer does not fit the model.
    """
    source = ModelFolder(folder)
    config = load_config(folder)
    head = find_head(source, config, allow_pickle=allow_pickle)
    trained = _serves(source, head, config, task, allow_pickle=allow_pickle)
    if trained and task.labels:
        source.labels()  # says what is wrong with them
    tokenizer = load_tokenizer(folder, config)
    unnamed = not task.labels and config.id2label.get(0) == "LABEL_0"
    if not trained or unnamed:
        set_labels(config, task.output_names)
    config.problem_type = task.problem
    new: New = "nothing" if trained else "head"
    loaded = load_model(
        folder,
        task.auto_class(),
        config,
        new="pooler" if task.vectors else new,
        drop_heads=not trained,
        allow_pickle=allow_pickle,
        frozen=trained,
    )
    check_vocabulary(folder, tokenizer, loaded.model)
    hide_padding(loaded.model)
    if reads_last_place(loaded.model):
        tokenizer.padding_side = "left"  # also for whoever loads the bundle
    if task.pair:
        check_token_types(folder, tokenizer, config)
    if trained:
        _align_labels(loaded.model, task, name)
    if task.vectors:
        limit_length(loaded.model, folder, tokenizer)
    other = head.name if head.part in ("task", "other") and not trained else ""
    return Teacher(
        name,
        folder,
        loaded.model,
        tokenizer,
        identify(folder),
        trained,
        pickled=allow_pickle,
        other_head=other,
    )


def _align_labels(model: PreTrainedModel, task: Task, name: str) -> None:
    """Reorder the head's outputs to match the data's labels. Raises TeacherError if
    their names differ."""
    if not task.labels:
        return
    names: Any = model.config.id2label
    written = [str(names[index]) for index in range(task.outputs)]
    theirs = task.standard_labels(written, f"teacher {name}")
    order = task.match_labels(theirs)
    if order is None:
        raise TeacherError(
            f"teacher {name}: its labels are {', '.join(theirs)}, the data's are "
            f"{', '.join(task.labels)}: they cannot be matched. Correct id2label in "
            "its config.json, or rename the data's labels"
        )
    set_labels(model.config, task.labels)
    if order == sorted(order):
        return
    head = [
        m
        for m in model.modules()
        if isinstance(m, nn.Linear) and m.out_features == task.outputs
    ][-1]
    _hold_weights(head)
    for weight in head.parameters():
        weight.data = weight.data[order]


def _hold_weights(module: nn.Module) -> None:
    """Keep the weights of a layer in memory that are read from elsewhere in each
    pass."""
    hook: Any = getattr(module, "_hf_hook", None)
    if hook is None:
        return
    from accelerate.hooks import remove_hook_from_module
    from accelerate.utils import align_module_device

    with align_module_device(module):
        held = {name: each.detach().clone() for name, each in module.named_parameters()}
    remove_hook_from_module(module)
    for name, values in held.items():
        near = values.to(hook.execution_device)
        setattr(module, name, nn.Parameter(near, requires_grad=False))
