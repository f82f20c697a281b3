"""Run stages that need no task: general students, language models, encoders trained on
text alone."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from compress.arguments import with_keywords_of
from compress.commands import preflight
from compress.jobs.phase import estimate_phases, run_phases
from compress.jobs.pretrain import PRETRAIN_PHASES, open_pretraining
from compress.jobs.request import (
    ForecastPretrainingArguments,
    PretrainArguments,
    PretrainRequest,
)
from compress.records.forecast import Forecast
from compress.training.processes import wait_for_all
from compress.training.run import RESULT
from compress.training.trainer import peak_rss_mb


@with_keywords_of(PretrainArguments)
def pretrain(arguments: PretrainArguments) -> Path:
    """Run a recipe's stages up to the first with a task's head; return the checkpoint's
    folder, `out`/student.

    teacher   alias, folder or hub id: the teacher; for stages that learn from text
              alone, the model whose vocabulary and sizes are used
    corpus    text for stages on text
    data      labelled data for stages that answer with text, as T5 does
    length    how long its stages train; options: as for `distill`, without `gate`

    The checkpoint is a plain transformers folder with its tokenizer, and can be the
    teacher of other runs. Next to it are a page, report.html, and for a causal language
    model perplexity.json, which compares it with its teacher on held-out documents.
    Raises a CompressError for anything wrong with the arguments.
    """
    return run_pretraining(preflight.pretrain_request(arguments, arguments.out))


def run_pretraining(request: PretrainRequest) -> Path:
    """Run the unfinished phases of a pre-training; return the checkpoint."""
    with open_pretraining(request) as job:
        run_phases(PRETRAIN_PHASES, job)
        run = job.models.run
        if run.main:
            run.finish()
        wait_for_all()
    return run.path / RESULT


@with_keywords_of(ForecastPretrainingArguments)
def forecast_pretraining(arguments: ForecastPretrainingArguments) -> Forecast:
    """Forecast the minutes and the memory that `compress.pretrain` would take, like
    `forecast`."""
    arguments = replace(arguments, options=arguments.options.for_trial())
    with TemporaryDirectory() as scratch:
        request = preflight.pretrain_request(arguments, Path(scratch) / "run")
        return estimate_pretraining(request)


def estimate_pretraining(request: PretrainRequest) -> Forecast:
    """Try the phases of a pre-training in a temporary folder."""
    options = request.options.for_trial()
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
