"""The record of `compress doctor`: what of this machine was looked at, and what was found, as plain values."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final, Literal

SCHEMA: Final = "compress.doctor/1"
Group = Literal["machine", "extras", "tools", "packages", "compute"]
State = Literal["ok", "missing", "broken"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    found       the version, the place or the figures; of what is missing or broken, why
    needed_for  what does not work without it
    remedy      the one command that brings it; '' where there is none
    required    whether the base install needs it
    values      the figures in `found`: name with its unit -> value
    """

    group: Group
    name: str
    state: State
    found: str
    needed_for: str = ""
    remedy: str = ""
    required: bool = False
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnosis:
    """All that was looked at, in the order in which it was found."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Tell whether the base install has all that it needs."""
        return not self.faults

    @property
    def faults(self) -> tuple[Check, ...]:
        """List what the base install needs and is missing or broken."""
        return tuple(each for each in self.checks if each.required and each.state != "ok")

    def to_json(self) -> str:
        """Write one JSON object: schema, ok, checks."""
        content = {"schema": SCHEMA, "ok": self.ok, "checks": [asdict(each) for each in self.checks]}
        return json.dumps(content, ensure_ascii=False, indent=1)
