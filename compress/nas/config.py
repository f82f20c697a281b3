"""The settings of a search: teacher, data, space, budget and where it is measured; kept as search.yaml.

A space of students is strict YAML: which sizes and settings may be chosen, and the stages that judge and train them.
`width-depth` is `recipes/spaces/width-depth.yaml`; a path ends in .yaml. All problems of a file are reported at once.
This module imports neither torch nor transformers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from compress import io
from compress.config import loader, user_code
from compress.config.loader import parse_yaml, plain_tree
from compress.config.options import BudgetOptions, DataOptions
from compress.config.recipe import (
    ALL_KINDS,
    FINETUNE,
    TEACHER_LM,
    Frozen,
    Line,
    Paper,
    Recipe,
    Stage,
    StudentSpec,
)
from compress.config.reference import Call
from compress.errors import RecipeError, SearchError, did_you_mean
from compress.records.latency import FEWEST_SHAPES, Setting
from compress.records.search_report import ObjectiveName

if TYPE_CHECKING:
    from compress.exporters.artifact import Precision


Value = int | float | str | bool
"""A value of an axis. For sizes, an int is a count and a float a share of the teacher's (1.0: all of it)."""

SIZES = ("layers", "hidden", "heads", "ffn", "embedding", "bottleneck")
SLICED = (*SIZES, "precision")
"""The axes in which the subnets of one supernet can differ."""
AXES = (*SIZES[:-1], "share.attention", "share.ffn", "precision")
"""The axes in which students that are each built anew can differ, besides `config.SETTING`."""
PRECISIONS = ("int8", "fp32")
ROUNDED = 1e-6
"""The part of a step by which the last value may miss `to`: shares such as 1/96 are written with ten digits."""


def _values(given: Any) -> tuple[Value, ...]:
    """Parse a list, one value, or {from, to, step} into the values, each once. Raises ValueError."""
    if isinstance(given, Mapping):
        return _range(given)
    values = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not values:
        raise ValueError("is an empty list: expected at least one value")
    if strange := [value for value in values if not isinstance(value, Value)]:
        raise ValueError(f"expected numbers or words, found {strange[0]!r}")
    if twice := [value for value in values if sum(each == value for each in values) > 1]:
        raise ValueError(f"has {twice[0]!r} twice")
    return values


def _range(given: Mapping[str, Any]) -> tuple[Value, ...]:
    if given.keys() != {"from", "to", "step"}:
        raise ValueError(f"expected a list of values, or {{from:, to:, step:}}, found {dict(given)!r}")
    low, high, step = (given[key] for key in ("from", "to", "step"))
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in (low, high, step)):
        raise ValueError(f"from, to and step must be numbers, found {dict(given)!r}")
    if len({isinstance(value, int) for value in (low, high, step)}) > 1:
        raise ValueError(f"from {low}, to {high}, step {step}: all counts (whole), or all shares (1.0 is all)")
    if low > high:
        raise ValueError(f"contradictory bounds: from {low} is more than to {high}")
    if step <= 0:
        raise ValueError(f"step is {step}; expected more than 0")
    steps = int((high - low) / step + ROUNDED)
    return tuple(min(high, round(low + step * at, 9)) for at in range(steps + 1))


def _student(given: Any) -> Any:
    return {"family": given} if isinstance(given, str) else given


