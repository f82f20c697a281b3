"""Runs that end when their last stage is done: shipping takes longer than a tiny training."""

from pathlib import Path
from typing import Any


class Trained(Exception):  # noqa: N818
    """The last stage is done."""


class Unshipped:
    """Stands for Bundle."""

    @staticmethod
    def write(path: Path, **_: Any) -> None:
        raise Trained
