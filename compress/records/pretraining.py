"""Hold what a pre-training has made, as its page shows it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compress.records.language_scores import LanguageScores
from compress.records.run_report import Point


@dataclass(frozen=True)
class TrainedStage:
    """Hold the name of a stage, its length and best score in words, and its curve, as
    in `Report.curves`."""

    name: str
    about: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Pretraining:
    """Describe a finished pre-training.

    text        the corpus, or the labelled data
    parameters  of the checkpoint
    seconds     wall time of all stages
    scores      None unless the checkpoint is a causal language model
    following   the command that continues with the checkpoint
    machine     hardware facts, name -> value; versions: library -> version
    """

    recipe: str
    teacher: str
    text: str
    checkpoint: str
    parameters: int
    stages: tuple[TrainedStage, ...]
    scores: LanguageScores | None
    following: str
    command: str
    date: str
    seed: int
    seconds: float
    machine: Mapping[str, str]
    versions: Mapping[str, str]
