"""The record of one search, in plain values that JSON can hold: `search.json`, all that its page reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from compress.errors import SearchError
from compress.records.json_text import from_json, to_json
from compress.records.run_report import finite


def find_front(placed: Iterable[tuple[tuple[float, ...], int]]) -> list[tuple[tuple[float, ...], int]]:
    """Return those of (values to minimise, number) that no other equals or beats in all; of equals, the first number.

    In order of the values nothing is beaten by what comes later, so each is held against the kept ones alone.
    """
    kept: list[tuple[tuple[float, ...], int]] = []
    for values, number in sorted(placed):
        if not any(all(a <= b for a, b in zip(other, values, strict=True)) for other, _ in kept):
            kept.append((values, number))
    return kept


State = Literal["complete", "pruned", "duplicate", "too slow", "failed"]
ScoreStage = Literal["subnet", "short", "final", "shipped"]
ObjectiveName = Literal["score", "latency", "parameters", "flops_per_token", "file_mb"]

STAGES: tuple[ScoreStage, ...] = ("subnet", "short", "final", "shipped")
"""The stages in the order in which a shape gets its scores: the last one it has is the one it stands at."""


@dataclass(frozen=True)
class TrialRecord:
    """One shape that was asked for, and what became of it. None (or a missing or NaN score): not known.

    number             of the trial in the study
    choice             what was asked of the space: `layers`, `hidden`, `config.hidden_act`, `precision` ...
    state              complete: scored; pruned: given up at a rung; duplicate: of a shape already known; too slow:
                       outside the budget before anything was scored; failed
    scores             stage -> score. subnet: of the supernet, untrained (or a trial's short training in a search
                       without one); short, final: after those distillations; shipped: of the file that ships
    body_parameters    without the tables of words, positions and segments
    flops_per_token    of the encoder, in one forward
    measured           setting (`str` of a Setting) -> ms of one forward
    reason             why it was not completed, in words
    bundle             where it was written to, if it was
    started, seconds   since the search began, and what the trial itself took
    """

    number: int
    choice: Mapping[str, int | float | str]
    state: State
    scores: Mapping[ScoreStage, float | None] = field(default_factory=dict)
    parameters: int | None = None
    body_parameters: int | None = None
    flops_per_token: float | None = None
    file_mb: float | None = None
    predicted_ms: float | None = None
    predicted_error_ms: float | None = None
    measured: Mapping[str, float] | None = None
    reason: str = ""
    bundle: str | None = None
    started: float | None = None
    seconds: float | None = None

    @property
    def stage(self) -> ScoreStage | None:
        """The last stage at which it has a score."""
        return next((one for one in reversed(STAGES) if finite(self.scores.get(one)) is not None), None)

    @property
    def score(self) -> float | None:
        """The score of its last stage."""
        return finite(self.scores.get(self.stage)) if self.stage else None

    @property
    def first(self) -> float | None:
        """The score of its first stage: what trials are compared by before some are trained on."""
        return next((score for one in STAGES if (score := finite(self.scores.get(one))) is not None), None)


@dataclass(frozen=True)
class Timing:
    """A shape that was measured beside what was predicted of it, both in ms.

    predicted_ms   by a predictor that had not seen this shape: leave-one-out for the shapes it was fitted to
    flops_ms       the same from FLOPs alone
    finalist       measured only after the search; the others are what the predictor was fitted to
    """

    name: str
    measured_ms: float
    predicted_ms: float
    error_ms: float | None = None
    flops_ms: float | None = None
    finalist: bool = False
    noisy: bool = False


@dataclass(frozen=True)
class LatencyPrediction:
    """The prediction of latency, and its quality: errors are means of |predicted - measured| / measured, left out.

    about   the predictor in words: its terms, rounds and runs of each measurement
    """

    about: str
    error: float | None
    flops_error: float | None
    timings: tuple[Timing, ...] = ()


@dataclass(frozen=True)
class Rung:
    """One score on the way, for the question of what size and data buy.

    what              `supernet`, or the stage that trained a student
    body_parameters   of the scored shape, without its tables of embeddings
    examples          rows seen in training until then
    flops             spent in training until then
    """

    what: str
    body_parameters: int
    examples: int
    flops: float
    score: float


@dataclass(frozen=True)
class Anchor:
    """Something known to compare with: a recipe's fixed shape, a pruned student, another bundle."""

    name: str
    score: float | None
    ms: float | None = None
    parameters: int | None = None
    file_mb: float | None = None


@dataclass(frozen=True)
class ChoiceImportance:
    """The share of what varies in `target` that each choice explains: shares that sum to 1.

    evaluator   Optuna's, by name
    trials      so many complete ones it rests on
    """

    target: ObjectiveName
    evaluator: str
    trials: int
    shares: Mapping[str, float]


