"""A result file: what one command measured, on what, when. `compress report` reads such
files."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from compress.arguments import FileName, check_arguments
from compress.outputs import output_file
from compress.records.json_text import from_json, to_json
from compress.records.latency import DeviceError, Latency, Sustained

MOST_PROBLEMS = 5
"""Maximum problems of one file that an error lists."""


@dataclass(frozen=True)
class RacedFormat:
    """A file that was exported to be raced.

    format, precision  as for `compress export`
    bytes              of the file, with its weights
    difference, logit  the largest difference from the fp32 ONNX file's logits on random
                       tokens, and the largest logit
    """

    format: str
    precision: str
    bytes: int
    difference: float
    logit: float


@dataclass(frozen=True)
class BenchResult:
    """machine: the device's facts; date: ISO 8601. Names in latencies are `<bundle
    folder>:<precision>`; for exported files they are `<bundle folder>:<format>
    <precision>`.

    sha256    name -> the digest of the file that ran
    formats   name -> what is known of an exported file
    left_out  format -> why it was not exported; install: the command that installs what
              some of these formats need
    """

    format: Literal[1] = field(default=1, kw_only=True)
    device: str
    machine: Mapping[str, str]
    date: str
    command: str
    latencies: tuple[Latency, ...]
    sustained: tuple[Sustained, ...] = ()
    sha256: Mapping[str, str] = field(default_factory=dict)
    formats: Mapping[str, RacedFormat] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    install: str = ""

    def to_json(self) -> str:
        """Write indented JSON, `format` first."""
        return to_json(self)

    @check_arguments
    def write(self, path: FileName) -> None:
        """Write the result to a file, whole or not at all. Raises OutputError."""
        with output_file(Path(path)) as partial:
            partial.write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def from_json(path: Path) -> "BenchResult":
        """Read a result file. Raises DeviceError naming each field in error, and each
        impossible time."""
        result = from_json(
            BenchResult,
            path,
            DeviceError,
            "result of `compress bench --out`",
            "expected format 1. Measure again",
        )

        def is_time(value: float) -> bool:
            return math.isfinite(value) and value > 0

        problems = [
            f"latencies.{index}.{key}: {getattr(latency, key)} is not a time above 0"
            for index, latency in enumerate(result.latencies)
            for key in ("min_ms", "p50_ms", "p95_ms")
            if not is_time(getattr(latency, key))
        ]
        problems += [
            f"sustained.{index}: expected one time above 0 and one temperature for "
            "every minute"
            for index, run in enumerate(result.sustained)
            if not all(map(is_time, run.minutes))
            or len(run.temperatures) != len(run.minutes)
        ]
        if problems:
            more = (
                f"; and {len(problems) - MOST_PROBLEMS} more"
                if len(problems) > MOST_PROBLEMS
                else ""
            )
            raise DeviceError(
                f"{path}: {'; '.join(problems[:MOST_PROBLEMS])}{more}; measure again"
            )
        return result
