"""Whether a loss can compare what a student and its teacher show, as far as their sizes tell."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from compress.call import options
from compress.errors import ObjectiveError
from compress.papers.reading import Reading
from compress.shape import Shape
from compress.term import Term


@dataclass(frozen=True)
class Loss:
    """A formula, what it reads, and whether it takes the mask."""

    function: Callable[..., Tensor]
    reading: Reading
    masked: bool = True

    def __call__(self, student: Tensor, target: Any, mask_BL: Tensor, /, **options: Any) -> Tensor:
        return self.function(student, target, *([mask_BL] if self.masked else []), **options)


_MUST_AGREE = {
    "logits": ("classes",),
    "pair": (),
    "embeddings": ("hidden",),
    "layers": ("hidden",),
    "encoder_layers": ("hidden",),
    "scores": ("heads",),
    "queries": ("heads", "head_size"),
    "keys": ("heads", "head_size"),
    "values": ("heads", "head_size"),
}
_SIZE = {"hidden": "width"}


def check_sizes(term: Term, loss: Loss, student: Shape, teacher: Shape) -> None:
    """Raise ObjectiveError when this loss cannot compare these two shapes."""
    reading = loss.reading
    over_tokens = reading.signal == "logits" and reading.per != "example"
    for size in ("vocabulary",) if over_tokens else _MUST_AGREE[reading.signal]:
        mine, theirs, called = getattr(student, size), getattr(teacher, size), _SIZE.get(size, size)
        if mine == theirs or called in reading.bridges or (called == "width" and term.project):
            continue
        remedy = {
            "width": "add `project: true` to learn a linear map between them",
            "heads": f"give the student {theirs} heads, or compare relations instead, which bear any head count: "
            "minilm.query_relations, minilm.key_relations, minilm.value_relations",
            "head_size": "compare relations instead: minilm.value_relations",
            "classes": "both need the same labels",
            "vocabulary": "both need the same tokenizer",
        }[called]
        raise ObjectiveError(
            f"{term.name} compares {reading.signal}, but the student has {called.replace('_', ' ')} {mine} and the "
            f"teacher {theirs}: {remedy}"
        )
    if relation_heads := _relation_heads(term, loss):
        for side, shape in (("student", student), ("teacher", teacher)):
            if shape.heads * shape.head_size % relation_heads:
                raise ObjectiveError(
                    f"{term.name}: {relation_heads} relation heads do not divide the {side}'s attention width "
                    f"{shape.heads * shape.head_size}; choose `heads` so that they do"
                )


def check_layers(term: Term, loss: Loss, student: Shape, teacher: Shape, pairs: Sequence[tuple[int, int]]) -> None:
    """Raise ObjectiveError when this loss cannot compare these layers, of models whose layers differ in heads."""
    if "heads" not in _MUST_AGREE[loss.reading.signal]:
        return
    bridges, relation_heads = "heads" in loss.reading.bridges, _relation_heads(term, loss)
    for m, n in pairs:
        mine, theirs = student.heads_of(m), teacher.heads_of(n)
        differ = f"{term.name}: layer {m} of the student has {mine} heads and layer {n} of the teacher {theirs}"
        if not bridges and mine != theirs:
            raise ObjectiveError(
                f"{differ}: compare hidden states instead (tinybert.hidden), or layers that agree, as in "
                "`layers: [[0, 0]]`"
            )
        widths = {mine * student.head_size, theirs * teacher.head_size}
        if relation_heads is not None and any(not width or width % relation_heads for width in widths):
            raise ObjectiveError(
                f"{differ}, which {relation_heads} relation heads do not divide: choose `heads`, or `layers`, so that "
                "they do"
            )


def _relation_heads(term: Term, loss: Loss) -> int | None:
    """Into how many heads a loss splits what it compares; None where it takes the heads that there are."""
    if "heads" not in loss.reading.bridges:
        return None
    known = options(loss.function)
    found = term.options.get("heads", known["heads"].default if "heads" in known else None)
    return None if found is None else int(found)
