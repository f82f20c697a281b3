"""Runs that end when their last stage is done, or ship in haste: shipping takes longer than a tiny training."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from compress.records.latency import Latency, Setting
from tests.latencies import steady


class Trained(Exception):  # noqa: N818
    """The last stage is done."""


class Unshipped:
    """Stands for Bundle."""

    @staticmethod
    def write(path: Path, **_: Any) -> None:
        raise Trained


def hasten(patch: pytest.MonkeyPatch) -> None:
    """Take files' sizes for their times, and estimate the error of a teacher's lead from fewer groups."""
    from compress.commands import ship
    from compress.evaluation import baselines

    patch.setattr(ship, "race", _weigh)
    patch.setattr(baselines, "GROUPS", 4)


def _weigh(files: Mapping[str, Path], settings: Sequence[Setting], *, say: Callable[[str], None]) -> list[Latency]:
    """Stand in for `compress.benchmark.local.race`, which starts a process for every file, setting and pass."""
    return [steady(name, each, 1 + path.stat().st_size / 1e4) for each in settings for name, path in files.items()]
