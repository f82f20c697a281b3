"""A recipe: the paper's numbers, as strict YAML read into frozen models.

The name is the address: `tinybert` is `recipes/tinybert.yaml`; a path ends in .yaml. A loss `tinybert.attention` is
the function `attention` of `compress/papers/tinybert.py`. All problems of a recipe are reported at once.
This module imports neither torch nor transformers.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from compress.config import user_code
from compress.config.loader import explain, locate, override, resolve_extends
from compress.config.reference import Call
from compress.config.reference import parse as parse_call
from compress.config.term import Term, parse
from compress.errors import RecipeError, did_you_mean

KINDS = ("distill", "finetune", "pretrain")
INITS = ("scratch", "teacher", "auto")
"""The values of a student's `init` that are no checkpoint."""
ALL_KINDS = (*KINDS, "prune")

Head = Literal["task", "encoder", "masked_lm", "pretraining", "causal_lm", "seq2seq"]
Line = Annotated[Call, BeforeValidator(parse_call)]
"""A function by its address, with options: `paper.function` or `{by: paper.function, option: value}`."""
LineOrAuto = Annotated[
    Call | Literal["auto"], BeforeValidator(lambda line: "auto" if line == "auto" else parse_call(line))
]
Decay = Annotated[float, Field(ge=0, lt=1)]
ADAM = (0.9, 0.999), 1e-8
"""Adam's betas and eps, where nothing else is said: Kingma & Ba 2015, arXiv:1412.6980, Sec. 2."""
NUMBER, AUTO = "a number", "or auto"
Auto = Annotated[Literal["auto"], Tag(AUTO)]
NumberOrAuto = Discriminator(lambda given: AUTO if given == "auto" else NUMBER)


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)


class StudentSpec(Frozen):
    """The student to build. A size left out is the teacher's; a size below 1 is a share of the teacher's.

    init: scratch (random weights), teacher (copy chosen layers, and of a wider teacher the units of most importance),
    auto (teacher where its weights can be cut to the student's sizes, else scratch), the folder of a checkpoint, or a
    function (student, teacher) that fills the weights. copy_layers: even (first, last and evenly between: DistilBERT's
    0 2 4 7 9 11), uniform (every N/M-th), first, last, or a list of 0-based teacher layers. config: further settings of
    the family's transformers config. share: how many different attention blocks, and FFNs, the layers use
    (`models.sharing`).
    """

    family: str = "teacher"
    layers: float | None = Field(None, gt=0, le=1000)
    hidden: float | None = Field(None, gt=0, le=100_000)
    ffn: float | None = Field(None, gt=0, le=1_000_000)
    heads: float | None = Field(None, gt=0, le=10_000)
    embedding: float | None = Field(None, gt=0, le=100_000)
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

    def plain(self) -> dict[str, Any]:
        """Return the mapping of YAML, defaults included."""
        tree = self.model_dump()
        return tree | {"init": self.init.plain()} if isinstance(self.init, Call) else tree


