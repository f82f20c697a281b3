"""A term of an objective: a loss, its weight, and which layers of student and teacher it compares."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any, Literal

from compress.errors import RecipeError, did_you_mean

LayerMap = Literal["uniform", "last", "first", "top", "skip", "spread"]
LAYER_MAPS: tuple[str, ...] = ("uniform", "last", "first", "top", "skip", "spread")
KINDS: tuple[str, ...] = ("classification", "multilabel", "regression", "tagging", "qa")


@dataclass(frozen=True)
class Term:
    """weight * loss(student signal, teacher signal), summed over the mapped layers.

    loss      `paper.function` (compress/papers/paper.py), a dotted path to your own, or the function itself
    weight    factor of this term in the objective
    layers    for losses on layers: a named map (see `objective.layer_pairs`) or explicit 0-based
              [student, teacher] pairs; negative numbers count from the end
    project   True: one learned linear map, student width -> teacher width, for all layers of this term;
              a name: the same, shared by all terms that give this name; False: widths must agree
    only      the task kinds this term is for; empty: all
    options   keyword arguments of the loss
    """

    loss: str | Callable[..., Any]
    weight: float = 1.0
    layers: str | tuple[tuple[int, int], ...] = "uniform"
    project: bool | str = False
    only: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What logs and errors call this term."""
        if isinstance(self.loss, str):
            return self.loss
        return f"{self.loss.__module__.rpartition('.')[2]}.{self.loss.__qualname__}"

    def serves(self, kind: str | None) -> bool:
        return not self.only or kind is None or kind in self.only

    def plain(self) -> dict[str, Any]:
        """One line of YAML: settings that differ from their defaults, options inline."""
        line: dict[str, Any] = {"loss": self.name}
        for each in fields(self)[1:-1]:
            value = getattr(self, each.name)
            if value != each.default:
                line[each.name] = _listed(value)
        return line | dict(self.options)


def parse(line: object, where: str) -> Term:
    """A line of YAML -> Term. What is no setting of a term is an option of its loss. Raises RecipeError."""
    if not isinstance(line, Mapping) or "loss" not in line:
        raise RecipeError([f"{where}: expected a mapping with `loss: paper.function`, found {line!r}"])
    settings = {each.name for each in fields(Term)} - {"options"}
    known = {key: value for key, value in line.items() if key in settings}
    options = {str(key): value for key, value in line.items() if key not in settings}
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
    if not isinstance(known["loss"], str):
        problems.append(f"{where}: loss must be a name, found {known['loss']!r}")
    weight = known.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight):
        problems.append(f"{where}: weight must be a number, found {weight!r}")
    project = known.get("project", False)
    if not isinstance(project, bool | str):
        problems.append(f"{where}: project must be true, false or a name shared by several terms, found {project!r}")
    if problems:
        raise RecipeError(problems)
    return Term(known["loss"], float(weight), layers, project, only, options)


def _is_pairs(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(at, int) for at in pair) for pair in value
    )


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, tuple) else value
