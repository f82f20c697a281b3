"""A search small enough to know by heart: shapes whose score and latency are formulas. Also a worker, as a process.

python -m tests.search.toy STORAGE VERSION [stall]   judges shapes of the only study there, as that version of the code;
                                                     `stall`: says which shape, and never ends
"""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import optuna

from compress.errors import PruneError
from compress.nas import config as identity
from compress.nas.config import code_version
from compress.nas.storage import Pulse
from compress.nas.study import Choice, open_study
from compress.nas.worker import work

OF = {"teacher": "minilm", "data": "sst2.tsv", "space": "toy"}
PULSE = Pulse(interval=1, grace=60)


@dataclass(frozen=True)
class Toy:
    """Shapes of `layers` 1-8 by `hidden` 1-32."""

    layers: int = 8
    hidden: int = 32

    def suggest(self, trial: optuna.Trial) -> Choice:
        return {
            "layers": trial.suggest_int("layers", 1, self.layers),
            "hidden": trial.suggest_int("hidden", 1, self.hidden),
        }

    def key(self, choice: Choice) -> str:
        return f"{choice['layers']}x{choice['hidden']}"

    def size(self) -> int:
        return self.layers * self.hidden


@dataclass(frozen=True)
class Milliseconds:
    ms: float
    error_ms: float


@dataclass
class ToyJudge:
    """Scores grow with size, by rung; `seen` are the (shape, rung) it scored, in order."""

    rungs: int = 1
    error_ms: float = 0.0
    fails: Callable[[Choice], bool] = lambda choice: False
    begin: Callable[[Choice], None] = lambda choice: None
    seen: list[tuple[str, int]] = field(default_factory=list)

    def latency(self, choice: Choice) -> Milliseconds | None:
        return Milliseconds(milliseconds(choice), self.error_ms)

    def facts(self, choice: Choice) -> Mapping[str, float]:
        return {
            "parameters": float(choice["layers"]) * float(choice["hidden"]) ** 2,
            "file_mb": float(choice["hidden"]),
        }

    def score(self, choice: Choice, rung: int) -> float:
        self.begin(choice)
        if self.fails(choice):
            raise PruneError(f"layers {choice['layers']}: no such slice")
        self.seen.append((Toy().key(choice), rung))
        return score(choice) - 0.1 / (1 + rung)


def milliseconds(choice: Choice) -> float:
    return float(choice["layers"]) * (1 + float(choice["hidden"]) / 8)


def score(choice: Choice) -> float:
    """More layers and more width are better, each less and less so; odd widths are worse."""
    layers, hidden = float(choice["layers"]), float(choice["hidden"])
    return 1 - 0.3 / layers - 0.5 / hidden - 0.2 * (hidden % 2)


def started(storage: Path | str, name: str = "toy", **options: object) -> optuna.Study:
    """The study of the toy, over score and latency unless said otherwise, saying nothing."""
    given = {"objectives": ("score", "latency"), "seed": 7, "pulse": PULSE, "say": lambda line: None, **options}
    return open_study(storage, name, OF, **given)  # type: ignore[arg-type]


def worker(storage: Path | str, *words: str) -> "subprocess.Popen[str]":
    """This file as a process of its own; as the code that this process was started with, whoever edits it meanwhile."""
    command = [sys.executable, "-W", "error", "-m", "tests.search.toy", str(storage), code_version(), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def main(storage: str, version: str, *words: str) -> None:
    def stall(choice: Choice) -> None:
        print(f"judging {Toy().key(choice)}", flush=True)
        time.sleep(600)

    def slowly(choice: Choice) -> None:
        time.sleep(0.02)

    def made(identity: Mapping[str, str]) -> tuple[Toy, ToyJudge]:
        assert identity == OF
        return Toy(), ToyJudge(begin=stall if "stall" in words else slowly)

    with mock.patch.object(identity, "code_version", lambda: version):
        work(storage, None, made, pulse=PULSE, say=lambda line: print(line, flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
