"""Define the stages of a recipe and the student that a stage trains, as frozen models.

This module imports neither torch nor transformers.
"""

import os
from typing import Annotated, Any, Literal, Self, get_args

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

from compress.config.loader import explain
from compress.config.reference import Call
from compress.config.reference import parse as parse_call
from compress.config.term import Term
from compress.config.term import parse as parse_term
from compress.errors import RecipeError
from compress.io import JsonObject

STAGE_KINDS = ("distill", "finetune", "pretrain")
INITS = ("scratch", "teacher", "auto")
"""The values of a student's `init` that do not name a checkpoint."""
ALL_KINDS = (*STAGE_KINDS, "prune")

Head = Literal["task", "encoder", "masked_lm", "pretraining", "causal_lm", "seq2seq"]
TermLine = Annotated[Call, BeforeValidator(parse_call)]
"""A function by its address, with options: `paper.function` or `{by: paper.function,
option: value}`."""
Effort = Literal["quick", "normal", "best"]
StageName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
Decay = Annotated[float, Field(ge=0, lt=1)]
ADAM = (0.9, 0.999), 1e-8
"""Adam's default betas and eps: Kingma & Ba 2015, arXiv:1412.6980, Sec. 2."""
NUMBER_BRANCH = "a number"
AUTO = "or auto"
Auto = Annotated[Literal["auto"], Tag(AUTO)]
NumberOrAuto = Discriminator(lambda given: AUTO if given == "auto" else NUMBER_BRANCH)
TEXT_LENGTH = 128
"""Default tokens of a row that a stage makes from text."""


