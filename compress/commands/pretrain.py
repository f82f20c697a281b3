"""Run stages that need no task: general students, language models, encoders trained on
text alone."""

from dataclasses import replace
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
from compress.config.options import LengthOptions, RunOptions
from compress.config.recipe import Recipe
from compress.data.objects import data_path, teacher_path
from compress.jobs.phase import estimate_phases, run_phases
from compress.jobs.pretrain import PRETRAIN_PHASES, RESULT, open_pretraining
from compress.jobs.request import PretrainRequest
from compress.records.forecast import Forecast
from compress.training import scoring
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
    request = _request(
        teacher,
        recipe,
        Path(out),
        corpus=corpus,
        data=data,
        length=length,
        options=options,
        console=console,
    )
    with open_pretraining(request) as job:
        run_phases(PRETRAIN_PHASES, job)
        run = job.models.run
        if run.main:
            run.finish()
        for stage in job.models.recipe.stages if run.main else ():
            spent = load_trained(run, stage.name, request.console)
            if spent is None:
                continue
            score = describe_score(spent)
            request.console.print(
                f"{stage.name}: {spent.steps:,} steps in {spent.seconds:,.0f} s{score}",
                highlight=False,
            )
        request.console.print(f"checkpoint: {run.path / RESULT}", highlight=False)
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
    options = replace(options, resume=False, track=None)
    with TemporaryDirectory() as scratch:
        place = Path(scratch) / "run"
        request = _request(
            teacher,
            recipe,
            place,
            corpus=corpus,
            data=data,
            length=length,
            options=options,
            console=console,
        )
        with (
            open_pretraining(request) as job,
            request.console.status("trying each stage"),
        ):
            _, estimates = estimate_phases(
                PRETRAIN_PHASES, job.for_trial(Path(scratch))
            )
            models = job.models
    title = (
        f"{models.recipe.name}: {request.corpus or request.data}, tokens of "
        f"{models.base_teacher.name}"
    )
    return Forecast(title, tuple(estimates), peak_rss_mb(), length.minutes)


def _request(
    teacher: TeacherLike,
    recipe: NameLike | Recipe,
    out: Path,
    *,
    corpus: NameLike | None,
    data: DataLike | None,
    length: LengthOptions,
    options: RunOptions,
    console: Console | None,
) -> PretrainRequest:
    """Load the recipe, and check settings and files before anything is loaded."""
    name = teacher_path(teacher)
    text = optional_name(corpus)
    source = None if data is None else data_path(data)
    loaded = preflight.load_recipe(recipe, options.overrides, length)
    preflight.check(
        loaded, teacher=name, out=out, data=source, corpus=text, options=options
    )
    return PretrainRequest(
        teacher=name,
        data=source,
        out=out,
        recipe=preflight.without_task(loaded, text, source),
        corpus=text,
        length=length,
        options=options,
        console=console or Console(quiet=True),
    )


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
