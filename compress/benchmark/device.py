"""The methods that every device has: see `Device`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from compress.arrays import Floats
from compress.exporters.session import EncodedRow
from compress.records.latency import Latency, Setting, Sustained


class Device(Protocol):
    """An open device. Its methods raise DeviceError if the device fails and ExportError
    for a file that is not a text encoder; neither leaves a process or a file behind."""

    @property
    def name(self) -> str:
        """Return the name: `local`, `ssh:pi`, `browser`, `adb:SERIAL`."""

    def facts(self) -> dict[str, str]:
        """Describe the machine: processor, cores, instructions, governor, temperature,
        system, runtime."""

    def race(
        self,
        files: Mapping[str, Path],
        settings: Sequence[Setting],
        *,
        rounds: int,
        runs: int,
    ) -> list[Latency]:
        """Measure the latency of each file at each setting, interleaved; sorted by
        setting, then by file, as given."""

    def sustain(
        self,
        files: Mapping[str, Path],
        setting: Setting,
        *,
        seconds: float,
    ) -> list[Sustained]:
        """Run each file in turn for `seconds` without a pause."""

    def logits(
        self,
        file: Path,
        rows: Sequence[EncodedRow],
    ) -> list[Floats]:
        """Compute the file's logits of each row by itself: (outputs,), or (tokens,
        outputs) for a tokenwise task."""
