"""A result file: what one command measured, on what, when. `compress report` reads such files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from compress.io import written
from compress.records.json_text import from_json, to_json
from compress.records.latency import DeviceError, Latency, Sustained


@dataclass(frozen=True)
class Result:
    """machine: the device's facts; date: ISO 8601. Names in latencies are `<bundle folder>:<precision>`.

    sha256  name -> the digest of the file that ran
    """

    format: Literal[1] = field(default=1, kw_only=True)
    device: str
    machine: Mapping[str, str]
    date: str
    command: str
    latencies: tuple[Latency, ...]
    sustained: tuple[Sustained, ...] = ()
    sha256: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Write indented JSON, `format` first."""
        return to_json(self)

    @staticmethod
    def from_json(path: Path) -> "Result":
        """Read the result in a file. Raises DeviceError naming each field in error."""
        return from_json(
            Result, path, DeviceError, "result of `compress bench --out`", "expected format 1. Measure again"
        )


def save(result: Result, path: Path) -> None:
    """Write the result, whole or not at all."""
    with written(path) as partial:
        partial.write_text(result.to_json(), encoding="utf-8")
