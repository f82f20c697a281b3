"""Check numbers that commands and functions share."""

from typing import Final

from compress.errors import CompressError, did_you_mean
from compress.provenance import find_missing, install_command

MOST_SEED: Final = 2**32 - 1
"""The largest seed that numpy's generators accept."""
TRACKERS: Final = ("tensorboard", "mlflow", "wandb", "trackio")
"""The trackers of a run; each but the first is installed by the extra of its name."""


def check_number(name: str, value: float, least: float, most: float) -> None:
    """Raise CompressError unless `value` is a number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise CompressError(f"{name} {value}: expected a number from {least:g} to {most:g}")


def check_seed(seed: int) -> None:
    """Raise CompressError for a seed that numpy's or torch's generators do not accept."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MOST_SEED:
        raise CompressError(f"--seed {seed}: expected a whole number from 0 to {MOST_SEED}")


def check_minutes(minutes: float | None) -> None:
    """Raise CompressError unless a time limit lies between six seconds and a year; None is no limit."""
    if minutes is not None:
        check_number("minutes", minutes, 0.1, 366 * 24 * 60)


def check_tracker(name: str | None) -> None:
    """Raise CompressError for a tracker that is unknown, not installed, or too old; None means no tracker."""
    if name is None:
        return
    if name not in TRACKERS:
        raise CompressError(f"--track {name}: is no tracker.{did_you_mean(name, TRACKERS)}")
    if name != "tensorboard" and (absent := find_missing(name)):
        raise CompressError(f"--track {name}: {absent}; this tracker needs it: {install_command(name)}")
