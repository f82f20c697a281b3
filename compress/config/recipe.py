"""Define recipes: the numbers of a paper, as strict YAML loaded into frozen models.

The name is the address: `tinybert` is `recipes/tinybert.yaml`; a path ends in .yaml. A
loss `tinybert.attention` is the function `attention` of `compress/papers/tinybert.py`.
All problems of a recipe are reported at once. This module imports neither torch nor
transformers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from compress.arguments import (
    NameLike,
    TokenCount,
    check_arguments,
    name_of,
    optional_name,
)
from compress.config import user_code
from compress.config.loader import (
    dump_yaml,
    explain,
    locate,
    override,
    plain_tree,
    resolve_extends,
)
from compress.config.stages import (
    ALL_KINDS,
    UNION_BRANCHES,
    AnyStage,
    Effort,
    Frozen,
    Prune,
    SizeRequest,
    Stage,
    StudentSpec,
)
from compress.errors import RecipeError, did_you_mean

DEFAULT_CONFIDENCE = 0.5
"""At 0.5, a student keeps the share if its validation score does. At 0.9, one that
keeps 99.3 % on 800 rows is rejected for one that is two thirds as fast
(docs/LOG.md)."""


MOST_SPEEDUP = 1000
"""A speed-up that no smaller shape of a model reaches."""


class Target(SizeRequest):
    """The sizes that the prune stages aim at, or a budget that decides them. Empty: not
    known yet.

    layers ... bottleneck    counts, or shares below 1 of the teacher's; left out: the
                             teacher's

    max_latency_ms  the maximum milliseconds of one forward pass on `device` with
                    `threads`, `batch` and `seq` tokens (left out: the last stage's
                    max_length), as the file of this `precision`
    speedup         how many times faster than the teacher's own file of that precision
    max_params      the maximum number of parameters, including the head
    keep            the share of the teacher's score that the student must keep; of the
                    students that do, the one with the least of `least` is taken
    confidence      the required chance that it keeps that share, judged on the
                    validation split
    """

    max_latency_ms: float | None = Field(None, gt=0)
    speedup: float | None = Field(None, gt=1, lt=MOST_SPEEDUP)
    max_params: int | None = Field(None, gt=0)
    keep: float | None = Field(None, gt=0, le=1)
    least: Literal["latency", "mb", "params"] = "latency"
    confidence: float = Field(DEFAULT_CONFIDENCE, ge=0.5, lt=1)
    device: str = "local"
    threads: int = Field(1, gt=0, le=1024)
    batch: int = Field(1, gt=0, le=100_000)
    seq: int | None = Field(None, gt=0, le=1_000_000)
    precision: Literal["int8", "fp32"] = "int8"

    @property
    def budgets(self) -> dict[str, float]:
        """Return the budgets that are set."""
        return {
            name: value
            for name in BUDGETS
            if (value := getattr(self, name)) is not None
        }

    @property
    def limits_time(self) -> bool:
        """Return True if a latency or a speed-up is set."""
        return self.max_latency_ms is not None or self.speedup is not None

    @property
    def needs_device(self) -> bool:
        """Return True if latencies are measured to find the sizes."""
        by_latency = self.keep is not None and self.least == "latency"
        return self.limits_time or by_latency

    @model_validator(mode="after")
    def _check_sizes_or_budget(self) -> "Target":
        if self.sizes and self.budgets:
            both = f"{', '.join(self.sizes)} and {', '.join(self.budgets)}"
            raise ValueError(
                f"asks for {both}: give sizes, or a budget that decides the sizes"
            )
        if self.max_latency_ms is not None and self.speedup is not None:
            raise ValueError(
                "asks for max_latency_ms and speedup, which both limit the time: give "
                "one of them"
            )
        if self.keep is None and self.least != "latency":
            raise ValueError(f"asks for the least {self.least}: give keep too")
        if self.keep is None and self.confidence != DEFAULT_CONFIDENCE:
            raise ValueError(
                f"asks for a confidence of {self.confidence:g}: give keep too"
            )
        if self.keep is not None and len(self.budgets) > 1:
            others = ", ".join(name for name in self.budgets if name != "keep")
            raise ValueError(
                f"asks for keep and {others}: a share of the score decides all sizes; "
                "give one of the two"
            )
        return self


TIMES = ("max_latency_ms", "speedup")
"""The budgets that limit the latency, of which a target has one."""
BUDGETS = (*TIMES, "max_params", "keep")


class Paper(Frozen):
    title: str
    authors: str
    year: int
    url: str


FINETUNE = {"finetune": "teacher", "epochs": "auto", "lr": "auto", "batch": 32}
PUBLISHED_FINETUNE = FINETUNE | {"epochs": 3, "lr": 5e-5}
"""Devlin et al. 2019, A.3: batch 16 or 32, Adam 5e-5, 3e-5 or 2e-5, 2 to 4 epochs,
warm-up, decay 0.01."""
TEACHER_LM = {
    "pretrain": "teacher-lm",
    "head": "masked_lm",
    "corrupt": "bert.mask",
    "objective": [{"loss": "bert.masked_lm"}],
    "steps": 1000,
    "max_epochs": 40,
    "limit_tokens": 4_000_000,
    "batch": 16,
    "lr": 5e-4,
    "evaluate": 1,
}
"""Measured (docs/LOG.md): the embedded teacher's head alone stays at the perplexity of
word counts. More than 40 passes over the same text are worth nothing (Muennighoff et
al. 2023, arXiv:2305.16264, Sec. 6)."""
TEACHER_ITSELF = StudentSpec.model_validate({"init": "teacher"})
"""A student that begins as the teacher itself."""


class Recipe(Frozen):
    """The `stages` that make a student, and the `student` they begin with.

    teacher       the stage that fine-tunes a teacher that has no head for the task
    teacher_lm    the stage that trains a language model's head, if a stage needs one
                  and the checkpoint has none; both results are kept for later runs
    choose        when to choose this recipe; needs: what the user must provide; cost:
                  how long it takes
    needs_knowledge    whether its teacher reads facts from a table of triples
    target        the sizes or the budget of a recipe that prunes, whose student is the
                  teacher itself
    """

    name: str
    paper: Paper
    about: str
    choose: str | None = None
    needs: str | None = None
    cost: str | None = None
    needs_knowledge: bool = False
    teacher: Stage
    teacher_lm: Stage
    student: StudentSpec = Field(default_factory=StudentSpec)  # type: ignore[arg-type]  # mypy infers Never for it
    target: Target = Field(default_factory=Target)  # type: ignore[arg-type]  # the same
    stages: tuple[AnyStage, ...] = Field(min_length=1)

    @property
    def named_stages(self) -> list[tuple[str, AnyStage]]:
        """The stages, with the names that messages use for them."""
        return [(f"stages[{at}]", stage) for at, stage in enumerate(self.stages)]

    @property
    def training(self) -> tuple[Stage, ...]:
        """Return the stages that train."""
        return tuple(stage for stage in self.stages if isinstance(stage, Stage))

    @property
    def only_kind(self) -> str | None:
        """Return the only kind of task that its terms are for, or None if they are for
        several."""
        terms = [
            term
            for stage in self.training
            if stage.data == "task"
            for term in stage.objective
        ]
        kinds = {term.only for term in terms}
        return (
            next(iter(kinds))[0]
            if len(kinds) == 1 and all(len(only) == 1 for only in kinds)
            else None
        )

    @property
    def pruning(self) -> tuple[Prune, ...]:
        """Return the stages that prune."""
        return tuple(stage for stage in self.stages if isinstance(stage, Prune))

    @model_validator(mode="after")
    def _check_names(self) -> "Recipe":
        names = [stage.name for stage in (self.teacher, self.teacher_lm, *self.stages)]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(
                f"two stages are called {', '.join(sorted(twice))}; each needs its own "
                "name"
            )
        return self

    @model_validator(mode="after")
    def _check_pruning(self) -> "Recipe":
        if not self.pruning:
            if self.target.model_fields_set:
                raise ValueError(
                    "target: no stage prunes: set the sizes of `student`, or use a "
                    "recipe that prunes, such as prune-taylor"
                )
            return self
        new = [stage.name for stage in self.training if stage.student is not None]
        if self.student != TEACHER_ITSELF or new:
            where = f"stage {new[0]}: student" if new else "student"
            raise ValueError(
                f"{where}: a recipe that prunes begins with the teacher itself: "
                "expected `student: {init: teacher}` without sizes"
            )
        ways = [stage.way for stage in self.pruning if stage.to is None]
        if not ways:
            return self
        if ways != sorted(set(ways)) or ways[-1] != 1:
            raise ValueError(
                "`way` of the prune stages is "
                f"{', '.join(f'{way:g}' for way in ways)}; expected increasing values, "
                "the last of them 1"
            )
        return self

    @staticmethod
    @check_arguments
    def load(
        name: NameLike,
        overrides: Sequence[str] = (),
        *,
        paper: bool = False,
        allow_code: NameLike | None = None,
    ) -> "Recipe":
        """Load `recipes/<name>.yaml` (or the .yaml file `name`), apply `path=value`
        overrides, check everything.

        paper        use the paper's own numbers, which stages have under `published`,
                     instead of those that fit any data
        allow_code   a folder, or an installed package, with the user's own functions
                     that the recipe names; they are imported after all checks. By
                     default none is imported

        Raises RecipeError with every problem found. `objective.check_terms`, which
        needs torch, looks up the losses."""
        path = locate(name_of(name))
        tree = resolve_extends(path)
        problems = _take_published(tree, path.name, paper=paper)
        for line in overrides:
            override(tree, line, ALL_KINDS)
        tree.setdefault("name", path.stem)
        for key, default in (
            ("teacher", PUBLISHED_FINETUNE if paper else FINETUNE),
            ("teacher_lm", TEACHER_LM),
        ):
            own = {} if tree.get(key) is None else tree[key]
            if isinstance(own, dict):
                lasts = (
                    {"steps", "max_epochs"}
                    if {"steps", "epochs"} & own.keys()
                    else set[str]()
                )
                own = {
                    name: value for name, value in default.items() if name not in lasts
                } | own
            tree[key] = own
        try:
            recipe = Recipe.model_validate(tree)
        except ValidationError as error:
            problems += explain(path.name, error, _settings_at, tags=UNION_BRANCHES)
        if problems:
            raise RecipeError(sorted(set(problems)))
        return (
            recipe
            if allow_code is None
            else user_code.load(recipe, optional_name(allow_code))
        )

    @check_arguments
    def free_suffix(self, suffix: str) -> str:
        """Return `suffix` with enough leading hyphens that no stage's name plus it is
        another stage's name."""
        names = {stage.name for stage in self.stages}
        while any(name + suffix in names for name in names):
            suffix = f"-{suffix}"
        return suffix

    @check_arguments
    def with_length(self, fitting: TokenCount) -> "Recipe":
        """Return the recipe with this length in every stage whose `max_length` is
        auto."""
        stages = tuple(stage.with_length(fitting) for stage in self.stages)
        return self.model_copy(
            update={"teacher": self.teacher.with_length(fitting), "stages": stages}
        )

    @check_arguments
    def with_effort(self, effort: Effort) -> "Recipe":
        """Return the recipe with its open-ended stages at this effort."""
        update = {"effort": effort}
        stages = tuple(
            stage.model_copy(update=update) if isinstance(stage, Stage) else stage
            for stage in self.stages
        )
        return self.model_copy(
            update={"teacher": self.teacher.model_copy(update=update), "stages": stages}
        )

    def plain(self) -> dict[str, Any]:
        """Return the recipe as plain data, defaults included."""
        tree = self.model_dump(
            exclude={"stages", "teacher", "teacher_lm", "student", "target"}
        )
        if not self.needs_knowledge:
            del tree["needs_knowledge"]
        tree["student"] = self.student.plain()
        tree["teacher"] = self.teacher.plain()
        tree["teacher_lm"] = self.teacher_lm.plain()
        if self.pruning or self.target.model_fields_set:
            tree["target"] = self.target.model_dump(exclude_none=True)
        tree["stages"] = [stage.plain() for stage in self.stages]
        plain: dict[str, Any] = plain_tree(tree)
        return plain

    def to_yaml(self) -> str:
        """Return the resolved recipe as YAML. Loading it again yields an equal
        recipe."""
        return dump_yaml(self.plain())


