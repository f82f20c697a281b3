"""A result file: what one command measured, on what, when. `compress report` reads such files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from compress.benchmark import jobs
from compress.benchmark.devices import Device
from compress.io import sha256, written
from compress.provenance import command_line
from compress.records.latency import DeviceError, Latency, Setting, Sustained


@dataclass(frozen=True)
class Result:
    """machine: the device's facts; date: ISO 8601. Names in latencies are `<bundle folder>:<precision>`.

    sha256  name -> the digest of the file that ran; {} in older results
    """

    device: str
    machine: Mapping[str, str]
    date: str
    command: str
    latencies: tuple[Latency, ...]
    sustained: tuple[Sustained, ...] = ()
    sha256: Mapping[str, str] = field(default_factory=dict)
    format: Literal[1] = field(default=1, kw_only=True)

    def to_json(self) -> str:
        from pydantic import TypeAdapter

        found = TypeAdapter(Result).dump_python(self, mode="json")
        return json.dumps({"format": found.pop("format"), **found}, indent=1) + "\n"

    @staticmethod
    def from_json(path: Path) -> "Result":
        """The result in a file. Raises DeviceError naming each field in error."""
        from pydantic import TypeAdapter, ValidationError

        try:
            return TypeAdapter(Result).validate_json(path.read_bytes())
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'JSON'}: {one['msg']}" for one in error.errors())
            raise DeviceError(
                f"{path}: not a result of `compress bench --out` ({problems}); expected format 1. Measure again"
            ) from error


def measure(
    device: Device,
    files: Mapping[str, Path],
    settings: Sequence[Setting],
    *,
    rounds: int,
    runs: int,
    seconds: float | None,
) -> Result:
    """Race the files at every setting; then, where `seconds` is given, run each alone for so long at the first."""
    jobs.check(device.name, device.facts().get("cores", ""), files, settings)
    digests = {name: sha256(path) for name, path in files.items()}
    latencies = device.race(files, settings, rounds=rounds, runs=runs)
    sustained = device.sustain(files, settings[0], seconds=seconds) if seconds is not None else []
    return Result(
        device=device.name,
        machine=device.facts(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command_line(),
        latencies=tuple(latencies),
        sustained=tuple(sustained),
        sha256=digests,
    )


def save(result: Result, path: Path) -> None:
    """Whole, or not there."""
    with written(path) as partial:
        partial.write_text(result.to_json(), encoding="utf-8")
