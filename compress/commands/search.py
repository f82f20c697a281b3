"""Search the best students of a teacher under a budget, then distil and ship them."""

import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, astuple, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from transformers import PreTrainedModel

from compress.arguments import (
    DataLike,
    NameLike,
    PathName,
    Share,
    TeacherLike,
    check_arguments,
    name_of,
)
from compress.benchmark.device import Device
from compress.benchmark.devices import open_chosen
from compress.commands import preflight
from compress.commands.checks import (
    check_kind,
    check_lengths,
    check_recipe,
    join_processes,
    measure_lengths,
)
from compress.commands.distill import StageModels, compare_texts, load_inputs
from compress.commands.ship import BUDGETED_LIMIT, ship
from compress.config import user_code
from compress.config.options import (
    DataOptions,
    MeasureOptions,
    RunOptions,
    StudyOptions,
)
from compress.config.recipe import Recipe
from compress.config.stages import AnyStage, Stage
from compress.console import print_note
from compress.data import load_task
from compress.data.objects import data_path, teacher_path
from compress.errors import RecipeError, SearchError
from compress.evaluation.evaluator import Evaluator
from compress.exporters.artifact import Bundle, check_place
from compress.exporters.manifest import kind_of_bundle
from compress.exporters.onnx import makes_segments
from compress.io import load_json
from compress.latency.model import LatencyTable
from compress.models import checkpoints
from compress.models import precision as precisions
from compress.models import teacher as teachers
from compress.models.loader import load_result
from compress.models.teacher import Teacher
from compress.nas import costs as latencies
from compress.nas import record
from compress.nas.config import NAME, Budget, SearchConfig, Space
from compress.nas.context import (
    PLAIN,
    SUPERNET,
    Parts,
    RunStages,
    ScratchEvaluator,
    SearchContext,
    StudentEvaluator,
    SupernetEvaluator,
    TimeBudget,
    load_student_state,
)
from compress.nas.costs import CostModel
from compress.nas.finalists import (
    choose_winner,
    copy_student,
    distill_briefly,
    distill_winner,
    find_checkpoint,
    ship_student,
    shortlist,
    time_finalists,
)
from compress.nas.space import Shapes
from compress.nas.storage import close_storage, open_storage
from compress.nas.study import close_study, make_sampler, open_study, run_trials
from compress.nas.supernet import DRAWN, train_supernet
from compress.nas.worker import join, write_inputs
from compress.provenance import command_line, redact
from compress.pruning.budget import device_messages
from compress.records.search_report import SearchReport, TrialRecord
from compress.slicing.plan import SlicePlan
from compress.training.context import TrainingContext
from compress.training.finetune import load_task_teacher
from compress.training.run import Run

if TYPE_CHECKING:
    import optuna


TRIALS = {"supernet": 200, "plain": 24}
"""Number of shapes to score, if neither a number nor a time limit is given."""
LEAST_TRIALS = 8
"""Minimum number of students that a time limit must allow, if each is trained by
itself."""
STUDY = "study.db"
"""The database of the study in the search's folder."""
PRINT_EVERY = 30.0
"""Seconds between two prints of the front while trials run."""


@check_arguments
def search(
    *,
    teacher: TeacherLike,
    data: DataLike,
    out: PathName,
    space: NameLike | Space = "width-depth",
    budget: Budget = Budget(),
    device: MeasureOptions = MeasureOptions(),
    study: StudyOptions = StudyOptions(),
    max_drop: Share = BUDGETED_LIMIT,
    columns: DataOptions = DataOptions(),
    options: RunOptions = RunOptions(),
    console: Console | None = None,
) -> SearchReport:
    """Find the best students of `teacher` on `data` under a budget; distil and ship the
    winners.

    teacher, data, columns, options    as for `compress.distill`
    space     name (recipes/spaces), path of a .yaml, or a Space
    budget    what a student may cost; latency is measured on `device`, with its file
              and setting
    study     how shapes are drawn and chosen, and where the study is stored
    max_drop  how much of the score, in its own unit, the shipped int8 file may lose
    out       the search's folder; `options.resume` continues an interrupted search, in
              any phase

    Raises a CompressError for anything wrong with these; results up to then are kept.
    """
    console = console or Console(quiet=True)
    config = make_config(
        teacher,
        data,
        out,
        space,
        budget,
        device=device,
        study=study,
        max_drop=max_drop,
        columns=columns,
        options=options,
    )
    run = Run.open(
        Path(out),
        config,
        _identity(config, study),
        resume=options.resume,
        name=NAME,
        track=options.track,
    )
    with (
        closing(run),
        open_chosen(device, say=device_messages(device.device, console)) as target,
    ):
        seconds = None if study.minutes is None else 60 * study.minutes
        context = load_context(
            config,
            run,
            TimeBudget(run.path, parts(config.space), seconds),
            target,
            strict=options.gate == "refuse",
            allow_pickle=options.allow_pickle,
            console=console,
        )
        with begin_study(context, study) as optuna_study:
            context = context.with_student_evaluator(make_student_evaluator(context))
            write_inputs(optuna_study, context)
            default = TRIALS[config.space.mode] if study.minutes is None else None
            report = run_search(
                context,
                optuna_study,
                trials=default if study.trials is None else study.trials,
            )
            return ship_winners(context, optuna_study, report, target, study)


