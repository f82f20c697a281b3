"""A term of an objective: a loss, its weight, and which layers of student and teacher it compares."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from compress.config.reference import address, is_own
from compress.errors import RecipeError, did_you_mean

LayerMap = Literal["uniform", "last", "first", "top", "skip", "spread"]
LAYER_MAPS: tuple[str, ...] = ("uniform", "last", "first", "top", "skip", "spread")
KINDS: tuple[str, ...] = ("classification", "multilabel", "regression", "tagging", "qa", "embedding", "ranking")
MOST_WEIGHT = 1e6
"""Weights of the papers lie between 0.1 and 100; what is far beyond overflows float32 in the sum."""


@dataclass(frozen=True, init=False)
class Term:
    """weight * loss(student signal, teacher signal), summed over the mapped layers (a few losses take their mean).

        Term("tinybert.hidden", weight=0.5, layers="last", project=True)
        Term(margin, reads="logits", temperature=2.0)

    loss      `paper.function` (compress/papers/paper.py), `module.function` of your own, or the function itself
    weight    factor of this term in the objective
    layers    for losses on layers: a named map (see `objective.layer_pairs`) or explicit 0-based
              [student, teacher] pairs; negative numbers count from the end
    project   True: one learned linear map, student width -> teacher width, for all layers of this term;
              a name: the same, shared by all terms that give this name; False: widths must agree
    only      the task kinds this term is for; empty: all
    reads     the signal that a function of your own compares, where it does not say so itself (`compress.reads`)
    options   keyword arguments of the loss; further keywords of a term are the same
    code      your own function that `loss` names, once it has been imported
    """

    loss: str | Callable[..., Any]
    weight: float = 1.0
    layers: str | tuple[tuple[int, int], ...] = "uniform"
    project: bool | str = False
    only: tuple[str, ...] = ()
    reads: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    code: Callable[..., Any] | None = field(default=None, compare=False, repr=False)

    def __init__(
        self,
        loss: str | Callable[..., Any],
        weight: float = 1.0,
        layers: str | tuple[tuple[int, int], ...] = "uniform",
        project: bool | str = False,
        only: tuple[str, ...] = (),
        *,
        reads: str | None = None,
        options: Mapping[str, Any] | None = None,
        code: Callable[..., Any] | None = None,
        **more: Any,
    ) -> None:  # `more` hides no typo: options are checked against the loss's own, see objective.check_terms
        values = {
            "loss": loss, "weight": weight, "layers": layers, "project": project, "only": only, "reads": reads,
            "options": {**(options or {}), **more}, "code": code,
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        """Return what logs and errors call this term."""
        if isinstance(self.loss, str):
            return self.loss
        home, called = (
            getattr(self.loss, each, None) or getattr(type(self.loss), each) for each in ("__module__", "__qualname__")
        )
        return f"{home.removeprefix('compress.papers.')}.{called}"

    @property
    def absent(self) -> bool:
        """Tell whether this is the user's own function, and has not been imported."""
        return self.code is None and isinstance(self.loss, str) and is_own(self.loss)

    def serves(self, kind: str | None) -> bool:
        return not self.only or kind is None or kind in self.only

    def plain(self) -> dict[str, Any]:
        """Return one line of YAML: settings that differ from their defaults, options inline."""
        line: dict[str, Any] = {"loss": self.name}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in ("loss", "options", "code") and value != each.default:
                line[each.name] = _as_lists(value)
        return line | dict(self.options)


SETTINGS = tuple(each.name for each in fields(Term) if each.name not in ("options", "code"))
"""The settings of a term in YAML; anything else in its line is an option of the loss."""


def parse(line: object, where: str) -> Term:
    """Read a line of YAML. What is no setting of a term is an option of its loss. Raises RecipeError."""
    if not isinstance(line, Mapping) or "loss" not in line:
        raise RecipeError([f"{where}: expected a mapping with `loss: paper.function`, found {line!r}"])
    known = {key: value for key, value in line.items() if key in SETTINGS}
    options = {str(key): value for key, value in line.items() if key not in SETTINGS}
    problems: list[str] = []
    layers, only = known.get("layers", "uniform"), known.get("only", ())
    if isinstance(layers, str):
        if layers not in LAYER_MAPS:
            problems.append(f"{where}: no layer map {layers!r}.{did_you_mean(layers, LAYER_MAPS)}")
    elif not _is_pairs(layers):
        problems.append(f"{where}: layers must be a named map or a list of [student, teacher] pairs, found {layers!r}")
    else:
        layers = tuple((int(student), int(teacher)) for student, teacher in layers)
    only = tuple(only) if isinstance(only, list | tuple) else (only,)
    unknown = [str(kind) for kind in only if kind not in KINDS]
    problems += [f"{where}: no task kind {kind!r}.{did_you_mean(kind, KINDS)}" for kind in unknown]
    problems += _find_misnamed(known["loss"], where)
    weight = known.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MOST_WEIGHT:
        problems.append(f"{where}: weight must be a number from 0 to {MOST_WEIGHT:,.0f}, found {weight!r}")
    project = known.get("project", False)
    if not isinstance(project, bool | str):
        problems.append(f"{where}: project must be true, false or a name shared by several terms, found {project!r}")
    reads = known.get("reads")
    if reads is not None and not isinstance(reads, str):
        problems.append(f"{where}: reads must be the name of a signal, found {reads!r}")
    if problems:
        raise RecipeError(problems)
    return Term(known["loss"], float(weight), layers, project, only, reads=reads, options=options)


def _find_misnamed(loss: object, where: str) -> list[str]:
    if not isinstance(loss, str):
        return [f"{where}: loss must be a name, found {loss!r}"]
    try:
        address(loss)
    except ValueError as error:
        return [f"{where}: loss {error}"]
    return []


def _is_pairs(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(at, int) for at in pair) for pair in value
    )


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, tuple) else value
