"""Search the best students of a teacher under a budget, then distil and ship them."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from compress.arguments import with_keywords_of
from compress.benchmark.devices import open_chosen
from compress.commands import preflight
from compress.config import user_code
from compress.config.options import StudyOptions
from compress.data.objects import data_path, teacher_path
from compress.errors import SearchError
from compress.exporters.artifact import Bundle, check_place
from compress.io import load_json
from compress.jobs.phase import estimate_phases, run_phases
from compress.nas import record
from compress.nas.config import STUDY_CONFIG, SearchConfig, Space
from compress.nas.context import load_student_state
from compress.nas.finalists import distill_winner
from compress.nas.phases import MakeEvaluator, begin_study, list_phases, ship_untrained
from compress.nas.preparation import (
    SearchJob,
    SearchProgress,
    SearchRequest,
    open_search,
    parts,
)
from compress.nas.time_budget import TimeBudget
from compress.pruning.budget import device_messages
from compress.records.forecast import Forecast
from compress.records.search_report import SearchReport, load_report
from compress.training.run import Run
from compress.training.trainer import peak_rss_mb


@with_keywords_of(SearchRequest)
def search(request: SearchRequest) -> SearchReport:
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
    config = _configure(request)
    study = request.study
    options = request.options
    run = Run.open(
        Path(request.out),
        config,
        request.identify(config),
        resume=options.resume,
        name=STUDY_CONFIG,
        track=options.track,
    )
    seconds = None if study.minutes is None else 60 * study.minutes
    preparing, searching = list_phases(strict=options.gate == "refuse")
    with _open_job(request, config, run, seconds) as opened:
        job = run_phases(preparing, opened)
        with begin_study(job.context, study) as optuna_study:
            job = run_phases(searching, replace(job, study=optuna_study))
    assert job.report is not None, "its last phase has updated it"
    return job.report


@with_keywords_of(SearchRequest)
def forecast_search(request: SearchRequest) -> Forecast:
    """Forecast what `compress.search` would take with the same arguments, on this
    machine and its device.

    The shapes with the fewest and the most operations are exported, timed and scored
    like a trial; stages are tried as in `forecast`. A pruned trial ends after its first
    rung: the minimum assumes this for all trials, the maximum for none. With
    `options.resume`, what the search in `out` has done takes no time. A budget that the
    smallest shape exceeds is reported as out of reach. Raises a CompressError for
    anything that `search` would refuse before training.
    """
    config = _configure(request)
    study = request.study
    options = request.options
    preparing, searching = list_phases(strict=options.gate == "refuse")
    with TemporaryDirectory() as folder:
        run = Run.open(Path(folder) / "run", config, {"seed": config.seed})
        with _open_job(request, config, run, None) as opened:
            teacher = opened.teacher.for_trial(Path(folder))
            job = replace(opened, teacher=teacher)
            if options.resume:
                done = SearchProgress.read(Path(request.out), config, study)
                job = replace(job, done=done)
            with request.screen.status("trying each phase"):
                job, estimates = estimate_phases([*preparing, *searching], job)
    models = job.teacher.models
    title = (
        f"{config.space.name}: {models.base_teacher.name} on "
        f"{models.context.data.name}, {job.shapes.size():,} shapes"
    )
    return Forecast(
        title, tuple(estimates), peak_rss_mb(), study.minutes, job.unreachable
    )


@contextmanager
def _open_job(
    request: SearchRequest,
    config: SearchConfig,
    run: Run,
    seconds: float | None,
) -> Iterator[SearchJob]:
    """Reach the device, and load teacher and data; close the run at the end."""
    device = request.device
    time_budget = TimeBudget(run.path, parts(config.space), seconds)
    messages = device_messages(device.device, request.screen)
    with closing(run), open_chosen(device, say=messages) as target:
        with time_budget.part("preparation"):
            job = open_search(
                config,
                request.study,
                run,
                time_budget,
                target,
                allow_pickle=request.options.allow_pickle,
                console=request.screen,
            )
        yield job


def _configure(request: SearchRequest) -> SearchConfig:
    """Check the request, and return the settings of its search."""
    options = request.options
    teacher = teacher_path(request.teacher)
    data = data_path(request.data)
    space = Space.from_argument(request.space, options.overrides or ())
    preflight.check(
        space,
        teacher=teacher,
        out=request.out,
        data=data,
        columns=request.columns,
        options=options,
    )
    preflight.check_search(space, request.study, request.device)
    return request.make_config(teacher, data, space)


def show(
    study: Path,
    number: int,
    out: Path,
    *,
    train: bool = False,
    allow_code: str | Path | None = None,
    console: Console | None = None,
) -> Bundle:
    """Write the student of a trial as a bundle into `out`, measured against its
    teacher.

    train       distil it fully first, by the search's final stages; else it is shipped
                as the search left it (a subnet of the supernet, or a briefly trained
                student), and its card says so
    allow_code  the folder of your own functions that the space names

    A student that the search has shipped is copied. Raises SearchError if there is no
    such trial, or if it failed."""
    console = console or Console(quiet=True)
    config = SearchConfig.load(study)
    report = load_report(study)
    point = report.point(number)
    if not point.choice or point.state == "failed":
        raise SearchError(
            f"{study}: trial {number} failed ({point.reason}); choose another: "
            f"compress search show {study}"
        )
    check_place(out)
    state = load_student_state(study, number)
    if state.bundle is not None and (not train or "final" in state.scores):
        return Bundle.load(state.bundle).copy_to(out)
    facts = load_json(
        study / "run.json",
        f"Restore it from a copy; the trials can still be shown: {study}",
    )
    known = config.with_code(allow_code)
    identity = facts | {"code": user_code.digests(known.space, known.columns.kind)}
    with closing(
        Run.open(study, config, identity, resume=True, name=STUDY_CONFIG)
    ) as run:
        config = known
        folder = study / "students" / str(number)  # its time is not that of the search
        folder.mkdir(parents=True, exist_ok=True)
        time_budget = TimeBudget(folder, parts(config.space), None)
        job = open_search(
            config, StudyOptions(), run, time_budget, None, console=console
        )
        preparing, _ = list_phases(strict=False)
        context = run_phases([*preparing, MakeEvaluator()], job).context
        bundle = (
            distill_winner(context, point) if train else ship_untrained(context, point)
        )
        points = tuple(
            record.add_results(study, each) if each.number == number else each
            for each in report.points
        )
        updated = replace(report, points=points, front=())
        record.write_report(replace(updated, front=updated.compute_front()), study)
    return bundle.copy_to(out)