class Frozen(BaseModel):
    """An immutable pydantic model that rejects unknown settings."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False
    )

    def __init__(self, /, **settings: Any) -> None:
        """Check the settings. Raises RecipeError with every problem."""
        try:
            super().__init__(**settings)
        except ValidationError as error:
            own = type(self)
            problems = explain(
                own.__name__,
                error,
                lambda at: own.model_fields if len(at) == 1 else (),
                tags=UNION_BRANCHES,
            )
            raise RecipeError(problems) from error

    # pydantic's mark of a constructor that adds nothing to the schema: models inside
    # others are not made by calling it, so that all problems are found at once
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_as_number(cls, value: Any, seen: ValidationInfo) -> Any:
        """Refuse true and false where they would be read as 1 and 0."""
        if isinstance(value, bool) and not _takes(
            bool, cls.model_fields[str(seen.field_name)].annotation
        ):
            raise ValueError(f"expected no true or false, found {value}")
        return value


def _takes(kind: type, annotation: Any) -> bool:
    """Return True if an annotation names a type, at any depth."""
    return annotation in (kind, Any) or any(
        _takes(kind, inner) for inner in get_args(annotation)
    )


def _read_init(init: Any) -> Any:
    """Read a function, or the path of a checkpoint as a text."""
    if isinstance(init, dict):
        return parse_call(init)
    return os.fspath(init) if isinstance(init, os.PathLike) else init


class StudentSpec(Frozen):
    """The student to build. A size left out is the teacher's; a size below 1 is a share
    of the teacher's.

    init          scratch: random weights. teacher: the weights of chosen teacher
                  layers, and of a wider teacher the most important units. auto: teacher
                  if its weights can be cut to the student's sizes, else scratch.
                  Otherwise the folder of a checkpoint, or a function (student, teacher)
                  that fills the weights
    copy_layers   even: first, last and evenly between (DistilBERT's 0 2 4 7 9 11);
                  uniform: every N/M-th; first; last; or a list of 0-based teacher
                  layers
    config        further settings of the family's transformers config
    share         how many different attention blocks and FFNs the layers use
                  (`models.sharing`)
    """

    family: str = "teacher"
    layers: float | None = Field(None, gt=0, le=1000)
    hidden: float | None = Field(None, gt=0, le=100_000)
    ffn: float | None = Field(None, gt=0, le=1_000_000)
    heads: float | None = Field(None, gt=0, le=10_000)
    embedding: float | None = Field(None, gt=0, le=100_000)
    init: Annotated[str | Call, BeforeValidator(_read_init)] = "scratch"
    copy_layers: Literal["even", "uniform", "first", "last"] | tuple[int, ...] = "even"
    config: JsonObject = Field(default_factory=dict)
    share: dict[Literal["attention", "ffn"], int] = Field(default_factory=dict)

    def plain(self) -> JsonObject:
        """Return the mapping of YAML, defaults included."""
        tree = self.model_dump()
        return (
            tree | {"init": self.init.plain()} if isinstance(self.init, Call) else tree
        )


class SizeRequest(Frozen):
    """The sizes of a pruned model: counts, or shares below 1 of the teacher's. Omitted
    sizes are the teacher's."""

    layers: float | None = Field(None, gt=0)
    hidden: float | None = Field(None, gt=0)
    heads: float | None = Field(None, gt=0)
    ffn: float | None = Field(None, gt=0)
    embedding: float | None = Field(None, gt=0)
    bottleneck: float | None = Field(None, gt=0)

    @property
    def sizes(self) -> dict[str, float]:
        """Return the sizes that are set."""
        return {
            name: value for name in SIZES if (value := getattr(self, name)) is not None
        }


SIZES = tuple(SizeRequest.model_fields)


class ReadsRows(Frozen):
    """A stage that reads rows of at most `max_length` tokens, made from the task's
    examples or from text.

    max_length   auto, the default for rows of the task: as many as 99 % of them need
                 (`data.lengths`)
    """

    data: Literal["task", "text"]
    head: Head
    max_length: Annotated[
        Annotated[int, Field(ge=8, le=1_000_000), Tag(NUMBER_BRANCH)] | Auto,
        NumberOrAuto,
    ]

    @property
    def length(self) -> int:
        """Return `max_length`, which must be a number: `with_length` replaces `auto`
        once the data are known."""
        assert self.max_length != "auto", "the data were not read yet"
        return self.max_length

    def with_length(self, fitting: int) -> Self:
        """Return the stage with this length instead of `auto`."""
        return (
            self
            if self.max_length != "auto"
            else self.model_copy(update={"max_length": fitting})
        )

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.max_length == "auto" and not self.reads_examples:
            raise ValueError(
                "has `max_length: auto`, which fits the task's own rows only: expected "
                "a number of tokens"
            )
        return self

    @property
    def reads_examples(self) -> bool:
        """Return True if the rows are the task's examples, one by one, so that their
        lengths can be known."""
        return self.data == "task"

    @property
    def continues_text(self) -> bool:
        """Return True if the model is a causal language model, which reads texts with
        their line ends, spaces and indentation."""
        return self.head == "causal_lm"


class Stage(ReadsRows):
    """Train a model: minimise an objective, or the losses of a paper's own step.

    data         task (labelled examples) or text (the given corpus, else the task's own
                 sentences); `head: causal_lm` reads documents unchanged, other models
                 without line ends
    head         the head of the model; by default task or encoder (none), as `data` is
                 task or text
    teacher      task: fine-tuned for the task; general: as pre-trained, with `head`;
                 previous: the model before the latest `student`. By default task or
                 general, as `data` is task or text. A stage that learns from labels or
                 text alone builds its student from this model, too
    student      a new student, with which this stage begins
    train        all weights, or only the head's, or all but the table of positions, if
                 there is one
    table        codebook: round the table of words to a codebook at the beginning, and
                 do not train it: a quarter of its bytes in int8 files
                 (`training.codebook`)
    rows, corrupt, step, augment    functions of papers: turn a corpus into rows, change
                                    every batch, replace the plain objective by a
                                    mechanism, add rows to the task's. `augment: auto`
                                    adds variants of the rows, if there are few, and a
                                    second stage on the corpus, if there is one
                                    (`training.augment.add_stages`)
    corpus       add the texts of the given corpus to the task's rows, with the
                 teacher's answers
    improve      keep the weights the stage began with unless its last ones score better
                 on the validation split
    limit_tokens     how many tokens of a corpus to read; limit_rows: how many rows of
                     the task, drawn at random, the same ones in every stage
    epochs       may be a fraction; auto: train until the validation split shows no more
                 improvement, then let the rate fall linearly whatever `schedule` is
                 (`training.schedule`); effort: how long that may take
    steps        replaces epochs, but never exceeds max_epochs
    batch        examples per optimiser step over all processes
    tokens       replaces batch by as many rows as fill this many tokens, padding
                 included
    language_sampling    exponent for sampling languages: a batch holds one language,
                         drawn in proportion to its rows to this power; batches of
                         translation pairs, of `tokens` tokens, alternate with them
    micro_batch  the most examples that one process holds at once; gradients accumulate,
                 and results do not depend on the number of processes
    lr           its meaning depends on the optimizer (`training.optimizer`): the size
                 of a step for AdamW, a share of a tensor's norm for LAMB, of its root
                 mean square for Adafactor. auto: 5e-5 at BERT-base's width,
                 proportional to 1 / width, for AdamW only
    schedule     inverse_sqrt: lr sqrt(w / n) at step n, after w warm-up steps
    lr_end       the rate at which a linear schedule ends, for a stage that another one
                 continues
    betas, eps   of AdamW and LAMB
    evaluate     how often to score the student per epoch; the best weights are kept;
                 the last ones with 0, or nothing to score
    checkpoint   optimiser steps between checkpoints; by default ten per stage, but at
                 least 200 steps apart
    cache_teacher    keep the teacher's outputs on disk instead of computing them in
                     every epoch. auto: if the stage goes through its rows more than
                     once, its objective reads no language model's logits and nothing of
                     attention but scores, and they take less than 2 GB
    """

    kind: Literal["distill", "finetune", "pretrain"]
    name: StageName
    teacher: Literal["task", "general", "previous"]
    student: StudentSpec | None = None
    train: Literal["all", "head", "no positions"] = "all"
    table: Literal["full", "codebook"] = "full"
    rows: TermLine | None = None
    corrupt: TermLine | None = None
    step: TermLine | None = None
    augment: (
        Annotated[
            Call | Literal["auto"],
            BeforeValidator(lambda line: line if line == "auto" else parse_call(line)),
        ]
        | None
    ) = None
    corpus: bool = False
    improve: bool = False
    limit_tokens: int | None = Field(None, gt=0)
    limit_rows: int | None = Field(None, gt=0)
    epochs: Annotated[
        Annotated[float, Field(gt=0, le=100_000), Tag(NUMBER_BRANCH)] | Auto,
        NumberOrAuto,
    ] = 1.0
    effort: Effort = "normal"
    steps: int | None = Field(None, gt=0, le=100_000_000)
    max_epochs: float | None = Field(None, gt=0, le=100_000)
    batch: int = Field(32, gt=0, le=1_000_000)
    tokens: int | None = Field(None, gt=0, le=1_000_000_000)
    language_sampling: float | None = Field(None, ge=0, le=1)
    micro_batch: int | None = Field(None, gt=0)
    lr: Annotated[
        Annotated[float, Field(gt=0, le=10), Tag(NUMBER_BRANCH)] | Auto, NumberOrAuto
    ]
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
    objective: tuple[Annotated[Term, BeforeValidator(parse_term)], ...]

    @field_validator("objective")
    @classmethod
    def _check_not_empty(
        cls,
        terms: tuple[Term, ...],
        seen: ValidationInfo,
    ) -> tuple[Term, ...]:
        if seen.data.get("step") is None and not any(term.weight for term in terms):
            raise ValueError(
                "has no term with a weight; give one, or a `step` with its own losses"
            )
        return terms

    @model_validator(mode="before")
    @classmethod
    def _set_defaults(cls, line: Any) -> Any:
        """Split `distill: intermediate` into kind and name; set the defaults that
        depend on `kind` and `data`."""
        if not isinstance(line, dict):
            return line
        line = _split_kind(line)
        data = line.get("data", "text" if line["kind"] == "pretrain" else "task")
        on_task = data == "task"
        defaults = {
            "data": data,
            "head": "task" if on_task else "encoder",
            "teacher": "task" if on_task else "general",
        }
        defaults["max_length"] = (
            "auto" if on_task and line.get("rows") is None else TEXT_LENGTH
        )
        if line["kind"] == "finetune":
            defaults["objective"] = (Term("bert.labels"),)
        elif "step" in line:
            defaults["objective"] = ()
        return defaults | line

    @model_validator(mode="after")
    def _check_settings_together(self) -> "Stage":
        if self.lr_end and (
            self.lr == "auto"
            or self.open_ended
            or self.schedule != "linear"
            or self.lr_end >= self.lr
        ):
            raise ValueError(
                "has an `lr_end`, which needs `schedule: linear`, a length, and an "
                "`lr` above it"
            )
        if self.cache_teacher is True and self.corrupt is not None:
            raise ValueError(
                "has `cache_teacher: true`, which keeps the teacher's outputs for the "
                "rows as they are, but `corrupt` changes every batch: leave it out"
            )
        if self.optimizer != "adamw" and self.lr == "auto":
            raise ValueError(
                "has `lr: auto`, which is AdamW's rate: expected a number for "
                f"{self.optimizer}"
            )
        if self.optimizer == "adafactor" and (self.betas, self.eps) != ADAM:
            raise ValueError(
                "has `betas` or `eps`, which `optimizer: adafactor` does not read: "
                "leave them out"
            )
        if self.language_sampling is not None and self.rows is None:
            raise ValueError(
                "has `language_sampling`, which needs `rows`: a function that builds "
                "rows of each language"
            )
        if self.reads_unlabelled and not self.may_read_texts:
            cause = "corpus: true" if self.corpus else "partners"
            raise ValueError(
                f"has `{cause}`: only a plain distillation of the task has a teacher "
                "that can answer for texts"
            )
        return self

    @property
    def may_read_texts(self) -> bool:
        """Return True if the stage's teacher can answer for texts without labels."""
        plain = self.rows is None and self.step is None
        return plain and (self.kind, self.data, self.head) == (
            "distill",
            "task",
            "task",
        )

    @property
    def reads_examples(self) -> bool:
        """Return True if the rows are the task's examples, one by one, so that their
        lengths can be known."""
        return self.data == "task" and self.rows is None and self.tokens is None

    @property
    def reads_unlabelled(self) -> bool:
        """Return True if the stage reads rows without labels, which its teacher
        answers."""
        return self.corpus or (
            isinstance(self.augment, Call)
            and bool(self.augment.options.get("partners"))
        )

    @property
    def open_ended(self) -> bool:
        """Return True if the validation split decides how long the stage trains."""
        return self.epochs == "auto" and self.steps is None

    def plain(self) -> JsonObject:
        """Return the mapping of YAML, defaults included."""
        last = ("rows", "corrupt", "step", "augment", "student")
        tree = {self.kind: self.name} | self.model_dump(
            exclude={"kind", "name", "objective", *last}
        )
        for name in last:
            if (value := getattr(self, name)) is not None:
                tree[name] = value if value == "auto" else value.plain()
        return tree | (
            {"objective": [term.plain() for term in self.objective]}
            if self.objective
            else {}
        )


def _split_kind(line: JsonObject) -> JsonObject:
    """Split `distill: intermediate` into kind and name."""
    if "kind" in line:
        return line
    kinds = [kind for kind in ALL_KINDS if kind in line]
    if len(kinds) != 1:
        raise ValueError(
            "expected exactly one of "
            f"{', '.join(f'`{kind}: NAME`' for kind in ALL_KINDS)}"
        )
    return {"kind": kinds[0], "name": line[kinds[0]]} | {
        key: v for key, v in line.items() if key != kinds[0]
    }


class Prune(ReadsRows):
    """Cut the least important units out of a model; nothing is trained.

    importance   function of a paper that rates the units: `molchanov.taylor`,
                 `minitron.activation`, ...
    way          how far this stage goes from the teacher's sizes (0) to the target's
                 (1, as the last stage must). At 0 nothing is cut, but units are sorted
                 by importance, as a supernet needs them
    to           the sizes that this stage leaves, instead of `way`: records how a run
                 with `target.keep` got to its student
    copy_layers  which layers stay: importance (the most important), or a rule of
                 StudentSpec.copy_layers
    rows         how many rows to measure importance on, with this batch; with a task,
                 rows of the validation split come first
    data, head   as in other stages
    """

    kind: Literal["prune"]
    name: StageName
    data: Literal["task", "text"] = "task"
    head: Head = "task"
    importance: TermLine
    way: float = Field(1.0, ge=0, le=1)
    to: SizeRequest | None = None
    copy_layers: Literal["importance", "even", "uniform", "first", "last"] = (
        "importance"
    )
    rows: int = Field(512, gt=0)
    batch: int = Field(32, gt=0, le=1_000_000)

    @model_validator(mode="before")
    @classmethod
    def _set_defaults(cls, line: Any) -> Any:
        if not isinstance(line, dict):
            return line
        return {
            "max_length": TEXT_LENGTH if line.get("data") == "text" else "auto"
        } | _split_kind(line)

    @property
    def rule(self) -> str | None:
        """Return the rule that selects layers; None: by importance."""
        return None if self.copy_layers == "importance" else self.copy_layers

    def plain(self) -> JsonObject:
        """Return the mapping of YAML, defaults included."""
        tree = self.model_dump(exclude={"kind", "name", "importance"})
        return {self.kind: self.name, "importance": self.importance.plain()} | tree


UNION_BRANCHES = ("a stage that trains", "a stage that prunes", NUMBER_BRANCH, AUTO)
"""The branches of unions in pydantic's locations; never the name of a setting."""


def _tag(line: Any) -> str:
    prunes = isinstance(line, Prune) or (
        isinstance(line, dict) and ("prune" in line or line.get("kind") == "prune")
    )
    return UNION_BRANCHES[prunes]


AnyStage = Annotated[
    Annotated[Stage, Tag(UNION_BRANCHES[0])] | Annotated[Prune, Tag(UNION_BRANCHES[1])],
    Discriminator(_tag),
]
