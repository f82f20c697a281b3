"""A recipe: the paper's numbers, as strict YAML read into frozen models.

The name is the address: `tinybert` is `recipes/tinybert.yaml`; a path ends in .yaml. A loss `tinybert.attention` is
the function `attention` of `compress/papers/tinybert.py`. All problems of a recipe are reported at once.
This module imports neither torch nor transformers.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from compress.call import Call
from compress.call import parse as parse_call
from compress.errors import RecipeError, did_you_mean
from compress.recipe_file import extended, locate, override
from compress.term import Term, parse

KINDS = ("distill", "finetune", "pretrain")

Head = Literal["task", "encoder", "masked_lm", "pretraining", "causal_lm", "seq2seq"]
Line = Annotated[Call, BeforeValidator(parse_call)]
"""A function by its address, with options: `paper.function` or `{by: paper.function, option: value}`."""


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)


class Paper(Frozen):
    title: str
    authors: str
    year: int
    url: str


class StudentSpec(Frozen):
    """What to build. A size left out is the teacher's; a size below 1 is a share of the teacher's.

    init: scratch (random weights), teacher (copy chosen layers, narrowed in width where the student is smaller), the
    folder of a checkpoint, or a function (student, teacher) that fills the weights. copy_layers: even (first, last and
    evenly between: DistilBERT's 0 2 4 7 9 11), uniform (every N/M-th), first, last, or a list of 0-based teacher
    layers. config: further settings of the family's transformers config. share: how many different attention blocks,
    and FFNs, the layers use (`students.sharing`).
    """

    family: str = "teacher"
    layers: float | None = Field(None, gt=0)
    hidden: float | None = Field(None, gt=0)
    ffn: float | None = Field(None, gt=0)
    heads: float | None = Field(None, gt=0)
    embedding: float | None = Field(None, gt=0)
    init: str | Line = "scratch"
    copy_layers: Literal["even", "uniform", "first", "last"] | tuple[int, ...] = "even"
    config: dict[str, Any] = Field(default_factory=dict)
    share: dict[Literal["attention", "ffn"], int] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _a_mapping_is_a_call(cls, line: Any) -> Any:
        if isinstance(line, dict) and isinstance(line.get("init"), dict):
            return line | {"init": parse_call(line["init"])}
        return line


class Stage(Frozen):
    """model -> model by minimising an objective, or the losses of a paper's own step.

    batch is the number of examples per optimiser step over all processes, micro_batch the most that one process holds
    at once (gradients accumulate); results do not depend on the number of processes. tokens, padding included, stand
    in place of batch where rows are short and as many as fill them are wanted. epochs may be a fraction.
    evaluate: how often per epoch the student is scored; the best weights are kept (0: never, the last are kept; also
    so where there is nothing to score). checkpoint: optimiser steps between checkpoints (left out: ten per stage).
    cache_teacher: keep the teacher's outputs on disk instead of computing them in every epoch.

    data     task (labelled examples) or text (the corpus given, else the task's own sentences)
    head     what the model ends in; task and encoder (none) by default, as `data` is task or text
    teacher  task: fine-tuned for it; general: as it was pre-trained, with `head`; previous: the model there was before
             the latest `student`. By default task or general, as `data` is task or text
    student  this stage begins with a new one
    train    all, or the head only
    rows, corrupt, step, augment    functions of papers: how a corpus becomes rows, what is done to each batch, a
             mechanism in place of the plain objective, more rows than the task has
    limit_tokens    how much of a corpus is read
    """

    kind: Literal["distill", "finetune", "pretrain"]
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    data: Literal["task", "text"]
    head: Head
    teacher: Literal["task", "general", "previous"]
    student: StudentSpec | None = None
    train: Literal["all", "head"] = "all"
    rows: Line | None = None
    corrupt: Line | None = None
    step: Line | None = None
    augment: Line | None = None
    limit_tokens: int | None = Field(None, gt=0)
    epochs: float = Field(1.0, gt=0)
    steps: int | None = Field(None, gt=0)
    batch: int = Field(32, gt=0)
    tokens: int | None = Field(None, gt=0)
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
    objective: tuple[Term, ...]

    @field_validator("objective")
    @classmethod
    def _has_something_to_minimise(cls, terms: tuple[Term, ...], seen: ValidationInfo) -> tuple[Term, ...]:
        if not terms and seen.data.get("step") is None:
            raise ValueError("is empty; a stage needs terms, or a `step` that brings its own losses")
        return terms

    @model_validator(mode="before")
    @classmethod
    def _kind_is_the_first_key(cls, line: Any) -> Any:
        """`distill: intermediate` names kind and stage in one; what `data` is decides what else is usual."""
        if not isinstance(line, dict):
            return line
        if "kind" not in line:
            kinds = [kind for kind in KINDS if kind in line]
            if len(kinds) != 1:
                raise ValueError(f"expected exactly one of {', '.join(f'`{kind}: NAME`' for kind in KINDS)}")
            line = {"kind": kinds[0], "name": line[kinds[0]]} | {k: v for k, v in line.items() if k != kinds[0]}
        usual: dict[str, Any] = {"data": "text" if line["kind"] == "pretrain" else "task"}
        on_task = line.get("data", usual["data"]) == "task"
        usual |= {"head": "task" if on_task else "encoder", "teacher": "task" if on_task else "general"}
        if line["kind"] == "finetune":
            usual["objective"] = (Term("bert.labels"),)
        elif "step" in line:
            usual["objective"] = ()
        return usual | line


FINETUNE = {"finetune": "teacher", "epochs": 3, "lr": 5e-5, "batch": 32, "evaluate": 2}
"""Devlin et al. 2019, A.3: batch 16 or 32, Adam 5e-5, 3e-5 or 2e-5, 2 to 4 epochs, warm-up, decay 0.01."""


TEACHER_LM = {
    "pretrain": "teacher-lm",
    "head": "masked_lm",
    "corrupt": "bert.mask",
    "objective": [{"loss": "bert.masked_lm"}],
    "steps": 1000,
    "limit_tokens": 4_000_000,
    "batch": 16,
    "lr": 5e-4,
    "evaluate": 1,
}
"""Measured (docs/LOG.md): the embedded teacher's head alone stays at the perplexity of word counts."""


class Recipe(Frozen):
    """What `stages` make of a `student`.

    teacher is the stage that fine-tunes a teacher without a head for the task, teacher_lm the one that gives it a
    language model's head where a stage needs that and the checkpoint has none; both results are kept for later runs.
    choose, needs and cost say when to take it, what must be given, and the class of time it takes.
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
    stages: tuple[Stage, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _stage_names_differ(self) -> "Recipe":
        names = [stage.name for stage in (self.teacher, self.teacher_lm, *self.stages)]
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
        tree = extended(path)
        for line in overrides:
            override(tree, line, KINDS)
        tree.setdefault("name", path.stem)
        for key, default in (("teacher", FINETUNE), ("teacher_lm", TEACHER_LM)):
            given = tree.get(key)
            tree[key] = default | given if isinstance(given, dict) else dict(default) if given is None else given
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
        tree = self.model_dump(mode="python", exclude={"stages", "teacher", "teacher_lm", "student"})
        tree["student"] = _plain_student(self.student)
        tree["teacher"], tree["teacher_lm"] = _plain_stage(self.teacher), _plain_stage(self.teacher_lm)
        tree["stages"] = [_plain_stage(stage) for stage in self.stages]
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
    where = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in error["loc"]).lstrip(".")
    if error["type"] == "extra_forbidden":
        parent = error["loc"][0] if len(error["loc"]) > 1 else "recipe"
        models = {"stages": Stage, "teacher": Stage, "teacher_lm": Stage, "student": StudentSpec, "paper": Paper}
        inner = StudentSpec if "student" in error["loc"] else models.get(str(parent), Recipe)
        known = inner.model_fields  # type: ignore[attr-defined]
        return f"{file}: {where}: no such setting.{did_you_mean(str(error['loc'][-1]), known)}"
    if error["type"] == "missing":
        return f"{file}: {where}: is missing"
    given = error.get("input")
    shown = f", found {given!r}" if isinstance(given, str | int | float | bool) else ""
    return f"{file}: {where + ': ' if where else ''}{error['msg'].removeprefix('Value error, ')}{shown}"


def _plain_stage(stage: Stage) -> dict[str, Any]:
    tree = stage.model_dump(exclude={"kind", "name", "objective", "student", "rows", "corrupt", "step", "augment"})
    calls = {key: getattr(stage, key) for key in ("rows", "corrupt", "step", "augment")}
    tree |= {key: call.plain() for key, call in calls.items() if call is not None}
    if stage.student is not None:
        tree["student"] = _plain_student(stage.student)
    terms = {"objective": [term.plain() for term in stage.objective]} if stage.objective else {}
    return {stage.kind: stage.name} | tree | terms


def _plain_student(spec: StudentSpec) -> dict[str, Any]:
    tree = spec.model_dump()
    return tree | {"init": spec.init.plain()} if isinstance(spec.init, Call) else tree


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
