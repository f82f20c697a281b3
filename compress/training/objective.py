"""An objective is a weighted sum of terms; a term is one paper's loss applied to mapped layers.

Shapes: B batch, L tokens, D hidden, H heads.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from compress.config.reference import check_options, find, options
from compress.config.term import SETTINGS, Term
from compress.data.constants import IGNORE_INDEX
from compress.errors import ObjectiveError, did_you_mean
from compress.models.signals import ATTENTION, LAYERED, NAMES, Signals
from compress.slicing.shape import Shape
from compress.training.reads import USUAL_ITEMS, Reading


@dataclass(frozen=True)
class Loss:
    """Hold a formula, what it reads, and whether it takes the mask."""

    function: Callable[..., Tensor]
    reading: Reading
    masked: bool = True

    def __call__(self, student: Tensor, target: Any, mask_BL: Tensor, /, **options: Any) -> Tensor:
        return self.function(student, target, *([mask_BL] if self.masked else []), **options)


_MASKED_BY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"labels": ("labels",), "queries": ("query",), "preferences": ("query", "labels")}
)
"""The columns of a batch that a mask is made of."""
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
            "heads": f"give the student {theirs} heads, or take a loss that bears any number of them: "
            "tinybert.attention, minilm.query_relations, minilm.key_relations, minilm.value_relations",
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


def _relation_heads(term: Term, loss: Loss) -> int | None:
    """Return into how many heads a loss splits what it compares; None where it takes the heads that there are."""
    if "heads" not in loss.reading.bridges:
        return None
    known = options(loss.function)
    found = term.options.get("heads", known["heads"].default if "heads" in known else None)
    return None if found is None else int(found)


def layer_pairs(layers: str | Sequence[tuple[int, int]], students: int, teachers: int) -> list[tuple[int, int]]:
    """Return 0-based (student layer, teacher layer) pairs for M student and N teacher layers. Raises ObjectiveError.

    uniform  m -> floor((m + 1) N / M) - 1: TinyBERT's g(m) = m N / M, where M need not divide N
    skip     uniform without the final layer: PKD-Skip
    first    m -> m; top: m -> N - M + m: TinyBERT's bottom and top strategies
    last     only the last of each: MiniLM
    spread   uniform, also where the student is the deeper one: n <- floor((n + 1) M / N) - 1 for each teacher layer n
    pairs    as given; negative numbers count from the end
    """
    if not isinstance(layers, str):
        for student, teacher in layers:
            if not (-students <= student < students and -teachers <= teacher < teachers):
                raise ObjectiveError(
                    f"layers: [{student}, {teacher}] does not exist: the student has {students} layers, the teacher "
                    f"{teachers}, numbered from 0"
                )
        pairs = [(student % students, teacher % teachers) for student, teacher in layers]
    elif layers == "last":
        pairs = [(students - 1, teachers - 1)]
    elif layers == "spread" and students > teachers:
        pairs = [((n + 1) * students // teachers - 1, n) for n in range(teachers)]
    elif students > teachers:
        raise ObjectiveError(
            f"layers: {layers} maps {students} student layers onto only {teachers} of the teacher; give explicit pairs"
        )
    elif layers == "first":
        pairs = [(m, m) for m in range(students)]
    elif layers == "top":
        pairs = [(m, teachers - students + m) for m in range(students)]
    else:
        pairs = [(m, (m + 1) * teachers // students - 1) for m in range(students - (layers == "skip"))]
    if not pairs:
        raise ObjectiveError(f"layers: {layers!r} leaves no layer to compare of the student's {students}")
    return pairs


def pairs_of_subnet(pairs: Sequence[tuple[int, int]], layers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (student layer, teacher layer) pairs of a subnet with these layers, in its own numbers.

    A layer is compared with what it is compared with in the whole student; where none of them is, the last one with
    what the student's last compared layer is.
    """
    mine = [(m, teacher) for m, source in enumerate(layers) for student, teacher in pairs if student == source]
    return mine if mine or not pairs else [(len(layers) - 1, max(pairs)[1])]


OWN_LABELS: Mapping[str, str] = MappingProxyType({"ranking": "lce.relevance"})
"""What `bert.labels`, the task's own loss, is of kinds of task that it has no formula for."""
MASKED = -1e4
"""Score of a pad where a softmax runs over positions: its exp is 0 in float32, also after a temperature."""

PROJECTABLE = frozenset({"embeddings", "layers", "encoder_layers"})


