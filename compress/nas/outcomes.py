"""What a study's trials say of themselves, read back: outcomes, the front, and the points of a page.

Attributes of a trial, beside its parameters and values (optuna-dashboard shows them all):

    owner, beat        who runs it, and when it last showed that it lives (pulse.py)
    choice, key        the shape asked for, and its hash
    latency            {"ms", "error_ms"}: predicted
    facts              parameters, flops_per_token, file_mb, ...
    scores             of each rung it reached; the last rung's is the score
    state, reason      as found.TrialRecord's
    twin               the trial of the same shape whose outcome it took over
    again, deaths      the trial of which it is another attempt, and how many workers died of it
    seconds            what it took
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from rich.table import Table

from compress.records.search_report import Stage, State, TrialRecord

_KEPT: Mapping[TrialState, tuple[State, ...]] = {
    TrialState.COMPLETE: ("complete", "duplicate"),
    TrialState.PRUNED: ("pruned", "too slow", "duplicate"),
    TrialState.FAIL: ("failed", "duplicate"),
}


def outcome(trial: FrozenTrial) -> State | None:
    """What became of it; None while it waits or runs, and when its worker was gone before it was judged."""
    state: State | None = trial.user_attrs.get("state")
    return state if state in _KEPT.get(trial.state, ()) else None


def counted(trials: Sequence[FrozenTrial]) -> int:
    """The trials whose shape was scored, or could not be: what a search spends its time on."""
    return sum(outcome(trial) in {"complete", "pruned", "failed"} for trial in trials)


def fits(trial: FrozenTrial) -> bool:
    """Whether it keeps all limits of the study."""
    return all(excess <= 0 for excess in trial.constraints.values())


def front(study: optuna.Study) -> list[FrozenTrial]:
    """The completed trials within the limits that no other equals or beats in all objectives, by the first cost."""
    signs = [-1.0 if direction == StudyDirection.MAXIMIZE else 1.0 for direction in study.directions]
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    placed = [
        (tuple(sign * one for sign, one in zip(signs, trial.values, strict=True)), trial)
        for trial in trials
        if outcome(trial) == "complete" and fits(trial)
    ]
    kept: list[tuple[tuple[float, ...], FrozenTrial]] = []
    for values, trial in sorted(placed, key=lambda one: (one[0], one[1].number)):
        # In this order nothing is beaten by what comes after it.
        if not any(all(a <= b for a, b in zip(other, values, strict=True)) for other, _ in kept):
            kept.append((values, trial))
    objectives = recorded(study)["objectives"]
    return [trial for _, trial in sorted(kept, key=lambda one: costs(one[1].user_attrs, objectives))]


def points(study: optuna.Study, stage: Stage = "subnet") -> tuple[TrialRecord, ...]:
    """Every trial that is over, with its last score as that of `stage`. Times count from the study's first trial."""
    trials = study.get_trials(deepcopy=False)
    begins = [trial.datetime_start for trial in trials if trial.datetime_start]
    return tuple(_point(trial, stage, min(begins)) for trial in trials if trial.state.is_finished())


def front_table(study: optuna.Study) -> Table:
    """The front as it stands, for the terminal."""
    table = Table("trial", *recorded(study)["objectives"], "choice", box=None, pad_edge=False)
    for trial in front(study):
        table.add_row(str(trial.number), *(f"{value:.4g}" for value in trial.values), shape_of(trial.user_attrs))
    return table


def shape_of(attributes: Mapping[str, Any]) -> str:
    """The choice of a trial, in words."""
    return ", ".join(f"{name} {value}" for name, value in attributes.get("choice", {}).items())


def recorded(study: optuna.Study) -> dict[str, Any]:
    """What the study is of, as identity.record wrote it."""
    kept: dict[str, Any] = study.user_attrs["identity"]
    return kept


def costs(attributes: Mapping[str, Any], objectives: Sequence[str]) -> tuple[float, ...]:
    """The values of the objectives other than the score, in their order."""
    return tuple(cost(attributes, name) for name in objectives if name != "score")


def cost(attributes: Mapping[str, Any], objective: str) -> float:
    """The value of an objective other than the score; not a number if it is not known."""
    if objective == "latency":
        return float(attributes.get("latency", {}).get("ms", math.nan))
    return float(attributes.get("facts", {}).get(objective, math.nan))


def _point(trial: FrozenTrial, stage: Stage, begin: Any) -> TrialRecord:
    attributes = trial.user_attrs
    latency, facts, scores = (attributes.get(name, {}) for name in ("latency", "facts", "scores"))
    state = outcome(trial)
    return TrialRecord(
        number=trial.number,
        choice=attributes.get("choice", {}),
        state=state or "failed",
        scores={stage: scores[-1]} if scores else {},
        parameters=_whole(facts.get("parameters")),
        body_parameters=_whole(facts.get("body_parameters")),
        flops_per_token=facts.get("flops_per_token"),
        file_mb=facts.get("file_mb"),
        predicted_ms=latency.get("ms"),
        predicted_error_ms=latency.get("error_ms"),
        reason=attributes.get("reason", "") if state else "its worker was stopped before it was judged",
        started=(trial.datetime_start - begin).total_seconds() if trial.datetime_start else None,
        seconds=attributes.get("seconds"),
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