class Stage(Frozen):
    """model -> model by minimising an objective, or the losses of a paper's own step.

    batch is the number of examples per optimiser step over all processes, micro_batch the most that one process holds
    at once (gradients accumulate); results do not depend on the number of processes. tokens, padding included, stand
    in place of batch where rows are short and as many as fill them are wanted. epochs may be a fraction, or auto: until
    the validation split shows no more improvement, and then the rate falls in a straight line instead of as `schedule`
    says (`training.schedule`). lr auto is 5e-5 for BERT-base's width and goes with 1 / width. steps stand in the place
    of epochs, but are no more than what max_epochs come to.
    lr_end: the rate that a linear schedule ends at, for a stage that another one continues.
    optimizer: adamw, lamb or adafactor (`training.optimizer`). lr is another quantity for each: the size of a step for
    Adam, its share of a tensor's length for LAMB, of a tensor's root mean square for Adafactor; auto is Adam's.
    Adafactor has no betas and eps. schedule inverse_sqrt: lr sqrt(w / n) at step n, after w steps of warm-up.
    evaluate: how often per epoch the student is scored; the best weights are kept (0: never, the last are kept; also
    so where there is nothing to score). checkpoint: optimiser steps between checkpoints (left out: ten per stage, but
    200 steps apart at least).
    cache_teacher: keep the teacher's outputs on disk instead of computing them in every epoch. auto: where the stage
    goes through its rows more than once, its objective reads no language model's logits and of attention no more than
    the scores, and they take less than 2 GB.

    data     task (labelled examples) or text (the corpus given, else the task's own sentences)
    head     what the model ends in; task and encoder (none) by default, as `data` is task or text
    teacher  task: fine-tuned for it; general: as it was pre-trained, with `head`; previous: the model there was before
             the latest `student`. By default task or general, as `data` is task or text
    student  this stage begins with a new one
    train    all, or the head only
    rows, corrupt, step, augment    functions of papers: how a corpus becomes rows, what is done to each batch, a
             mechanism in place of the plain objective, more rows than the task has. `augment: auto`: a second stage
             goes on with variants of the rows, where there are few, and the corpus (`training.augment.add_stages`)
    corpus   texts of the corpus given are rows of the task too, for which the teacher answers
    improve  the weights it begins with are kept where the validation split does not find those it ends with better
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
    augment: LineOrAuto | None = None
    corpus: bool = False
    improve: bool = False
    limit_tokens: int | None = Field(None, gt=0)
    epochs: Annotated[Annotated[float, Field(gt=0, le=100_000), Tag(NUMBER)] | Auto, NumberOrAuto] = 1.0
    effort: Literal["quick", "normal", "best"] = "normal"
    steps: int | None = Field(None, gt=0, le=100_000_000)
    max_epochs: float | None = Field(None, gt=0, le=100_000)
    batch: int = Field(32, gt=0, le=1_000_000)
    tokens: int | None = Field(None, gt=0, le=1_000_000_000)
    micro_batch: int | None = Field(None, gt=0)
    max_length: int = Field(128, ge=8, le=1_000_000)
    lr: Annotated[Annotated[float, Field(gt=0, le=10), Tag(NUMBER)] | Auto, NumberOrAuto]
    optimizer: Literal["adamw", "lamb", "adafactor"] = "adamw"
    schedule: Literal["linear", "constant", "cosine", "inverse_sqrt"] = "linear"
    lr_end: float = Field(0.0, ge=0, le=10)
    warmup: float = Field(0.1, ge=0, lt=1)
    weight_decay: float = Field(0.01, ge=0, le=10)
    betas: tuple[Decay, Decay] = ADAM[0]
    eps: float = Field(ADAM[1], gt=0, le=1)
    clip: float = Field(1.0, ge=0)
    evaluate: int = Field(2, ge=0, le=10_000)
    checkpoint: int | None = Field(None, gt=0)
    cache_teacher: bool | Literal["auto"] = False
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
                raise ValueError(f"expected exactly one of {', '.join(f'`{kind}: NAME`' for kind in ALL_KINDS)}")
            line = {"kind": kinds[0], "name": line[kinds[0]]} | {k: v for k, v in line.items() if k != kinds[0]}
        usual: dict[str, Any] = {"data": "text" if line["kind"] == "pretrain" else "task"}
        on_task = line.get("data", usual["data"]) == "task"
        usual |= {"head": "task" if on_task else "encoder", "teacher": "task" if on_task else "general"}
        if line["kind"] == "finetune":
            usual["objective"] = (Term("bert.labels"),)
        elif "step" in line:
            usual["objective"] = ()
        return usual | line

    @model_validator(mode="after")
    def _a_rate_to_end_at_needs_a_straight_line_to_it(self) -> "Stage":
        if self.lr_end and (self.lr == "auto" or self.open_ended or self.schedule != "linear" or self.lr_end > self.lr):
            raise ValueError("has an `lr_end`, which needs `schedule: linear`, a length, and an `lr` not below it")
        return self

    @model_validator(mode="after")
    def _settings_fit_each_other(self) -> "Stage":
        if self.optimizer != "adamw" and self.lr == "auto":
            raise ValueError(f"has `lr: auto`, which is Adam's rate: expected a number for {self.optimizer}")
        if self.optimizer == "adafactor" and (self.betas, self.eps) != ADAM:
            raise ValueError("has `betas` or `eps`, which `optimizer: adafactor` does not read: leave them out")
        if self.corpus and not self.may_read_texts:
            raise ValueError(
                "has `corpus: true`: only a plain distillation of the task has a teacher to answer for texts"
            )
        return self

    @property
    def may_read_texts(self) -> bool:
        """Return True if the stage has a teacher that can answer for texts without labels."""
        plain = self.rows is None and self.step is None
        return plain and (self.kind, self.data, self.head) == ("distill", "task", "task")

    @property
    def open_ended(self) -> bool:
        """Return True if the validation split decides how long the stage trains."""
        return self.epochs == "auto" and self.steps is None

    def plain(self) -> dict[str, Any]:
        """Return the mapping of YAML, defaults included."""
        tree = self.model_dump(exclude={"kind", "name", "objective", "student", "rows", "corrupt", "step", "augment"})
        calls = {key: getattr(self, key) for key in ("rows", "corrupt", "step", "augment")}
        tree |= {k: call.plain() if isinstance(call, Call) else call for k, call in calls.items() if call is not None}
        if self.student is not None:
            tree["student"] = self.student.plain()
        terms = {"objective": [term.plain() for term in self.objective]} if self.objective else {}
        return {self.kind: self.name} | tree | terms


class Prune(Frozen):
    """model -> smaller model: what matters least is cut away; nothing is trained.

    importance   function of a paper that rates the units: `molchanov.taylor`, `minitron.activation`, ...
    way          how far this stage goes from the teacher's sizes to the target's; the last one goes all of it, 1.
                 0: nothing is cut, units are put in the order of their importance, as a supernet's must be
    copy_layers  which layers stay: importance (the most important), or a rule of StudentSpec.copy_layers
    rows         so many training rows tell the importance; batch, max_length: how they are read
    data, head   as of other stages
    """

    kind: Literal["prune"]
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    data: Literal["task", "text"] = "task"
    head: Head = "task"
    importance: Line
    way: float = Field(1.0, ge=0, le=1)
    copy_layers: Literal["importance", "even", "uniform", "first", "last"] = "importance"
    rows: int = Field(512, gt=0)
    batch: int = Field(32, gt=0, le=1_000_000)
    max_length: int = Field(128, ge=8, le=1_000_000)

    @model_validator(mode="before")
    @classmethod
    def _kind_is_the_first_key(cls, line: Any) -> Any:
        if not isinstance(line, dict) or "kind" in line:
            return line
        if also := [kind for kind in KINDS if kind in line]:
            raise ValueError(f"is `prune` and `{also[0]}`; a stage is one of them")
        return {"kind": "prune", "name": line["prune"]} | {k: v for k, v in line.items() if k != "prune"}

    @property
    def rule(self) -> str | None:
        """Return the rule by which layers stay; None: by importance."""
        return None if self.copy_layers == "importance" else self.copy_layers

    def plain(self) -> dict[str, Any]:
        """Return the mapping of YAML, defaults included."""
        tree = self.model_dump(exclude={"kind", "name", "importance"})
        return {self.kind: self.name, "importance": self.importance.plain()} | tree


TAGS = ("a stage that trains", "a stage that prunes", NUMBER, AUTO)
"""Places in which pydantic finds a problem of a stage; never the name of a setting."""


def _tag(line: Any) -> str:
    prunes = isinstance(line, Prune) or (isinstance(line, dict) and ("prune" in line or line.get("kind") == "prune"))
    return TAGS[prunes]


AnyStage = Annotated[Annotated[Stage, Tag(TAGS[0])] | Annotated[Prune, Tag(TAGS[1])], Discriminator(_tag)]


class Target(Frozen):
    """The aim of the prune stages: sizes, or a budget that is to be kept. Nothing given: neither is known yet.

    layers, hidden, heads, ffn, embedding, bottleneck: counts, or shares below 1 of the teacher's; left out: as there

    max_latency_ms  what one forward may take on `device` at `threads`, `batch` and `seq` tokens (left out: the last
                    stage's max_length), as the file of this `precision`
    speedup         how many times faster than the teacher's own file of that precision it is to be there
    max_params      how many parameters it may have, those of the head included
    """

    layers: float | None = Field(None, gt=0)
    hidden: float | None = Field(None, gt=0)
    heads: float | None = Field(None, gt=0)
    ffn: float | None = Field(None, gt=0)
    embedding: float | None = Field(None, gt=0)
    bottleneck: float | None = Field(None, gt=0)
    max_latency_ms: float | None = Field(None, gt=0)
    speedup: float | None = Field(None, gt=1)
    max_params: int | None = Field(None, gt=0)
    device: str = "local"
    threads: int = Field(1, gt=0, le=1024)
    batch: int = Field(1, gt=0, le=100_000)
    seq: int | None = Field(None, gt=0, le=1_000_000)
    precision: Literal["int8", "fp32"] = "int8"

    @property
    def sizes(self) -> dict[str, float]:
        """Return the sizes that are asked for."""
        return {name: value for name in SIZES if (value := getattr(self, name)) is not None}

    @property
    def budgets(self) -> dict[str, float]:
        """Return the budgets that are to be kept."""
        return {name: value for name in BUDGETS if (value := getattr(self, name)) is not None}

    @property
    def limits_time(self) -> bool:
        """Return True if one of the budgets is a latency or a speed-up."""
        return self.max_latency_ms is not None or self.speedup is not None

    @model_validator(mode="after")
    def _sizes_or_a_budget(self) -> "Target":
        if self.sizes and self.budgets:
            both = f"{', '.join(self.sizes)} and {', '.join(self.budgets)}"
            raise ValueError(f"asks for {both}: give sizes, or a budget that decides the sizes")
        if self.max_latency_ms is not None and self.speedup is not None:
            raise ValueError("asks for max_latency_ms and speedup, which both say how fast: give one of them")
        return self


SIZES = ("layers", "hidden", "heads", "ffn", "embedding", "bottleneck")
BUDGETS = ("max_latency_ms", "speedup", "max_params")


class Paper(Frozen):
    title: str
    authors: str
    year: int
    url: str


FINETUNE = {"finetune": "teacher", "epochs": "auto", "lr": "auto", "batch": 32}
PUBLISHED_FINETUNE = FINETUNE | {"epochs": 3, "lr": 5e-5}
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
    """The `stages` that make a student, and the `student` they begin with.

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
    student: StudentSpec = Field(default_factory=StudentSpec)  # type: ignore[arg-type]  # mypy infers Never for it
    target: Target = Field(default_factory=Target)  # type: ignore[arg-type]  # the same
    stages: tuple[AnyStage, ...] = Field(min_length=1)

    @property
    def training(self) -> tuple[Stage, ...]:
        """The stages that train."""
        return tuple(stage for stage in self.stages if isinstance(stage, Stage))

    @property
    def only_kind(self) -> str | None:
        """The one kind of task that every term of its stages on a task is for; None where they serve several."""
        terms = [term for stage in self.training if stage.data == "task" for term in stage.objective]
        kinds = {term.only for term in terms}
        return next(iter(kinds))[0] if len(kinds) == 1 and all(len(only) == 1 for only in kinds) else None

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
    def load(
        name: str | Path, overrides: Sequence[str] = (), *, paper: bool = False, allow_code: str | Path | None = None
    ) -> "Recipe":
        """Read `recipes/<name>.yaml` (or the .yaml file `name`), apply `path=value` overrides, check everything.

        paper        take what stages say under `published`, the paper's own numbers, in place of what fits any data
        allow_code   the folder of the user's own functions that the recipe names (or an installed package): they are
                     imported last, and only then. Left out, none is.

        Raises RecipeError with every problem found. Losses of papers are looked up by `objective.check_terms`, which
        needs torch.
        """
        path = locate(str(name))
        tree = resolve_extends(path)
        problems = _take_published(tree, path.name, paper=paper)
        for line in overrides:
            override(tree, line, ALL_KINDS)
        tree.setdefault("name", path.stem)
        for key, default in (("teacher", PUBLISHED_FINETUNE if paper else FINETUNE), ("teacher_lm", TEACHER_LM)):
            own = {} if tree.get(key) is None else tree[key]
            if isinstance(own, dict):
                lasts = {"steps", "max_epochs"} if {"steps", "epochs"} & own.keys() else set[str]()
                own = {name: value for name, value in default.items() if name not in lasts} | own
            tree[key] = own
        problems += _parse_terms(tree, path.name)
        try:
            recipe = Recipe.model_validate(tree)
        except ValidationError as error:
            problems += [
                explain(
                    path.name, {**each, "loc": [at for at in each["loc"] if at not in TAGS]}, _settings_at(each["loc"])
                )
                for each in error.errors()
                if not is_consequence(each)
            ]
        if problems:
            raise RecipeError(sorted(set(problems)))
        return recipe if allow_code is None else user_code.load(recipe, allow_code)

    def free_suffix(self, suffix: str) -> str:
        """Return `suffix`, with hyphens before it until no stage's name and it are the name of another stage."""
        names = {stage.name for stage in self.stages}
        while any(name + suffix in names for name in names):
            suffix = f"-{suffix}"
        return suffix

    def with_effort(self, effort: Literal["quick", "normal", "best"]) -> "Recipe":
        """Return the recipe with its open-ended stages at this effort."""

        def changed(stage: AnyStage) -> AnyStage:
            return stage.model_copy(update={"effort": effort}) if isinstance(stage, Stage) else stage

        return self.model_copy(
            update={"teacher": changed(self.teacher), "stages": tuple(changed(each) for each in self.stages)}
        )

    def plain(self) -> dict[str, Any]:
        """Plain data with every number, defaults included."""
        tree = self.model_dump(mode="python", exclude={"stages", "teacher", "teacher_lm", "student", "target"})
        tree["student"] = self.student.plain()
        tree["teacher"], tree["teacher_lm"] = self.teacher.plain(), self.teacher_lm.plain()
        if self.pruning or self.target.model_fields_set:
            tree["target"] = self.target.model_dump(exclude_none=True)
        tree["stages"] = [stage.plain() for stage in self.stages]
        return {key: plain_tree(value) for key, value in tree.items()}

    def to_yaml(self) -> str:
        """Write the resolved recipe. Loading it again gives an equal recipe."""
        return yaml.safe_dump(self.plain(), sort_keys=False, allow_unicode=True, width=120)


def _take_published(tree: dict[str, Any], file: str, *, paper: bool) -> list[str]:
    """Take a paper's own numbers out of student and stages, in place, and use them if `paper`; return the problems."""
    problems: list[str] = []
    student = tree.get("student")
    places: list[tuple[str, dict[str, Any], type[Frozen]]] = [(where, stage, Stage) for where, stage in _stages(tree)]
    places += [("student", student, StudentSpec)] if isinstance(student, dict) else []
    for where, stage, kind in places:
        published = stage.pop("published", {})
        if not isinstance(published, dict):
            problems.append(f"{file}: {where}.published: expected a mapping of settings, found {published!r}")
        elif unknown := published.keys() - kind.model_fields.keys():
            problems += [
                f"{file}: {where}.published.{name}: no such setting.{did_you_mean(str(name), kind.model_fields)}"
                for name in unknown
            ]
        elif paper:
            stage.update(published)
    return problems


def _parse_terms(tree: dict[str, Any], file: str) -> list[str]:
    """Replace each line of each objective by a Term, in place; return the problems."""
    problems: list[str] = []
    for where, stage in _stages(tree):
        lines = stage.get("objective")
        if lines is None and ("finetune" in stage or "step" in stage):
            continue
        if isinstance(lines, list):
            stage["objective"] = parse_lines(lines, f"{file}: {where}.objective", problems)
    return problems


def parse_lines(lines: Sequence[Any], where: str, problems: list[str]) -> list[Term]:
    """Parse the lines of an objective; add what is wrong with them to the problems."""
    terms = []
    for at, line in enumerate(lines):
        try:
            terms.append(line if isinstance(line, Term) else parse(line, f"{where}[{at}]"))
        except RecipeError as error:
            problems += error.problems
            terms.append(Term("hinton.soft_targets"))
    return terms


def _stages(tree: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    stages = tree.get("stages")
    for i, stage in enumerate(stages if isinstance(stages, list) else []):
        if isinstance(stage, dict):
            yield f"stages[{i}]", stage
    for key in ("teacher", "teacher_lm"):
        if isinstance(tree.get(key), dict):
            yield key, tree[key]


def is_consequence(error: Any) -> bool:
    """pydantic calls a list of invalid items too short as well: no problem of its own."""
    return error["type"] == "too_short" and bool(error["input"])


def _settings_at(loc: Sequence[Any]) -> Mapping[str, Any]:
    """Return the settings that there are where one was not found."""
    if "student" in loc[:-1]:
        return StudentSpec.model_fields
    inner: dict[str, type[Frozen]] = {"teacher": Stage, "teacher_lm": Stage, "paper": Paper, "target": Target}
    inner["stages"] = Prune if TAGS[1] in loc else Stage
    return (inner.get(str(loc[0]), Recipe) if len(loc) > 1 else Recipe).model_fields


def plain_tree(value: Any) -> Any:
    """Make lists of tuples, at any depth."""
    if isinstance(value, dict):
        return {key: plain_tree(item) for key, item in value.items()}
    return [plain_tree(item) for item in value] if isinstance(value, list | tuple) else value


def spec_of(recipe: Recipe, stage: AnyStage) -> StudentSpec | None:
    """Return what this stage builds anew: its own student, the recipe's in the first stage, else nothing."""
    if isinstance(stage, Stage) and stage.student is not None:
        return stage.student
    return recipe.student if stage is recipe.stages[0] else None


def ancestor(stages: Sequence[AnyStage], stage: Stage) -> AnyStage:
    """Find the stage that `teacher: previous` means: the one before the latest that began with a new student."""
    until = stages[: stages.index(stage) + 1]
    new = max((at for at, each in enumerate(until) if isinstance(each, Stage) and each.student is not None), default=0)
    if new == 0:
        raise RecipeError(
            [f"stage {stage.name}: `teacher: previous` needs a stage with `student:` after another stage"]
        )
    return stages[new - 1]