class Space(Frozen):
    """The students that there may be, and what is done with each.

    mode      supernet: one training of the teacher's own weights, of which every student is a part. plain: each is
              built and trained by itself
    student   plain: what all have in common; the axes set the rest
    axes      what a student is chosen by, with the values it may have: `layers`, `hidden`, `heads`, `ffn`, `embedding`,
              `bottleneck` (supernets), `share.attention`, `share.ffn`, `config.SETTING` (plain), `precision`
    tied      axes that are one choice: each takes its n-th value where the others take theirs
    teacher   the stage that fine-tunes a teacher without a head, as of a recipe
    supernet  the stage that trains it; its `step` is `dynabert.Sandwich` or alike
    short     supernet: the short distillation by which the best are ranked again. plain: the training of each trial
    importance    supernet: function of a paper by which units are put in order, the best first; rows: so many training
              rows tell it
    rungs     supernet: parts of the validation rows, one more each, after which a shape may be given up; plain: parts
              of the training. Shares that end in 1
    final     the stages that distil the winner; in YAML also the name of a recipe, whose stages they are
    """

    name: str
    paper: Paper
    about: str
    mode: Literal["supernet", "plain"]
    student: Annotated[StudentSpec, BeforeValidator(_student)] = Field(default_factory=StudentSpec)  # type: ignore[arg-type]
    axes: dict[str, Annotated[tuple[Value, ...], BeforeValidator(_values)]] = Field(min_length=1)
    tied: tuple[tuple[str, ...], ...] = ()
    teacher: Stage
    supernet: Stage | None = None
    importance: Line = Call("molchanov.taylor")
    rows: int = Field(512, gt=0)
    short: Stage
    rungs: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field((0.25, 1.0), min_length=1)
    final: tuple[Stage, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _axes_are_of_its_mode(self) -> "Space":
        problems = [problem for name, values in self.axes.items() for problem in _axis(name, values, self.mode)]
        problems += [problem for names in self.tied for problem in self._tie(names)]
        if self.mode == "supernet" and self.supernet is None:
            problems.append("supernet: is missing; a supernet needs the stage that trains it")
        if self.mode == "plain" and self.supernet is not None:
            problems.append("supernet: is given, and `mode: plain` trains none")
        if self.mode == "supernet" and self.student.model_fields_set:
            problems.append("student: a supernet's students are parts of the teacher; for others, mode: plain")
        if list(self.rungs) != sorted(set(self.rungs)) or self.rungs[-1] != 1:
            problems.append(f"rungs: {', '.join(map(str, self.rungs))}; expected growing shares that end in 1")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _tie(self, names: Sequence[str]) -> list[str]:
        if unknown := [name for name in names if name not in self.axes]:
            return [f"tied: {unknown[0]!r} is not among the axes.{did_you_mean(unknown[0], self.axes)}"]
        counts = {name: len(self.axes[name]) for name in names}
        if len(set(counts.values())) > 1:
            return [f"tied: {', '.join(f'{name} has {n} values' for name, n in counts.items())}; expected as many"]
        return []

    @property
    def stages(self) -> dict[str, Stage]:
        """Every stage there is, by where it stands."""
        numbered = {f"final[{at}]": stage for at, stage in enumerate(self.final)}
        own = {"supernet": self.supernet} if self.supernet else {}
        return {"teacher": self.teacher, **own, "short": self.short, **numbered}

    def recipe(self, name: str, stages: Sequence[Stage], student: StudentSpec | None = None) -> Recipe:
        """Make a recipe of some of its stages, for all that runs and checks recipes."""
        lm = Stage.model_validate(TEACHER_LM)
        return Recipe(
            name=name, paper=self.paper, about=self.about, teacher=self.teacher, teacher_lm=lm,
            student=student or StudentSpec.model_validate({"init": "teacher"}), stages=tuple(stages),
        )  # fmt: skip

    def plain(self) -> dict[str, Any]:
        """Plain data with every number, defaults included."""
        tree: dict[str, Any] = {
            "name": self.name, "paper": self.paper.model_dump(), "about": self.about, "mode": self.mode,
        }  # fmt: skip
        if self.mode == "plain":
            tree["student"] = self.student.plain()
        else:
            tree |= {"importance": self.importance.plain(), "rows": self.rows}
        tree |= {"axes": self.axes, "tied": self.tied, "rungs": self.rungs}
        tree |= {key: stage.plain() for key, stage in self.stages.items() if not key.startswith("final")}
        tree["final"] = [stage.plain() for stage in self.final]
        return {key: plain_tree(value) for key, value in tree.items()}

    def to_yaml(self) -> str:
        """Write the resolved space. Loading it again gives an equal space."""
        return yaml.safe_dump(self.plain(), sort_keys=False, allow_unicode=True, width=120)

    @staticmethod
    def load(name: str, overrides: Sequence[str] = ()) -> "Space":
        """Read `recipes/spaces/<name>.yaml` (or the .yaml file `name`), apply `path=value` overrides, check everything.

        Raises SearchError with every problem found.
        """
        given = name.endswith((".yaml", ".yml"))
        path = Path(name) if given else loader.folder() / "spaces" / f"{name}.yaml"
        if not path.is_file():
            hint = "" if given else did_you_mean(name, space_names())
            raise SearchError(f"no space {name!r}.{hint} A .yaml file also works")
        try:
            tree = loader.load_yaml(path)
            if not isinstance(tree, dict):
                raise SearchError(f"{path.name}: expected a mapping with axes and stages, found {type(tree).__name__}")
            for line in overrides:
                loader.override(tree, line, ALL_KINDS)
        except RecipeError as error:
            raise SearchError(str(error)) from error
        return Space.from_tree(tree | {"name": tree.get("name", path.stem)}, path.name)

    @staticmethod
    def from_tree(tree: Mapping[str, Any], file: str) -> "Space":
        """Make a space from plain data. Raises SearchError with every problem found; `file` says where."""
        tree, problems = dict(tree), list[str]()
        tree["teacher"] = FINETUNE | tree["teacher"] if isinstance(tree.get("teacher"), dict) else dict(FINETUNE)
        if isinstance(tree.get("final"), str):
            tree["final"] = _of_recipe(tree["final"], file, problems)
        try:
            space = Space.model_validate(tree)
        except ValidationError as error:
            inner: dict[str, type[Frozen]] = {"paper": Paper, "student": StudentSpec}
            problems += loader.explain(
                file, error, lambda loc: (inner.get(loc[0], Stage) if len(loc) > 1 else Space).model_fields, show=False
            )
        if problems:
            raise SearchError("\n".join(sorted(set(problems))))
        return space


def space_names() -> list[str]:
    return sorted(path.stem for path in (loader.folder() / "spaces").glob("*.yaml"))


def _axis(name: str, values: Sequence[Value], mode: str) -> list[str]:
    """List what is wrong with one axis."""
    known = SLICED if mode == "supernet" else AXES
    if name not in known and not (mode == "plain" and name.startswith("config.")):
        if name in (*SLICED, *AXES) or name.startswith("config."):
            why = "a supernet has one for all its students: use mode: plain" if mode == "supernet" else ""
            return [f"axes.{name}: {why or 'is for supernets; here it is config.intra_bottleneck_size'}"]
        return [f"axes.{name}: no such axis.{did_you_mean(name, known)}"]
    if name == "precision":
        return [f"axes.precision: no {value!r}.{did_you_mean(str(value), PRECISIONS)}" for value in values
                if value not in PRECISIONS]  # fmt: skip
    if name.startswith("config."):
        return []
    wrong = [value for value in values if isinstance(value, bool | str) or value <= 0]
    wrong += [value for value in values if isinstance(value, float) and value > 1]
    return [f"axes.{name}: {value!r}; expected a count, or a share of the teacher's up to 1.0" for value in wrong]


def _of_recipe(name: str, file: str, problems: list[str]) -> Any:
    """Return the stages of the recipe of that name."""
    try:
        recipe = Recipe.load(name)
    except RecipeError as error:
        problems += [f"{file}: final: {problem}" for problem in error.problems]
        return []
    if recipe.pruning or any(stage.student for stage in recipe.training):
        problems.append(f"{file}: final: recipe {name} builds or prunes a student of its own; expected plain stages")
    return list(recipe.training)


OBJECTIVES: Mapping[str, Literal["maximize", "minimize"]] = {
    "score": "maximize",
    "latency": "minimize",
    "parameters": "minimize",
    "flops_per_token": "minimize",
    "file_mb": "minimize",
}
"""The objectives of a study, which may also be limited: the score from below, the others from above."""
NAME = "search.yaml"
SURE = 2.0
"""Standard deviations of its prediction by which a shape must be within the latency asked for."""


def describe_choice(choice: Mapping[str, Any]) -> str:
    """Write a choice as `layers 4, hidden 256, heads 8, ffn 768`."""
    return ", ".join(f"{name.removeprefix('config.')} {value}" for name, value in choice.items())


@dataclass(frozen=True, kw_only=True)
class Budget(BudgetOptions):
    """The limits of one student, checked: see `BudgetOptions`."""

    def __post_init__(self) -> None:
        """Raise SearchError for limits that nothing can keep."""
        for each in fields(self):
            value, option = getattr(self, each.name), f"--{each.name.replace('_', '-')}"
            if value is not None and not value > 0 and each.name != "min_score":
                raise SearchError(f"{option} {value:g}: expected a number above 0")
        if self.speedup is not None and self.speedup <= 1:
            raise SearchError(
                f"--speedup {self.speedup:g}: the teacher itself has 1; expected more, as in 2 for half of its latency"
            )
        if self.min_score is not None and self.min_score > 1:
            raise SearchError(f"--min-score {self.min_score:g}: no metric is above 1; expected a share, as in 0.9")

    def limits(self, teacher_ms: float | None) -> dict[ObjectiveName, float]:
        """Return the most that each objective may be, of the score the least; a speed-up limits the latency.

        Raises SearchError for a speed-up where the teacher was not measured.
        """
        most = self.max_latency_ms
        if self.speedup is not None:
            if teacher_ms is None:
                raise SearchError(
                    f"--speedup {self.speedup:g}: the teacher has no latency to compare with, as it cannot be "
                    "exported; give --max-latency-ms"
                )
            most = min(teacher_ms / self.speedup, most or math.inf)
        named: dict[ObjectiveName, float | None] = {
            "latency": most, "parameters": self.max_params, "file_mb": self.max_file_mb, "score": self.min_score,
        }  # fmt: skip
        return {name: value for name, value in named.items() if value is not None}


class SearchConfig(Frozen):
    """A search: the same one is resumed, joined by workers, and shown.

    budget      what a student may cost; a latency is of the file of `precision` on `device`, in one forward of `batch`
                texts of `seq` tokens, a speed-up over the teacher's own file of that precision there
    objectives  what the front is over; the score is one
    precision   of the file, where the space does not choose it
    training    what training computes in
    max_drop    of the score, that the int8 file of a student that ships may lose
    shapes      how many are measured to predict the others
    rounds, runs  of each measurement, as of `compress bench`
    anchors     bundles of the same task that are scored and measured beside the shapes, to compare with
    """

    teacher: str
    data: str
    columns: DataOptions = DataOptions()
    space: Space
    budget: Budget = Budget()
    objectives: tuple[str, ...] = ("score", "latency")
    device: str = "local"
    threads: int = Field(1, gt=0, le=1024)
    batch: int = Field(1, gt=0, le=100_000)
    seq: int = Field(128, gt=0, le=1_000_000)
    precision: Literal["int8", "fp32"] = "int8"
    training: Literal["bf16", "fp32"] = "fp32"
    max_drop: float = Field(0.005, ge=0, le=1)
    shapes: int = Field(16, ge=FEWEST_SHAPES, le=64)
    rounds: int = Field(4, ge=2)
    runs: int = Field(10, ge=1)
    anchors: tuple[str, ...] = ()
    seed: int = 0

    @field_validator("objectives")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in OBJECTIVES:
                raise ValueError(f"no objective {name!r}.{did_you_mean(name, OBJECTIVES)}")
        if "score" not in names or len(set(names)) < len(names):
            raise ValueError(f"{', '.join(names) or 'nothing'}; expected score and others, each once")
        return names

    @property
    def setting(self) -> Setting:
        return Setting(threads=self.threads, batch=self.batch, seq=self.seq)

    @property
    def precisions(self) -> "tuple[Precision, ...]":
        """Return the precisions in which shapes are measured."""
        chosen: Any = self.space.axes.get("precision", (self.precision,))
        return tuple(chosen)

    @property
    def max_length(self) -> int:
        """Return the tokens of the longest text that the shipped student reads."""
        return self.space.final[-1].max_length

    def identity(self) -> dict[str, str]:
        """Describe the search in short, for a study to be known by."""
        tree = self.plain()
        words = {name: str(tree[name]) for name in ("teacher", "data", "device", "precision", "training", "seed")}
        allowed = {name: f"{value:g}" for name, value in tree["budget"].items() if value is not None}
        return {
            **words, **allowed, "space": self.space.name, "setting": str(self.setting),
            "search": io.hash_value(tree)[:16],
        }  # fmt: skip

    def with_code(self, allow_code: str | Path | None) -> "SearchConfig":
        """Return the search with the user's own functions that its space names. Raises RecipeError."""
        return self.model_copy(update={"space": user_code.load(self.space, allow_code)})

    def plain(self) -> dict[str, Any]:
        """Plain data with every number."""
        return self.model_dump(mode="json", exclude={"space"}) | {"space": self.space.plain()}

    def to_yaml(self) -> str:
        """search.yaml. Reading it again gives an equal search."""
        return yaml.safe_dump(self.plain(), sort_keys=False, allow_unicode=True, width=120)

    @staticmethod
    def of(**given: Any) -> "SearchConfig":
        """Check the settings. Raises SearchError with every problem, in the words of the command line."""
        try:
            return SearchConfig.model_validate(given)
        except ValidationError as error:
            raise SearchError("\n".join(map(_said, error.errors()))) from error

    @staticmethod
    def from_yaml(text: str, source: str) -> "SearchConfig":
        """Load what `to_yaml` wrote. Raises SearchError."""
        tree = parse_yaml(text, source)
        if not isinstance(tree, dict) or not isinstance(tree.get("space"), dict):
            raise SearchError(f"{source}: is not a search of this tool")
        return SearchConfig.of(**tree | {"space": Space.from_tree(tree["space"], source)})

    @staticmethod
    def read(study: Path) -> "SearchConfig":
        """Load search.yaml from the study folder. Raises SearchError where there is none."""
        file = study / NAME
        if not file.is_file():
            raise SearchError(f"{study}: holds no search; expected the folder that `compress search --out` made")
        return SearchConfig.from_yaml(file.read_text(encoding="utf-8"), str(file))


def _said(error: Mapping[str, Any]) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    if not error["loc"]:
        return message
    option = {"objectives": "objective", "anchors": "anchor"}.get(str(error["loc"][0]), str(error["loc"][0]))
    shown = f", found {error['input']!r}" if isinstance(error["input"], str | int | float) else ""
    return f"--{option.replace('_', '-')}: {message}{shown}"
