"""The record of one search, kept as `search.json`, from which its page is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from compress.errors import SearchError
from compress.records.json_text import from_json, to_json
from compress.records.run_report import finite

SEARCH_RECORD = "search.json"
"""The file of a search's record."""


Placed = tuple[tuple[float, ...], int]
"""A point: the values to minimise, and the number of what it stands for."""


def find_front(
    placed: Iterable[Placed],
) -> list[Placed]:
    """Return the Pareto front of the points (values to minimise, number): no other
    point equals or beats one of them in all values; of equals, the first.

    In sorted order no point is beaten by a later one, so each is only compared with the
    front so far.
    """
    front: list[Placed] = []
    for values, number in sorted(placed):
        if not any(
            all(a <= b for a, b in zip(other, values, strict=True))
            for other, _ in front
        ):
            front.append((values, number))
    return front


TrialOutcome = Literal["complete", "pruned", "duplicate", "too slow", "failed"]
ScoreStage = Literal["subnet", "short", "final", "shipped"]
ObjectiveName = Literal["score", "latency", "parameters", "flops_per_token", "file_mb"]

STAGES: tuple[ScoreStage, ...] = ("subnet", "short", "final", "shipped")
"""The stages in the order in which a shape is scored."""


@dataclass(frozen=True)
class TrialRecord:
    """One trial: the shape that was sampled, and its results. None (or a missing or NaN
    score): not known.

    number             of the trial in the study
    choice             the sampled values: `layers`, `hidden`, `config.hidden_act`,
                       `precision` ...
    state              complete: scored; pruned: stopped at a rung; duplicate: of an
                       earlier shape; too slow: over the budget before it was scored;
                       failed
    scores             stage -> score. subnet: of the untrained subnet (or after the
                       short training, in a search without a supernet); short, final:
                       after those distillations; shipped: of the file that ships
    body_parameters    without the tables of words, positions and segments
    flops_per_token    of the encoder, in one forward
    measured           setting (`str` of a Setting) -> ms of one forward
    reason             why it was not completed
    bundle             path of its bundle, if one was written
    started, seconds   seconds since the search began, and of the trial itself
    """

    number: int
    choice: Mapping[str, int | float | str]
    state: TrialOutcome
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
    def known_scores(self) -> dict[ScoreStage, float]:
        """The finite scores, in the order of the stages."""
        scores = {stage: finite(self.scores.get(stage)) for stage in STAGES}
        return {stage: score for stage, score in scores.items() if score is not None}

    @property
    def stage(self) -> ScoreStage | None:
        """The last stage that has a score."""
        return next(reversed(self.known_scores), None)

    @property
    def score(self) -> float | None:
        """The score of the last stage."""
        return next(reversed(self.known_scores.values()), None)

    @property
    def first(self) -> float | None:
        """The score of the first stage, by which trials are compared before some are
        trained further."""
        return next(iter(self.known_scores.values()), None)


