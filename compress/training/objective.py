"""An objective is a weighted sum of terms; a term is one paper's loss applied to mapped
layers.

Shapes: B batch, L tokens, D hidden, H heads.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from compress import kinds
from compress.arguments import check_arguments
from compress.config.reference import check_options, find, options
from compress.config.term import LAYERED, TERM_SETTINGS, Term, layer_pairs
from compress.data.constants import IGNORE_INDEX
from compress.data.task import Task
from compress.errors import ObjectiveError, did_you_mean
from compress.kinds import Kind
from compress.models.signals import ATTENTION, SIGNAL_NAMES, Signals, mark_tokens
from compress.slicing.shape import Shape
from compress.tensors import TensorDict, Tensors
from compress.training.reads import USUAL_ITEMS, Reading
from compress.values import Range


@dataclass(frozen=True)
class Loss:
    """A loss function, the signals that it reads, and whether it takes the mask."""

    function: Callable[..., Tensor]
    reading: Reading
    masked: bool = True

    def __call__(
        self, student: Tensor, target: Any, mask_BL: Tensor, /, **options: Any
    ) -> Tensor:
        return self.function(
            student, target, *([mask_BL] if self.masked else []), **options
        )


LayerPair = tuple[int, int]
"""A layer of the student, and the teacher's layer that it is compared with."""
_MASKED_BY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "labels": ("labels",),
        "queries": ("query",),
        "preferences": ("query", "labels"),
        "answers": ("query", "text", "asker"),
    }
)
"""Columns of a batch that each kind of mask is computed from."""
_OF_TARGET = frozenset({"logits", "embeddings", "layers"})
"""The signals of an encoder-decoder that have a place for each token of the target."""
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


def check_sizes(term: Term, loss: Loss, student: Shape, teacher: Shape) -> None:
    """Raise ObjectiveError when this loss cannot compare these two shapes."""
    reading = loss.reading
    over_tokens = reading.signal == "logits" and reading.per != "example"
    for size in ("vocabulary",) if over_tokens else _MUST_AGREE[reading.signal]:
        own = getattr(student, size)
        other = getattr(teacher, size)
        name = "width" if size == "hidden" else size
        if (
            own == other
            or name in reading.bridges
            or (name == "width" and term.project)
        ):
            continue
        remedy = {
            "width": "add `project: true` to learn a linear map between them",
            "heads": f"give the student {other} heads, or use a loss that accepts any "
            "number of heads: tinybert.attention, minilm.query_relations, "
            "minilm.key_relations, minilm.value_relations",
            "head_size": "compare relations instead: minilm.value_relations",
            "classes": "both need the same labels",
            "vocabulary": "both need the same tokenizer",
        }[name]
        raise ObjectiveError(
            f"{term.name} compares {reading.signal}, but the student has "
            f"{name.replace('_', ' ')} {own} and the teacher {other}: {remedy}"
        )
    if "heads" in reading.bridges and "heads" in (known := options(loss.function)):
        relation_heads = term.options.get("heads", known["heads"].default)
        for side, shape in (("student", student), ("teacher", teacher)):
            if relation_heads and shape.heads * shape.head_size % relation_heads:
                raise ObjectiveError(
                    f"{term.name}: {relation_heads} relation heads do not divide the "
                    f"{side}'s attention width {shape.heads * shape.head_size}; choose "
                    "`heads` so that they do"
                )


def pairs_of_subnet(
    pairs: Sequence[LayerPair], layers: Sequence[int]
) -> list[LayerPair]:
    """Return the (student layer, teacher layer) pairs of a subnet of these layers,
    numbered within the subnet.

    Each layer keeps its teacher layer from the whole student. If no layer of the subnet
    has one, its last layer takes the teacher layer of the student's last compared
    layer.
    """
    own = [
        (m, teacher)
        for m, source in enumerate(layers)
        for student, teacher in pairs
        if student == source
    ]
    return own if own or not pairs else [(len(layers) - 1, max(pairs)[1])]


PROJECTABLE = frozenset({"embeddings", "layers", "encoder_layers"})


