"""What an interrupted stage continues from: the newest of its checkpoints that is as it was written.

checkpoints/checkpoint-<step>/   weights, optimizer, scheduler, random states and costs, sealed; the newest two
"""

import json
import pickle
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from compress.errors import DamagedError
from compress.io import load_json, make, put, seal, verify

COSTS = "costs.json"
KEPT = 2
"""Checkpoints that stay: the newest, and the one before it, should the newest be damaged."""


@dataclass(frozen=True)
class Spent:
    """What a stage has taken until a checkpoint, in all processes that worked on it one after another.

    loss   the sum over its steps; peak_rss_mb: the most that one process held
    """

    seconds: float = 0.0
    peak_rss_mb: float = 0.0
    loss: float = 0.0

    @staticmethod
    def load(checkpoint: Path | None) -> "Spent":
        """Load what a checkpoint has recorded; nothing was spent where there is none."""
        if checkpoint is None:
            return Spent()
        with loading(checkpoint):
            return Spent(**load_json(checkpoint / COSTS, _remedy(checkpoint)))

    def save(self, checkpoint: Path) -> None:
        """Write it into a checkpoint that is not sealed yet."""
        (checkpoint / COSTS).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def peak_rss_mb() -> float:
    """Ask the system for the most memory this process has held, in megabytes (10^6 bytes)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def steps_of(checkpoint: Path | None) -> int:
    """Read the optimiser steps of a checkpoint from its name; 0 where there is none."""
    return int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0


def checkpoints(stage: Path) -> list[Path]:
    """List the checkpoints in a stage's folder, the newest first."""
    found = (stage / "checkpoints").glob("checkpoint-*")
    return sorted((each for each in found if each.name.rpartition("-")[2].isdigit()), key=steps_of, reverse=True)


def keep(partial: Path, stage: Path) -> None:
    """Seal a finished checkpoint, flush it, give it its place in the stage's folder, and drop all but the newest."""
    seal(partial)
    make(stage / "checkpoints")
    put(partial, stage / "checkpoints" / partial.name)
    for older in checkpoints(stage)[KEPT:]:
        shutil.rmtree(older)


def newest_checkpoint(stage: Path, warn: Callable[[str], None]) -> Path | None:
    """Find the newest checkpoint in a stage's folder that is whole; damaged ones are removed, with a warning."""
    damaged: list[DamagedError] = []
    whole: Path | None = None
    for checkpoint in checkpoints(stage):
        try:
            verify(checkpoint)
        except DamagedError as error:
            damaged.append(error)
        else:
            whole = checkpoint
            break
    for each in damaged:
        where = f"goes on from the checkpoint of step {steps_of(whole)}" if whole else "starts from its beginning"
        lost = steps_of(each.path) - steps_of(whole)
        warn(f"{each} The stage {where}: {lost} steps are trained again.")
        shutil.rmtree(each.path)
    return whole


@contextmanager
def loading(checkpoint: Path) -> Iterator[None]:
    """Turn what libraries raise on a checkpoint that was made or changed by others into a DamagedError."""
    try:
        yield
    except (torch.OutOfMemoryError, DamagedError):
        raise
    except (pickle.UnpicklingError, SafetensorError, RuntimeError, ValueError, TypeError, KeyError, EOFError) as error:
        why = " ".join(str(error).split())[:200]
        raise DamagedError(checkpoint, [f"it cannot be loaded ({why})"], _remedy(checkpoint)) from error


def _remedy(checkpoint: Path) -> str:
    return f"Remove {checkpoint}: the stage then goes on from the checkpoint before it, or from its beginning"