_PARTS: Mapping[str, type[Frozen]] = {
    "teacher": Stage,
    "teacher_lm": Stage,
    "student": StudentSpec,
    "paper": Paper,
    "target": Target,
    "stages": Stage,
}
"""The models of a recipe's parts; a stage may also be a `Prune`."""


def _take_published(tree: dict[str, Any], file: str, *, paper: bool) -> list[str]:
    """Remove `published` from student and stages in place, and apply it if `paper`.
    Return the problems."""
    stages = tree["stages"] if isinstance(tree.get("stages"), list) else []
    places: list[tuple[str, Any, type[Frozen]]] = [
        (f"stages[{at}]", stage, Stage) for at, stage in enumerate(stages)
    ]
    places += [
        (name, tree.get(name), _PARTS[name])
        for name in ("teacher", "teacher_lm", "student")
    ]
    problems: list[str] = []
    for where, settings, kind in places:
        if not isinstance(settings, dict):
            continue
        published = settings.pop("published", {})
        if not isinstance(published, dict):
            problems.append(
                f"{file}: {where}.published: expected a mapping of settings, found "
                f"{published!r}"
            )
        elif unknown := published.keys() - kind.model_fields.keys():
            problems += [
                f"{file}: {where}.published.{name}: no such "
                f"setting.{did_you_mean(str(name), kind.model_fields)}"
                for name in unknown
            ]
        elif paper:
            settings.update(published)
    return problems


def _settings_at(loc: Sequence[Any]) -> Mapping[str, Any]:
    """Return the settings that are allowed at a location."""
    if "student" in loc[:-1]:
        return StudentSpec.model_fields
    if UNION_BRANCHES[1] in loc:
        return Prune.model_fields
    return _PARTS.get(str(loc[0]) if len(loc) > 1 else "", Recipe).model_fields


def spec_of(recipe: Recipe, stage: AnyStage) -> StudentSpec | None:
    """Return the student that a stage builds: its own, in the first stage the recipe's,
    else None."""
    if isinstance(stage, Stage) and stage.student is not None:
        return stage.student
    return recipe.student if stage is recipe.stages[0] else None


def ancestor(stages: Sequence[AnyStage], stage: Stage) -> AnyStage:
    """Return the stage that `teacher: previous` means: the one before the latest that
    began with a new student."""
    until = stages[: stages.index(stage) + 1]
    new = max(
        (
            at
            for at, each in enumerate(until)
            if isinstance(each, Stage) and each.student is not None
        ),
        default=0,
    )
    if new == 0:
        raise RecipeError(
            [
                f"stage {stage.name}: `teacher: previous` needs a stage with "
                "`student:` after another stage"
            ]
        )
    return stages[new - 1]
