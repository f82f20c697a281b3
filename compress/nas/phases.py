"""The phases of a search."""

import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from compress.benchmark.device import Device
from compress.config.options import StudyOptions
from compress.config.stages import Stage, StudentSpec
from compress.console import plain_printer
from compress.errors import SearchError
from compress.evaluation.evaluator import Evaluator
from compress.exporters.artifact import Bundle
from compress.exporters.onnx import makes_segments
from compress.jobs.job import Job
from compress.jobs.phase import Estimated, Phase, estimate_phases, run_phases
from compress.jobs.shipping import Ship
from compress.jobs.stages import StageModels
from compress.jobs.train import RunStages
from compress.jobs.trials import ROWS, SCORED
from compress.latency.measure import MORE, SWEEPS, choose_spread, exported
from compress.latency.model import LatencyTable
from compress.models.checkpoints import save_tokenizer
from compress.models.loader import load_result
from compress.nas import costs as latencies
from compress.nas import record
from compress.nas.config import Space, describe_choice
from compress.nas.context import (
    ScratchEvaluator,
    SearchContext,
    StudentEvaluator,
    SupernetEvaluator,
)
from compress.nas.costs import LATENCIES, SHAPES_DRAWN, CostModel
from compress.nas.finalists import (
    choose_winner,
    distill_briefly,
    distill_winner,
    find_checkpoint,
    ship_student,
    shortlist,
    time_finalists,
)
from compress.nas.preparation import STUDY, SearchJob, parts
from compress.nas.space import ShapeChoice
from compress.nas.study import close_study, open_study, run_trials
from compress.nas.supernet import (
    Ladder,
    Supernet,
    draw_from,
    put_in_order,
    train_supernet,
    with_looks,
)
from compress.nas.worker import write_inputs
from compress.records.forecast import PhaseEstimate, time_call
from compress.records.search_report import TrialRecord
from compress.teachers.checkpoint import CheckTeacher, FineTune
from compress.training.run import Run
from compress.training.schedule import TimeLimit

if TYPE_CHECKING:
    import optuna

DEFAULT_TRIALS = {"supernet": 200, "plain": 24}
"""Number of shapes to score, if neither a number nor a time limit is given."""
TEACHER_SHARE = 0.3
"""The largest share of a search's time for fine-tuning its teacher."""
TIMED = 0.25
"""Position of the likely time to measure files between the cheapest shape (0) and the
most expensive one (1), from docs/LOG.md."""


@dataclass(frozen=True)
class PrepareTeacher(Phase[SearchJob]):
    """Fine-tune the teacher if it needs that, and check it."""

    strict: bool

    @property
    def phases(self) -> list[Phase[Job]]:
        return [FineTune(), CheckTeacher(self.strict)]

    def run(self, job: SearchJob) -> SearchJob:
        with job.time_budget.part("preparation"):
            context = job.teacher.models.context
            limited = replace(context, time_limit=self._limit(job))
            teacher = job.teacher.with_context(limited)
            teacher = run_phases(self.phases, teacher)
            return replace(job, teacher=teacher.with_context(context))

    def _limit(self, job: SearchJob) -> TimeLimit | None:
        """Return the time that fine-tuning may take, or None if the search has no time
        limit."""
        total = job.time_budget.total
        if total is None:
            return None
        began = time.monotonic()
        names = (job.teacher.models.recipe.teacher.name,)
        return TimeLimit(began + TEACHER_SHARE * total, names, total / 60, began)

    def estimate(self, job: SearchJob) -> Estimated[SearchJob]:
        teacher, found = estimate_phases(self.phases, job.teacher)
        return replace(job, teacher=teacher), found


