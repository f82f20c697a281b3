"""The record of one comparison of a new model with the one it is to replace, as plain values that JSON can hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from compress.records.json_text import to_json

Outcome = Literal["passed", "failed", "cannot be told"]


@dataclass(frozen=True)
class GateCheck:
    """One measure of both models, and what it says of the limit.

    what        latency: ms of one forward; size: 10^6 bytes of the file; score: of the task's metric
    change      latency, size: how much more the new one takes, as a share of the old one; score: new - old
    low, high   the 95 % interval of the change; None: it has none (size), or nothing is known yet
    limit       the most that latency and size may grow, as shares; the most that the score may fall; None: none was set
    samples     paired passes of the latency; rows of the score
    reason      all of that in a sentence
    """

    what: Literal["latency", "score", "size"]
    outcome: Outcome
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
    """Record what became of all checks. date: ISO 8601; seconds: of everything; machine: the device's facts.

    old, new   the files that were compared; sha256: of both
    data       whose rows were scored, of which split; '' where none were given
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
    def outcome(self) -> Outcome:
        """Failed where one check has failed; else passed only where every one has."""
        found = {one.outcome for one in self.checks}
        return "failed" if "failed" in found else "cannot be told" if "cannot be told" in found else "passed"

    def to_json(self) -> str:
        """Write indented JSON."""
        return to_json(self)
