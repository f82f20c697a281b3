"""A search small enough to know by heart: shapes whose score and latency are formulas. Also a worker, as a process.

python -m tests.nas.toy STORAGE VERSION [stall]   judges shapes of the only study there, as that version of the code;
                                                  `stall`: never ends a trial
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast
from unittest import mock

import optuna
from optuna.storages import BaseStorage, InMemoryStorage

from compress.errors import PruneError
from compress.nas import study as studies
from compress.nas.storage import open_storage
from compress.nas.study import code_version, join_study, open_study, run_trials

if TYPE_CHECKING:  # these import torch, which takes a worker seconds
    from compress.latency.model import Estimate
    from compress.nas.space import ShapeChoice

OF = {"teacher": "minilm", "data": "sst2.tsv", "space": "toy"}


@dataclass(frozen=True)
class Toy:
    """Shapes of `layers` 1-8 by `hidden` 1-32."""

    layers: int = 8
    hidden: int = 32

    def suggest(self, trial: optuna.Trial) -> ShapeChoice:
        return {
            "layers": trial.suggest_int("layers", 1, self.layers),
            "hidden": trial.suggest_int("hidden", 1, self.hidden),
        }

    def key(self, choice: ShapeChoice) -> str:
        return f"{choice['layers']}x{choice['hidden']}"

    def size(self) -> int:
        return self.layers * self.hidden


@dataclass
class ToyEvaluator:
    """Scores grow with size, by rung; `seen` are the (shape, rung) it scored, in order. Its own cost model."""

    rungs: int = 1
    error_ms: float = 0.0
    fails: Callable[[ShapeChoice], bool] = lambda choice: False
    begin: Callable[[ShapeChoice], None] = lambda choice: None
    seen: list[tuple[str, int]] = field(default_factory=list)
    shapes: Toy = Toy()

    @property
    def costs(self) -> ToyEvaluator:
        return self

    def latency(self, choice: ShapeChoice) -> Estimate | None:
        return cast("Estimate", SimpleNamespace(ms=milliseconds(choice), error_ms=self.error_ms))

    def facts(self, choice: ShapeChoice) -> dict[str, float]:
        return {
            "parameters": float(choice["layers"]) * float(choice["hidden"]) ** 2,
            "file_mb": float(choice["hidden"]),
        }

    def score(self, choice: ShapeChoice, rung: int) -> float:
        self.begin(choice)
        if self.fails(choice):
            raise PruneError(f"layers {choice['layers']}: no such slice")
        self.seen.append((Toy().key(choice), rung))
        return score(choice) - 0.1 / (1 + rung)


def milliseconds(choice: ShapeChoice) -> float:
    return float(choice["layers"]) * (1 + float(choice["hidden"]) / 8)


def score(choice: ShapeChoice) -> float:
    """More layers and more width are better, each less and less so; odd widths are worse."""
    layers, hidden = float(choice["layers"]), float(choice["hidden"])
    return 1 - 0.3 / layers - 0.5 / hidden - 0.2 * (hidden % 2)


def begin(storage: Path | str | BaseStorage | None = None, name: str = "toy", **options: object) -> optuna.Study:
    """Begin or continue the study of the toy, in memory by default, over score and latency unless said otherwise."""
    given = {"objectives": ("score", "latency"), "seed": 7, "say": lambda line: None, **options}
    return open_study(InMemoryStorage() if storage is None else storage, name, OF, **given)  # type: ignore[arg-type]


def hasty(where: Path | str, create: bool = True) -> BaseStorage:
    """Open a storage in which a process is dead after four seconds."""
    return open_storage(where, create=create, heartbeat=1, grace=4, say=lambda line: None)


def run(study: optuna.Study, evaluator: ToyEvaluator, **options: object) -> list[str]:
    """Run the trials of the toy; return what was said."""
    said: list[str] = []
    given = {"say": said.append, "wait": 5.0, **options}
    run_trials(study, evaluator, **given)  # type: ignore[arg-type]
    return said


def start_worker(storage: Path | str, *words: str) -> subprocess.Popen[str]:
    """Start this file as a process of its own; as the code this process has read, whoever edits it meanwhile."""
    command = [sys.executable, "-W", "error", "-m", "tests.nas.toy", str(storage), code_version(), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def main(storage: str, version: str, *words: str) -> None:
    def stall(choice: ShapeChoice) -> None:
        print(f"judging {Toy().key(choice)}", flush=True)
        time.sleep(600)

    def slowly(choice: ShapeChoice) -> None:
        time.sleep(0.05)

    evaluator = ToyEvaluator(begin=stall if "stall" in words else slowly)
    with mock.patch.object(studies, "code_version", lambda: version):
        study = join_study(hasty(storage, create=False))
        run(study, evaluator, worker=True, say=lambda line: print(line, flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
