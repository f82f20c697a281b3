"""The record of `compress inspect`: what something is, its size and contents, and what
can be done with it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

INSPECTION_SCHEMA: Final = "compress.inspect/1"
InspectedForm = Literal["checkpoint", "bundle", "recipe", "data", "run", "study"]


@dataclass(frozen=True)
class Spread:
    """The lengths of the texts of a split: median, 95th percentile, maximum."""

    median: float
    p95: float
    longest: int


@dataclass(frozen=True)
class SplitFacts:
    """Facts about one split.

    repeated     rows whose text an earlier row of the split has, up to case and spaces
    conflicting  rows whose text has another label elsewhere in the split (0 where
                 labels are not classes)
    words        lengths in words, separated by spaces
    classes      class -> share of the rows (for tagging: of the words) that have it;
                 empty without classes
    """

    name: str
    rows: int
    repeated: int
    conflicting: int
    words: Spread
    classes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Overlap:
    """Rows of the split `other` whose text is also in the split `one`; share: of the
    rows of `other`."""

    one: str
    other: str
    rows: int
    share: float


@dataclass(frozen=True)
class Coverage:
    """Record how well a teacher's tokenizer covers the first `texts` texts of the
    training split.

    unknown  share of unknown tokens
    pieces   average number of tokens for a word
    tokens   lengths in tokens, with special tokens
    cut      share of the texts with more than `limit` tokens, the most that the teacher
             reads; None: it has no limit
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
    """Record what was read about a model, data, recipe, run or study, without running
    or changing it.

    thing     its name as the user gave it; path: None if it is not on this machine
    title     a description in one line
    licence   as stated in its files; None if they state none
    facts     name -> plain value
    labels    the classes of its task, in the order of the logits
    scores    the rows of its report: name, role, metric, MB and ms
    files     path inside it -> bytes
    verified  whether the hashes of all files match its manifest; None without hashes
    problems  damaged or missing files; notes: other remarks
    next      commands to continue with, ready to paste
    """

    thing: str
    form: InspectedForm
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
        return json.dumps(
            {"schema": INSPECTION_SCHEMA, **asdict(self)},
            ensure_ascii=False,
            indent=1,
        )
