"""A recipe: the paper's numbers, as strict YAML read into frozen models.

The name is the address: `tinybert` is `recipes/tinybert.yaml`; a path ends in .yaml. A loss `tinybert.attention` is
the function `attention` of `compress/papers/tinybert.py`. All problems of a recipe are reported at once.
This module imports neither torch nor transformers.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from compress.errors import RecipeError, did_you_mean
from compress.term import Term, parse

KINDS = ("distill", "finetune")


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)


class Paper(Frozen):
    title: str
    authors: str
    year: int
    url: str


class StudentSpec(Frozen):
    """What to build. A size left out is the teacher's; a size below 1 is a share of the teacher's.

    init: scratch (random weights), teacher (copy chosen layers, narrowed in width where the student is smaller), or
    the folder of a checkpoint. copy_layers: even (first, last and evenly between: DistilBERT's 0 2 4 7 9 11), uniform
    (every N/M-th), first, last, or a list of 0-based teacher layers.
    """

    family: str = "teacher"
    layers: float | None = Field(None, gt=0)
    hidden: float | None = Field(None, gt=0)
    ffn: float | None = Field(None, gt=0)
    heads: float | None = Field(None, gt=0)
    embedding: float | None = Field(None, gt=0)
    init: str = "scratch"
    copy_layers: Literal["even", "uniform", "first", "last"] | tuple[int, ...] = "even"


class Stage(Frozen):
    """model -> model by minimising an objective.

    batch is the number of examples per optimiser step over all processes, micro_batch the most that one process holds
    at once (gradients accumulate); results do not depend on the number of processes. epochs may be a fraction.
    evaluate: how often per epoch the student is scored on the validation split; the best weights are kept (0: never,
    the last are kept; also so when the objective reads no logits). data: task (labelled examples) or text (the corpus
    given, else the task's own sentences). checkpoint: optimiser steps between checkpoints (left out: ten per stage).
    cache_teacher: keep the teacher's outputs on disk instead of computing them in every epoch.
    """

    kind: Literal["distill", "finetune"]
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    data: Literal["task", "text"] = "task"
    epochs: float = Field(1.0, gt=0)
    steps: int | None = Field(None, gt=0)
    batch: int = Field(32, gt=0)
    micro_batch: int | None = Field(None, gt=0)
    max_length: int = Field(128, ge=8)
    lr: float = Field(gt=0)
    schedule: Literal["linear", "constant", "cosine"] = "linear"
    warmup: float = Field(0.1, ge=0, lt=1)
    weight_decay: float = Field(0.01, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    clip: float = Field(1.0, ge=0)
    evaluate: int = Field(2, ge=0)
    checkpoint: int | None = Field(None, gt=0)
    cache_teacher: bool = False
    objective: tuple[Term, ...] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _kind_is_the_first_key(cls, line: Any) -> Any:
        """`distill: intermediate` names kind and stage in one."""
        if not isinstance(line, dict) or "kind" in line:
            return line
        kinds = [kind for kind in KINDS if kind in line]
        if len(kinds) != 1:
            raise ValueError(f"expected exactly one of {', '.join(f'`{kind}: NAME`' for kind in KINDS)}")
        line = {"kind": kinds[0], "name": line[kinds[0]]} | {k: v for k, v in line.items() if k != kinds[0]}
        if kinds[0] == "finetune":
            line.setdefault("objective", (Term("bert.labels"),))
        return line


FINETUNE = {"finetune": "teacher", "epochs": 3, "lr": 5e-5, "batch": 32, "evaluate": 2}
"""Devlin et al. 2019, A.3: batch 16 or 32, Adam 5e-5, 3e-5 or 2e-5, 2 to 4 epochs, warm-up, decay 0.01."""


class Recipe(Frozen):
    """What `stages` make of a `student`; `teacher` is the stage that fine-tunes a teacher without a head."""

    name: str
    paper: Paper
    about: str
    teacher: Stage
    student: StudentSpec
    stages: tuple[Stage, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _stage_names_differ(self) -> "Recipe":
        names = [stage.name for stage in (self.teacher, *self.stages)]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"two stages are called {', '.join(sorted(twice))}; each needs its own name")
        return self

    @staticmethod
    def load(name: str, overrides: Sequence[str] = ()) -> "Recipe":
        """Read `recipes/<name>.yaml` (or the .yaml file `name`), apply `path=value` overrides, check everything.

        Raises RecipeError with every problem found. Losses are looked up by `objective.check`, which needs torch.
        """
        path = locate(name)
        tree = _extended(path)
        for override in overrides:
            _set(tree, override)
        tree.setdefault("name", path.stem)
        teacher = tree.get("teacher")
        tree["teacher"] = FINETUNE | teacher if isinstance(teacher, dict) else FINETUNE if teacher is None else teacher
        problems = _parse_terms(tree, path.name)
        try:
            recipe = Recipe.model_validate(tree)
        except ValidationError as error:
            problems += [_problem(path.name, each) for each in error.errors() if not _follows(each)]
        if problems:
            raise RecipeError(sorted(set(problems)))
        return recipe

    def plain(self) -> dict[str, Any]:
        """Plain data with every number, defaults included."""
        tree = self.model_dump(mode="python", exclude={"stages", "teacher"})
        tree["teacher"] = _plain_stage(self.teacher)
        tree["stages"] = [_plain_stage(stage) for stage in self.stages]
        return {key: _plain(value) for key, value in tree.items()}

    def to_yaml(self) -> str:
        """The resolved recipe. Loading it again gives an equal recipe."""
        return yaml.safe_dump(self.plain(), sort_keys=False, allow_unicode=True, width=120)


def folder() -> Path:
    """Where the recipes lie: inside the installed package, or beside it in a checkout."""
    here = Path(__file__).resolve().parent
    return here / "recipes" if (here / "recipes").is_dir() else here.parent / "recipes"


def names() -> list[str]:
    return sorted(path.stem for path in folder().glob("*.yaml"))


def locate(name: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise RecipeError([f"{name}: no such recipe file"])
        return path
    if name not in names():
        hint = did_you_mean(name, names())
        raise RecipeError([f"no recipe {name!r}.{hint} `compress recipes` lists them; a .yaml file also works"])
    return folder() / f"{name}.yaml"


class _StrictLoader(yaml.SafeLoader):
    """safe_load, but a key given twice is an error, not silently the last, and 5e-5 is a number, not text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?([0-9]+\.?|[0-9]*\.[0-9]+)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def _parsed(text: str | bytes, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise RecipeError([f"{where}: not readable as YAML: {' '.join(str(error).split())}"]) from error


def _read(path: Path) -> dict[str, Any]:
    tree = _parsed(path.read_bytes(), path.name)
    if not isinstance(tree, dict):
        raise RecipeError([f"{path.name}: expected a mapping with student and stages, found {type(tree).__name__}"])
    return tree


def _extended(path: Path) -> dict[str, Any]:
    """One level of `extends:`; mappings are merged, everything else is replaced."""
    tree = _read(path)
    parent = tree.pop("extends", None)
    if parent is None:
        return tree
    beside = path.with_name(f"{parent}.yaml")
    base = _read(beside if beside.is_file() else locate(str(parent)))
    if "extends" in base:
        raise RecipeError([f"{path.name}: extends {parent!r}, which itself extends another; one level only"])
    for key, value in tree.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        base[key] = base[key] | value if both else value
    return base | {"name": tree.get("name", path.stem)}


def _set(tree: dict[str, Any], override: str) -> None:
    """`stages.0.lr=3e-5` -> tree["stages"][0]["lr"] = "3e-5". Stages may be named: `stages.prediction.lr=...`."""
    path, sign, text = override.partition("=")
    if not sign or not path:
        raise RecipeError([f"--set {override}: expected PATH=VALUE, as in --set stages.0.lr=3e-5"])
    *way, last = path.split(".")
    at: Any = tree
    for number, key in enumerate([*way, last]):
        if isinstance(at, list):
            found = [i for i, item in enumerate(at) if isinstance(item, dict) and key in map(item.get, KINDS)]
            if not re.fullmatch(r"-?[0-9]+", key) and not found:
                raise RecipeError([f"--set {override}: no stage {key!r}; use its name or its number from 0"])
            place: Any = found[0] if found else int(key)
            if not -len(at) <= place < len(at):
                raise RecipeError([f"--set {override}: there are only {len(at)} entries, numbered from 0"])
        elif isinstance(at, dict):
            place = key
        else:
            raise RecipeError([f"--set {override}: {'.'.join(path.split('.')[:number])} has no settings below it"])
        if number == len(way):
            at[place] = _parsed(text, f"--set {override}")
        else:
            at = at.setdefault(place, {}) if isinstance(at, dict) else at[place]


def _parse_terms(tree: dict[str, Any], file: str) -> list[str]:
    """Replace each line of each objective by a Term, in place; return the problems."""
    problems: list[str] = []
    for where, stage in _stages(tree):
        lines = stage.get("objective")
        if lines is None and "finetune" in stage:
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
    if isinstance(tree.get("teacher"), dict):
        yield "teacher", tree["teacher"]


def _follows(error: Any) -> bool:
    """pydantic calls a list of invalid items too short as well: no problem of its own."""
    return error["type"] == "too_short" and bool(error["input"])


def _problem(file: str, error: Any) -> str:
    """pydantic's error as one sentence: where, what, and the nearest known name."""
    where = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in error["loc"]).lstrip(".")
    if error["type"] == "extra_forbidden":
        parent = error["loc"][0] if len(error["loc"]) > 1 else "recipe"
        models = {"stages": Stage, "teacher": Stage, "student": StudentSpec, "paper": Paper}
        known = models.get(str(parent), Recipe).model_fields  # type: ignore[attr-defined]
        return f"{file}: {where}: no such setting.{did_you_mean(str(error['loc'][-1]), known)}"
    if error["type"] == "missing":
        return f"{file}: {where}: is missing"
    given = error.get("input")
    shown = f", found {given!r}" if isinstance(given, str | int | float | bool) else ""
    return f"{file}: {where + ': ' if where else ''}{error['msg'].removeprefix('Value error, ')}{shown}"


def _plain_stage(stage: Stage) -> dict[str, Any]:
    tree = stage.model_dump(exclude={"kind", "name", "objective"})
    return {stage.kind: stage.name} | tree | {"objective": [term.plain() for term in stage.objective]}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