@dataclass(frozen=True)
class SearchReport:
    """The findings of a search under its budgets, with all that is needed to judge and repeat it.

    study        where it is, as `compress search show` takes it
    teacher_ms   on the same device at the same setting, in the same race as the finalists
    budgets      objective -> the most it may be; of the score, the least
    objectives   what the front is over
    split        whose rows the scores are of, and how many those are; train_rows: what there is to train on
    front        the numbers of its points, by cost; winner: of the student that was distilled fully and ships
    costs        part (`measuring`, `supernet`, `trials`, `short distillations`, `final` ...) -> seconds
    ladder       scores of subnets and students while training went on
    date         ISO 8601
    """

    title: str
    study: str
    teacher: str
    data: str
    metric: str
    teacher_score: float | None
    device: str
    setting: str
    budgets: Mapping[ObjectiveName, float]
    objectives: tuple[ObjectiveName, ...]
    points: tuple[TrialRecord, ...]
    command: str
    date: str
    front: tuple[int, ...] = ()
    winner: int | None = None
    teacher_ms: float | None = None
    teacher_parameters: int | None = None
    teacher_mb: float | None = None
    prediction: LatencyPrediction | None = None
    importances: tuple[ChoiceImportance, ...] = ()
    costs: Mapping[str, float] = field(default_factory=dict)
    ladder: tuple[Rung, ...] = ()
    anchors: tuple[Anchor, ...] = ()
    split: str = ""
    split_rows: int | None = None
    train_rows: int | None = None
    sampler: str = ""
    seed: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        known = {point.number for point in self.points}
        if len(known) < len(self.points):
            raise SearchError(f"{self.study}: a trial is listed twice")
        if strange := {*self.front, *(() if self.winner is None else (self.winner,))} - known:
            raise SearchError(f"{self.study}: no trial {', '.join(map(str, sorted(strange)))} on record")

    def point(self, number: int) -> TrialRecord:
        """Return the trial of this number. Raises SearchError where there is none."""
        found = next((point for point in self.points if point.number == number), None)
        if found is None:
            span = f", {self.points[0].number} to {self.points[-1].number}" if self.points else ""
            raise SearchError(f"{self.study}: no trial {number}; it has {len(self.points)}{span}")
        return found

    def measured_ms(self, point: TrialRecord) -> float | None:
        """Return what it took on the device at the search's setting."""
        return finite((point.measured or {}).get(self.setting))

    def ms(self, point: TrialRecord) -> float | None:
        """Return what it takes at the search's setting: measured, or else predicted."""
        measured = self.measured_ms(point)
        return finite(point.predicted_ms) if measured is None else measured

    def value(self, point: TrialRecord, objective: ObjectiveName) -> float | None:
        """Return the point's value of an objective."""
        if objective == "score":
            return point.score
        if objective == "latency":
            return self.ms(point)
        return finite(getattr(point, objective))

    def feasible(self, point: TrialRecord) -> bool:
        """Return True if it was completed and is known to be within every budget."""
        return point.state == "complete" and point.score is not None and not self.exceeded(point)

    def exceeded(self, point: TrialRecord) -> tuple[ObjectiveName, ...]:
        """List the budgets that it is not known to keep."""

        def kept(objective: ObjectiveName, limit: float) -> bool:
            value = self.value(point, objective)
            return value is not None and (value >= limit if objective == "score" else value <= limit)

        return tuple(objective for objective, limit in self.budgets.items() if not kept(objective, limit))

    def best_within(self) -> TrialRecord | None:
        """Return the feasible point that scores best; of equals, the one that takes least."""
        within = [point for point in self.points if self.feasible(point)]
        return max(within, key=lambda point: (point.score, -(self.ms(point) or 0.0), -point.number), default=None)

    def nearest(self) -> TrialRecord | None:
        """Return the point that exceeds its budgets by the least factor, where nothing is feasible; of equals, the
        best."""
        known = [(over, point) for point in self.points if (over := self._excess(point)) is not None]
        return min(known, key=lambda one: (one[0], -(one[1].score or 0.0), one[1].number), default=(0.0, None))[1]

    def compute_front(self, objectives: Sequence[ObjectiveName] | None = None) -> tuple[int, ...]:
        """Return the feasible points that no other feasible one equals or beats in every objective; by the first
        cost."""
        wanted = tuple(objectives or self.objectives)
        signs = [-1.0 if objective == "score" else 1.0 for objective in wanted]
        placed = []
        for point in self.points:
            values = [self.value(point, objective) for objective in wanted]
            known = [value for value in values if value is not None]
            if len(known) == len(wanted) and self.feasible(point):
                placed.append((tuple(sign * one for sign, one in zip(signs, known, strict=True)), point.number))
        costs = [index for index, objective in enumerate(wanted) if objective != "score"]
        return tuple(number for _, number in sorted(find_front(placed), key=lambda one: [one[0][i] for i in costs]))

    def counts(self) -> dict[State, int]:
        """Count the trials that ended in each state, those that none ended in left out."""
        return dict(Counter(point.state for point in self.points))

    def to_json(self) -> str:
        """Write indented JSON without defaults; what is not a finite number becomes null."""
        return to_json(self, compact=True)

    @staticmethod
    def from_json(source: str | bytes | Path) -> SearchReport:
        """Read what `to_json` wrote, from its text or file. Raises SearchError naming each field in error."""
        return from_json(SearchReport, source, SearchError, "search of this tool", "run the search again")

    def _excess(self, point: TrialRecord) -> float | None:
        """Return the factor by which it is over the budget it is most over; None where not all are known."""
        factors = []
        for objective, limit in self.budgets.items():
            value = self.value(point, objective)
            if value is None or value <= 0:
                return None
            factors.append(limit / value if objective == "score" else value / limit)
        return max(factors, default=1.0)
