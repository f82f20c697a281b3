"""Run stages that need no task: general students, language models, encoders trained on
text alone."""

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from accelerate import PartialState
from rich.console import Console

from compress.arguments import (
    DataLike,
    NameLike,
    PathName,
    TeacherLike,
    check_arguments,
    optional_name,
)
from compress.commands import preflight
from compress.config import user_code
from compress.config.options import LengthOptions, RunOptions
from compress.config.recipe import Recipe
from compress.console import warn
from compress.data import load_task
from compress.data.collate import Collate
from compress.data.corpus import load_corpus
from compress.data.objects import data_path, teacher_path
from compress.io import atomic_folder, keep_if_intact
from compress.jobs.checks import (
    check_lengths,
    join_processes,
    load_functions,
    measure_lengths,
)
from compress.jobs.job import Job
from compress.jobs.phase import Phase, estimate_phases, run_phases
from compress.jobs.stages import StageModels
from compress.jobs.train import RunStages
from compress.models import checkpoints
from compress.models import precision as precisions
from compress.provenance import command_line
from compress.records.forecast import Forecast
from compress.training import finetune, scoring
from compress.training.context import TrainingContext, use_bf16
from compress.training.run import Run
from compress.training.schedule import TimeLimit
from compress.training.stage import Trained, load_trained
from compress.training.trainer import peak_rss_mb


@check_arguments
def pretrain(
    *,
    teacher: TeacherLike,
    recipe: NameLike | Recipe,
    out: PathName,
    corpus: NameLike | None = None,
    data: DataLike | None = None,
    length: LengthOptions = LengthOptions(),
    options: RunOptions = RunOptions(),
    console: Console | None = None,
) -> Path:
    """Run a recipe's stages up to the first with a task's head; return the checkpoint's
    folder, `out`/student.

    teacher   alias, folder or hub id: the teacher; for stages that learn from text
              alone, the model whose vocabulary and sizes are used
    corpus    text for stages on text
    data      labelled data for stages that answer with text, as T5 does
    length    how long its stages train; options: as for `distill`, without `gate`

    The checkpoint is a plain transformers folder with its tokenizer, and can be the
    teacher of other runs. Raises a CompressError for anything wrong with the arguments.
    """
    console = console or Console(quiet=True)
    opened = open_pretraining(
        teacher,
        recipe,
        Path(out),
        corpus=optional_name(corpus),
        data=data,
        length=length,
        options=options,
        console=console,
    )
    with opened as job:
        run_phases(PRETRAIN_PHASES, job)
        run = job.models.run
        if run.main:
            run.finish()
        for stage in job.models.recipe.stages if run.main else ():
            spent = load_trained(run, stage.name, console)
            if spent is None:
                continue
            score = describe_score(spent)
            console.print(
                f"{stage.name}: {spent.steps:,} steps in {spent.seconds:,.0f} s{score}",
                highlight=False,
            )
        console.print(f"checkpoint: {run.path / RESULT}", highlight=False)
        PartialState().wait_for_everyone()
    return run.path / RESULT


@check_arguments
def forecast_pretraining(
    *,
    teacher: TeacherLike,
    recipe: NameLike | Recipe,
    corpus: NameLike | None = None,
    data: DataLike | None = None,
    length: LengthOptions = LengthOptions(),
    options: RunOptions = RunOptions(),
    console: Console | None = None,
) -> Forecast:
    """Forecast the minutes and the memory that `compress.pretrain` would take, like
    `forecast`."""
    console = console or Console(quiet=True)
    with TemporaryDirectory() as scratch:
        opened = open_pretraining(
            teacher,
            recipe,
            Path(scratch) / "run",
            corpus=optional_name(corpus),
            data=data,
            length=length,
            options=replace(options, resume=False, track=None),
            console=console,
        )
        with opened as job, console.status("trying each stage"):
            _, estimates = estimate_phases(
                PRETRAIN_PHASES, job.for_trial(Path(scratch))
            )
            models = job.models
    title = (
        f"{models.recipe.name}: {corpus or data}, tokens of {models.base_teacher.name}"
    )
    return Forecast(title, tuple(estimates), peak_rss_mb(), length.minutes)


