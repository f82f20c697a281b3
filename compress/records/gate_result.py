"""The record of `compress gate`: a new model compared with the one it is to replace."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from compress.records.json_text import to_json

GateOutcome = Literal["passed", "failed", "cannot be told"]


@dataclass(frozen=True)
class GateCheck:
    """One measure of both models, checked against a limit.

    what        latency: ms of one forward; size: 10^6 bytes of the file; score: of the
                task's metric
    change      latency, size: growth as a share of the old value; score: new - old
    low, high   the 95 % interval of the change; None for a size, and where nothing is
                known yet
    limit       the largest growth of latency and size, as shares; the largest drop of
                the score; None: no limit
    samples     paired passes of the latency; rows of the score
    reason      the verdict in a sentence
    """

    what: Literal["latency", "score", "size"]
    outcome: GateOutcome
    old: float
    new: float
    unit: str
    change: float
    low: float | None
    high: float | None
    limit: float | None
    samples: int
    reason: str


@dataclass(frozen=True)
class GateResult:
    """All checks of a gate. date: ISO 8601; seconds: of the whole command; machine: the
    device's facts.

    old, new   the files that were compared; sha256: of both
    data       the data and the split whose rows were scored; '' if none were
    """

    old: str
    new: str
    checks: tuple[GateCheck, ...]
    device: str
    machine: Mapping[str, str]
    setting: str
    data: str
    split: str
    sha256: tuple[str, str]
    command: str
    date: str
    seconds: float

    @property
    def outcome(self) -> GateOutcome:
        """Return the worst outcome of the checks: `failed`, `cannot be told`, or
        `passed` if all passed."""
        outcomes = {one.outcome for one in self.checks}
        if "failed" in outcomes:
            return "failed"
        return "cannot be told" if "cannot be told" in outcomes else "passed"

    def to_json(self) -> str:
        """Write indented JSON."""
        return to_json(self)
