"""Quantise a bundle to int8 by one of several methods, and certify the file on its
data."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from compress import io
from compress.arguments import with_keywords_of
from compress.benchmark.devices import open_chosen
from compress.commands.distill import distill, forecast
from compress.config.options import (
    DataOptions,
    RunOptions,
)
from compress.console import Screen, plain_printer
from compress.data.cache import home
from compress.data.objects import data_path
from compress.exporters.artifact import Bundle
from compress.exporters.codebook import has_codebook
from compress.jobs.phase import estimate_phases, run_phases
from compress.jobs.quantize import (
    QUANTIZE_PHASES,
    ForecastQuantizeArguments,
    QuantizeArguments,
    QuantizeJob,
    QuantizeRequest,
)
from compress.quantization.select import Quantized
from compress.records.forecast import Forecast, PhaseEstimate
from compress.training.trainer import peak_rss_mb

RECIPE = "q8bert"


@with_keywords_of(QuantizeArguments)
def quantize(arguments: QuantizeArguments) -> Quantized:
    """Quantise a bundle again by `method`, in place or into a new folder `out`, and
    certify the int8 file on `device`.

    method       dynamic, static, smoothquant; auto: static if that is close enough,
                 else smoothquant; qat trains the model again, so it needs `out`
    int8         how it is calibrated and written: see `Int8Options`
    max_drop     allowed loss of the score, in its own unit, but never finer than the
                 rows resolve (`certify.RESOLVED`). Matrix products are left in float32
                 until it is met on the validation split. The certificate is for the
                 test split, or the validation split if there is none with labels, and
                 compares int8 with the fp32 file of the given bundle, before any
                 training
    columns, seed   for the data, as in `distill`
    overrides    changes of the recipe q8bert, for qat

    If the target is missed, the certificate says so, and the best file is kept. The
    bundle is unchanged until everything is done. Raises BundleError for data of another
    task, and the errors of its parts."""
    say = arguments.say
    arguments.check()
    with ExitStack() as stack:
        bundle = arguments.source
        if arguments.method == "qat":
            say(
                "training for int8; after an interruption, the same command continues "
                "from the last checkpoint"
            )
            bundle = stack.enter_context(train_for_int8(arguments))
        scratch = Path(stack.enter_context(TemporaryDirectory()))
        device = stack.enter_context(open_chosen(arguments.device, say=say))
        job = QuantizeJob(arguments, bundle, device, scratch, say)
        quantized = run_phases(QUANTIZE_PHASES, job).quantized
    assert quantized is not None, "its phases have made it"
    return quantized


@with_keywords_of(ForecastQuantizeArguments)
def forecast_quantization(arguments: ForecastQuantizeArguments) -> Forecast:
    """Forecast what `compress.quantize` would take with the same arguments, on this
    machine and `device`.

    One file of each kind is written, calibrated and scored on few rows, and
    extrapolated to all files and rows. The minimum assumes that static is close enough
    for `auto`, and all-int8 for any method; the maximum, that each product is tried in
    float32. The trial's file shows which is likely, except for `qat`, which trains for
    the minimum.
    """
    console = arguments.console or Console(quiet=True)
    say = plain_printer(console)
    arguments.check()
    source = arguments.source
    training: tuple[PhaseEstimate, ...] = ()
    if arguments.method == "qat":
        training = forecast(**_arguments_of_training(arguments)).phases
    with (
        TemporaryDirectory() as scratch,
        open_chosen(arguments.device, say=say) as device,
        console.status("trying each phase"),
    ):
        job = QuantizeJob(arguments, source, device, Path(scratch), say)
        _, estimates = estimate_phases(QUANTIZE_PHASES, job)
    name = arguments.task_data.name
    title = f"{source.path}: int8 by {arguments.method} on {name}"
    return Forecast(title, (*training, *estimates), peak_rss_mb())


@contextmanager
def train_for_int8(request: QuantizeRequest) -> Iterator[Bundle]:
    """Yield a new bundle: the model trained to answer in int8 as it does in float, and
    its static int8 file.

    The model learns from its own float answers, on the train split. The run is kept
    under $COMPRESS_HOME/qat until the caller is done with the bundle: after an
    interruption, the same call continues from its last checkpoint.
    """
    columns = request.columns
    key = [
        [asdict(stamp) for stamp in request.source.manifest.files.values()],
        data_path(request.data),
        RECIPE,
        list(request.overrides),
        columns.text,
        columns.label,
        request.seed,
    ]
    run = home() / "qat" / io.hash_value(key)[:24]
    arguments = _arguments_of_training(request)
    options = replace(
        arguments.pop("options"), resume=(run / "run.json").is_file(), gate="warn"
    )
    yield distill(**arguments, out=run, options=options, console=Screen(stderr=True))
    shutil.rmtree(run)


def _arguments_of_training(request: QuantizeRequest) -> dict[str, Any]:
    """Return the arguments of `distill`, or of its forecast, for training in int8."""
    task = request.task_data.task
    columns = request.columns
    settings = [f"stages.0.max_length={request.source.manifest.max_length}"]
    if has_codebook(request.source.files()["int8"]):
        settings.append("stages.0.table=codebook")
    return {
        "teacher": str(request.source.path),
        "recipe": RECIPE,
        "data": data_path(request.data),
        "columns": DataOptions(
            text=columns.text, label=columns.label, kind=task.kind, metric=task.metric
        ),
        # it is compared with the former model, token by token
        "vocabulary": "full",
        "options": RunOptions(
            overrides=[*settings, *request.overrides], seed=request.seed
        ),
    }
