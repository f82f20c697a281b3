"""Distil a teacher into a student: load and check, make the teacher, run the recipe's
stages, ship and measure."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from compress.arguments import with_keywords_of
from compress.commands import preflight
from compress.console import print_note
from compress.exporters.artifact import Bundle
from compress.jobs.budget import CheckBudget, KeepBudget
from compress.jobs.job import Job, describe_pending
from compress.jobs.path import KeepScore
from compress.jobs.phase import Phase, estimate_phases, run_phases
from compress.jobs.request import DistillArguments, DistillRequest, ForecastArguments
from compress.jobs.shipping import BUDGETED_LIMIT, INT8_LIMIT, Ship
from compress.jobs.train import RunStages
from compress.records.forecast import Forecast
from compress.teachers.inputs import open_job
from compress.training.processes import from_first
from compress.training.trainer import peak_rss_mb


@with_keywords_of(DistillArguments)
def distill(arguments: DistillArguments) -> Bundle:
    """Distil `teacher` into a student by `recipe`, ship it as a bundle in `out`/bundle,
    and measure it.

    teacher    alias (`minilm`, `bert-base`, ...), folder, hub id, or (model,
               tokenizer); fine-tuned first if it has no head for the task. Or
               precomputed vectors of the texts (see `prompting.vectors`), or a
               cross-encoder for vectors that learn from scores: the student is then cut
               out of the checkpoint that the recipe's student names, or else of minilm.
               If the data have a teacher's scores (see `data.ranking`), it only names
               the checkpoint that the student is cut out of
    data       embedded set, folder, hub id, DataFrame, Dataset, or {split: any of
               these}; `columns` name what cannot be detected
    recipe     name, path of a .yaml, or a Recipe; `auto`, or a .yaml of choices,
               chooses one for teacher and task
    corpus     unlabelled text: for stages on text, and as additional rows for tasks on
               single texts or their words
    prompt     name or path of a .yaml file: `teacher` is then a language model (or an
               endpoint's .yaml file) that labels the data by answering the prompt; the
               recipe's student names the checkpoint to start from
    knowledge  path of a table of triples (head, relation, tail): the teacher reads each
               text with the facts about the names in it, the student the text alone
    goal       the share of the teacher's score that the student must keep, from which
               its sizes are found: see `GoalOptions`
    out        the run's directory, which the first process of a launch writes;
               `options.resume` continues an interrupted run, to the same final weights
    vocabulary auto: the student leaves out tokens that are neither frequent nor in the
    training texts or the corpus, if that keeps its score; full:
               it keeps all
    max_drop   how much of the score, in its own unit, int8 may lose before matrix
               products stay in float32; default: INT8_LIMIT, or BUDGETED_LIMIT for a
               student made for a latency
    length     how long the stages train: see `LengthOptions`
    options    seed, precision, resume and others: see `RunOptions`. A recipe that names
               your own functions runs only with `allow_code`

    Raises a CompressError that says what to do for anything wrong with these.
    """
    request = preflight.distill_request(arguments, arguments.out)
    return run_distillation(request, arguments.max_drop)


def run_distillation(request: DistillRequest, max_drop: float | None = None) -> Bundle:
    """Run the unfinished phases of a distillation; return its bundle."""
    started = time.time()
    with open_job(request) as (job, teacher_phases):
        run = job.models.run
        phases = list_phases(job, teacher_phases, request, max_drop)
        print_note(
            request.console,
            f"this run will {describe_pending(phases, job)}; --plan forecasts how long "
            "that takes",
        )
        run_phases(phases, replace(job, started=started))
        if run.main:
            run.finish()
        return from_first(lambda: Bundle.load(run.path / "bundle"))


def list_phases(
    job: Job,
    teacher_phases: Sequence[Phase[Job]],
    request: DistillRequest,
    max_drop: float | None = None,
) -> list[Phase[Job]]:
    """List the phases of a distillation: of the teacher, then of the student."""
    if max_drop is None:
        for_time = job.models.recipe.target.needs_device
        max_drop = BUDGETED_LIMIT if for_time else INT8_LIMIT
    student = (RunStages(), Ship(max_drop, request.vocabulary))
    if job.models.recipe.target.keep is not None:
        return [*teacher_phases, KeepScore(student)]
    return [CheckBudget(), *teacher_phases, KeepBudget(student)]


@with_keywords_of(ForecastArguments)
def forecast(arguments: ForecastArguments) -> Forecast:
    """Forecast the minutes and the memory that `compress.distill` would take with the
    same arguments, on this machine.

    Everything is loaded and checked as for a run; then each phase is tried for a few
    steps on a few rows, from untrained weights. A stage that early stopping ends has a
    minimum and a maximum. For a budget of latency, nothing is raced, and stages are
    tried at the teacher's sizes. A prompted teacher answers a few rows, and an endpoint
    embeds one batch; these answers and the encoded rows are cached for the run, and
    made-up answers stand in for the rest. Raises a CompressError for anything that
    `distill` would refuse before training.
    """
    arguments = replace(arguments, options=arguments.options.for_trial())
    with TemporaryDirectory() as scratch:
        request = preflight.distill_request(arguments, Path(scratch) / "run")
        return estimate_distillation(request)


def estimate_distillation(request: DistillRequest) -> Forecast:
    """Try the phases of a distillation in a temporary folder."""
    options = request.options.for_trial()
    with TemporaryDirectory() as scratch:
        request = replace(request, out=Path(scratch) / "run", options=options)
        with (
            open_job(request, trial=True) as (job, teacher_phases),
            request.console.status("trying each phase"),
        ):
            phases = list_phases(job, teacher_phases, request)
            tried, estimates = estimate_phases(phases, job.for_trial(Path(scratch)))
            rows = job.models.context.data
            title = (
                f"{job.models.recipe.name}: {tried.teacher.name} on {rows.name}, "
                f"{len(rows.train):,} rows"
            )
    minutes = request.length.minutes
    return Forecast(title, tuple(estimates), peak_rss_mb(), minutes)
