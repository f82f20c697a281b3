"""What a recipe is made of: a student, stages that train, stages that prune, and what the pruning is to reach."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from compress.call import Call
from compress.call import parse as parse_call
from compress.term import Term

KINDS = ("distill", "finetune", "pretrain")
ALL_KINDS = (*KINDS, "prune")

Head = Literal["task", "encoder", "masked_lm", "pretraining", "causal_lm", "seq2seq"]
Line = Annotated[Call, BeforeValidator(parse_call)]
"""A function by its address, with options: `paper.function` or `{by: paper.function, option: value}`."""


Decay = Annotated[float, Field(ge=0, lt=1)]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)


class StudentSpec(Frozen):
    """What to build. A size left out is the teacher's; a size below 1 is a share of the teacher's.

    init: scratch (random weights), teacher (copy chosen layers, narrowed in width where the student is smaller), the
    folder of a checkpoint, or a function (student, teacher) that fills the weights. copy_layers: even (first, last and
    evenly between: DistilBERT's 0 2 4 7 9 11), uniform (every N/M-th), first, last, or a list of 0-based teacher
    layers. config: further settings of the family's transformers config. share: how many different attention blocks,
    and FFNs, the layers use (`students.sharing`).
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
        """The mapping of YAML, defaults included."""
        tree = self.model_dump()
        return tree | {"init": self.init.plain()} if isinstance(self.init, Call) else tree


class Stage(Frozen):
    """model -> model by minimising an objective, or the losses of a paper's own step.

    batch is the number of examples per optimiser step over all processes, micro_batch the most that one process holds
    at once (gradients accumulate); results do not depend on the number of processes. tokens, padding included, stand
    in place of batch where rows are short and as many as fill them are wanted. epochs may be a fraction; steps stand in
    their place, but are no more than what max_epochs come to.
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
    epochs: float = Field(1.0, gt=0, le=100_000)
    steps: int | None = Field(None, gt=0, le=100_000_000)
    max_epochs: float | None = Field(None, gt=0, le=100_000)
    batch: int = Field(32, gt=0, le=1_000_000)
    tokens: int | None = Field(None, gt=0, le=1_000_000_000)
    micro_batch: int | None = Field(None, gt=0)
    max_length: int = Field(128, ge=8, le=1_000_000)
    lr: float = Field(gt=0, le=10)
    schedule: Literal["linear", "constant", "cosine"] = "linear"
    warmup: float = Field(0.1, ge=0, lt=1)
    weight_decay: float = Field(0.01, ge=0, le=10)
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0, le=1)
    clip: float = Field(1.0, ge=0)
    evaluate: int = Field(2, ge=0, le=10_000)
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

    def plain(self) -> dict[str, Any]:
        """The mapping of YAML, defaults included."""
        tree = self.model_dump(exclude={"kind", "name", "objective", "student", "rows", "corrupt", "step", "augment"})
        calls = {key: getattr(self, key) for key in ("rows", "corrupt", "step", "augment")}
        tree |= {key: call.plain() for key, call in calls.items() if call is not None}
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
        """By which layers stay; None: by importance."""
        return None if self.copy_layers == "importance" else self.copy_layers

    def plain(self) -> dict[str, Any]:
        """The mapping of YAML, defaults included."""
        tree = self.model_dump(exclude={"kind", "name", "importance"})
        return {self.kind: self.name, "importance": self.importance.plain()} | tree


TAGS = ("a stage that trains", "a stage that prunes")
"""Where pydantic found a problem of a stage; never the name of a setting."""


def _tag(line: Any) -> str:
    prunes = isinstance(line, Prune) or (isinstance(line, dict) and ("prune" in line or line.get("kind") == "prune"))
    return TAGS[prunes]


AnyStage = Annotated[Annotated[Stage, Tag(TAGS[0])] | Annotated[Prune, Tag(TAGS[1])], Discriminator(_tag)]


class Target(Frozen):
    """What the prune stages are to reach: sizes, or a budget that is to be kept. Nothing given: neither is known yet.

    layers, hidden, heads, ffn, embedding, bottleneck: counts, or shares below 1 of the teacher's; left out: as there

    max_latency_ms  what one forward may take on `device` at `threads`, `batch` and `seq` tokens (left out: the last
                    stage's max_length), as the file of this `precision`
    speedup         how many times faster than the teacher's own file of that precision it is to be there
    max_params      how many parameters it may have, those of the head included
    uneven          layers may differ in heads and neurons, whose counts are then means over the layers
                    (`models.uneven`): no plain transformers checkpoint
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
    uneven: bool = False

    @property
    def sizes(self) -> dict[str, float]:
        """Those that are asked for."""
        return {name: value for name in SIZES if (value := getattr(self, name)) is not None}

    @property
    def budgets(self) -> dict[str, float]:
        """Those that are to be kept."""
        return {name: value for name in BUDGETS if (value := getattr(self, name)) is not None}

    @model_validator(mode="after")
    def _sizes_or_a_budget(self) -> "Target":
        if self.sizes and self.budgets:
            both = f"{', '.join(self.sizes)} and {', '.join(self.budgets)}"
            raise ValueError(f"asks for {both}: give sizes, or a budget that decides the sizes")
        if self.max_latency_ms is not None and self.speedup is not None:
            raise ValueError("asks for max_latency_ms and speedup, which both say how fast: give one of them")
        if self.uneven and self.budgets:
            raise ValueError(f"asks for layers that differ (uneven) and {', '.join(self.budgets)}: give sizes with it")
        return self


SIZES = ("layers", "hidden", "heads", "ffn", "embedding", "bottleneck")
BUDGETS = ("max_latency_ms", "speedup", "max_params")
