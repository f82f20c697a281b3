"""Runs that end when their last stage is done, or ship in haste: shipping takes longer than a tiny training."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest


class Trained(Exception):  # noqa: N818
    """The last stage is done."""


class Unshipped:
    """Stands for Bundle."""

    @staticmethod
    def write(path: Path, **_: Any) -> None:
        raise Trained


def hasten(patch: pytest.MonkeyPatch) -> None:
    """Race in as few rounds as there may be, and estimate the error of a teacher's lead from fewer groups."""
    from compress.commands import ship
    from compress.evaluation import baselines

    patch.setattr(ship, "race", partial(ship.race, rounds=2, runs=1))
    patch.setattr(baselines, "GROUPS", 4)
