"""A recipe: the paper's numbers, as strict YAML read into frozen models.

The name is the address: `tinybert` is `recipes/tinybert.yaml`; a path ends in .yaml. A loss `tinybert.attention` is
the function `attention` of `compress/papers/tinybert.py`. All problems of a recipe are reported at once.
This module imports neither torch nor transformers.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, model_validator

from compress import user_code
from compress.errors import RecipeError, did_you_mean
from compress.recipe_file import extended, locate, override
from compress.recipe_stage import ALL_KINDS, KINDS, TAGS, AnyStage, Frozen, Head, Prune, Stage, StudentSpec, Target
from compress.term import Term, parse

__all__ = ["FINETUNE", "KINDS", "AnyStage", "Frozen", "Head", "Prune", "Recipe", "Stage", "StudentSpec", "Target"]


class Paper(Frozen):
    title: str
    authors: str
    year: int
    url: str


FINETUNE = {"finetune": "teacher", "epochs": 3, "lr": 5e-5, "batch": 32, "evaluate": 2}
"""Devlin et al. 2019, A.3: batch 16 or 32, Adam 5e-5, 3e-5 or 2e-5, 2 to 4 epochs, warm-up, decay 0.01."""


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
"""Measured (docs/LOG.md): the embedded teacher's head alone stays at the perplexity of word counts. More than 40 passes
over the same text are worth nothing (Muennighoff et al. 2023, arXiv:2305.16264, Sec. 6)."""


WHOLE = StudentSpec.model_validate({"init": "teacher"})
"""A student that is the teacher itself, to begin with."""


class Recipe(Frozen):
    """What `stages` make of a `student`.

    teacher is the stage that fine-tunes a teacher without a head for the task, teacher_lm the one that gives it a
    language model's head where a stage needs that and the checkpoint has none; both results are kept for later runs.
    choose, needs and cost say when to take it, what must be given, and the class of time it takes. A recipe that prunes
    begins with the teacher itself as its student, and goes to the sizes, or the budget, of `target`.
    """

    name: str
    paper: Paper
    about: str
    choose: str | None = None
    needs: str | None = None
    cost: str | None = None
    teacher: Stage
    teacher_lm: Stage
    student: StudentSpec = Field(default_factory=StudentSpec)  # type: ignore[arg-type]
    target: Target = Field(default_factory=Target)  # type: ignore[arg-type]
    stages: tuple[AnyStage, ...] = Field(min_length=1)

    @property
    def training(self) -> tuple[Stage, ...]:
        """The stages that train."""
        return tuple(stage for stage in self.stages if isinstance(stage, Stage))

    @property
    def pruning(self) -> tuple[Prune, ...]:
        """The stages that prune."""
        return tuple(stage for stage in self.stages if isinstance(stage, Prune))

    @model_validator(mode="after")
    def _stage_names_differ(self) -> "Recipe":
        names = [stage.name for stage in (self.teacher, self.teacher_lm, *self.stages)]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"two stages are called {', '.join(sorted(twice))}; each needs its own name")
        return self

    @model_validator(mode="after")
    def _pruning_begins_with_the_teacher_and_ends_at_the_target(self) -> "Recipe":
        if not self.pruning:
            return self
        new = [stage.name for stage in self.training if stage.student is not None]
        if self.student != WHOLE or new:
            where = f"stage {new[0]}: student" if new else "student"
            raise ValueError(
                f"{where}: what is pruned is the teacher itself: expected `student: {{init: teacher}}`, no sizes"
            )
        ways = [stage.way for stage in self.pruning]
        if ways != sorted(set(ways)) or ways[-1] != 1:
            raise ValueError(
                f"`way` of the prune stages is {', '.join(f'{way:g}' for way in ways)}; each goes further than the one "
                "before, and the last all of the way, 1"
            )
        return self

    @staticmethod
    def load(name: str | Path, overrides: Sequence[str] = (), *, allow_code: str | Path | None = None) -> "Recipe":
        """Read `recipes/<name>.yaml` (or the .yaml file `name`), apply `path=value` overrides, check everything.

        allow_code   the folder of the user's own functions that the recipe names (or an installed package): they are
                     imported last, and only then. Left out, none is.

        Raises RecipeError with every problem found. Losses of papers are looked up by `objective.check`, which needs
        torch.
        """
        path = locate(str(name))
        tree = extended(path)
        for line in overrides:
            override(tree, line, ALL_KINDS)
        tree.setdefault("name", path.stem)
        for key, default in (("teacher", FINETUNE), ("teacher_lm", TEACHER_LM)):
            own = {} if tree.get(key) is None else tree[key]
            if isinstance(own, dict):
                lasts = {"steps", "max_epochs"} if {"steps", "epochs"} & own.keys() else set[str]()
                own = {name: value for name, value in default.items() if name not in lasts} | own
            tree[key] = own
        problems = _parse_terms(tree, path.name)
        try:
            recipe = Recipe.model_validate(tree)
        except ValidationError as error:
            problems += [_problem(path.name, each) for each in error.errors() if not _follows(each)]
        if problems:
            raise RecipeError(sorted(set(problems)))
        return recipe if allow_code is None else user_code.load(recipe, allow_code)

    def plain(self) -> dict[str, Any]:
        """Plain data with every number, defaults included."""
        tree = self.model_dump(mode="python", exclude={"stages", "teacher", "teacher_lm", "student", "target"})
        tree["student"] = self.student.plain()
        tree["teacher"], tree["teacher_lm"] = self.teacher.plain(), self.teacher_lm.plain()
        if self.pruning or self.target.model_fields_set:
            tree["target"] = self.target.model_dump(exclude_none=True)
        tree["stages"] = [stage.plain() for stage in self.stages]
        return {key: _plain(value) for key, value in tree.items()}

    def to_yaml(self) -> str:
        """The resolved recipe. Loading it again gives an equal recipe."""
        return yaml.safe_dump(self.plain(), sort_keys=False, allow_unicode=True, width=120)


def _parse_terms(tree: dict[str, Any], file: str) -> list[str]:
    """Replace each line of each objective by a Term, in place; return the problems."""
    problems: list[str] = []
    for where, stage in _stages(tree):
        lines = stage.get("objective")
        if lines is None and ("finetune" in stage or "step" in stage):
            continue
        terms: list[Term] = []
        for i, line in enumerate(lines if isinstance(lines, list) else []):
            try:
                terms.append(parse(line, f"{file}: {where}.objective[{i}]"))
            except RecipeError as error:
                problems += error.problems
                terms.append(Term("hinton.soft_targets"))
        if isinstance(lines, list):
            stage["objective"] = terms
    return problems


def _stages(tree: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    stages = tree.get("stages")
    for i, stage in enumerate(stages if isinstance(stages, list) else []):
        if isinstance(stage, dict):
            yield f"stages[{i}]", stage
    for key in ("teacher", "teacher_lm"):
        if isinstance(tree.get(key), dict):
            yield key, tree[key]


def _follows(error: Any) -> bool:
    """pydantic calls a list of invalid items too short as well: no problem of its own."""
    return error["type"] == "too_short" and bool(error["input"])


def _problem(file: str, error: Any) -> str:
    """pydantic's error as one sentence: where, what, and the nearest known name."""
    way = [at for at in error["loc"] if at not in TAGS]
    where = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in way).lstrip(".")
    if error["type"] == "extra_forbidden":
        known = _settings_at(error["loc"])
        return f"{file}: {where}: no such setting.{did_you_mean(str(way[-1]), known)}"
    if error["type"] == "missing":
        return f"{file}: {where}: is missing"
    given = error.get("input")
    shown = f", found {given!r}" if isinstance(given, str | int | float | bool) else ""
    return f"{file}: {where + ': ' if where else ''}{error['msg'].removeprefix('Value error, ')}{shown}"


def _settings_at(loc: Sequence[Any]) -> Mapping[str, Any]:
    """The settings that there are where one was not found."""
    if "student" in loc[:-1]:
        return StudentSpec.model_fields
    inner: dict[str, type[Frozen]] = {"teacher": Stage, "teacher_lm": Stage, "paper": Paper, "target": Target}
    inner["stages"] = Prune if TAGS[1] in loc else Stage
    return (inner.get(str(loc[0]), Recipe) if len(loc) > 1 else Recipe).model_fields


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
