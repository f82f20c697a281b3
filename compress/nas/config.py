"""The settings of a search, kept as search.yaml: teacher, data, space, budget, and the
device to measure on.

A space of students is strict YAML: which sizes and settings may vary, and the stages
that score and train them. `width-depth` is `recipes/spaces/width-depth.yaml`; a path
ends in .yaml. All problems of a file are reported at once. This module imports neither
torch nor transformers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from compress import io
from compress.arguments import NameLike, check_arguments, name_of
from compress.config import loader, user_code
from compress.config.loader import dump_yaml, parse_yaml, plain_tree
from compress.config.options import BudgetOptions, DataOptions
from compress.config.recipe import FINETUNE, TEACHER_LM, Paper, Recipe
from compress.config.reference import Call
from compress.config.stages import (
    ALL_KINDS,
    SIZES,
    Frozen,
    Stage,
    StudentSpec,
    TermLine,
)
from compress.errors import RecipeError, SearchError, did_you_mean
from compress.records.latency import FEWEST_SHAPES, Setting
from compress.records.search_report import ObjectiveName

SettingValue = int | float | str | bool
"""A value of an axis. For sizes, an int is a count and a float a share of the
teacher's."""
SettingValues = tuple[SettingValue, ...]

SLICED = (*SIZES, "precision")
"""The axes along which the subnets of a supernet can differ."""
AXES = (*SIZES[:-1], "share.attention", "share.ffn", "precision")
"""The axes along which students built from scratch can differ, besides
`config.SETTING`."""
PRECISIONS = ("int8", "fp32")
COST_ROUNDING = 1e-6
"""How far the last value may miss `to`, as a share of a step: shares such as 1/96 are
written with ten digits."""


def _parse_values(value: Any) -> SettingValues:
    """Parse a list, a single value, or {from, to, step} into distinct values. Raises
    ValueError."""
    if isinstance(value, Mapping):
        if value.keys() != {"from", "to", "step"}:
            raise ValueError(
                "expected a list of values, or {from:, to:, step:}, found "
                f"{dict(value)!r}"
            )
        low, high, step = bounds = [value[key] for key in ("from", "to", "step")]
        kinds = {type(bound) for bound in bounds}
        if not kinds <= {int, float}:
            raise ValueError(
                f"from, to and step must be numbers, found {dict(value)!r}"
            )
        if len(kinds) > 1:
            raise ValueError(
                f"from {low}, to {high}, step {step}: expected only counts (whole), or "
                "only shares"
            )
        if low > high or step <= 0:
            raise ValueError(
                f"from {low}, to {high}, step {step}: expected `to` of at least "
                "`from`, and a step above 0"
            )
        return tuple(
            min(high, round(low + step * at, 9))
            for at in range(int((high - low) / step + COST_ROUNDING) + 1)
        )
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not values:
        raise ValueError("is an empty list: expected at least one value")
    if wrong := [each for each in values if not isinstance(each, SettingValue)]:
        raise ValueError(f"expected numbers or words, found {wrong[0]!r}")
    if repeated := [each for each in values if values.count(each) > 1]:
        raise ValueError(f"has {repeated[0]!r} twice")
    return values


