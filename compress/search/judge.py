"""What a study needs of a search: where choices come from, and what they are worth."""

from collections.abc import Mapping
from typing import Protocol

import optuna

Choice = Mapping[str, int | float | str]
"""One shape asked of a space: `layers`, `hidden`, `config.hidden_act`, `precision` ..."""


class Predicted(Protocol):
    """A latency in ms, and one standard deviation of it."""

    @property
    def ms(self) -> float: ...
    @property
    def error_ms(self) -> float: ...


class Space(Protocol):
    """space.Shapes is one."""

    def suggest(self, trial: optuna.Trial) -> Choice: ...

    def key(self, choice: Choice) -> str:
        """The same for the same shape, in whatever order it is written."""

    def size(self) -> int | None:
        """How many shapes there are, if that is known."""


class Judge(Protocol):
    """Evaluates choices. A CompressError of any of these ends that trial, not the study.

    rungs   how often a shape is scored, each time on more rows or after more training
    """

    @property
    def rungs(self) -> int: ...

    def latency(self, choice: Choice) -> Predicted | None:
        """None where nothing is known of it; then it can be neither an objective nor limited."""

    def facts(self, choice: Choice) -> Mapping[str, float]:
        """parameters, flops_per_token, file_mb: objectives and limits other than the score and the latency."""

    def score(self, choice: Choice, rung: int) -> float:
        """More is better. Asked of a shape for rung 0, 1 ... in order, in one process; the last is its score."""
