"""Which choices decide: Optuna's parameter importances over a search's trials.

PED-ANOVA (Watanabe et al. 2023, arXiv:2304.10255): how differently a choice is distributed among the best tenth of the
trials than among all. It says what sets the best apart, not how a shape's score comes about.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from compress.records.run_report import finite
from compress.records.search_report import Importance, Objective, SearchReport, TrialRecord

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

LEAST_TRIALS = 20
"""Of fewer, the best tenth is one trial."""


def importances(found: SearchReport) -> tuple[Importance, ...]:
    """The importances for each objective, the greatest first; none for one that too few trials have a value of.

    Scores are those of the first stage that all trials went through, so that trained shapes stand beside the others as
    they stood before. An objective in which all are equal has none either.
    """
    complete = [point for point in found.points if point.state == "complete"]
    told = []
    for objective in found.objectives:
        values = {point.number: _value(found, point, objective) for point in complete}
        known = [point for point in complete if values[point.number] is not None]
        if len(known) >= LEAST_TRIALS and len({values[point.number] for point in known}) > 1:
            shares = _shares(known, [values[point.number] or 0.0 for point in known], objective == "score")
            told.append(Importance(objective, "PED-ANOVA", len(known), shares))
    return tuple(told)


def _value(found: SearchReport, point: TrialRecord, objective: Objective) -> float | None:
    """The value before any training on top and before any measurement: what all trials are compared by."""
    if objective == "score":
        return point.first
    if objective == "latency":
        return finite(point.predicted_ms) if point.predicted_ms is not None else found.ms(point)
    return found.value(point, objective)


def _shares(points: Sequence[TrialRecord], values: Sequence[float], maximise: bool) -> dict[str, float]:
    import optuna

    known: dict[str, list[int | float | str]] = {}
    for point in points:
        for name, value in point.choice.items():
            known.setdefault(name, []).append(value)
    spaces = {name: _distribution(found) for name, found in known.items()}
    trials = [
        optuna.trial.create_trial(
            params={name: _told(point.choice[name], spaces[name]) for name in point.choice},
            distributions={name: spaces[name] for name in point.choice},
            value=value,
        )
        for point, value in zip(points, values, strict=True)
    ]
    with _quiet():
        study = optuna.create_study(direction="maximize" if maximise else "minimize")
        study.add_trials(trials)
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        shares: Mapping[str, float] = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {name: float(share) for name, share in shares.items()}


def _distribution(values: Sequence[int | float | str]) -> "BaseDistribution":
    """The range of the numbers seen; of words, which they are."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    numbers = [value for value in values if not isinstance(value, str | bool)]
    if len(numbers) < len(values):
        return CategoricalDistribution(sorted({str(value) for value in values}))
    if all(isinstance(value, int) for value in numbers):
        return IntDistribution(int(min(numbers)), int(max(numbers)))
    return FloatDistribution(min(numbers), max(numbers))


def _told(value: int | float | str, space: "BaseDistribution") -> int | float | str:
    from optuna.distributions import CategoricalDistribution

    return str(value) if isinstance(space, CategoricalDistribution) else value


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Optuna's word about the study in memory, which is none of the user's."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