def find_loss(term: Term) -> Loss:
    """Return the formula of a term, and what it reads: a paper's, or the user's own where that has been imported.

    Raises ObjectiveError when there is none, when it does not say what it reads, or takes other arguments than a loss.
    """
    if term.code is not None or not isinstance(term.loss, str):
        function: Any = term.code or term.loss
    else:
        function = find(term.loss, called="loss", mark="reading")
    marked = getattr(function, "reading", None)
    if isinstance(marked, Reading) and term.reads is not None:
        raise ObjectiveError(f"{term.name} says itself that it reads {marked.signal}: remove `reads`")
    if not isinstance(marked, Reading):
        if term.reads is None:
            raise ObjectiveError(
                f"{term.name} does not say what it reads: mark it, as in @compress.reads('logits'), or say it in the "
                "recipe, as in `reads: logits`"
            )
        marked = Reading(term.reads, per=USUAL_ITEMS.get(term.reads, "token"))
    return Loss(function, marked, masked=_takes_mask(function, term.name, marked))


def _takes_mask(function: Any, name: str, reading: Reading) -> bool:
    """Tell whether a loss takes the mask. Raises ObjectiveError for arguments that are not those of a loss."""
    expected = f"expected def {name.rpartition('.')[2]}(student, {reading.against}[, mask], *, option=...)"
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:  # what is not called, or is of C
        raise ObjectiveError(f"{name}: its arguments cannot be read; {expected}") from error
    places = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    stray = [each for each in parameters if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    if len(places) not in (2, 3) or stray:
        raise ObjectiveError(f"{name} takes {inspect.signature(function)}; {expected}: options stand after the *")
    return len(places) == 3


def check_terms(terms: Sequence[Term], where: str, *, absent: bool = False) -> list[str]:
    """List every problem of these terms that shows without models: unknown losses and options, senseless settings.

    absent: functions of the user's that have not been imported are passed over.
    """
    problems: list[str] = []
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
        if reading.signal not in NAMES:
            problems.append(f"{place}: {term.name} reads {reading.signal!r}.{did_you_mean(reading.signal, NAMES)}")
        wrong = check_options(term.options, options(loss.function), SETTINGS[1:])
        problems += [f"{place}: {term.name}{problem}" for problem in wrong]
        if term.project and reading.signal not in PROJECTABLE:
            problems.append(f"{place}: {term.name} reads {reading.signal}, which cannot be projected; remove `project`")
        if term.layers != "uniform" and reading.signal not in LAYERED:
            problems.append(f"{place}: {term.name} reads {reading.signal}, which is not per layer; remove `layers`")
    return problems


class Objective(nn.Module):
    """Sum weighted terms; owns the learned projections, everything else is the papers' pure functions.

    `kind` chooses the terms that serve this kind of task. `teacher` may be None when every term reads labels only.
    Raises ObjectiveError, saying which loss cannot compare what, when shapes do not fit.
    """

    def __init__(
        self, terms: Sequence[Term], student: Shape, teacher: Shape | None = None, *, kind: str | None = None
    ) -> None:
        super().__init__()
        self.kind = kind
        own = OWN_LABELS.get(kind or "")
        self.terms = [
            replace(term, loss=own) if own and term.loss == "bert.labels" else term
            for term in terms if term.serves(kind)
        ]  # fmt: skip
        if not self.terms:
            raise ObjectiveError(f"no term of this objective serves a {kind} task: {', '.join(t.name for t in terms)}")
        problems = check_terms(self.terms, "")
        if problems:
            raise ObjectiveError("\n".join(problems))
        self.losses = [find_loss(term) for term in self.terms]
        self.readings = [loss.reading for loss in self.losses]
        for term, reading in zip(self.terms, self.readings, strict=True):
            if kind is not None and reading.kinds and kind not in reading.kinds:
                about = " or ".join(sorted(reading.kinds))
                raise ObjectiveError(f"{term.name} is about {about} tasks, this one is {kind}: add `only: {about}`")
        self.names = _distinct([term.name for term in self.terms])
        self.student_wants = frozenset(reading.signal for reading in self.readings)
        self.teacher_wants = frozenset(r.signal for r in self.readings if r.against == "teacher")
        if self.teacher_wants and teacher is None:
            raise ObjectiveError(f"{', '.join(self.names)}: needs a teacher, none was given")
        self.pairs: list[list[tuple[int, int]]] = []
        self.projections = nn.ModuleDict()
        self.maps = [_projection(term, name) for term, name in zip(self.terms, self.names, strict=True)]
        for term, loss, name in zip(self.terms, self.losses, self.maps, strict=True):
            reading = loss.reading
            self.pairs.append([])
            if reading.against == "teacher" and teacher is not None:
                check_sizes(term, loss, student, teacher)
                if reading.signal in LAYERED:
                    counts = (shape.stack(reading.signal) for shape in (student, teacher))
                    self.pairs[-1] = layer_pairs(term.layers, *counts)
                if term.project and name not in self.projections:
                    self.projections[name] = nn.Linear(student.hidden, teacher.hidden, bias=False)

    @property
    def reads_only_labelled(self) -> bool:
        """Return True if all that is read of the logits is at labelled positions, as in masked language modelling."""
        items = {reading.per for reading in self.readings if reading.signal == "logits"}
        return items == {"label"}

    def forward(
        self,
        student: Signals,
        teacher: Signals | None,
        targets: Mapping[str, Tensor] | None = None,
        items: Mapping[str, Tensor] | None = None,
        pairs: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> dict[str, Tensor]:
        """Return {term name: weighted loss, ..., "total": their sum}, float32 scalars.

        `targets` is the batch, of which losses read `labels` or another column. `items` gives, for each of
        Reading.per, the mean number of items over all the parts (processes, accumulation) of the batch of which this
        is one part: with it the mean over parts of `total` is the loss of the whole batch. `pairs` are the layers that
        each term compares, where these are not its own: of a subnet that has some of the student's.
        """
        targets = targets or {}
        parts: dict[str, Tensor] = {}
        here = self.items({**targets, "attention_mask": student.mask_BL}) if items is not None else {}
        for i, name in enumerate(self.names):
            parts[name] = self.terms[i].weight * self._value(i, student, teacher, targets, (pairs or self.pairs)[i])
            if items is not None:
                per = self.readings[i].per
                parts[name] = parts[name] * here[per] / items[per].where(items[per] > 0, 1)
        return parts | {"total": torch.stack(list(parts.values())).sum()}

    def items(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Count the items of each kind in a batch of this objective's task."""
        counts = count_items(batch["attention_mask"], batch.get("labels"), per_token=self.kind == "tagging")
        if "query" in batch:
            same_BB = batch["query"][:, None] == batch["query"]
            counts["query"] = (1 / same_BB.sum(1)).sum()
            if "labels" in batch:
                counts["preference"] = preferences(batch["query"], batch["labels"]).sum().float()
        return counts

    def fits(self, student: Shape, teacher: Shape) -> None:
        """Raise ObjectiveError when some term cannot compare these shapes, as a subnet of the student may have."""
        for term, loss in zip(self.terms, self.losses, strict=True):
            if loss.reading.against == "teacher":
                check_sizes(term, loss, student, teacher)

    def _value(
        self,
        i: int,
        student: Signals,
        teacher: Signals | None,
        targets: Mapping[str, Tensor],
        pairs: Sequence[tuple[int, int]],
    ) -> Tensor:
        term, loss, reading = self.terms[i], self.losses[i], self.readings[i]
        self._check_batch(i, student, targets)
        mask_BL, labels = student.mask_BL, targets.get("labels")
        if reading.mask == "labels" and labels is not None:
            mask_BL = (labels != IGNORE_INDEX).to(mask_BL.dtype)
        elif reading.mask == "queries":
            mask_BL = (targets["query"][:, None] == targets["query"]).to(mask_BL.dtype)
        elif reading.mask == "preferences" and labels is not None:
            mask_BL = preferences(targets["query"], labels).to(mask_BL.dtype)
        mine = getattr(student, reading.signal)
        theirs = targets[reading.against] if reading.against != "teacher" else getattr(teacher, reading.signal)
        if reading.signal == "logits":
            mine, theirs, mask_BL = self._answers(reading, mine, theirs, mask_BL, labels)
            if not mine.numel():  # nothing is labelled in this part of the batch
                return mine.float().sum()

        def project(hidden_BLD: Tensor) -> Tensor:
            """Apply a term's linear map; a student narrower than the map takes its first columns."""
            if not term.project:
                return hidden_BLD
            map_TD = self.projections[self.maps[i]].weight
            return linear(hidden_BLD, map_TD[:, : hidden_BLD.shape[-1]])  # type: ignore[index]

        compared = [(mine, theirs, mask_BL)]
        if reading.signal in LAYERED:
            compared = [(mine[m], theirs[n], self._mask_seen(i, student, teacher, mask_BL, (m, n))) for m, n in pairs]
        values = [loss(project(own), other, mask, **term.options) for own, other, mask in compared]
        for value in values:
            if not isinstance(value, Tensor) or value.dim():
                shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ObjectiveError(f"{term.name} returns {shown}; expected one number, a tensor without dimensions")
        over_layers = torch.stack(values)
        return over_layers.mean() if reading.layers == "mean" else over_layers.sum()

    def _mask_seen(
        self, i: int, student: Signals, teacher: Signals | None, mask_BL: Tensor, pair: tuple[int, int]
    ) -> Tensor:
        """Return the mask of real tokens, or where attention of one of these layers is local, of pairs seen in both."""
        if self.readings[i].signal not in ATTENTION:
            return mask_BL
        shown = [
            side.attention[n].seen_BLL for side, n in zip((student, teacher), pair, strict=True) if side is not None
        ]
        local = [seen_BLL for seen_BLL in shown if seen_BLL is not None]
        if not local:
            return mask_BL
        if not self.readings[i].windows:
            raise ObjectiveError(
                f"{self.terms[i].name} compares attention of all pairs of tokens, but layers {pair[0]} of the student "
                f"and {pair[1]} of the teacher see a window only, which this batch's texts are longer than: mark the "
                "loss windows=True in `reads` if it bears a mask (B, L, L), compare global layers by `layers`, or "
                "choose a smaller max_length"
            )
        return torch.stack([mask_BL[:, :, None].bool() & mask_BL[:, None, :].bool(), *local]).all(0)

    def _answers(
        self, reading: Reading, mine: Tensor, theirs: Tensor, mask_BL: Tensor, labels: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits and targets as this loss takes them: one distribution per row where the task has several per example.

        tagging (B, L, C) -> (R, C) of the R labelled tokens; qa (B, L, 2) -> (2 B, L), starts and ends, which makes a
        mean over rows the mean of both, as Sanh et al. and Devlin et al. take it.
        """
        chosen = None
        if reading.per == "label" and mine.dim() == 2 and labels is not None:
            chosen = labels != IGNORE_INDEX
        elif reading.per == "example" and self.kind == "tagging":
            chosen = mask_BL.bool() if labels is None else labels != IGNORE_INDEX
        elif reading.per == "example" and self.kind == "qa":
            theirs = _over_positions(theirs, mask_BL) if reading.against == "teacher" else theirs.flatten()
            return _over_positions(mine, mask_BL), theirs, mask_BL
        if chosen is None:
            return mine, theirs, mask_BL
        mine, theirs = (each[chosen] if each.shape[:2] == chosen.shape else each for each in (mine, theirs))
        return mine, theirs, mask_BL.new_ones(len(mine))

    def _check_batch(self, i: int, student: Signals, targets: Mapping[str, Tensor]) -> None:
        """Raise ObjectiveError when this batch is not of the kind that the loss is about."""
        name, reading = self.terms[i].name, self.readings[i]
        needed = [reading.against, *_MASKED_BY.get(reading.mask, ())]
        for column in needed:
            if column != "teacher" and column not in targets:
                raise ObjectiveError(f"{name} needs {column}, and this batch has none: use it on data that has them")
        shown = getattr(student, reading.signal)
        if shown is None or (isinstance(shown, tuple) and not shown):
            raise ObjectiveError(f"{name} reads {reading.signal}, and this model shows none: give the stage its `head`")
        spread = self.kind in ("tagging", "qa")
        if reading.signal == "logits" and reading.per == "example" and shown.dim() != 2 and not spread:
            raise ObjectiveError(
                f"{name} averages over examples, but these logits are one per token: use a token loss, such as "
                "distilbert.soft_targets or bert.masked_lm"
            )


def _over_positions(logits_BL2: Tensor, mask_BL: Tensor) -> Tensor:
    """(B, L, 2) -> (2 B, L): the scores of starting, and of ending, at each position; pads never win."""
    return logits_BL2.mT.masked_fill(mask_BL[:, None] == 0, MASKED).flatten(0, 1)


def preferences(query_B: Tensor, labels: Tensor) -> Tensor:
    """(B, B): where two rows are of the same query, and the first of them is more relevant than the second."""
    relevance_B = labels.view(-1)
    return (query_B[:, None] == query_B) & (relevance_B[:, None] > relevance_B)


def count_items(mask_BL: Tensor, labels: Tensor | None, *, per_token: bool = False) -> dict[str, Tensor]:
    """Count the items of each kind (Reading.per) in a batch, as float scalars; `per_token`: each label is one."""
    lengths_B = mask_BL.sum(-1).float()
    labelled = lengths_B.new_zeros(()) if labels is None else (labels != IGNORE_INDEX).sum().float()
    return {
        "example": labelled if per_token else lengths_B.new_tensor(float(mask_BL.shape[0])),
        "token": lengths_B.sum(),
        "pair": lengths_B.pow(2).sum(),
        "label": labelled,
    }


def _projection(term: Term, name: str) -> str:
    """Return the key of a term's linear map: the name it shares, else its own."""
    return (term.project if isinstance(term.project, str) else name).replace(".", "_")


def _distinct(names: list[str]) -> list[str]:
    """Tell the same loss twice apart in the logs: x, x#2."""
    seen: dict[str, int] = {}
    out = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        out.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return out
