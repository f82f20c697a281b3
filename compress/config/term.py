"""Define a term of an objective: a loss, its weight, and the layers of student and
teacher that it compares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from compress.arguments import check_arguments, find_problems
from compress.config.loader import plain_tree
from compress.config.reference import Function, check_address, is_user_code
from compress.errors import ObjectiveError
from compress.kinds import Kind
from compress.values import ArgumentCheck, Range

LayerMap = Literal["uniform", "last", "first", "top", "skip", "spread"]
LAYERED = frozenset({"layers", "encoder_layers", "scores", "queries", "keys", "values"})
"""Signals with one tensor per layer; the others are a single tensor."""
MOST_WEIGHT = 1e6
"""Largest weight of a term: the papers' lie between 0.1 and 100; much larger ones
overflow float32 in the sum."""


@dataclass(frozen=True)
class LossCheck(ArgumentCheck):
    """A loss function, or its address."""

    expected: str = "`paper.function`, `module.function` of your own, or a function"

    def fits(self, value: Any) -> bool:
        return isinstance(value, str) or callable(value)

    def take(self, value: Any, name: str) -> Any:
        """Return the loss. Raises ArgumentError for a text that cannot be an
        address."""
        if not isinstance(super().take(value, name), str):
            return value
        try:
            return check_address(str(value))
        except ValueError:
            raise self.refuse(value, name) from None


@check_arguments
@dataclass(frozen=True, init=False)
class Term:
    """weight * loss(student signal, teacher signal), summed over the mapped layers (a
    few losses take their mean).

        Term("tinybert.hidden", weight=0.5, layers="last", project=True)
        Term(margin, reads="logits", temperature=2.0)

    loss      `paper.function` (compress/papers/paper.py), `module.function` of your
              own, or the function itself
    weight    factor of this term in the objective
    layers    for losses on layers: a named map (see `layer_pairs`) or
              explicit 0-based [student, teacher] pairs; negative numbers count from the
              end
    project   True: one learned linear map, student width -> teacher width, for all
              layers of this term; a name: the same, shared by all terms with this name;
              False: the widths must agree
    only      the kinds of task that this term is for; empty: all
    reads     the signal that a function of your own compares, unless it is marked with
              `compress.reads`
    options   keyword arguments of the loss; further keywords of a term are added to
              them
    code      your own function named by `loss`, once it has been imported
    """

    loss: str | Function
    weight: float = 1.0
    layers: LayerMap | tuple[tuple[int, int], ...] = "uniform"
    project: bool | str = False
    only: tuple[Kind, ...] = ()
    reads: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    code: Function | None = field(default=None, compare=False, repr=False)

    def __init__(
        self,
        loss: Annotated[str | Function, LossCheck()],
        weight: Annotated[float, Range(0, MOST_WEIGHT)] = 1.0,
        layers: LayerMap | tuple[tuple[int, int], ...] = "uniform",
        project: bool | str = False,
        only: tuple[Kind, ...] = (),
        *,
        reads: str | None = None,
        options: Mapping[str, Any] | None = None,
        code: Function | None = None,
        **more: Any,
    ) -> None:
        """Set the fields. Raises ArgumentError, as a line of YAML with these values
        does.

        `more` cannot hide a typo: objective.check_terms checks options against the
        loss's signature.
        """
        values = {
            "loss": loss,
            "weight": float(weight),
            "layers": layers,
            "project": project,
            "only": only,
            "reads": reads,
            "options": {**(options or {}), **more},
            "code": code,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        """Return the name of this term in logs and errors."""
        if isinstance(self.loss, str):
            return self.loss
        home = getattr(self.loss, "__module__", None) or type(self.loss).__module__
        called = (
            getattr(self.loss, "__qualname__", None) or type(self.loss).__qualname__
        )
        return f"{home.removeprefix('compress.papers.')}.{called}"

    @property
    def unresolved(self) -> bool:
        """Return True if this is the user's own function and has not been imported
        yet."""
        return (
            self.code is None and isinstance(self.loss, str) and is_user_code(self.loss)
        )

    def serves(self, kind: str | None) -> bool:
        return not self.only or kind is None or kind in self.only

    def plain(self) -> dict[str, Any]:
        """Return the line of YAML: the settings that differ from their defaults, and
        the options."""
        changed = {
            name: getattr(self, name)
            for name in TERM_SETTINGS[1:]
            if getattr(self, name) != getattr(Term, name)
        }
        return (
            {"loss": self.name}
            | {key: plain_tree(value) for key, value in changed.items()}
            | dict(self.options)
        )


TERM_SETTINGS = tuple(
    each.name for each in fields(Term) if each.name not in ("options", "code")
)
"""The settings of a term in YAML; every other key of its line is an option of the
loss."""


def parse(line: object) -> Term:
    """Parse a line of YAML; keys that are not settings of a term are options of its
    loss.

    Raises ValueError with all problems, one on each line.
    """
    if isinstance(line, Term):
        return line
    if not isinstance(line, Mapping) or "loss" not in line:
        raise ValueError(
            f"expected a mapping with `loss: paper.function`, found {line!r}"
        )
    settings = {str(key): value for key, value in line.items() if key in TERM_SETTINGS}
    options = {
        str(key): value for key, value in line.items() if key not in TERM_SETTINGS
    }
    if problems := find_problems(Term, settings):
        raise ValueError("\n".join(map(str, problems)))
    return Term(**settings, options=options)


def layer_pairs(
    layers: str | Sequence[tuple[int, int]], M: int, N: int
) -> list[tuple[int, int]]:
    """Return 0-based (student layer, teacher layer) pairs for M student and N teacher
    layers. Raises ObjectiveError.

    uniform  m -> floor((m + 1) N / M) - 1: TinyBERT's g(m) = m N / M, where M need not
             divide N
    skip     uniform without the final layer: PKD-Skip
    first    m -> m; top: m -> N - M + m: TinyBERT's bottom and top strategies
    last     the last layer of each: MiniLM
    spread   uniform; for a student deeper than its teacher floor((n + 1) M / N) - 1 ->
             n for each teacher layer n
    pairs    explicit pairs; negative numbers count from the end
    """
    if not isinstance(layers, str):
        for student, teacher in layers:
            if not (-M <= student < M and -N <= teacher < N):
                raise ObjectiveError(
                    f"layers: [{student}, {teacher}] does not exist: the student has "
                    f"{M} layers, the teacher {N}, numbered from 0"
                )
        pairs = [(student % M, teacher % N) for student, teacher in layers]
    elif layers == "last":
        pairs = [(M - 1, N - 1)]
    elif layers == "spread" and M > N:
        pairs = [((n + 1) * M // N - 1, n) for n in range(N)]
    elif M > N:
        raise ObjectiveError(
            f"layers: {layers} maps each of the {M} student layers to one of only {N} "
            f"teacher layers: expected a student of at most {N} layers, or explicit "
            "pairs"
        )
    elif layers == "first":
        pairs = [(m, m) for m in range(M)]
    elif layers == "top":
        pairs = [(m, N - M + m) for m in range(M)]
    else:
        pairs = [(m, (m + 1) * N // M - 1) for m in range(M - (layers == "skip"))]
    if not pairs:
        raise ObjectiveError(
            f"layers: {layers!r} leaves none of the student's {M} layers to compare"
        )
    return pairs
