"""One trial of a study: evaluate its shape, rung by rung, and read its outcome back.

Attributes of a trial, besides its parameters and values (optuna-dashboard shows them
all):

    choice, key        the shape that was drawn, and its hash
    latency            {"ms", "error_ms"}: predicted
    facts              parameters, flops_per_token, file_mb, ...
    scores             one for each rung; the last one is the trial's score
    state, reason      as in search_report.TrialRecord
    twin               the trial of the same shape whose outcome was copied
    seconds            duration
    owner              the search whose own process runs it; absent from a worker's
                       trial
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import ceil
from typing import TYPE_CHECKING, Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from compress.errors import CompressError, SearchError
from compress.nas.config import SURE_DEVIATIONS
from compress.records.search_report import TrialOutcome

if TYPE_CHECKING:
    from compress.nas.context import StudentEvaluator

TRIAL_STATES: Mapping[TrialState, tuple[TrialOutcome, ...]] = {
    TrialState.COMPLETE: ("complete", "duplicate"),
    TrialState.PRUNED: ("pruned", "too slow", "duplicate"),
    TrialState.FAIL: ("failed", "duplicate"),
}

# ---- reading trials back


def outcome(trial: FrozenTrial) -> TrialOutcome | None:
    """Return the trial's outcome; None while it waits or runs, and where its process
    died before the end."""
    state: TrialOutcome | None = trial.user_attrs.get("state")
    return state if state in TRIAL_STATES.get(trial.state, ()) else None


def count_scored(trials: Sequence[FrozenTrial]) -> int:
    """Count the trials whose shape was scored, or failed: those that a search spends
    its time on."""
    return sum(outcome(trial) in {"complete", "pruned", "failed"} for trial in trials)


def is_within_limits(trial: FrozenTrial) -> bool:
    """Return whether the trial keeps all limits of the study."""
    return all(excess <= 0 for excess in trial.constraints.values())


def pareto_front(study: optuna.Study) -> list[FrozenTrial]:
    """Return the completed trials within the limits that no other beats in all
    objectives."""
    return [trial for trial in study.best_trials if outcome(trial) == "complete"]


def costs_of(
    attributes: Mapping[str, Any], objectives: Sequence[str]
) -> tuple[float, ...]:
    """Return the values of the objectives other than the score, in their order; NaN for
    one that is not known."""
    latency = attributes.get("latency", {}).get("ms", math.nan)
    costs = {"latency": latency, **attributes.get("facts", {})}
    return tuple(
        float(costs.get(name, math.nan)) for name in objectives if name != "score"
    )


# ---- a pruning rule for several objectives; Optuna's pruners support one

REDUCTION = 3
"""One trial in REDUCTION is promoted to the next rung, as in successive halving."""
ALIKE = 1.2
"""The largest ratio of two costs that count as about the same."""


@dataclass(frozen=True)
class Standing:
    """A trial's score at a rung (higher is better) and its costs (lower is better)."""

    score: float
    costs: tuple[float, ...] = ()

    def beats(self, other: "Standing") -> bool:
        return (
            self.score >= other.score
            and self.costs_no_more_than(other)
            and self != other
        )

    def costs_no_more_than(self, other: "Standing", factor: float = 1.0) -> bool:
        return all(
            own <= limit * factor
            for own, limit in zip(self.costs, other.costs, strict=True)
        )


def reason_to_prune(standing: Standing, others: Sequence[Standing]) -> str:
    """Return why a trial is not promoted to the next rung; empty if it is. `others`
    have a score at its rung."""
    if not any(other.beats(standing) for other in others):
        return ""
    cheap = [other for other in others if other.costs_no_more_than(standing, ALIKE)]
    rivals = [other for other in cheap if standing.costs_no_more_than(other, ALIKE)]
    about = "cost about the same"
    if len(rivals) < REDUCTION:
        rivals = cheap
        about = "cost no more"
    place = 1 + sum(other.score > standing.score for other in rivals)
    promoted = ceil((len(rivals) + 1) / REDUCTION)
    if len(rivals) < REDUCTION or place <= promoted:
        return ""
    return (
        f"{standing.score:.4g} ranks {place} of {len(rivals) + 1} that {about}; the "
        f"best {promoted} continue"
    )


# ---- evaluating a trial


@dataclass(frozen=True)
class Verdict:
    """The end of a trial: its values in the order of the objectives if it has any, else
    the reason."""

    state: TrialOutcome | None
    reason: str = ""
    values: tuple[float, ...] | None = None


