"""Check the tracker of a run, before torch is imported."""

from typing import Final

from compress.errors import CompressError, did_you_mean
from compress.provenance import find_missing, install_command

TRACKERS: Final = ("tensorboard", "mlflow", "wandb", "trackio")
"""The trackers of a run; each but the first is installed by the extra of its name."""


def check_tracker(name: str | None) -> None:
    """Raise CompressError for a tracker that is unknown, not installed, or too old; None means no tracker."""
    if name is None:
        return
    if name not in TRACKERS:
        raise CompressError(f"--track {name}: is no tracker.{did_you_mean(name, TRACKERS)}")
    if name != "tensorboard" and (absent := find_missing(name)):
        raise CompressError(f"--track {name}: {absent}; this tracker needs it: {install_command(name)}")