@dataclass(frozen=True)
class Timing:
    """The measured and the predicted latency of a shape, in ms.

    predicted_ms   by a predictor that was not fitted to this shape (leave-one-out for
                   those it was fitted to)
    flops_ms       predicted from FLOPs alone
    finalist       measured only after the search; the predictor was fitted to the
                   others
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
    """The quality of the latency predictor: leave-one-out means of |predicted -
    measured| / measured.

    about   a description of the predictor: its terms, and the rounds and runs of each
            measurement
    """

    about: str
    error: float | None
    flops_error: float | None
    timings: tuple[Timing, ...] = ()


@dataclass(frozen=True)
class Rung:
    """One score during training, from which the scaling law is fitted.

    what              `supernet`, or the stage that trained a student
    body_parameters   of the scored shape, without embeddings
    examples          rows seen in training so far
    flops             spent in training so far
    """

    what: str
    body_parameters: int
    examples: int
    flops: float
    score: float


@dataclass(frozen=True)
class Anchor:
    """Something to compare students with: the fixed shape of a recipe, a pruned
    student, another bundle."""

    name: str
    score: float | None
    ms: float | None = None
    parameters: int | None = None
    file_mb: float | None = None


@dataclass(frozen=True)
class ChoiceImportance:
    """The share of the variation of `target` that each choice explains; shares sum to
    1.

    evaluator   name of Optuna's evaluator
    trials      number of complete trials it is computed from
    """

    target: ObjectiveName
    evaluator: str
    trials: int
    shares: Mapping[str, float]


@dataclass(frozen=True)
class SearchReport:
    """The results of a search under its budgets, with all that is needed to judge and
    repeat it.

    study        its folder, as given to `compress search show`
    teacher_ms   on the same device and setting, in the same race as the finalists
    budgets      objective -> its maximum; for the score, its minimum
    objectives   of the front
    split        the split that was scored, of split_rows rows; train_rows: number of
                 rows to train on
    front        trial numbers, by cost; winner: number of the student that was fully
                 distilled and ships
    costs        part (`measuring`, `supernet`, `trials`, `short distillations`, `final`
                 ...) -> seconds
    ladder       scores of subnets and students during training
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
        named = {*self.front} if self.winner is None else {*self.front, self.winner}
        if strange := named - known:
            raise SearchError(
                f"{self.study}: no trial {', '.join(map(str, sorted(strange)))} on "
                "record"
            )

    def point(self, number: int) -> TrialRecord:
        """Return the trial of this number. Raises SearchError if there is none."""
        found = next((point for point in self.points if point.number == number), None)
        if found is None:
            span = (
                f", {self.points[0].number} to {self.points[-1].number}"
                if self.points
                else ""
            )
            raise SearchError(
                f"{self.study}: no trial {number}; it has {len(self.points)}{span}"
            )
        return found

    def measured_ms(self, point: TrialRecord) -> float | None:
        """Return the measured ms on the device at the setting of the search."""
        return finite((point.measured or {}).get(self.setting))

    def ms(self, point: TrialRecord) -> float | None:
        """Return the ms at the setting of the search: measured, or else predicted."""
        measured = self.measured_ms(point)
        return finite(point.predicted_ms) if measured is None else measured

    def value(self, point: TrialRecord, objective: ObjectiveName) -> float | None:
        """Return the value of an objective."""
        if objective == "latency":
            return self.ms(point)
        return finite(getattr(point, objective))

    def feasible(self, point: TrialRecord) -> bool:
        """Return True if the trial is complete and known to be within every budget."""
        return (
            point.state == "complete"
            and point.score is not None
            and not self.exceeded(point)
        )

    def exceeded(self, point: TrialRecord) -> tuple[ObjectiveName, ...]:
        """List the budgets that the trial is not known to meet."""

        def kept(objective: ObjectiveName, limit: float) -> bool:
            value = self.value(point, objective)
            return value is not None and (
                value >= limit if objective == "score" else value <= limit
            )

        return tuple(
            objective
            for objective, limit in self.budgets.items()
            if not kept(objective, limit)
        )

    def best_within(self) -> TrialRecord | None:
        """Return the feasible point that scores best; of equals, the one that takes
        least."""
        within = [point for point in self.points if self.feasible(point)]
        return max(
            within,
            key=lambda point: (point.score, -(self.ms(point) or 0.0), -point.number),
            default=None,
        )

    def nearest(self) -> TrialRecord | None:
        """Return the point that exceeds its budgets by the smallest factor; of equals,
        the one that scores best."""
        excess = {point.number: self._excess(point) for point in self.points}
        return min(
            (point for point in self.points if excess[point.number] is not None),
            key=lambda one: (excess[one.number], -(one.score or 0.0), one.number),
            default=None,
        )

    def compute_front(
        self, objectives: Sequence[ObjectiveName] | None = None
    ) -> tuple[int, ...]:
        """Return the Pareto front of the feasible points over all objectives, sorted by
        the first cost."""
        names = tuple(dict.fromkeys(objectives or self.objectives))
        placed = []
        for point in filter(self.feasible, self.points):
            values = []
            for name in names:
                value = self.value(point, name)
                if value is not None:
                    values.append(-value if name == "score" else value)
            if len(values) == len(names):
                placed.append((tuple(values), point.number))
        costs = [index for index, name in enumerate(names) if name != "score"]
        return tuple(
            number
            for _, number in sorted(
                find_front(placed), key=lambda one: [one[0][i] for i in costs]
            )
        )

    def counts(self) -> dict[TrialOutcome, int]:
        """Count the trials by state."""
        return dict(Counter(point.state for point in self.points))

    def to_json(self) -> str:
        """Write indented JSON without defaults; numbers that are not finite become
        null."""
        return to_json(self, compact=True)

    @staticmethod
    def from_json(source: str | bytes | Path) -> SearchReport:
        """Read what `to_json` wrote, from its text or file. Raises SearchError naming
        each field in error."""
        return from_json(
            SearchReport,
            source,
            SearchError,
            "search of this tool",
            "run the search again",
        )

    def _excess(self, point: TrialRecord) -> float | None:
        """Return the largest factor by which it exceeds a budget; None unless all
        values are known."""
        factors = []
        for objective, limit in self.budgets.items():
            value = self.value(point, objective)
            if value is None or value <= 0:
                return None
            factors.append(limit / value if objective == "score" else value / limit)
        return max(factors, default=1.0)


def load_report(study: Path) -> SearchReport:
    """Load the report of the search in this folder. Raises SearchError if there is
    none."""
    if not (study / SEARCH_RECORD).is_file():
        raise SearchError(
            f"{study}: has no {SEARCH_RECORD} yet; expected the folder of a `compress "
            "search` with trials"
        )
    return SearchReport.from_json(study / SEARCH_RECORD)