def evaluate_trial(
    study: optuna.Study,
    trial: optuna.Trial,
    evaluator: "StudentEvaluator",
    limits: Mapping[str, float],
) -> Verdict:
    """Evaluate the shape that the trial draws; write every result into the trial as
    soon as it is known."""
    costs = evaluator.costs
    try:
        choice = costs.shapes.suggest(trial)
        key = costs.shapes.key(choice)
        trial.set_user_attr("choice", dict(choice))
        trial.set_user_attr("key", key)
        if twin := _find_twin(study, key, trial.number):
            return _copy_outcome(trial, twin)
        latency = costs.latency(choice)
        trial.set_user_attr("latency", {"ms": latency.ms, "error_ms": latency.error_ms})
        if excess := _check_limits(trial, limits, {"latency"}):
            return Verdict("too slow", excess)
        trial.set_user_attr("facts", costs.facts(choice))
        if excess := _check_limits(trial, limits, limits.keys() - {"latency", "score"}):
            return Verdict("too slow", excess)
        return _score_rungs(study, trial, evaluator, choice, limits)
    except CompressError as error:
        return Verdict("failed", str(error))


def _score_rungs(
    study: optuna.Study,
    trial: optuna.Trial,
    evaluator: "StudentEvaluator",
    choice: Any,
    limits: Mapping[str, float],
) -> Verdict:
    """Score the shape on one rung after the other, until it is pruned, or the search
    ends elsewhere."""
    objectives = study.user_attrs["identity"]["objectives"]
    costs = costs_of(trial.user_attrs, objectives)
    scores = list[float]()
    for rung in range(evaluator.rungs):
        score = float(evaluator.score(choice, rung))
        if not math.isfinite(score):
            raise SearchError(f"its score at rung {rung} is {score}")
        scores.append(score)
        trial.set_user_attr("scores", scores)
        if rung < evaluator.rungs - 1:
            if study.user_attrs.get("over"):
                return Verdict(None, "the search has ended")
            others = [
                Standing(
                    other.user_attrs["scores"][rung],
                    costs_of(other.user_attrs, objectives),
                )
                for other in study.get_trials(deepcopy=False)
                if other.number != trial.number
                and (
                    other.state == TrialState.RUNNING
                    or outcome(other) in {"complete", "pruned"}
                )
                and len(other.user_attrs.get("scores", ())) > rung
            ]
            if reason := reason_to_prune(Standing(score, costs), others):
                return Verdict("pruned", f"rung {rung}: {reason}")
    if "score" in limits:
        trial.set_constraint("score", limits["score"] - scores[-1])
    rest = iter(costs)
    values = (scores[-1] if name == "score" else next(rest) for name in objectives)
    return Verdict("complete", values=tuple(values))


def _check_limits(
    trial: optuna.Trial, limits: Mapping[str, float], names: set[str]
) -> str:
    """Return which limits the trial exceeds; tell the sampler by what share of each
    limit."""
    over = []
    for name in sorted(names & limits.keys()):
        (value,) = costs_of(trial.user_attrs, [name])
        limit = limits[name]
        error = (
            SURE_DEVIATIONS * trial.user_attrs["latency"]["error_ms"]
            if name == "latency"
            else 0.0
        )
        trial.set_constraint(name, (value + error - limit) / limit)
        if value + error > limit:
            spread = f" + {error:.2g} ({SURE_DEVIATIONS:g} errors)" if error else ""
            over.append(f"{name} {value:.4g}{spread}, limit {limit:g}")
    return "; ".join(over)


DRAWING = 10.0
"""Seconds within which a started trial has drawn its shape, unless its process died."""


def _find_twin(study: optuna.Study, key: str, number: int) -> FrozenTrial | None:
    """Return the trial of the same shape whose outcome is known, or that started before
    this one and still runs.

    Wait for trials that started earlier to draw their shapes: of two that draw the same
    shape, one must see the other.
    """
    while True:
        trials = study.get_trials(deepcopy=False)
        for trial in trials:
            if (
                trial.number == number
                or trial.user_attrs.get("key") != key
                or outcome(trial) == "duplicate"
            ):
                continue
            if outcome(trial) or (
                trial.state == TrialState.RUNNING and trial.number < number
            ):
                return trial
        if not any(_is_drawing(trial) for trial in trials[:number]):
            return None
        time.sleep(0.02)


def _is_drawing(trial: FrozenTrial) -> bool:
    if (
        trial.state != TrialState.RUNNING
        or "key" in trial.user_attrs
        or trial.datetime_start is None
    ):
        return False
    return abs((datetime.now() - trial.datetime_start).total_seconds()) < DRAWING


def _copy_outcome(trial: optuna.Trial, twin: FrozenTrial) -> Verdict:
    """Copy the twin's results into this trial, so that the sampler learns from it."""
    trial.set_user_attr("twin", twin.number)
    for name in twin.user_attrs.keys() & {"latency", "facts", "scores"}:
        trial.set_user_attr(name, twin.user_attrs[name])
    for name, excess in twin.constraints.items():
        trial.set_constraint(name, excess)
    state = outcome(twin)
    values = tuple(twin.values) if state == "complete" else None
    reason = f"the shape of trial {twin.number} ({state or 'running'})"
    return Verdict("duplicate", reason, values)
