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
)
from compress.commands import preflight
from compress.config.options import LengthOptions, RunOptions
from compress.config.recipe import Recipe
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
    request = preflight.pretrain_request(
        teacher=teacher,
        recipe=recipe,
        out=out,
        corpus=corpus,
        data=data,
        length=length,
        options=options,
        console=console,
    )
    return run_pretraining(request)


def run_pretraining(request: PretrainRequest) -> Path:
    """Run the phases of a pre-training that are not done; return the checkpoint."""
    console = request.console
    with open_pretraining(request) as job:
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
    with TemporaryDirectory() as scratch:
        request = preflight.pretrain_request(
            teacher=teacher,
            recipe=recipe,
            out=Path(scratch) / "run",
            corpus=corpus,
            data=data,
            length=length,
            options=replace(options, resume=False),
            console=console,
        )
        return estimate_pretraining(request)


def estimate_pretraining(request: PretrainRequest) -> Forecast:
    """Try the phases of a pre-training in a temporary folder."""
    options = replace(request.options, resume=False, track=None)
    with TemporaryDirectory() as scratch:
        request = replace(request, out=Path(scratch) / "run", options=options)
        with (
            open_pretraining(request) as job,
            request.console.status("trying each stage"),
        ):
            trial = job.for_trial(Path(scratch))
            _, estimates = estimate_phases(PRETRAIN_PHASES, trial)
            models = job.models
    title = (
        f"{models.recipe.name}: {request.corpus or request.data}, tokens of "
        f"{models.base_teacher.name}"
    )
    return Forecast(title, tuple(estimates), peak_rss_mb(), request.length.minutes)


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
