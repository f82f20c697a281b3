"""Trim the vocabulary of a bundle or checkpoint, and certify what that costs on
labelled data."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from compress.arguments import (
    Count,
    DataLike,
    ModelLike,
    NameLike,
    PathName,
    Share,
    ThreadCount,
    check_arguments,
    name_of,
    optional_name,
)
from compress.commands import preflight
from compress.config.options import ColumnOptions
from compress.jobs.phase import estimate_phases, run_phases
from compress.jobs.trim import TRIM_PHASES, TrimJob, TrimResult, load_trim_texts
from compress.records.forecast import Forecast
from compress.training.trainer import peak_rss_mb


@check_arguments
def trim(
    model: ModelLike,
    out: PathName,
    *,
    data: DataLike | None = None,
    corpus: NameLike | None = None,
    columns: ColumnOptions = ColumnOptions(),
    min_count: Count = 1,
    keep: Sequence[str] = (),
    max_drop: Share = 0.005,
    threads: ThreadCount = 1,
) -> TrimResult:
    """Trim a bundle or a checkpoint to the tokens of the training texts of `data` and
    of `corpus`.

    Every file of a bundle is scored on the test split of `data`, or on the validation
    split if there is none.

    min_count  drop tokens that occur less often
    keep       texts whose tokens are kept in any case
    max_drop   allowed loss of the score, in its own unit; a file that loses more is
               marked as not certified, and kept

    The folder appears when all of it is certified or marked; after an interruption,
    repeat the call. Raises CompressError with neither data nor corpus, BundleError for
    data of another task, and the errors of `trim_bundle`."""
    name = name_of(model)
    folder = Path(out)
    preflight.check_trimming(data, corpus, folder, columns)
    bundle, task_data, texts = load_trim_texts(
        name, data=data, corpus=optional_name(corpus), columns=columns
    )
    job = TrimJob(
        name, folder, bundle, task_data, texts, min_count, keep, max_drop, threads
    )
    with job.closing:
        result = run_phases(TRIM_PHASES, job).result
    assert result is not None, "its phases have made it"
    return result


@check_arguments
def forecast_trimming(
    model: ModelLike,
    out: PathName,
    *,
    data: DataLike | None = None,
    corpus: NameLike | None = None,
    columns: ColumnOptions = ColumnOptions(),
    min_count: Count = 1,
    keep: Sequence[str] = (),
    threads: ThreadCount = 1,
    console: Console | None = None,
) -> Forecast:
    """Forecast what `compress.trim` would take with the same arguments, on this
    machine.

    All texts are read once and counted; everything else is done with the first
    thousand, into a temporary folder.
    """
    name = name_of(model)
    folder = Path(out)
    preflight.check_trimming(data, corpus, folder, columns)
    bundle, task_data, texts = load_trim_texts(
        name, data=data, corpus=optional_name(corpus), columns=columns
    )
    job = TrimJob(name, folder, bundle, task_data, texts, min_count, keep, 0.0, threads)
    with (console or Console(quiet=True)).status("trying each phase"):
        _, estimates = estimate_phases(TRIM_PHASES, job)
    return Forecast(f"{name}, trimmed", tuple(estimates), peak_rss_mb())
