"""The record of `compress inspect`: what a thing is, how large, what is in it, and what can be done with it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

SCHEMA: Final = "compress.inspect/1"
Form = Literal["checkpoint", "bundle", "recipe", "data", "run", "study"]


@dataclass(frozen=True)
class Spread:
    """The lengths of a split's texts: the median, the longest of the shortest 95 %, the longest."""

    median: float
    p95: float
    longest: int


@dataclass(frozen=True)
class SplitFacts:
    """Describe one split.

    repeated     rows whose text an earlier row of the split has, but for case and spaces
    conflicting  rows whose text has another label in another row of the split (of classes; 0 of other kinds)
    words        lengths in words between spaces
    classes      class -> share of the rows (of tagging: of the words) that have it; empty without classes
    """

    name: str
    rows: int
    repeated: int
    conflicting: int
    words: Spread
    classes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Overlap:
    """Rows of the split `other` whose text the split `one` has, too; share: of the rows of `other`."""

    one: str
    other: str
    rows: int
    share: float


@dataclass(frozen=True)
class Coverage:
    """Describe how a teacher's tokenizer reads the texts of the training split, or so many of them.

    unknown  share of the tokens that stand for what the vocabulary lacks
    pieces   tokens of a word between spaces, on average
    tokens   lengths in tokens, special ones included
    cut      share of the texts that are longer than `limit` tokens, all that the teacher reads; None: it has no limit
    """

    tokenizer: str
    texts: int
    unknown: float
    pieces: float
    tokens: Spread
    limit: int | None = None
    cut: float | None = None


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """One thing, looked at without running or changing it.

    thing     as it was named; path: where it is, None where it is not on this machine
    title     what it is, in one line
    licence   what the thing itself says; None: it says nothing
    facts     what is known of it: a name in words -> a plain value
    labels    the classes of its task, in the order of the logits
    scores    the rows of its report: name, role, the metric, MB and ms
    files     path inside it -> bytes
    verified  whether every file has the hash that was written down for it; None: none was
    problems  what is damaged or missing; notes: what the reader should know
    next      commands to go on with, ready to be pasted
    """

    thing: str
    form: Form
    title: str
    path: str | None = None
    licence: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    splits: tuple[SplitFacts, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    coverage: Coverage | None = None
    scores: tuple[Mapping[str, Any], ...] = ()
    files: Mapping[str, int] = field(default_factory=dict)
    verified: bool | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    next: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Write one JSON object: schema, then the fields."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, ensure_ascii=False, indent=1)