class Space(Frozen):
    """A space of students, and the stages that score and train them.

    mode      supernet: every student is a part of one trained supernet, made of the
              teacher's weights. plain: each student is built and trained on its own
    student   plain: settings that all students share; the axes set the rest
    axes      the dimensions of the space and their values: `layers`, `hidden`, `heads`,
              `ffn`, `embedding`, `bottleneck` (supernets), `share.attention`,
              `share.ffn`, `config.SETTING` (plain), `precision`
    tied      axes that vary together: each takes its n-th value where the others take
              theirs
    teacher   the stage that fine-tunes a teacher without a head, as in a recipe
    supernet  the stage that trains the supernet; its `step` is `dynabert.Sandwich` or
              similar
    short     supernet: the short distillation that ranks the best students again.
              plain: the training of each trial
    importance    supernet: a paper's function that sorts the units, the best first;
                  rows: training rows it reads
    rungs     growing shares that end in 1, after each of which a shape may be pruned:
              of the validation rows (supernet), or of the training (plain)
    final     the stages that distil the winner; in YAML also the name of a recipe,
              whose stages are taken
    """

    name: str
    paper: Paper
    about: str
    mode: Literal["supernet", "plain"]
    student: Annotated[
        StudentSpec,
        BeforeValidator(
            lambda value: {"family": value} if isinstance(value, str) else value
        ),
    ] = Field(default_factory=StudentSpec)  # type: ignore[arg-type]
    axes: dict[str, Annotated[SettingValues, BeforeValidator(_parse_values)]] = Field(
        min_length=1
    )
    tied: tuple[tuple[str, ...], ...] = ()
    teacher: Stage
    supernet: Stage | None = None
    importance: TermLine = Call("molchanov.taylor")
    rows: int = Field(512, gt=0)
    short: Stage
    rungs: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(
        (0.25, 1.0), min_length=1
    )
    final: tuple[Stage, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> "Space":
        problems = [
            problem
            for name, values in self.axes.items()
            for problem in _check_axis(name, values, self.mode)
        ]
        for names in self.tied:
            counts = {name: len(self.axes.get(name, ())) for name in names}
            if unknown := [name for name in names if name not in self.axes]:
                problems.append(
                    f"tied: {unknown[0]!r} is not among the "
                    f"axes.{did_you_mean(unknown[0], self.axes)}"
                )
            elif len(set(counts.values())) > 1:
                found = ", ".join(
                    f"{name} has {count} values" for name, count in counts.items()
                )
                problems.append(f"tied: {found}; expected equal numbers")
        supernet = self.mode == "supernet"
        if supernet and self.supernet is None:
            problems.append(
                "supernet: is missing; a supernet needs the stage that trains it"
            )
        if not supernet and self.supernet is not None:
            problems.append("supernet: is given, and `mode: plain` trains none")
        if supernet and self.student.model_fields_set:
            problems.append(
                "student: a supernet's students are parts of the teacher; use "
                "mode: plain for others"
            )
        if list(self.rungs) != sorted({*self.rungs, 1.0}):
            problems.append(
                f"rungs: {', '.join(map(str, self.rungs))}; expected growing shares "
                "that end in 1"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def stages(self) -> dict[str, Stage]:
        """Every stage, by its place in the YAML."""
        numbered = {f"final[{at}]": stage for at, stage in enumerate(self.final)}
        own = {"supernet": self.supernet} if self.supernet else {}
        return {"teacher": self.teacher, **own, "short": self.short, **numbered}

    def with_length(self, fitting: int) -> "Space":
        """Return the space with this length in every stage whose `max_length` is
        auto."""
        stages = {
            where: stage.with_length(fitting) for where, stage in self.stages.items()
        }
        final = tuple(stages.pop(f"final[{at}]") for at in range(len(self.final)))
        return self.model_copy(update={**stages, "final": final})

    def recipe(
        self,
        name: str,
        stages: Sequence[Stage],
        student: StudentSpec | None = None,
    ) -> Recipe:
        """Make a recipe from some of the stages, so that they can be checked and run
        like one."""
        lm = Stage.model_validate(TEACHER_LM)
        return Recipe(
            name=name,
            paper=self.paper,
            about=self.about,
            teacher=self.teacher,
            teacher_lm=lm,
            student=student or StudentSpec.model_validate({"init": "teacher"}),
            stages=tuple(stages),
        )

    def plain(self) -> dict[str, Any]:
        """Plain data with every number, defaults included."""
        tree: dict[str, Any] = {
            "name": self.name,
            "paper": self.paper.model_dump(),
            "about": self.about,
            "mode": self.mode,
        }
        if self.mode == "plain":
            tree["student"] = self.student.plain()
        else:
            tree |= {"importance": self.importance.plain(), "rows": self.rows}
        tree |= {"axes": self.axes, "tied": self.tied, "rungs": self.rungs}
        tree |= {
            key: stage.plain()
            for key, stage in self.stages.items()
            if not key.startswith("final")
        }
        tree["final"] = [stage.plain() for stage in self.final]
        plain: dict[str, Any] = plain_tree(tree)
        return plain

    def to_yaml(self) -> str:
        """Write the resolved space as YAML. Loading it again gives an equal space."""
        return dump_yaml(self.plain())

    @staticmethod
    def from_argument(
        space: "NameLike | Space",
        overrides: Sequence[str] = (),
    ) -> "Space":
        """Load a space given as a name, a path or a Space."""
        if isinstance(space, Space):
            return space
        return Space.load(name_of(space), overrides)

    @staticmethod
    def load(name: str, overrides: Sequence[str] = ()) -> "Space":
        """Load `recipes/spaces/<name>.yaml` (or the .yaml file `name`) with
        `path=value` overrides, and check it.

        Raises SearchError with every problem found.
        """
        path = _locate(name)
        try:
            tree = loader.resolve_extends(path, find=_locate, parts="axes and stages")
            for line in overrides:
                loader.override(tree, line, ALL_KINDS)
        except RecipeError as error:
            raise SearchError(str(error)) from error
        return Space.from_tree(tree | {"name": tree.get("name", path.stem)}, path.name)

    @staticmethod
    def from_tree(tree: Mapping[str, Any], file: str) -> "Space":
        """Make a space from plain data read from `file`. Raises SearchError with every
        problem found."""
        tree = dict(tree)
        problems = list[str]()
        tree["teacher"] = (
            FINETUNE | tree["teacher"]
            if isinstance(tree.get("teacher"), dict)
            else dict(FINETUNE)
        )
        if isinstance(tree.get("final"), str):
            tree["final"] = _load_final(tree["final"], file, problems)
        try:
            space = Space.model_validate(tree)
        except ValidationError as error:
            models: dict[str, type[Frozen]] = {"paper": Paper, "student": StudentSpec}
            problems += loader.explain(
                file,
                error,
                lambda loc: (
                    (models.get(loc[0], Stage) if len(loc) > 1 else Space).model_fields
                ),
                show=False,
            )
        if problems:
            raise SearchError("\n".join(sorted(set(problems))))
        return space


def _locate(name: str) -> Path:
    """Return the file of the built-in space of this name, or the .yaml file itself.
    Raises SearchError."""
    is_file = name.endswith((".yaml", ".yml"))
    path = Path(name) if is_file else loader.folder() / "spaces" / f"{name}.yaml"
    if not path.is_file():
        hint = "" if is_file else did_you_mean(name, space_names())
        raise SearchError(f"no such space: {name!r}.{hint} A .yaml file also works")
    return path


def space_names() -> list[str]:
    return sorted(path.stem for path in (loader.folder() / "spaces").glob("*.yaml"))


def _check_axis(name: str, values: Sequence[SettingValue], mode: str) -> list[str]:
    """List the problems of one axis."""
    known = SLICED if mode == "supernet" else AXES
    if name not in known and not (mode == "plain" and name.startswith("config.")):
        if mode == "supernet" and (name in AXES or name.startswith("config.")):
            return [
                f"axes.{name}: is the same for all students of a supernet: use mode: "
                "plain"
            ]
        if name in SLICED:
            return [
                f"axes.{name}: is for supernets; here, use config.intra_bottleneck_size"
            ]
        return [f"axes.{name}: no such axis.{did_you_mean(name, known)}"]
    if name == "precision":
        return [
            f"axes.precision: no {value!r}.{did_you_mean(str(value), PRECISIONS)}"
            for value in values
            if value not in PRECISIONS
        ]
    if name.startswith("config."):
        return []
    return [
        f"axes.{name}: {value!r}; expected a count, or a share of the teacher's up to "
        "1.0"
        for value in values
        if isinstance(value, bool | str)
        or value <= 0
        or (isinstance(value, float) and value > 1)
    ]


def _load_final(name: str, file: str, problems: list[str]) -> list[Stage]:
    """Load the stages of the recipe of that name; add its problems to `problems`."""
    try:
        recipe = Recipe.load(name)
    except RecipeError as error:
        problems += [f"{file}: final: {problem}" for problem in error.problems]
        return []
    if recipe.pruning or any(stage.student for stage in recipe.training):
        problems.append(
            f"{file}: final: recipe {name} builds or prunes a student of its own; "
            "expected plain stages"
        )
    return list(recipe.training)


OBJECTIVES: Mapping[str, Literal["maximize", "minimize"]] = {
    "score": "maximize",
    "latency": "minimize",
    "parameters": "minimize",
    "flops_per_token": "minimize",
    "file_mb": "minimize",
}
"""The objectives of a study, which can also be limited: the score from below, the
others from above."""
STUDY_CONFIG = "search.yaml"
SURE_DEVIATIONS = 2.0
"""Standard deviations by which a predicted latency must keep its limit."""


def describe_choice(choice: Mapping[str, Any]) -> str:
    """Write a choice as `layers 4, hidden 256, heads 8, ffn 768`."""
    return ", ".join(
        f"{name.removeprefix('config.')} {value}" for name, value in choice.items()
    )


@check_arguments
@dataclass(frozen=True, kw_only=True)
class Budget(BudgetOptions):
    """The checked limits of a student: see `BudgetOptions`."""

    def __post_init__(self) -> None:
        """Raise SearchError for limits that no student can keep."""
        for name, value in vars(self).items():
            if value is not None and not value > 0 and name != "min_score":
                raise SearchError(
                    f"--{name.replace('_', '-')} {value:g}: expected a number above 0"
                )
        if self.speedup is not None and self.speedup <= 1:
            raise SearchError(
                f"--speedup {self.speedup:g}: the teacher itself has 1; expected more, "
                "such as 2 for half of its latency"
            )
        if self.min_score is not None and self.min_score > 1:
            raise SearchError(
                f"--min-score {self.min_score:g}: no metric is above 1; expected a "
                "share, such as 0.9"
            )

    def limits(self, teacher_ms: float | None) -> dict[ObjectiveName, float]:
        """Return the maximum of each objective, for the score its minimum; a speed-up
        limits the latency.

        Raises SearchError for a speed-up over a teacher that was not measured.
        """
        latency = self.max_latency_ms
        if self.speedup is not None:
            if teacher_ms is None:
                raise SearchError(
                    f"--speedup {self.speedup:g}: the teacher has no latency to "
                    "compare with, as it cannot be exported; give --max-latency-ms"
                )
            latency = min(teacher_ms / self.speedup, latency or math.inf)
        named: dict[ObjectiveName, float | None] = {
            "latency": latency,
            "parameters": self.max_params,
            "file_mb": self.max_file_mb,
            "score": self.min_score,
        }
        return {name: value for name, value in named.items() if value is not None}


class SearchConfig(Frozen):
    """The settings of a search, by which it is resumed, joined by workers, and shown.

    budget      the limits of a student; its latency is that of the `precision` file on
                `device` in one forward of `batch` texts of `seq` tokens, and a speed-up
                is over the teacher's own file of that precision
    objectives  the objectives of the front, including the score
    precision   precision of the file, unless the space varies it
    training    number format of training
    max_drop    share of the score that a shipped int8 file may lose
    shapes      shapes to measure, from which the others are predicted
    rounds, runs  per measurement, as in `compress bench`
    anchors     bundles of the same task to score and measure for comparison
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
    def _check_objectives(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in OBJECTIVES:
                raise ValueError(
                    f"no objective {name!r}.{did_you_mean(name, OBJECTIVES)}"
                )
        if "score" not in names or len(set(names)) < len(names):
            raise ValueError(
                f"{', '.join(names) or 'nothing'}; expected score and others, each once"
            )
        return names

    @property
    def setting(self) -> Setting:
        return Setting(threads=self.threads, batch=self.batch, seq=self.seq)

    @property
    def precisions(self) -> tuple[Any, ...]:
        """Return the precisions to measure shapes in."""
        return self.space.axes.get("precision", (self.precision,))

    @property
    def max_length(self) -> int:
        """Return the most tokens that the shipped student reads."""
        return self.space.final[-1].length

    def identity(self) -> dict[str, str]:
        """Return the settings that identify a study."""
        tree = self.plain()
        settings = {
            name: str(tree[name])
            for name in ("teacher", "data", "device", "precision", "training", "seed")
        }
        budget = {
            name: f"{value:g}"
            for name, value in tree["budget"].items()
            if value is not None
        }
        return {
            **settings,
            **budget,
            "space": self.space.name,
            "setting": str(self.setting),
            "search": io.hash_value(tree)[:16],
        }

    def with_code(self, allow_code: str | Path | None) -> "SearchConfig":
        """Load the user's own functions that the space names, and their kind of task.
        Raises a CompressError."""
        user_code.load_kind(self.columns.kind, allow_code)
        return self.model_copy(update={"space": user_code.load(self.space, allow_code)})

    def plain(self) -> dict[str, Any]:
        """Plain data with every number."""
        return self.model_dump(mode="json", exclude={"space"}) | {
            "space": self.space.plain()
        }

    def to_yaml(self) -> str:
        """Write search.yaml. Loading it again gives equal settings."""
        return dump_yaml(self.plain())

    @staticmethod
    def parse(**settings: Any) -> "SearchConfig":
        """Check the settings. Raises SearchError with every problem, named by the
        option of the command line."""
        try:
            return SearchConfig.model_validate(settings)
        except ValidationError as error:
            problems = []
            for each in error.errors():
                message = str(each["msg"]).removeprefix("Value error, ")
                option = "".join(str(name) for name in each["loc"][:1]).replace(
                    "_", "-"
                )
                option = {"objectives": "objective", "anchors": "anchor"}.get(
                    option, option
                )
                found = (
                    f", found {each['input']!r}"
                    if isinstance(each["input"], str | int | float)
                    else ""
                )
                problems.append(f"--{option}: {message}{found}" if option else message)
            raise SearchError("\n".join(problems)) from error

    @staticmethod
    def from_yaml(text: str, source: str) -> "SearchConfig":
        """Load the text that `to_yaml` wrote. Raises SearchError."""
        tree = parse_yaml(text, source)
        if not isinstance(tree, dict) or not isinstance(tree.get("space"), dict):
            raise SearchError(f"{source}: is not a search of this tool")
        return SearchConfig.parse(
            **tree | {"space": Space.from_tree(tree["space"], source)}
        )

    @staticmethod
    def load(study: Path) -> "SearchConfig":
        """Load search.yaml from the study folder. Raises SearchError if it is
        missing."""
        file = study / STUDY_CONFIG
        if not file.is_file():
            raise SearchError(
                f"{study}: holds no search; expected the folder that `compress search "
                "--out` made"
            )
        return SearchConfig.from_yaml(file.read_text(encoding="utf-8"), str(file))
