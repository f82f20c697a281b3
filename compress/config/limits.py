"""Ranges that numbers of commands and functions must lie in."""

from typing import Final

from compress.errors import CompressError, did_you_mean
from compress.provenance import install_command, lacks

MOST_SEED: Final = 2**32 - 1
"""The largest seed that numpy's generators take."""


TRACKERS: Final = ("tensorboard", "mlflow", "wandb", "trackio")
"""The trackers of a run; all but the first are brought by extras of their names."""


def check_number(name: str, value: float, least: float, most: float) -> None:
    """Raise CompressError for what is no number from `least` to `most`; `name` says of what."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise CompressError(f"{name} {value}: expected a number from {least:g} to {most:g}")


def check_seed(seed: int) -> None:
    """Raise CompressError for a number that numpy's and torch's generators do not both take."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MOST_SEED:
        raise CompressError(f"--seed {seed}: expected a whole number from 0 to {MOST_SEED}")


def check_minutes(minutes: float | None) -> None:
    """Raise CompressError for a time limit that is none: from six seconds to a year; None is no limit."""
    if minutes is not None:
        check_number("minutes", minutes, 0.1, 366 * 24 * 60)


def check_tracker(name: str | None) -> None:
    """Raise CompressError for a tracker that is none, that is not installed, or too old; None is none."""
    if name not in (None, *TRACKERS):
        raise CompressError(f"--track {name}: is no tracker.{did_you_mean(str(name), TRACKERS)}")
    if name not in (None, "tensorboard") and (absent := lacks(str(name))):
        raise CompressError(f"--track {name}: {absent}; expected it for this tracker: {install_command(str(name))}")


def check_max_drop(max_drop: float) -> None:
    """Raise CompressError for a loss of score that none can be, in the score's own unit."""
    check_number("max_drop", max_drop, 0, 1)
