"""One trial: a known shape gets the known values, one outside the limits is not scored, the others climb the rungs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import optuna
from optuna.trial import FrozenTrial, TrialState

from compress.errors import CompressError, SearchError
from compress.search.budget import SURE
from compress.search.found import State
from compress.search.judge import Choice, Judge, Space
from compress.search.reach import StorageError
from compress.search.rungs import Standing, cut
from compress.search.told import cost, costs, outcome, recorded


@dataclass(frozen=True)
class Verdict:
    """What becomes of a trial: its values, in the order of the objectives, if it has them; else why not."""

    state: State
    values: tuple[float, ...] | None = None
    reason: str = ""

    @property
    def told(self) -> TrialState:
        """As what Optuna is told of it."""
        if self.values is not None:
            return TrialState.COMPLETE
        return TrialState.FAIL if self.state == "failed" else TrialState.PRUNED


def judge_trial(
    study: optuna.Study, trial: optuna.Trial, space: Space, judge: Judge, limits: Mapping[str, float]
) -> Verdict:
    """The shape the trial stands for, judged; each thing known of it is written down as it comes to be known."""
    try:
        choice = space.suggest(trial)
        key = space.key(choice)
        trial.set_user_attr("choice", dict(choice))
        trial.set_user_attr("key", key)
        if twin := _twin(study, key, trial.number):
            return _as_twin(trial, twin)
        if latency := judge.latency(choice):
            trial.set_user_attr("latency", {"ms": float(latency.ms), "error_ms": float(latency.error_ms)})
        if outside := _outside(trial, limits, ("latency",)):
            return Verdict("too slow", None, outside)
        trial.set_user_attr("facts", {name: float(value) for name, value in judge.facts(choice).items()})
        if outside := _outside(trial, limits, [name for name in limits if name not in {"latency", "score"}]):
            return Verdict("too slow", None, outside)
        return _climbed(study, trial, judge, choice, limits)
    except StorageError:
        raise
    except CompressError as error:
        return Verdict("failed", None, str(error))


def _climbed(
    study: optuna.Study, trial: optuna.Trial, judge: Judge, choice: Choice, limits: Mapping[str, float]
) -> Verdict:
    """Up the rungs as long as it goes on."""
    objectives = recorded(study)["objectives"]
    paid = {name: cost(trial.user_attrs, name) for name in objectives if name != "score"}
    if unknown := [name for name, value in paid.items() if not math.isfinite(value)]:
        raise SearchError(f"its {' and '.join(unknown)} is not known, but an objective of the study")
    scores: list[float] = []
    for rung in range(judge.rungs):
        score = float(judge.score(choice, rung))
        if not math.isfinite(score):
            raise SearchError(f"its score at rung {rung} is {score}")
        scores.append(score)
        trial.set_user_attr("scores", scores)
        if rung < judge.rungs - 1:
            before = _standings(study, rung, trial.number, objectives)
            if why := cut(Standing(score, tuple(paid.values())), before):
                return Verdict("pruned", None, f"rung {rung}: {why}")
    if "score" in limits:
        trial.set_constraint("score", limits["score"] - scores[-1])
    return Verdict("complete", tuple({**paid, "score": scores[-1]}[name] for name in objectives))


def _outside(trial: optuna.Trial, limits: Mapping[str, float], names: Sequence[str]) -> str:
    """What the trial is over, in words. The sampler is told by how much, of the limit, it is over or under."""
    over = []
    for name in set(names) & set(limits):
        value, limit = cost(trial.user_attrs, name), limits[name]
        if not math.isfinite(value):
            raise SearchError(f"its {name} is not known, but limited to {limit:g}")
        error = SURE * trial.user_attrs["latency"]["error_ms"] if name == "latency" else 0.0
        trial.set_constraint(name, (value + error - limit) / limit)
        if value + error > limit:
            over.append(f"{name} {value:.4g}{f' + {error:.2g} ({SURE:g} errors)' if error else ''}, limit {limit:g}")
    return "; ".join(sorted(over))


def _standings(study: optuna.Study, rung: int, number: int, objectives: Sequence[str]) -> list[Standing]:
    """The others that have a score at that rung: of trials that run, were cut, or came to the top."""
    return [
        Standing(trial.user_attrs["scores"][rung], costs(trial.user_attrs, objectives))
        for trial in study.get_trials(deepcopy=False)
        if trial.number != number
        and (trial.state == TrialState.RUNNING or outcome(trial) in {"complete", "pruned"})
        and len(trial.user_attrs.get("scores", ())) > rung
    ]


def _twin(study: optuna.Study, key: str, number: int) -> FrozenTrial | None:
    """The trial of the same shape whose outcome is known, or that began before this one and runs."""
    for trial in study.get_trials(deepcopy=False):
        if trial.number == number or trial.user_attrs.get("key") != key or outcome(trial) == "duplicate":
            continue
        if outcome(trial) or (trial.state == TrialState.RUNNING and trial.number < number):
            return trial
    return None


def _as_twin(trial: optuna.Trial, twin: FrozenTrial) -> Verdict:
    """What is known of the twin, told of this trial too, so that the sampler learns from it."""
    trial.set_user_attr("twin", twin.number)
    for name in ("latency", "facts", "scores"):
        if name in twin.user_attrs:
            trial.set_user_attr(name, twin.user_attrs[name])
    for name, excess in twin.constraints.items():
        trial.set_constraint(name, excess)
    became = outcome(twin)
    values = tuple(twin.values) if became == "complete" else None
    return Verdict("duplicate", values, f"the shape of trial {twin.number} ({became or 'running'})")
