"""Build the report of a search, search.json and search.html, from its folder and its
study."""

import datetime
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from rich.console import Console

from compress.benchmark.local import machine
from compress.config.stages import Stage
from compress.console import plain_printer
from compress.exporters.artifact import Bundle
from compress.io import atomic_file
from compress.nas.context import SearchContext, load_student_state
from compress.nas.storage import quiet
from compress.nas.supernet import BACKWARD, load_ladder
from compress.nas.trial import outcome
from compress.provenance import command_line, timestamp, versions
from compress.records.run_report import finite
from compress.records.search_report import (
    SEARCH_RECORD,
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

PAGE = "search.html"
LIBRARIES = (
    "compress",
    "optuna",
    "torch",
    "transformers",
    "datasets",
    "onnxruntime",
    "onnx",
    "numpy",
)


def build_report(
    context: SearchContext,
    study: optuna.Study,
    *,
    teacher_ms: float | None = None,
    winner: int | None = None,
    anchors: Sequence[Anchor] = (),
    notes: Sequence[str] = (),
) -> SearchReport:
    """Build the report of the search as it stands. teacher_ms: from the latest race;
    default: the measuring phase."""
    search = context.search
    costs = context.costs
    task = context.training.data.task
    points = tuple(add_results(context.run.path, point) for point in read_trials(study))
    teacher_file = costs.latencies.teacher(search.precision)
    report = SearchReport(
        title=f"{search.space.name}: students of {context.task_teacher.name} on "
        f"{context.training.data.name}",
        study=str(context.run.path),
        teacher=context.task_teacher.name,
        data=context.training.data.name,
        metric=task.metric,
        teacher_score=context.teacher_check.scores[task.metric],
        device=search.device,
        setting=str(search.setting),
        budgets=costs.limits(),
        objectives=tuple(study.user_attrs["identity"]["objectives"]),
        points=points,
        command=command_line(),
        date=timestamp(),
        winner=winner,
        teacher_ms=teacher_ms or (teacher_file.ms if teacher_file else None),
        teacher_parameters=costs.teacher().parameters,
        teacher_mb=teacher_file.file_mb if teacher_file else None,
        prediction=costs.latencies.models[search.precision].record(),
        costs=context.time_budget.costs,
        ladder=(*load_ladder(context.run), *_stage_rungs(context, points)),
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
    return replace(
        report, front=report.compute_front(), importances=compute_importances(report)
    )


def read_trials(
    study: optuna.Study, stage: ScoreStage = "subnet"
) -> tuple[TrialRecord, ...]:
    """Read every finished trial, with its last score as that of `stage`. Times count
    from the study's first trial."""
    trials = study.get_trials(deepcopy=False)
    begins = [trial.datetime_start for trial in trials if trial.datetime_start]
    began = min(begins, default=datetime.datetime.now())
    records = []
    for trial in trials:
        if not trial.state.is_finished():
            continue
        attributes = trial.user_attrs
        state = outcome(trial)
        latency = attributes.get("latency", {})
        facts = attributes.get("facts", {})
        scores = attributes.get("scores", {})
        started = None
        if trial.datetime_start:
            started = (trial.datetime_start - began).total_seconds()
        records.append(
            TrialRecord(
                number=trial.number,
                choice=attributes.get("choice", {}),
                state=state or "failed",
                scores={stage: scores[-1]} if scores else {},
                parameters=facts.get("parameters"),
                body_parameters=facts.get("body_parameters"),
                flops_per_token=facts.get("flops_per_token"),
                file_mb=facts.get("file_mb"),
                predicted_ms=latency.get("ms"),
                predicted_error_ms=latency.get("error_ms"),
                reason=attributes.get("reason", "")
                if state
                else "its worker was stopped before it was scored",
                started=started,
                seconds=attributes.get("seconds"),
            )
        )
    return tuple(records)


def write_report(report: SearchReport, folder: Path) -> None:
    """Write both files, each whole or not at all."""
    contents = {SEARCH_RECORD: report.to_json(), PAGE: render_search(report)}
    for name, content in contents.items():
        with atomic_file(folder / name) as partial:
            partial.write_text(content, encoding="utf-8")


def print_front(report: SearchReport, console: Console, *, wide: bool = False) -> None:
    """Print the front with the teacher and anchors, as `compress search show` does."""
    say = plain_printer(console)
    if report.front:
        print_table(console, front_table(report), wide=wide)
    else:
        say(unmet(report))
    say(f"{report.device}, {report.setting}")
    if report.points:
        best = report.best_within() or report.nearest() or report.points[0]
        before, after = show_command(report, best.number)
        say(
            "a trial as a bundle (--train distils it first): "
            f"{before}{best.number}{after}"
        )


def score_anchors(context: SearchContext) -> list[Anchor]:
    """List the teacher's file of the other precision and the anchors, scored on the
    same rows, with their times in the measuring race; its file of the search's
    precision is timed again with the finalists."""
    search = context.search
    anchors = list[Anchor]()
    scores = {"fp32": context.teacher_check.scores[context.evaluator.task.metric]}
    parameters = context.costs.teacher().parameters
    for name, timed in context.costs.latencies.others.items():
        who, _, precision = name.rpartition(" ")
        if who == "teacher" and precision != search.precision:
            shown = f"{context.task_teacher.name} {precision}"
            score = scores.get(precision)
            anchors.append(Anchor(shown, score, timed.ms, parameters, timed.file_mb))
    for path in search.anchors:
        bundle = Bundle.load(path)
        timed = context.costs.latencies.others[f"{path} {search.precision}"]
        # with the bundle's own tokenizer
        evaluator = bundle.evaluator(context.training.data.validation)
        logits = bundle.logits(evaluator.rows, precision=search.precision)
        score = float(evaluator.scores(logits)[bundle.task.metric])
        parameters = bundle.manifest.parameters
        shown = Path(path).name
        anchors.append(Anchor(shown, score, timed.ms, parameters, timed.file_mb))
    return anchors


def add_results(study: Path, point: TrialRecord) -> TrialRecord:
    """Add the results of later phases of the search to a point."""
    state = load_student_state(study, point.number)
    return replace(
        point,
        scores={**point.scores, **state.scores},
        measured=state.measured or None,
        bundle=state.bundle,
        file_mb=state.file_mb or point.file_mb,
    )


def _stage_rungs(context: SearchContext, points: Sequence[TrialRecord]) -> list[Rung]:
    """List students' scores after a stage of their own, with the cost of that stage."""
    rungs = []
    stages: dict[ScoreStage, Stage] = {
        "short": context.search.space.short,
        "final": context.search.space.final[-1],
    }
    for point in points:
        size = point.body_parameters
        for name, stage in stages.items():
            score = point.scores.get(name)
            if score is None or size is None:
                continue
            run = context.student_run(point.number)
            spent = load_trained(run, stage.name, context.training.console)
            if spent is None:
                continue
            tokens = context.mean_tokens * spent.examples
            flops = BACKWARD * (point.flops_per_token or 0.0) * tokens
            rungs.append(Rung(name, size, spent.examples, flops, score))
    return rungs


LEAST_TRIALS = 20
"""The least number of trials whose best tenth is more than one trial."""


def compute_importances(report: SearchReport) -> tuple[ChoiceImportance, ...]:
    """Compute the importance of each choice for each objective, the greatest first.

    PED-ANOVA (Watanabe et al. 2023, arXiv:2304.10255): how differently a choice is
    distributed among the best tenth of the trials than among all. It shows what sets
    the best apart, not how a shape's score comes about.

    Scores are those of the first stage, which all trials went through. An objective
    with too few values, or with equal ones, is left out.
    """
    importances = []
    for objective in report.objectives:
        values = {
            point.number: value
            for point in report.points
            if point.state == "complete"
            and (value := _value_at_first(report, point, objective)) is not None
        }
        if len(values) < LEAST_TRIALS or len(set(values.values())) == 1:
            continue
        points = [point for point in report.points if point.number in values]
        spaces = {
            name: _distribution(
                [point.choice[name] for point in points if name in point.choice]
            )
            for name in dict.fromkeys(name for point in points for name in point.choice)
        }
        words = {
            name
            for name, each in spaces.items()
            if isinstance(each, CategoricalDistribution)
        }
        trials = [
            optuna.trial.create_trial(
                params={
                    name: str(choice) if name in words else choice
                    for name, choice in point.choice.items()
                },
                distributions={name: spaces[name] for name in point.choice},
                value=values[point.number],
            )
            for point in points
        ]
        with quiet():
            study = optuna.create_study(
                direction="maximize" if objective == "score" else "minimize"
            )
            study.add_trials(trials)
            evaluator = optuna.importance.PedAnovaImportanceEvaluator()
            shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
        importances.append(
            ChoiceImportance(objective, "PED-ANOVA", len(points), shares)
        )
    return tuple(importances)


def _value_at_first(
    report: SearchReport, point: TrialRecord, objective: ObjectiveName
) -> float | None:
    """Return the value before further training and measurements, by which all trials
    can be compared."""
    if objective == "score":
        return point.first
    if objective == "latency":
        return (
            finite(point.predicted_ms)
            if point.predicted_ms is not None
            else report.ms(point)
        )
    return report.value(point, objective)


def _distribution(values: Sequence[int | float | str]) -> BaseDistribution:
    """Return the range of the numbers that occur, or the choice among words."""
    numbers = [value for value in values if not isinstance(value, str | bool)]
    if len(numbers) < len(values):
        return CategoricalDistribution(sorted({str(value) for value in values}))
    if all(isinstance(value, int) for value in numbers):
        return IntDistribution(int(min(numbers)), int(max(numbers)))
    return FloatDistribution(min(numbers), max(numbers))