RESULT = "student"
"""The folder of the checkpoint in the run's folder."""


class KeepCheckpoint(Phase[Job]):
    """Copy the model of the last stage to the run's result."""

    def run(self, job: Job) -> Job:
        models = job.models
        run = models.run
        last = models.recipe.stages[-1]
        result = run.path / RESULT
        if run.main and not keep_if_intact(
            result, partial(warn, models.context.console)
        ):
            with atomic_folder(result, sealed=True) as folder:
                shutil.copytree(run.result(last.name), folder, dirs_exist_ok=True)
        return job


PRETRAIN_PHASES: tuple[Phase[Job], ...] = (RunStages(), KeepCheckpoint())


def describe_score(spent: Trained) -> str:
    """Say what a stage's best score is, and of which rows; '' if it was not scored."""
    if spent.score is None:
        return ""
    match spent.measure:
        case scoring.LOG_LIKELIHOOD:
            return f", log-likelihood of a held-out token {spent.score:.3f} nats"
        case scoring.NEGATIVE_LOSS:
            return f", loss on held-out rows {-spent.score:.3f}"
    return f", {spent.measure or 'score'} {spent.score:.3f} on the validation split"


@contextmanager
def open_pretraining(
    teacher: TeacherLike,
    recipe: NameLike | Recipe,
    out: Path,
    *,
    corpus: str | None,
    data: DataLike | None,
    length: LengthOptions,
    options: RunOptions,
    console: Console,
) -> Iterator[Job]:
    """Check the arguments of `pretrain`, load teacher and texts, and open the run;
    yield the job before anything is trained.

    Raises a CompressError for anything wrong with the arguments.
    """
    name = teacher_path(teacher)
    source = None if data is None else data_path(data)
    loaded = preflight.load_recipe(recipe, options.overrides, length)
    preflight.check(
        loaded, teacher=name, out=out, data=source, corpus=corpus, options=options
    )
    state = join_processes()
    given = load_functions(
        preflight.without_task(loaded, corpus, source),
        state.num_processes,
        options.allow_code,
    )
    number_format = precisions.choose(options.precision)
    with state.main_process_first():
        folder = checkpoints.resolve(name, allow_pickle=options.allow_pickle)
        base_teacher = finetune.load_with_head(
            name, folder, "encoder", allow_pickle=options.allow_pickle
        )
        task_data = load_task(source, seed=options.seed) if source else None
        text = load_corpus(corpus) if corpus else None
    resolved = given
    if task_data is not None:
        lengths = measure_lengths(task_data, base_teacher, options.seed)
        resolved = given.with_length(lengths.fitting)
    check_lengths(resolved, base_teacher)
    identity = {
        "teacher": name,
        "data": source,
        "corpus": corpus,
        "seed": options.seed,
        "precision": number_format,
        "columns": [None, None, None, None],
        "code": user_code.digests(resolved),
        "command": command_line(),
        "processes": state.num_processes,
    }
    run = Run.open(
        out,
        resolved,
        identity,
        given=given,
        resume=options.resume,
        main=state.is_main_process,
        track=options.track,
    )
    with closing(run):
        run.confirm(
            teacher=base_teacher.digest,
            **({"data": task_data.fingerprint} if task_data else {}),
            **({"corpus": text.fingerprint} if text else {}),
        )
        bf16 = use_bf16(number_format, resolved, base_teacher, console)
        tokenizer = base_teacher.tokenizer
        context = TrainingContext(
            task_data, text, tokenizer, Collate(tokenizer), bf16, console
        )
        if length.minutes is not None:
            stages = tuple(stage.name for stage in resolved.training)
            limit = TimeLimit.from_minutes(length.minutes, stages, run.before)
            context = replace(context, time_limit=limit)
        models = StageModels(resolved, base_teacher, None, context, run)
        for note in models.check():
            warn(console, note)
        yield Job(models)