def make_config(
    teacher: TeacherLike,
    data: DataLike,
    out: PathName,
    space: NameLike | Space,
    budget: Budget,
    *,
    device: MeasureOptions,
    study: StudyOptions,
    max_drop: float,
    columns: DataOptions,
    options: RunOptions,
) -> SearchConfig:
    """Check the arguments of a search, and return its settings. Raises a
    CompressError."""
    teacher, data = teacher_path(teacher), data_path(data)
    space = (
        space
        if isinstance(space, Space)
        else Space.load(name_of(space), options.overrides or ())
    )
    preflight.check(space, teacher=teacher, out=out, data=data, options=options)
    if any(stage.max_length == "auto" for stage in space.stages.values()):
        folder = checkpoints.resolve(teacher, allow_pickle=options.allow_pickle)
        found = replace(columns, kind=columns.kind or kind_of_bundle(folder))
        task_data = load_task(data, **asdict(found), seed=options.seed)
        base_teacher = teachers.load(
            teacher, folder, task_data.task, allow_pickle=options.allow_pickle
        )
        space = space.with_length(
            measure_lengths(task_data, base_teacher, options.seed).fitting
        )
    if join_processes().num_processes > 1:
        raise SearchError(
            "a search runs in one process; start more with `compress search --storage "
            "URL --worker`"
        )
    seq = min(128, space.final[-1].length) if device.seq is None else device.seq
    config = SearchConfig.parse(
        teacher=teacher,
        data=data,
        space=space,
        columns=columns,
        budget=budget,
        objectives=tuple(dict.fromkeys(["score", *(study.objective or ["latency"])])),
        device=device.device,
        threads=device.threads,
        batch=device.batch,
        seq=seq,
        precision=device.file,
        shapes=device.shapes,
        rounds=device.rounds,
        runs=device.runs,
        training=precisions.choose(options.precision),
        max_drop=max_drop,
        anchors=study.anchor or (),
        seed=options.seed,
    )
    _check_study(study)
    return config.with_code(options.allow_code)


def load_context(
    config: SearchConfig,
    run: Run,
    time_budget: TimeBudget,
    device: Device | None,
    *,
    strict: bool,
    allow_pickle: bool,
    console: Console,
) -> SearchContext:
    """Load teacher and data, and measure shapes, or load the latencies of an earlier
    session.

    device: None if shapes were measured before. Raises SearchError if no shape is
    within the budget.
    """
    with time_budget.part("preparation"):
        recipe = make_recipe(config.space)
        base_teacher, training = load_inputs(
            config.teacher,
            config.data,
            recipe,
            run,
            columns=config.columns,
            number_format=config.training,
            allow_pickle=allow_pickle,
            console=console,
        )
        training = compare_texts(base_teacher, training, config.max_length)
        shapes = Shapes.from_space(config.space, base_teacher.model.config)
        for line in shapes.dropped:
            print_note(console, line)
        check_stages(config.space, recipe, base_teacher, training, run)
        task_teacher, teacher_check = load_task_teacher(
            base_teacher, recipe, training, run, strict=strict
        )
    task = training.data.task
    table = LatencyTable.load(run.path / "latency", config.precisions)
    if table is None:
        if device is None:
            raise SearchError(
                f"{run.path}: has not measured its shapes yet; continue it with "
                "--resume"
            )
        with time_budget.part("measuring"):
            say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
            segments = makes_segments(task_teacher.tokenizer)
            table = latencies.measure(
                config, shapes, device, kind=task.kind, segments=segments, say=say
            )
            table.save(run.path / "latency")
    costs = CostModel(config, shapes, table, task.kind)
    evaluator = Evaluator.from_split(
        task, training.data.validation, task_teacher.tokenizer, config.max_length
    )
    among = tuple(latencies.choose_within_budget(costs, DRAWN))
    run_stages = stage_runner(base_teacher, task_teacher, training)
    return SearchContext(
        config,
        run,
        task_teacher,
        teacher_check,
        training,
        evaluator,
        costs,
        among,
        time_budget,
        run_stages,
        ship,
    )


