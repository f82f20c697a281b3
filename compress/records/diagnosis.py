"""The record of `compress doctor`: the checks of this machine and their results."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final, Literal

DIAGNOSIS_SCHEMA: Final = "compress.doctor/1"
CheckGroup = Literal["machine", "extras", "tools", "packages", "compute"]
CheckState = Literal["ok", "missing", "broken"]


@dataclass(frozen=True)
class Check:
    """One check.

    found       version, path or figures; or why it is missing or broken
    needed_for  what does not work without it
    remedy      the command that installs or repairs it; '' if none does
    required    whether the base install needs it
    values      the figures in `found`: name with unit -> value
    """

    group: CheckGroup
    name: str
    state: CheckState
    found: str
    needed_for: str = ""
    remedy: str = ""
    required: bool = False
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnosis:
    """All checks, in the order in which they were made."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Return True if the base install has all that it needs."""
        return not self.faults

    @property
    def faults(self) -> tuple[Check, ...]:
        """List the checks that failed and that the base install needs."""
        return tuple(
            check for check in self.checks if check.required and check.state != "ok"
        )

    def to_json(self) -> str:
        """Write one JSON object: schema, ok, checks."""
        content = {
            "schema": DIAGNOSIS_SCHEMA,
            "ok": self.ok,
            "checks": [asdict(check) for check in self.checks],
        }
        return json.dumps(content, ensure_ascii=False, indent=1)
