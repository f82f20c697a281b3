"""search.json and search.html: what a search has found so far, put together from its folder and its study."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial
from rich.console import Console

from compress.benchmark.local import machine
from compress.errors import SearchError
from compress.exporters.artifact import Bundle
from compress.io import atomic_file
from compress.nas.context import SearchContext, load_student_state
from compress.nas.storage import quiet
from compress.nas.supernet import BACKWARD, load_ladder
from compress.nas.trial import outcome
from compress.provenance import command_line, versions
from compress.records.run_report import finite
from compress.records.search_report import (
    Anchor,
    ChoiceImportance,
    ObjectiveName,
    Rung,
    ScoreStage,
    SearchReport,
    TrialRecord,
)
from compress.reporting.html import render_search
from compress.reporting.remarks import show_command, unmet
from compress.reporting.tables import front_table
from compress.reporting.terminal import print_table
from compress.training.stage import load_trained

RECORD, PAGE = "search.json", "search.html"
LIBRARIES = ("compress", "optuna", "torch", "transformers", "datasets", "onnxruntime", "onnx", "numpy")


def build_report(
    context: SearchContext, study: optuna.Study, *, teacher_ms: float | None = None, winner: int | None = None,
    anchors: Sequence[Anchor] = (), notes: Sequence[str] = (),
) -> SearchReport:  # fmt: skip
    """Collect all that is known now. teacher_ms: of the latest race; left out, that of the measuring phase."""
    search, costs, task = context.search, context.costs, context.training.data.task
    known = tuple(add_results(context.run.path, point) for point in read_trials(study))
    beside = costs.latencies.teacher(search.precision)
    weights = costs.teacher()
    now = SearchReport(
        title=f"{search.space.name}: students of {context.task_teacher.name} on {context.training.data.name}",
        study=str(context.run.path),
        teacher=context.task_teacher.name,
        data=context.training.data.name,
        metric=task.metric,
        teacher_score=context.teacher_check.scores[task.metric],
        device=search.device,
        setting=str(search.setting),
        budgets=costs.limits(),
        objectives=tuple(study.user_attrs["identity"]["objectives"]),
        points=known,
        command=command_line(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        winner=winner,
        teacher_ms=teacher_ms or (beside.ms if beside else None),
        teacher_parameters=weights.parameters,
        teacher_mb=beside.file_mb if beside else None,
        prediction=costs.latencies.models[search.precision].record(),
        costs=context.time_budget.costs,
        ladder=(*load_ladder(context.run), *_stage_rungs(context, known)),
        anchors=tuple(anchors),
        split="validation",
        split_rows=len(context.evaluator),
        train_rows=len(context.training.data.train),
        sampler=str(study.user_attrs.get("sampler", "")),
        seed=search.seed,
        versions=versions(LIBRARIES),
        machine=machine(),
        notes=(*context.teacher_check.notes, *costs.shapes.dropped, *notes),
    )
    now = replace(now, front=now.compute_front())
    return replace(now, importances=compute_importances(now))


def read_trials(study: optuna.Study, stage: ScoreStage = "subnet") -> tuple[TrialRecord, ...]:
    """Read every finished trial, with its last score as that of `stage`. Times count from the study's first trial."""
    trials = study.get_trials(deepcopy=False)
    begin = min((trial.datetime_start for trial in trials if trial.datetime_start), default=None)
    return tuple(_read_trial(trial, stage, begin) for trial in trials if trial.state.is_finished())


def _read_trial(trial: FrozenTrial, stage: ScoreStage, begin: datetime.datetime | None) -> TrialRecord:
    attributes, state = trial.user_attrs, outcome(trial)
    latency, facts, scores = (attributes.get(name, {}) for name in ("latency", "facts", "scores"))
    started = trial.datetime_start - begin if trial.datetime_start and begin else None
    return TrialRecord(
        number=trial.number,
        choice=attributes.get("choice", {}),
        state=state or "failed",
        scores={stage: scores[-1]} if scores else {},
        parameters=int(facts["parameters"]) if "parameters" in facts else None,
        body_parameters=int(facts["body_parameters"]) if "body_parameters" in facts else None,
        flops_per_token=facts.get("flops_per_token"),
        file_mb=facts.get("file_mb"),
        predicted_ms=latency.get("ms"),
        predicted_error_ms=latency.get("error_ms"),
        reason=attributes.get("reason", "") if state else "its worker was stopped before it was judged",
        started=started.total_seconds() if started is not None else None,
        seconds=attributes.get("seconds"),
    )


def write_report(record: SearchReport, folder: Path) -> None:
    """Write both files, each whole or not at all."""
    for name, content in ((RECORD, record.to_json()), (PAGE, render_search(record))):
        with atomic_file(folder / name) as partial:
            partial.write_text(content, encoding="utf-8")


def load_report(study: Path) -> SearchReport:
    """Load what the search in this folder has found. Raises SearchError where there is none."""
    if not (study / RECORD).is_file():
        raise SearchError(f"{study}: has no {RECORD} yet; expected the folder of a `compress search` with trials")
    return SearchReport.from_json(study / RECORD)


