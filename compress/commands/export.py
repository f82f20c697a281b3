"""Export a bundle, a run or a checkpoint to files for another runtime."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from compress.arguments import (
    DataLike,
    ModelLike,
    PathName,
    Share,
    check_arguments,
    name_of,
)
from compress.benchmark.devices import open_chosen
from compress.config.options import CheckpointOptions, ColumnOptions, DeviceOptions
from compress.errors import ExportError
from compress.exporters import formats
from compress.exporters.artifact import Bundle
from compress.exporters.checkpoint import ExportSource, load_source
from compress.exporters.export import check
from compress.exporters.export import export as write_export
from compress.exporters.writers.context import (
    ExportOptions,
    ExportResult,
    FixedOptions,
)
from compress.progress import Say
from compress.quantization.calibration import compute_ranges
from compress.quantization.similarities import certify_vectors
from compress.tuning import tune

if TYPE_CHECKING:
    from datasets import Dataset

    from compress.data.task import TaskData
    from compress.exporters.int8 import Ranges
    from compress.records.certificate import VariantResult
    from compress.records.latency import Setting

EXPORT_ROWS = 256
"""Rows for calibration, spread evenly over the training split."""


LoadData = Callable[..., "TaskData"]


@check_arguments
@dataclass(frozen=True)
class RaceOptions:
    """The settings and the device on which a bundle's files are raced.

    max_drop  how much of the score, in its own unit, int8 may lose
    """

    settings: "Sequence[Setting]"
    device: DeviceOptions = DeviceOptions()
    max_drop: Share = 0.005


@check_arguments
def export(
    model: ModelLike,
    out: PathName | None = None,
    *,
    to: str = "onnx",
    precisions: Sequence[str] = (),
    opset: int | None = None,
    race: RaceOptions | None = None,
    fixed: FixedOptions = FixedOptions(),
    data: DataLike | None = None,
    columns: ColumnOptions = ColumnOptions(),
    checkpoint: CheckpointOptions = CheckpointOptions(),
    command: str = "",
    say: Say = lambda _: None,
) -> ExportResult:
    """Write `model` for another runtime into the folder `out`, or, for `onnx`, into the
    bundle itself.

    model        a bundle's or a run's folder, or a checkpoint: alias, folder, hub id
    precisions   number formats of the weights; default: the format's own choice
    opset        export ONNX again from the weights at this opset; None: use the
                 bundle's files
    race         race variants of a bundle's files first, and export the fastest: see
                 `compress.tuning`
    fixed        lengths of files for NPUs, Core ML and Core AI, and the allowed loss
    data         examples of the task, as for `distill`: int8 is calibrated on them, and
                 scored in a race; files for NPUs are certified on them
    columns      columns of the data, if they cannot be detected
    checkpoint   how to read a checkpoint: see `CheckpointOptions`
    command      the command to record in the result
    say          called with progress messages

    Raises ExportError for options that do not go together, a missing extra, a model
    that the format cannot hold, or a file whose answers differ from the model's;
    nothing is written then. Raises DeviceError if the device fails."""
    if data is None:
        columns.refuse()
    model = name_of(model)
    source = load_source(model, **asdict(checkpoint))
    out = None if out is None else Path(out)
    check(source, out, to=to, precisions=precisions, opset=opset)
    if data is not None and race is None and not formats.find(to).reads_data:
        raise ExportError(
            f"--data: --for {to} reads it only with --tune; leave it out, or add --tune"
        )
    if race is not None and opset is not None:
        raise ExportError(
            "--tune and --opset: the race uses our own opset; give one of the two"
        )

    load_data: LoadData | None = None
    if data is not None:
        load_data = partial(
            Bundle.load_data, data=data, text=columns.text, label=columns.label
        )
    tried: Sequence[VariantResult] = ()
    options = ExportOptions(
        name=model,
        command=command,
        fixed=fixed,
        load_data=load_data,
        calibrate=None if load_data is None else partial(calibrate, load_data),
        certify=certify_vectors,
        say=say,
    )
    with ExitStack() as stack:
        if race is not None:
            source, tried = stack.enter_context(
                tune_source(source, race, load_data, in_place=out is None, say=say)
            )
        result = write_export(
            source, out, to=to, precisions=precisions, opset=opset, options=options
        )
    return replace(result, tried=tuple(tried))


@contextmanager
def tune_source(
    source: ExportSource,
    race: RaceOptions,
    load_data: LoadData | None,
    *,
    in_place: bool,
    say: Say,
) -> Iterator[tuple[Bundle, "Sequence[VariantResult]"]]:
    """Yield the bundle with the files that are fastest on the device, and all variants
    that were tried.

    The validation split decides, the test split certifies if it has labels. in_place:
    replace the given bundle by the tuned one; else the tuned one is temporary. Raises
    ExportError for a model that cannot be a bundle, DeviceError if the device fails.
    """
    if not isinstance(source, Bundle) and source.task is None:
        raise ExportError(
            f"{source.name}: --tune needs a model with a head for a task; this one has "
            "none"
        )
    with (
        tempfile.TemporaryDirectory(prefix="compress-export.") as scratch,
        open_chosen(race.device, say=say) as device,
    ):
        bundle = (
            source
            if isinstance(source, Bundle)
            else source.write(Path(scratch) / "bundle")
        )
        found = None if load_data is None else load_data(bundle)
        test = None if found is None else found.test
        made = tune(
            bundle,
            device=device,
            settings=race.settings,
            evaluator=None if found is None else bundle.evaluator(found.validation),
            calibration=() if found is None else calibration_rows(bundle, found),
            proof=None if test is None else bundle.evaluator(test),
            split="validation" if test is None else "test",
            data="" if found is None else found.name,
            max_drop=race.max_drop,
            out=None if in_place else Path(scratch) / "tuned" / bundle.path.name,
            say=say,
        )
        yield made.bundle, made.tried


def calibrate(load_data: LoadData, bundle: Bundle, file: Path) -> "Ranges":
    """Compute the ranges of an fp32 file of the bundle on its data."""
    return compute_ranges(file, calibration_rows(bundle, load_data(bundle)))


def calibration_rows(bundle: Bundle, data: "TaskData") -> "Dataset":
    """Encode examples of the training split for calibration."""
    return bundle.evaluator(data.train).subsample(EXPORT_ROWS).rows