class MeasureShapes(Phase[SearchJob]):
    """Measure the latencies of shapes, or load those of an earlier session. Raises
    SearchError if no shape is within the budget."""

    def run(self, job: SearchJob) -> SearchJob:
        search = job.search
        shapes = job.shapes
        models = job.teacher.models
        training = models.context
        teacher = job.teacher.teacher
        task = training.data.task
        say = plain_printer(training.console)
        file = models.run.path / LATENCIES
        table = LatencyTable.load(file)
        if table is None:
            if job.device is None:
                raise SearchError(
                    f"{models.run.path}: has not measured its shapes yet; continue it "
                    "with --resume"
                )
            segments = makes_segments(teacher.tokenizer)
            with job.time_budget.part("measuring"):
                table = latencies.measure(
                    search,
                    shapes,
                    job.device,
                    kind=task.kind,
                    segments=segments,
                    say=say,
                )
                table.save(file)
        costs = CostModel(search, shapes, table, task.kind)
        evaluator = Evaluator.from_split(
            task, training.data.validation, teacher.tokenizer, search.max_length
        )
        assert job.teacher.check is not None, "the teacher is checked first"
        context = SearchContext(
            search,
            models.run,
            teacher,
            job.teacher.check,
            training,
            evaluator,
            costs,
            tuple(latencies.choose_within_budget(costs, SHAPES_DRAWN)),
            job.time_budget,
        )
        return replace(job, found=context)

    def estimate(self, job: SearchJob) -> Estimated[SearchJob]:
        assert job.device is not None, "it is open"
        segments = makes_segments(job.teacher.teacher.tokenizer)
        found, per_file, unreachable = _measure(
            job.unmeasured, job.drawn, job.device, segments
        )
        if job.done.latencies:
            found = PhaseEstimate("measuring", cached=True)
        return replace(job, per_file=per_file, unreachable=unreachable), [found]


class MakeEvaluator(Phase[SearchJob]):
    """Train the supernet, or load that of an earlier session; in plain spaces, fit the
    short training to the time."""

    def run(self, job: SearchJob) -> SearchJob:
        context = job.context.with_student_evaluator(
            make_student_evaluator(job.context)
        )
        if job.study is not None:
            write_inputs(job.study, context)
        return replace(job, found=context)

    def estimate(self, job: SearchJob) -> Estimated[SearchJob]:
        if job.search.space.mode != "supernet":
            return job, []
        found, net = _try_supernet(job)
        return replace(job, net=net), found


class ScoreTrials(Phase[SearchJob]):
    """Score shapes as the study draws them."""

    def run(self, job: SearchJob) -> SearchJob:
        """Run the trials; write the report and its page periodically, and at the
        end."""
        assert job.study is not None, "the study was opened"
        context = job.context
        trials = job.options.trials
        if trials is None and job.options.minutes is None:
            trials = DEFAULT_TRIALS[job.search.space.mode]
        printed_at = time.monotonic()
        seconds_between_prints = 30.0
        anchors = record.score_anchors(context)

        def watch(now: "optuna.Study") -> None:
            nonlocal printed_at
            if time.monotonic() - printed_at > seconds_between_prints:
                so_far = record.build_report(context, now, anchors=anchors)
                record.write_report(so_far, context.run.path)
                record.print_front(so_far, context.training.console)
                printed_at = time.monotonic()

        try:
            with context.time_budget.part("trials"):
                run_trials(
                    job.study,
                    context.student_evaluator,
                    trials=trials,
                    seconds=context.time_budget.left("trials"),
                    say=context.say,
                    watch=watch,
                )
        finally:  # also after an interruption, or if no shape fits
            report = record.build_report(context, job.study, anchors=anchors)
            record.write_report(report, context.run.path)
        return replace(job, report=report)

    def estimate(self, job: SearchJob) -> Estimated[SearchJob]:
        ends = job.drawn[0], job.drawn[-1]
        if job.net is not None:
            trial = _try_scoring(job.unmeasured, ends, job.net, job.teacher.models)
        else:
            trial = _try_students(ends, job)
        scored = job.done.scored
        return job, [estimate_trials(trial, job.options, job.search.space, scored)]