def stage_runner(
    base_teacher: Teacher, task_teacher: Teacher, training: TrainingContext
) -> RunStages:
    """Return a function that runs stages of a recipe with these teachers, as `distill`
    does."""

    def run_stages(
        recipe: Recipe, run: Run, stages: Sequence[AnyStage], teacher_logits: Any = None
    ) -> PreTrainedModel:
        models = StageModels(recipe, base_teacher, task_teacher, training, run)
        return models.run_stages(stages, teacher_logits=teacher_logits)

    return run_stages


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
        context.run_stages(recipe, scratch, recipe.stages)

    with context.time_budget.part("trials"):
        short = context.search.space.short
        (stage,) = context.time_budget.fit(
            "trials", [short], context.training.data, train, share=1 / LEAST_TRIALS
        )
    return ScratchEvaluator(
        context.costs,
        context.run_stages,
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


def run_search(
    context: SearchContext, study: "optuna.Study", *, trials: int | None
) -> SearchReport:
    """Run the trials; write the report and its page from time to time, and at the
    end."""
    printed_at = time.monotonic()
    anchors = record.score_anchors(context)

    def watch(now: "optuna.Study") -> None:
        nonlocal printed_at
        if time.monotonic() - printed_at > PRINT_EVERY:
            so_far = record.build_report(context, now, anchors=anchors)
            record.write_report(so_far, context.run.path)
            record.print_front(so_far, context.training.console)
            printed_at = time.monotonic()

    try:
        with context.time_budget.part("trials"):
            run_trials(
                study,
                context.student_evaluator,
                trials=trials,
                seconds=context.time_budget.left("trials"),
                say=context.say,
                watch=watch,
            )
    finally:  # also after an interruption, or if no shape fits
        report = record.build_report(context, study, anchors=anchors)
        record.write_report(report, context.run.path)
    return report


def ship_winners(
    context: SearchContext,
    study: "optuna.Study",
    report: SearchReport,
    device: Device,
    options: StudyOptions,
) -> SearchReport:
    """Distil the finalists briefly and measure them; then distil, ship and measure the
    winners."""
    anchors, winners = report.anchors, options.winners

    def update(**results: Any) -> SearchReport:
        updated = record.build_report(context, study, anchors=anchors, **results)
        record.write_report(updated, context.run.path)
        return updated

    points, notes = shortlist(report, max(options.finalists, winners)), list[str]()
    if context.search.space.mode == "supernet":
        with context.time_budget.part("short distillations"):
            distill_briefly(context, points)
    with context.time_budget.part("timing finalists"):
        teacher_ms = time_finalists(context, points, device)
    report = update(teacher_ms=teacher_ms)
    for at in range(min(winners, len(points))):
        best = report.point(
            context.decide_winner(at, partial(choose_winner, report, points))
        )
        if over := report.exceeded(best):
            notes.append(
                f"No finalist is within the measured budget: trial {best.number} "
                f"exceeds {', '.join(over)}."
            )
            context.say(notes[-1])
        with context.time_budget.part("final"):
            distill_winner(context, best, share=1 / (winners - at))
        report = update(teacher_ms=teacher_ms, notes=notes)
    with context.time_budget.part("timing finalists"):
        teacher_ms = time_finalists(context, points, device)
    report = update(
        teacher_ms=teacher_ms, notes=notes, winner=next(iter(context.winners), None)
    )
    record.print_front(report, context.training.console)
    context.run.finish()
    context.say(f"page: {context.run.path / record.PAGE}")
    return report


def make_recipe(space: Space) -> Recipe:
    """Return all stages of a space as one recipe, to check them."""
    stages = [stage for where, stage in space.stages.items() if where != "teacher"]
    return space.recipe(
        space.name, stages, None if space.mode == "supernet" else space.student
    )


def parts(space: Space) -> Parts:
    """Return the shares of a time limit for the parts of a search."""
    return SUPERNET if space.mode == "supernet" else PLAIN


def check_stages(
    space: Space,
    recipe: Recipe,
    base_teacher: Teacher,
    training: TrainingContext,
    run: Run,
) -> None:
    """Check the stages of a space like those of a recipe; errors name them as the space
    does.

    See `commands.checks.check_recipe` and `StageModels.check`.
    """
    if space.mode == "supernet":
        SlicePlan.from_model(base_teacher.model)
    places = {
        f"stages[{at}]": where
        for at, where in enumerate(
            where for where in space.stages if where != "teacher"
        )
    }
    try:
        check_recipe(recipe, 1)
        check_lengths(recipe, base_teacher)
        check_kind(recipe, training.data.task.kind)
        StageModels(recipe, base_teacher, None, training, run).check()
    except RecipeError as error:
        problems = error.problems
        for stage, where in places.items():
            dotted = (
                stage.replace("[", ".").rstrip("]"),
                where.replace("[", ".").rstrip("]"),
            )
            problems = [
                problem.replace(stage, where).replace(*dotted) for problem in problems
            ]
        raise RecipeError(problems) from error


def _identity(config: SearchConfig, study: StudyOptions) -> dict[str, Any]:
    return {
        "teacher": config.teacher,
        "data": config.data,
        "seed": config.seed,
        "precision": config.training,
        "columns": list(astuple(config.columns)),
        "sampler": study.sampler,
        "storage": None if study.storage is None else redact(study.storage),
        "code": user_code.digests(config.space),
        "command": command_line(),
    }


def _check_study(study: StudyOptions) -> None:
    """Raise SearchError for an invalid sampler or number, StorageError for a database
    that cannot be reached."""
    for option in ("trials", "minutes", "finalists", "winners"):
        value = getattr(study, option)
        if value is not None and not value > 0:
            raise SearchError(f"--{option} {value:g}: expected a number above 0")
    make_sampler(study.sampler)
    if study.storage is not None and "://" in study.storage:
        close_storage(open_storage(study.storage))


def work(
    storage: str,
    *,
    name: str | None = None,
    weights: Path | None = None,
    minutes: float | None = None,
    allow_code: str | Path | None = None,
    console: Console | None = None,
) -> None:
    """Join the search in this storage, and evaluate shapes for it: see
    `nas.worker.join`."""
    join_processes()
    join(
        storage,
        name=name,
        weights=weights,
        minutes=minutes,
        allow_code=allow_code,
        console=console,
        stage_runner=stage_runner,
    )


def show(
    study: Path,
    number: int,
    out: Path,
    *,
    train: bool = False,
    allow_code: str | Path | None = None,
    console: Console | None = None,
) -> Bundle:
    """Write the student of a trial as a bundle into `out`, measured beside its teacher.

    train       distil it fully first, by the search's final stages; else it is shipped
                as the search left it (a subnet of the supernet, or a briefly trained
                student), and its card says so
    allow_code  the folder of your own functions that the space names

    A student that the search has shipped is copied. Raises SearchError if there is no
    such trial, or if it failed.
    """
    console = console or Console(quiet=True)
    config, report = SearchConfig.load(study), record.load_report(study)
    point = report.point(number)
    if not point.choice or point.state == "failed":
        raise SearchError(
            f"{study}: trial {number} failed ({point.reason}); choose another: "
            f"compress search show {study}"
        )
    check_place(out)
    state = load_student_state(study, number)
    if state.bundle is not None and (not train or "final" in state.scores):
        return copy_student(Path(state.bundle), out)
    facts = load_json(
        study / "run.json",
        f"Restore it from a copy; the trials can still be shown: {study}",
    )
    with closing(Run.open(study, config, facts, resume=True, name=NAME)) as run:
        config = config.with_code(allow_code)
        folder = study / "students" / str(number)  # its time is not that of the search
        folder.mkdir(parents=True, exist_ok=True)
        time_budget = TimeBudget(folder, parts(config.space), None)
        context = load_context(
            config,
            run,
            time_budget,
            None,
            strict=False,
            allow_pickle=False,
            console=console,
        )
        context = context.with_student_evaluator(make_student_evaluator(context))
        bundle = (
            distill_winner(context, point) if train else ship_untrained(context, point)
        )
        points = tuple(
            record.add_results(study, each) if each.number == number else each
            for each in report.points
        )
        updated = replace(report, points=points, front=())
        record.write_report(replace(updated, front=updated.compute_front()), study)
    return copy_student(bundle.path, out)


def ship_untrained(context: SearchContext, point: TrialRecord) -> Bundle:
    """Ship a student without further training."""
    space, short = (
        context.search.space,
        "short" in context.student_state(point.number).scores,
    )
    student = load_result(
        find_checkpoint(context, point), "task", context.training.kind
    )
    stages = [stage for stage in (space.supernet, space.short) if stage is not None]
    training = f"a short distillation, stage `{space.short.name}`"
    if space.mode == "supernet" and not short:
        stages, training = (
            stages[:1],
            f"that of the supernet it is a part of, stage `{stages[0].name}`",
        )
    note = (
        f"Its only training was {training}; the search's final distillation was left "
        "out."
    )
    return ship_student(context, point, student, stages, began=time.time(), note=note)