def print_front(found: SearchReport, console: Console, *, wide: bool = False) -> None:
    """Print the front and what it is held against, as `compress search show` does."""
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    if found.front:
        print_table(console, front_table(found), wide=wide)
    else:
        say(unmet(found))
    say(f"{found.device}, {found.setting}")
    if found.points:
        best = found.best_within() or found.nearest() or found.points[0]
        before, after = show_command(found, best.number)
        say(f"a trial as a bundle (--train distils it first): {before}{best.number}{after}")


def score_anchors(context: SearchContext) -> list[Anchor]:
    """List the teacher's own files and the anchors, scored on the same rows, with their times in the measuring race."""
    search, score = context.search, context.teacher_check.scores[context.evaluator.task.metric]
    beside = context.costs.latencies.others
    weights = context.costs.teacher().parameters
    known = []
    for name, one in beside.items():
        who, _, precision = name.rpartition(" ")
        if who == "teacher":
            own = score if precision == "fp32" else None
            known.append(Anchor(f"{context.task_teacher.name} {precision}", own, one.ms, weights, one.file_mb))
    for anchor in search.anchors:
        bundle, one = Bundle.load(Path(anchor)), beside[f"{anchor} {search.precision}"]
        evaluator = bundle.evaluator(context.training.data.validation)  # as its own tokenizer reads the rows
        logits = bundle.logits(evaluator.rows, precision=search.precision)
        value = float(evaluator.scores(logits)[bundle.task.metric])
        known.append(Anchor(Path(anchor).name, value, one.ms, bundle.manifest.parameters, one.file_mb))
    return known


def add_results(study: Path, point: TrialRecord) -> TrialRecord:
    """Add to the point what later phases of the search in this folder found of it."""
    more = load_student_state(study, point.number)
    return replace(
        point,
        scores={**point.scores, **more.scores},
        measured=more.measured or None,
        bundle=more.bundle,
        file_mb=more.file_mb or point.file_mb,
    )


def _stage_rungs(context: SearchContext, known: Sequence[TrialRecord]) -> list[Rung]:
    """List what students scored after a stage of their own, with what that stage cost."""
    rungs = []
    stages = {"short": context.search.space.short, "final": context.search.space.final[-1]}
    for point in known:
        for which, stage in stages.items():
            score = point.scores.get(which)  # type: ignore[call-overload]
            if score is None or point.body_parameters is None:
                continue
            spent = load_trained(context.student_run(point.number), stage.name, context.training.console)
            if spent is None:
                continue
            flops = BACKWARD * (point.flops_per_token or 0.0) * context.mean_tokens * spent.examples
            rungs.append(Rung(which, point.body_parameters, spent.examples, flops, score))
    return rungs


LEAST_TRIALS = 20
"""The least number of trials of which the best tenth is more than one."""


def compute_importances(found: SearchReport) -> tuple[ChoiceImportance, ...]:
    """Compute which choices decide each objective, the greatest first; none where too few trials have a value of it.

    PED-ANOVA (Watanabe et al. 2023, arXiv:2304.10255): how differently a choice is distributed among the best tenth of
    the trials than among all. It says what sets the best apart, not how a shape's score comes about.

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
            told.append(ChoiceImportance(objective, "PED-ANOVA", len(known), shares))
    return tuple(told)


def _value(found: SearchReport, point: TrialRecord, objective: ObjectiveName) -> float | None:
    """Return the value before any training on top and any measurement: what all trials are compared by."""
    if objective == "score":
        return point.first
    if objective == "latency":
        return finite(point.predicted_ms) if point.predicted_ms is not None else found.ms(point)
    return found.value(point, objective)


def _shares(points: Sequence[TrialRecord], values: Sequence[float], maximise: bool) -> dict[str, float]:
    known: dict[str, list[int | float | str]] = {}
    for point in points:
        for name, value in point.choice.items():
            known.setdefault(name, []).append(value)
    spaces = {name: _distribution(found) for name, found in known.items()}
    trials = [
        optuna.trial.create_trial(
            params={
                name: str(choice) if isinstance(spaces[name], CategoricalDistribution) else choice
                for name, choice in point.choice.items()
            },
            distributions={name: spaces[name] for name in point.choice},
            value=value,
        )
        for point, value in zip(points, values, strict=True)
    ]
    with quiet():
        study = optuna.create_study(direction="maximize" if maximise else "minimize")
        study.add_trials(trials)
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        shares: Mapping[str, float] = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {name: float(share) for name, share in shares.items()}


def _distribution(values: Sequence[int | float | str]) -> BaseDistribution:
    """Return the range of the numbers that occur; of words, the choice among them."""
    numbers = [value for value in values if not isinstance(value, str | bool)]
    if len(numbers) < len(values):
        return CategoricalDistribution(sorted({str(value) for value in values}))
    if all(isinstance(value, int) for value in numbers):
        return IntDistribution(int(min(numbers)), int(max(numbers)))
    return FloatDistribution(min(numbers), max(numbers))