class DistillFinalists(Phase[SearchJob]):
    """Distil the finalists of a supernet briefly."""

    def run(self, job: SearchJob) -> SearchJob:
        assert job.report is not None, "trials come first"
        count = max(job.options.finalists, job.options.winners)
        points = tuple(shortlist(job.report, count))
        if job.search.space.mode == "supernet":
            with job.time_budget.part("short distillations"):
                distill_briefly(job.context, points)
        return replace(job, points=points)

    def estimate(self, job: SearchJob) -> Estimated[SearchJob]:
        space = job.search.space
        shapes = job.shapes
        models = job.teacher.models
        middle = job.drawn[len(job.drawn) // 2]
        with TemporaryDirectory() as folder:
            stages = list(space.final)
            spec = shapes.spec(middle)
            if job.net is not None:
                subnet = Supernet(job.net).extract(shapes.sizes(middle))
                subnet.save_pretrained(folder)
                save_tokenizer(Path(folder), models.context.tokenizer)
                spec = StudentSpec.model_validate({"init": folder})
                stages = [space.short, *stages]
            recipe = space.recipe("finalist", stages, spec)
            tried, found = RunStages().estimate(job.teacher.with_recipe(recipe))
        job = replace(job, teacher=replace(tried, models=models))
        if job.net is None:
            return replace(job, stages=tuple(found)), []
        left = max(0, job.options.finalists - job.done.short)
        short = _repeat(found[0], left, "short distillations")
        return replace(job, stages=tuple(found[1:])), [short]


class TimeFinalists(Phase[SearchJob]):
    """Time the finalists in one race with the teacher."""

    def run(self, job: SearchJob) -> SearchJob:
        assert job.device is not None, "it is open"
        with job.time_budget.part("timing finalists"):
            teacher_ms = time_finalists(job.context, job.points, job.device)
        return update_report(replace(job, teacher_ms=teacher_ms))

    def estimate(self, job: SearchJob) -> Estimated[SearchJob]:
        least, most = (2 * (1 + job.options.finalists) * each for each in job.per_file)
        return job, [
            PhaseEstimate("timing finalists", seconds=(least, most), likely=TIMED)
        ]


class ShipWinners(Phase[SearchJob]):
    """Distil, ship and measure the winners."""

    def run(self, job: SearchJob) -> SearchJob:
        context = job.context
        points = job.points
        notes = list[str]()
        for at in range(min(job.options.winners, len(points))):
            assert job.report is not None, "trials come first"
            best = job.report.point(
                context.decide_winner(at, partial(choose_winner, job.report, points))
            )
            if over := job.report.exceeded(best):
                notes.append(
                    f"No finalist is within the measured budget: trial {best.number} "
                    f"exceeds {', '.join(over)}."
                )
                context.say(notes[-1])
            with context.time_budget.part("final"):
                distill_winner(context, best, share=1 / (job.options.winners - at))
            job = update_report(job, notes=notes)
        job = TimeFinalists().run(job)
        job = update_report(job, notes=notes, winner=next(iter(context.winners), None))
        assert job.report is not None, "it was updated"
        record.print_front(job.report, context.training.console)
        context.run.finish()
        context.say(f"page: {context.run.path / record.PAGE}")
        return job

    def estimate(self, job: SearchJob) -> Estimated[SearchJob]:
        tried = job.teacher
        left = max(0, job.options.winners - job.done.shipped)
        space = job.search.space
        recipe = space.recipe("winner", space.final)
        _, shipping = Ship(job.search.max_drop).estimate(tried.with_recipe(recipe))
        finals = [_repeat(each, left, f"final: {each.name}") for each in job.stages]
        shipped = [
            replace(_repeat(each, left, each.name), cached=False) for each in shipping
        ]
        return job, [*finals, *shipped]


def list_phases(*, strict: bool) -> tuple[list[Phase[SearchJob]], ...]:
    """List the phases of a search before its study is opened, and after."""
    return [PrepareTeacher(strict), MeasureShapes()], [
        MakeEvaluator(),
        ScoreTrials(),
        DistillFinalists(),
        TimeFinalists(),
        ShipWinners(),
    ]


def update_report(job: SearchJob, **results: Any) -> SearchJob:
    """Build the report of the search so far, and write it with its page."""
    assert job.report is not None and job.study is not None, "trials come first"
    report = record.build_report(
        job.context,
        job.study,
        anchors=job.report.anchors,
        teacher_ms=job.teacher_ms,
        **results,
    )
    record.write_report(report, job.context.run.path)
    return replace(job, report=report)


def make_student_evaluator(context: SearchContext) -> StudentEvaluator:
    """Train the supernet, or load that of an earlier session; in plain spaces, fit the
    short training to the time."""
    among = context.among
    if context.search.space.mode == "supernet":
        with context.time_budget.part("supernet"):
            net = train_supernet(
                context.costs,
                among,
                task_teacher=context.task_teacher,
                training=context.training,
                run=context.run,
                time_budget=context.time_budget,
            )
        return SupernetEvaluator.from_model(
            context.costs, net, context.evaluator, context.training
        )
    largest = max(among, key=lambda choice: context.costs.cost(choice).flops_per_token)

    def train(stage: Stage, scratch: Run) -> None:
        recipe = context.search.space.recipe(
            "timing", [stage], context.costs.shapes.spec(largest)
        )
        models = StageModels.from_teacher(
            recipe, context.task_teacher, context.training, scratch
        )
        models.run_stages(recipe.stages)

    # this many students, at least, must fit into the time
    least_trials = 8
    with context.time_budget.part("trials"):
        short = context.search.space.short
        (stage,) = context.time_budget.fit(
            "trials", [short], context.training.data, train, share=1 / least_trials
        )
    return ScratchEvaluator(
        context.costs,
        context.task_teacher,
        context.training,
        context.evaluator,
        context.run.path / "trials",
        stage,
    )


@contextmanager
def begin_study(
    context: SearchContext, options: StudyOptions
) -> "Iterator[optuna.Study]":
    """Create or continue the study of this search; close it at the end."""
    folder = context.run.path
    study = open_study(
        options.storage or folder / STUDY,
        options.name or folder.resolve().name,
        context.search.identity(),
        objectives=context.search.objectives,
        limits={str(name): most for name, most in context.costs.limits().items()},
        sampler=options.sampler,
        seed=context.search.seed,
        say=context.say,
        owner=f"{platform.node()}:{folder.resolve()}",  # this process has locked it
    )
    try:
        yield study
    finally:
        close_study(study)


def ship_untrained(context: SearchContext, point: TrialRecord) -> Bundle:
    """Ship a student without further training."""
    space = context.search.space
    short = "short" in context.student_state(point.number).scores
    student = load_result(
        find_checkpoint(context, point), "task", context.training.kind
    )
    stages = [stage for stage in (space.supernet, space.short) if stage is not None]
    training = f"a short distillation, stage `{space.short.name}`"
    if space.mode == "supernet" and not short:
        stages = stages[:1]
        training = f"that of the supernet that contains it, stage `{stages[0].name}`"
    note = (
        f"Its only training was {training}; the search's final distillation was "
        "skipped."
    )
    return ship_student(context, point, student, stages, began=time.time(), note=note)


def estimate_trials(
    trial: tuple[float, float], study: StudyOptions, space: Space, scored: int
) -> PhaseEstimate:
    """Estimate the trials from the minimum and maximum seconds of one, or, if only the
    time is limited, from their share of it."""
    if study.trials is None and study.minutes is not None:
        share = 60 * study.minutes * parts(space)["trials"]
        return PhaseEstimate(
            "trials",
            seconds=(share, share),
            note=f"{share / trial[1]:,.0f} shapes or more",
        )
    left = max(0, (study.trials or DEFAULT_TRIALS[space.mode]) - scored)
    note = f"{left:,} shapes, {scored:,} are scored" if scored else f"{left:,} shapes"
    return PhaseEstimate(
        "trials", seconds=(left * trial[0], left * trial[1]), note=note
    )


def _measure(
    costs: CostModel, drawn: Sequence[ShapeChoice], device: Device, segments: bool
) -> tuple[PhaseEstimate, tuple[float, float], tuple[str, ...]]:
    """Export and race the first and the last of these shapes, and the teacher.

    Return the forecast for all shapes to measure, the minimum and maximum seconds per
    file, and the budgets that the first shape, which has the fewest operations,
    exceeds.
    """
    search = costs.search
    shapes = costs.shapes
    configs = {
        "smallest": shapes.config(drawn[0]),
        "largest": shapes.config(drawn[-1]),
        "teacher": shapes.teacher,
    }
    began = time.perf_counter()
    with exported(
        configs,
        search.setting,
        precision=search.precision,
        kind=costs.kind,
        segments=segments,
    ) as files:
        exporting = (time.perf_counter() - began) / len(files)
        times = device.race(
            files, [search.setting], rounds=search.rounds, runs=search.runs
        )
    racing = (time.perf_counter() - began) / len(files) - exporting
    per_file = (exporting + SWEEPS * racing, exporting + (SWEEPS + MORE) * racing)
    bare = {
        describe_choice({**each, "precision": ""}): shapes.config(each)
        for each in drawn
    }
    chosen = choose_spread(bare, search.shapes, search.setting, costs.kind)
    count = len(search.precisions) * (len(chosen) + 1) + 1 + len(search.anchors)
    least, most = (count * each for each in per_file)
    phase = PhaseEstimate(
        "measuring", seconds=(least, most), note=f"{count} files", likely=TIMED
    )
    fastest = {each.name: min(each.lows or (each.p50_ms,)) for each in times}
    budget = search.budget
    cheapest = [costs.cost(each) for each in drawn]
    limits = (
        ("--max-latency-ms", budget.max_latency_ms, fastest["smallest"]),
        ("--max-params", budget.max_params, min(each.parameters for each in cheapest)),
        ("--max-file-mb", budget.max_file_mb, min(each.file_mb for each in cheapest)),
    )
    exceeded = [
        f"{option} {limit:g}: the smallest shape of the space has {reached:,.4g}"
        for option, limit, reached in limits
        if limit is not None and reached > limit
    ]
    speedup = fastest["teacher"] / fastest["smallest"]
    if budget.speedup is not None and speedup < budget.speedup:
        exceeded.append(
            f"--speedup {budget.speedup:g}: the smallest shape of the space is "
            f"{speedup:.1f} times as fast as the teacher"
        )
    return phase, per_file, tuple(exceeded)


def _try_supernet(job: SearchJob) -> tuple[list[PhaseEstimate], PreTrainedModel]:
    """Try the training of the supernet; return its estimate, and the barely trained
    supernet."""
    space = job.search.space
    models = job.teacher.models
    trials = job.teacher.trials
    costs = job.unmeasured
    drawn = job.drawn
    context = models.context
    assert space.supernet is not None, "a supernet space has a supernet stage"
    if job.done.supernet is not None:
        net = load_result(job.done.supernet, space.supernet.head, context.kind)
        return [PhaseEstimate("supernet", cached=True)], net
    few = min(ROWS, space.rows)
    brief = replace(
        costs,
        search=costs.search.model_copy(
            update={"space": space.model_copy(update={"rows": few})}
        ),
    )
    stage = draw_from(space.supernet, drawn, costs)
    began = time.perf_counter()
    net, origin_D = put_in_order(
        brief, stage, job.teacher.teacher, context, models.run.seed
    )
    seconds = (time.perf_counter() - began) * space.rows / few
    stage = with_looks(stage, len(context.data.train))
    phase, net = trials.try_stage(
        stage,
        net,
        job.teacher.teacher,
        origin_D,
        Ladder.from_choices(costs, drawn).score_rungs,
    )
    ordering = PhaseEstimate(
        "importance", seconds=(seconds, seconds), note=f"{space.rows:,} rows"
    )
    return [ordering, replace(phase, name="supernet")], net


def _try_scoring(
    costs: CostModel,
    ends: Sequence[ShapeChoice],
    net: PreTrainedModel,
    models: StageModels,
) -> tuple[float, float]:
    """Score these subnets on few rows; return the mean seconds of the first rung, and
    of all rungs, for all rows."""
    context = models.context
    task = models.context.data.task
    rows = Evaluator.from_split(
        task, context.data.validation, context.tokenizer, costs.search.max_length
    )
    few = rows.subsample(SCORED)
    student_evaluator = SupernetEvaluator.from_model(costs, net, few, context)
    seconds = [
        [
            time_call(partial(student_evaluator.score, each, rung))
            for rung in range(student_evaluator.rungs)
        ]
        for each in ends
    ]
    scale = len(rows) / len(few)
    return scale * fmean(rungs[0] for rungs in seconds), scale * fmean(
        map(sum, seconds)
    )


def _try_students(ends: Sequence[ShapeChoice], job: SearchJob) -> tuple[float, float]:
    """Train these students for a few steps; return the seconds of the first student's
    first rung, and of all rungs of the last."""
    space = job.search.space
    seconds = list[float]()
    for at, choice in enumerate(ends):
        stage = space.short.model_copy(update={"name": f"{space.short.name}-{at}"})
        recipe = space.recipe("trial", [stage], job.shapes.spec(choice))
        _, (found,) = RunStages().estimate(job.teacher.with_recipe(recipe))
        seconds.append(found.seconds[1])
    rows = len(job.teacher.models.context.data.validation)
    scoring = rows * job.teacher.trials.seconds_per_scored_row
    rungs = space.rungs
    return rungs[0] * seconds[0] + scoring, seconds[-1] + len(rungs) * scoring


def _repeat(phase: PhaseEstimate, times: int, name: str) -> PhaseEstimate:
    """Return the forecast of a phase that runs several times."""
    return replace(
        phase,
        name=name,
        steps=(times * phase.steps[0], times * phase.steps[1]),
        seconds=(times * phase.seconds[0], times * phase.seconds[1]),
        disk_mb=times * phase.disk_mb,
        cached=not times,
    )