def find_loss(term: Term) -> Loss:
    """Return the loss that a term names: a paper's loss, or the user's own if it has
    been imported.

    Raises ObjectiveError if it does not exist, does not declare what it reads, or does
    not have the parameters of a loss.
    """
    if term.code is not None or not isinstance(term.loss, str):
        function: Any = term.code or term.loss
    else:
        function = find(term.loss, called="loss", mark="reading")
    marked = getattr(function, "reading", None)
    if isinstance(marked, Reading) and term.reads is not None:
        raise ObjectiveError(
            f"{term.name} already declares that it reads {marked.signal}: remove "
            "`reads`"
        )
    if not isinstance(marked, Reading):
        if term.reads is None:
            raise ObjectiveError(
                f"{term.name} does not declare what it reads: decorate it, as in "
                "@compress.reads('logits'), or add `reads: logits` to the term"
            )
        marked = Reading(term.reads, per=USUAL_ITEMS.get(term.reads, "token"))
    return Loss(function, marked, masked=_takes_mask(function, term.name, marked))


def _takes_mask(function: Any, name: str, reading: Reading) -> bool:
    """Return True if a loss takes the mask. Raises ObjectiveError if it does not have
    the parameters of a loss."""
    expected = (
        f"expected def {name.rpartition('.')[2]}(student, {reading.against}[, mask], "
        "*, option=...)"
    )
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:  # not callable, or written in C
        raise ObjectiveError(
            f"{name}: its parameters cannot be read; {expected}"
        ) from error
    places = [
        each
        for each in parameters
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    stray = [
        each
        for each in parameters
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if len(places) not in (2, 3) or stray:
        raise ObjectiveError(
            f"{name} takes {inspect.signature(function)}; {expected}: options come "
            "after the *"
        )
    return len(places) == 3


def check_terms(
    terms: Sequence[Term], where: str, *, absent: bool = False
) -> list[str]:
    """List every problem of these terms that can be found without models: unknown
    losses and options, invalid settings.

    absent: skip the user's own functions that have not been imported.
    """
    problems = list[str]()
    for i, term in enumerate(terms):
        place = f"{where}.objective[{i}]".lstrip(".")
        if absent and term.unresolved:
            continue
        try:
            loss = find_loss(term)
        except ObjectiveError as error:
            problems.append(f"{place}: {error}")
            continue
        reading = loss.reading
        if reading.signal not in SIGNAL_NAMES:
            problems.append(
                f"{place}: {term.name} reads "
                f"{reading.signal!r}.{did_you_mean(reading.signal, SIGNAL_NAMES)}"
            )
        wrong = check_options(term.options, options(loss.function), TERM_SETTINGS[1:])
        problems += [f"{place}: {term.name}{problem}" for problem in wrong]
        if term.project and reading.signal not in PROJECTABLE:
            problems.append(
                f"{place}: {term.name} reads {reading.signal}, which cannot be "
                "projected; remove `project`"
            )
        if term.layers != "uniform" and reading.signal not in LAYERED:
            problems.append(
                f"{place}: {term.name} reads {reading.signal}, which is not per layer; "
                "remove `layers`"
            )
    return problems


@check_arguments
class Objective(nn.Module):
    """Sum weighted terms. It owns the learned projections; the losses are the papers'
    pure functions.

    `kind` selects the terms that serve this kind of task. `teacher` may be None if
    every term reads labels only. `unit` divides logits and labels before they are
    compared: for a regression, it is the standard deviation of the labels, so that
    weights of terms and learning rates suit labels on any scale. Raises ObjectiveError
    for a loss that cannot compare these two shapes.
    """

    def __init__(
        self,
        terms: Sequence[Term],
        student: Shape,
        teacher: Shape | None = None,
        *,
        kind: Kind | None = None,
        unit: Annotated[float, Range(1e-12)] = 1.0,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.task: type[Task] = Task if kind is None else kinds.find(kind)
        self.unit = unit
        own = self.task.own_loss
        self.terms = [
            replace(term, loss=own) if term.loss == Task.own_loss else term
            for term in terms
            if term.serves(kind)
        ]
        if not self.terms:
            given = ", ".join(term.name for term in terms) or "none was given"
            raise ObjectiveError(
                f"terms: no term of this objective serves a {kind or 'single'} task: "
                f"{given}"
            )
        problems = check_terms(self.terms, "")
        if problems:
            raise ObjectiveError("\n".join(problems))
        self.losses = [find_loss(term) for term in self.terms]
        self.readings = [loss.reading for loss in self.losses]
        for term, reading in zip(self.terms, self.readings, strict=True):
            if kind is not None and reading.kinds and kind not in reading.kinds:
                about = " or ".join(sorted(reading.kinds))
                raise ObjectiveError(
                    f"{term.name} is about {about} tasks, this one is {kind}: add "
                    f"`only: {about}`"
                )
        names = [term.name for term in self.terms]
        earlier = [names[:at].count(name) for at, name in enumerate(names)]
        self.names = [
            f"{name}#{n + 1}" if n else name
            for name, n in zip(names, earlier, strict=True)
        ]
        self.student_wants = frozenset(reading.signal for reading in self.readings)
        self.teacher_wants = frozenset(
            r.signal for r in self.readings if r.against == "teacher"
        )
        if self.teacher_wants and teacher is None:
            raise ObjectiveError(
                f"{', '.join(self.names)}: needs a teacher, none was given"
            )
        self.pairs = list[list[LayerPair]]()
        self.projections = nn.ModuleDict()
        self.maps = [  # the name that terms share, or the term's own
            (term.project if isinstance(term.project, str) else name).replace(".", "_")
            for term, name in zip(self.terms, self.names, strict=True)
        ]
        for term, loss, name in zip(self.terms, self.losses, self.maps, strict=True):
            reading = loss.reading
            self.pairs.append([])
            if reading.against == "teacher" and teacher is not None:
                check_sizes(term, loss, student, teacher)
                if reading.signal in LAYERED:
                    counts = (
                        shape.stack(reading.signal) for shape in (student, teacher)
                    )
                    self.pairs[-1] = layer_pairs(term.layers, *counts)
                if term.project and name not in self.projections:
                    self.projections[name] = nn.Linear(
                        student.hidden, teacher.hidden, bias=False
                    )

    @property
    def reads_only_labelled(self) -> bool:
        """Return True if logits are read at labelled positions only, as in masked
        language modelling."""
        items = {reading.per for reading in self.readings if reading.signal == "logits"}
        return items == {"label"}

    def forward(
        self,
        student: Signals,
        teacher: Signals | None,
        targets: Tensors | None = None,
        items: Tensors | None = None,
        pairs: Sequence[Sequence[LayerPair]] | None = None,
    ) -> TensorDict:
        """Return {term name: weighted loss, ..., "total": their sum}, float32 scalars.

        `targets` is the batch, from which losses read `labels` or another column. If
        this is one part of a batch that is split over processes or accumulated, `items`
        gives the mean number of items of each kind (Reading.per) over all parts: the
        mean of `total` over the parts is then the loss of the whole batch. `pairs`
        overrides the layers that each term compares, for a subnet with some of the
        student's layers.
        """
        targets = targets or {}
        pairs = pairs or self.pairs
        parts = {
            name: self.terms[i].weight
            * self._value(i, student, teacher, targets, pairs[i])
            for i, name in enumerate(self.names)
        }
        if items is not None:
            counts = self.items({**targets, "attention_mask": student.mask_BL})
            parts = {
                name: weigh_part(parts[name], counts[item], items[item])
                for name, item in zip(self.names, self._averaged, strict=True)
            }
        return parts | {"total": torch.stack(list(parts.values())).sum()}

    @property
    def _averaged(self) -> list[str]:
        """Name the items that each term averages over: examples are tokens of a tagging
        task in its logits, and rows in all other signals."""
        return [
            "row"
            if reading.per == "example" and reading.signal != "logits"
            else reading.per
            for reading in self.readings
        ]

    def items(self, batch: Tensors) -> TensorDict:
        """Count the items of each kind in a batch of this objective's task."""
        counts = count_items(
            mark_tokens(batch),
            batch.get("labels"),
            per_token=self.task.word_labels,
        )
        if "query" in batch:
            same_BB = batch["query"][:, None] == batch["query"]
            counts["query"] = (1 / same_BB.sum(1)).sum()
            if "labels" in batch:
                counts["preference"] = (
                    preferences(batch["query"], batch["labels"]).sum().float()
                )
        return counts

    def check_shapes(self, student: Shape, teacher: Shape) -> None:
        """Raise ObjectiveError if a term cannot compare these shapes, such as those of
        a subnet."""
        for term, loss in zip(self.terms, self.losses, strict=True):
            if loss.reading.against == "teacher":
                check_sizes(term, loss, student, teacher)

    def _value(
        self,
        i: int,
        student: Signals,
        teacher: Signals | None,
        targets: Tensors,
        pairs: Sequence[LayerPair],
    ) -> Tensor:
        term = self.terms[i]
        loss = self.losses[i]
        reading = self.readings[i]
        self._check_batch(i, student, targets)
        mask_BL = student.mask_BL
        labels = targets.get("labels")
        if reading.mask == "labels" and labels is not None:
            mask_BL = (labels != IGNORE_INDEX).to(mask_BL.dtype)
        elif reading.mask == "queries":
            mask_BL = (targets["query"][:, None] == targets["query"]).to(mask_BL.dtype)
        elif reading.mask == "preferences" and labels is not None:
            mask_BL = preferences(targets["query"], labels).to(mask_BL.dtype)
        elif reading.mask == "answers":
            mask_BL = answers(targets["query"], targets["text"], targets["asker"])
        own = getattr(student, reading.signal)
        target = (
            targets[reading.against]
            if reading.against != "teacher"
            else getattr(teacher, reading.signal)
        )
        if reading.signal == "logits":
            own, target, mask_BL = self._select_rows(
                reading, own, target, mask_BL, labels
            )
            if not own.numel():  # nothing is labelled in this part of the batch
                return own.float().sum()
            if self.unit != 1:
                own = own.float() / self.unit
                target = target.float() / self.unit

        def project(hidden_BLD: Tensor) -> Tensor:
            """Apply the term's linear map; a student narrower than the map uses the
            first columns."""
            if not term.project:
                return hidden_BLD
            map_TD: Any = self.projections[self.maps[i]].weight
            width = hidden_BLD.shape[-1]
            return linear(hidden_BLD.to(map_TD.dtype), map_TD[:, :width])

        compared = [(own, target, mask_BL)]
        if reading.signal in LAYERED:
            self._check_layers(i, len(own), len(target), pairs)
            compared = [
                (
                    own[m],
                    target[n],
                    self._mask_seen(i, student, teacher, mask_BL, (m, n)),
                )
                for m, n in pairs
            ]
        values = [
            loss(project(of_student), other, mask, **term.options)
            for of_student, other, mask in compared
        ]
        for value in values:
            if not isinstance(value, Tensor) or value.dim():
                what = (
                    f"a tensor of shape {tuple(value.shape)}"
                    if isinstance(value, Tensor)
                    else type(value).__name__
                )
                raise ObjectiveError(
                    f"{term.name} returns {what}; expected one number, a tensor "
                    "without dimensions"
                )
        over_layers = torch.stack(values)
        return over_layers.mean() if reading.layers == "mean" else over_layers.sum()

    def _check_layers(
        self, i: int, student: int, teacher: int, pairs: Sequence[LayerPair]
    ) -> None:
        """Raise ObjectiveError if a layer has not recorded the signal that the term
        reads, such as a layer without attention."""
        deepest = (
            max((m for m, _ in pairs), default=-1),
            max((n for _, n in pairs), default=-1),
        )
        for side, shown, number in zip(
            ("student", "teacher"), (student, teacher), deepest, strict=True
        ):
            if shown <= number:
                raise ObjectiveError(
                    f"{self.terms[i].name} compares {self.readings[i].signal} of layer "
                    f"{number} of the {side}, which has recorded them for {shown} "
                    "layers: choose others with `layers`, or compare layers and logits"
                )

    def _mask_seen(
        self,
        i: int,
        student: Signals,
        teacher: Signals | None,
        mask_BL: Tensor,
        pair: LayerPair,
    ) -> Tensor:
        """Return the mask of real tokens or, if a layer has local or causal attention,
        of the pairs of tokens that both layers see."""
        if self.readings[i].signal not in ATTENTION:
            return mask_BL
        sides = zip((student, teacher), pair, strict=True)
        local = [
            seen
            for side, n in sides
            if side is not None and (seen := side.attention[n].seen_BLL) is not None
        ]
        if not local:
            return mask_BL
        if not self.readings[i].windows:
            raise ObjectiveError(
                f"{self.terms[i].name} compares attention of all pairs of tokens, but "
                f"layer {pair[0]} of the student or {pair[1]} of the teacher attends "
                "within a window that is shorter than these texts, or to earlier "
                "tokens only: declare windows=True in `reads` if the loss accepts a "
                "mask (B, L, L), or for a window select global layers with `layers`, "
                "or lower max_length"
            )
        return torch.stack(
            [mask_BL[:, :, None].bool() & mask_BL[:, None, :].bool(), *local]
        ).all(0)

    def _select_rows(
        self,
        reading: Reading,
        logits: Tensor,
        target: Tensor,
        mask_BL: Tensor,
        labels: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Reshape logits, target and mask to one distribution per row, for tasks that
        have several per example: of tagging the R labelled tokens, (B, L, C) -> (R, C);
        otherwise see `Task.spread`.
        """
        chosen = None
        if reading.per == "label" and logits.dim() == 2 and labels is not None:
            chosen = labels != IGNORE_INDEX
        elif reading.per == "example" and self.task.word_labels:
            chosen = mask_BL.bool() if labels is None else labels != IGNORE_INDEX
        elif reading.per == "example":
            logits = self.task.spread(logits, mask_BL)
            target = self.task.spread(target, mask_BL)
        if chosen is None:
            return logits, target, mask_BL
        logits = logits[chosen] if logits.shape[:2] == chosen.shape else logits
        target = target[chosen] if target.shape[:2] == chosen.shape else target
        return logits, target, mask_BL.new_ones(len(logits))

    def _check_batch(self, i: int, student: Signals, targets: Tensors) -> None:
        """Raise ObjectiveError if the batch or the student's output lacks what the loss
        reads."""
        name = self.terms[i].name
        reading = self.readings[i]
        needed = [reading.against, *_MASKED_BY.get(reading.mask, ())]
        for column in needed:
            if column != "teacher" and column not in targets:
                raise ObjectiveError(
                    f"{name} needs {column}, but this batch has none: use it on data "
                    "that has this column"
                )
        value = getattr(student, reading.signal)
        if value is None or (isinstance(value, tuple) and not value):
            raise ObjectiveError(
                f"{name} reads {reading.signal}, but this model has none: set the "
                "stage's `head`"
            )
        over_source = reading.per in ("token", "pair") and reading.mask == "tokens"
        if student.two_stacks and over_source and reading.signal in _OF_TARGET:
            raise ObjectiveError(
                f"{name} averages over tokens of the source, but {reading.signal} of "
                "an encoder-decoder are of the target: use a loss over labels, such as "
                "distilbert.masked_soft_targets or seq2seq.decoder_hidden"
            )
        per_example = reading.per == "example" and not self.task.tokenwise
        if reading.signal == "logits" and per_example and value.dim() != 2:
            raise ObjectiveError(
                f"{name} averages over examples, but these logits are one per token: "
                "use a token loss, such as distilbert.soft_targets or bert.masked_lm"
            )


def preferences(query_B: Tensor, labels: Tensor) -> Tensor:
    """Mark pairs of rows of one query in which the first is more relevant than the
    second, (B, B)."""
    relevance_B = labels.view(-1)
    return (query_B[:, None] == query_B) & (relevance_B[:, None] > relevance_B)


def answers(query_B: Tensor, text_B: Tensor, asker_B: Tensor) -> Tensor:
    """Mark the passages (last axis) of each query, (B, B): see `Reading.mask`; the rows
    of passages are -1.

    query_B  the group of each row; text_B: the number of its text; asker_B: the number
             of the text of its group's query, which is no passage for this query
    """
    asks_B = text_B == asker_B
    itself_BB = asker_B[:, None] == text_B
    judged_BB = (asker_B[:, None] == asker_B) & asks_B[:, None] & ~asks_B
    own_BB = judged_BB & (query_B[:, None] == query_B)
    # over all groups of this query
    copies_BB = judged_BB.float() @ (text_B[:, None] == text_B).float() > 0
    unknown_BB = ~asks_B[:, None] | asks_B | copies_BB | itself_BB
    return own_BB.long() - (unknown_BB & ~own_BB).long()


def compares_queries(terms: Sequence[Term], kind: str | None) -> bool:
    """Check whether a term of this kind of task needs batches of queries with their
    passages."""
    return any(
        term.serves(kind) and find_loss(term).reading.mask == "answers"
        for term in terms
    )


def weigh_part(value: Tensor, count: Tensor | int, mean: Tensor) -> Tensor:
    """Weigh a mean over the `count` items of one part of a batch, whose parts have
    `mean` items on average.

    The mean over the parts is then the mean over all items.
    """
    return value * count / mean.where(mean > 0, 1)


def count_items(
    mask_BL: Tensor, labels: Tensor | None, *, per_token: bool = False
) -> TensorDict:
    """Count the items of each kind (Reading.per) in a batch, and its rows, as float
    scalars.

    per_token: each labelled token is an example, or each real one of a batch without
    labels.
    """
    lengths_B = mask_BL.sum(-1).float()
    labelled = (
        lengths_B.new_zeros(())
        if labels is None
        else (labels != IGNORE_INDEX).sum().float()
    )
    rows = examples = lengths_B.new_tensor(float(mask_BL.shape[0]))
    if per_token:
        examples = lengths_B.sum() if labels is None else labelled
    return {
        "example": examples,
        "row": rows,
        "token": lengths_B.sum(),
        "pair": lengths_B.pow(2).sum(),
        "label": labelled,
    }
