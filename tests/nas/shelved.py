"""A tiny space, and a device that takes what a file's size says: what tests of whole searches use."""

import inspect
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import compress.commands.search  # noqa: F401 shipping keeps the real device when tests replace it
from compress.benchmark.devices import open_device
from compress.exporters.onnx import to_onnx
from compress.io import hash_value
from compress.records.latency import DeviceError, Latency, Setting, Sustained
from tests import command
from tests.command import Shelf
from tests.latencies import steady

SPACE = """
paper: {title: A tiny test, authors: Nobody, year: 2025, url: https://example.org}
about: A tiny space.
mode: supernet
axes: {layers: [1, 2], hidden: [16, 24, 32], ffn: [16, 32, 64]}
teacher: {steps: 24, batch: 16, lr: 1.0e-2, max_length: 32, evaluate: 1, checkpoint: 6}
rows: 32
supernet:
  distill: supernet
  step: dynabert.Sandwich
  steps: 12
  batch: 16
  max_length: 32
  lr: 5.0e-3
  evaluate: 1
  checkpoint: 6
  objective: [{loss: hinton.soft_targets}]
short:
  distill: short
  steps: 6
  batch: 16
  max_length: 32
  lr: 5.0e-3
  evaluate: 0
  objective: [{loss: hinton.soft_targets}]
rungs: [0.5, 1.0]
final:
  - {distill: final, steps: 12, batch: 16, max_length: 32, lr: 1.0e-2, objective: [{loss: hinton.soft_targets}]}
"""
PLAIN = """
paper: {title: A tiny test, authors: Nobody, year: 2025, url: https://example.org}
about: Students that are each trained.
mode: plain
student: {family: bert, init: scratch}
axes: {layers: [1, 2], hidden: [16, 32], ffn: [16, 32], config.hidden_act: [gelu, relu], share.ffn: [1]}
teacher: {steps: 24, batch: 16, lr: 1.0e-2, max_length: 32, evaluate: 1, checkpoint: 6}
short:
  distill: trial
  steps: 4
  batch: 16
  max_length: 32
  lr: 1.0e-2
  evaluate: 0
  objective: [{loss: hinton.soft_targets}]
rungs: [0.5, 1.0]
final:
  - {distill: final, steps: 12, batch: 16, max_length: 32, lr: 1.0e-2, objective: [{loss: hinton.soft_targets}]}
"""


@dataclass
class Weighing:
    """Files take a millisecond for each 10 kB, and one more."""

    name: str = "local"
    races: int = 0

    def facts(self) -> dict[str, str]:
        return {"cpu": "none"}

    def race(self, files: Mapping[str, Path], settings: Sequence[Setting], *, rounds: int, runs: int) -> list[Latency]:
        self.races += 1
        return [steady(name, settings[0], 1 + path.stat().st_size / 1e4) for name, path in files.items()]

    def sustain(self, files: Mapping[str, Path], setting: Setting, *, seconds: float) -> list[Sustained]:
        raise DeviceError("not asked")

    def logits(self, file: Path, rows: Sequence[Any]) -> list[NDArray[np.float32]]:
        raise DeviceError("not asked")


@contextmanager
def weighing(name: str, **options: Any) -> Iterator[Weighing]:
    """Stand in for `open_device`, which takes these options and no others."""
    inspect.signature(open_device).bind(name, **options)
    yield Weighing(name)


def export_once(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Export every shape once for all races: its random weights are the same each time."""

    def export(model: Any, path: Path, **settings: Any) -> None:
        kept = folder / hash_value([model.config.to_dict(), settings])
        if not kept.exists():
            to_onnx(model, kept, **settings)
        shutil.copyfile(kept, path)

    patch.setattr("compress.latency.measure.to_onnx", export)


@dataclass(frozen=True)
class Searched:
    """A shelf with a space: the words of `compress search` of these."""

    shelf: Shelf
    space: str

    @staticmethod
    def fill(folder: Path, space: str = SPACE) -> "Searched":
        shelf = Shelf.fill(folder)
        (folder / "tiny-space.yaml").write_text(space, encoding="utf-8")
        return Searched(shelf, str(folder / "tiny-space.yaml"))

    def words(self, out: Path, *more: str, **changed: str) -> list[str]:
        """`changed` options instead of ours."""
        options = {
            "teacher": self.shelf.teacher, "data": self.shelf.data, "space": self.space, "out": str(out), "seq": "16",
            "shapes": "5", "rounds": "2", "runs": "1", "trials": "5", "finalists": "2", "precision": "fp32", **changed,
        }  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
        return ["search", *command.keep_last([*words, *more])]
