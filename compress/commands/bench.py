"""Measure the latency of bundles and model files on a device."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated

from compress.arguments import BundleLike, Count, DataLike, check_arguments, name_of
from compress.benchmark import arguments
from compress.benchmark.devices import measure, open_chosen
from compress.config.options import DeviceOptions
from compress.errors import ArgumentError, CompressError, ExportError, did_you_mean
from compress.exporters import formats
from compress.exporters.artifact import Bundle
from compress.exporters.formats.format import Format, Race
from compress.progress import Say
from compress.provenance import find_missing, install_command
from compress.records.bench_result import BenchResult, RacedFormat
from compress.records.latency import DeviceError, Setting
from compress.values import Range

ALL = "all"
ABSENT = "not installed here"
OTHER_ORT = ".with_runtime_opt.ort"
"""The suffix of files for providers other than the CPU."""


@check_arguments
def bench(
    files: Sequence[BundleLike],
    *,
    device: DeviceOptions = DeviceOptions(),
    precision: str = "",
    formats: str = "",
    data: DataLike | None = None,
    threads: Sequence[int] = (1,),
    batch: Sequence[int] = (1,),
    seq: Sequence[int] = (),
    rounds: Annotated[int, Range(2)] = 8,
    runs: Count = 15,
    sustain: Annotated[float | None, Range(0.001)] = None,
    say: Say = lambda _: None,
) -> BenchResult:
    """Measure the latency of files on a device: interleaved, warmed up, in two passes,
    with a verdict on noise.

    files      folders of bundles, or .onnx, .ort, .xml, .tflite or .pte files; they are
               raced together
    device     where to measure, and how to connect: see `DeviceOptions`
    precision  which files of the bundles to measure, such as "int8,fp32"; default: all
               of them
    formats    export each bundle to these formats, such as "onnx,openvino", and race
               those files instead; "all": every format whose runtime is installed here
    data       examples of the task, as for `distill`, for the formats that are
               calibrated: npu, and openvino in int8
    threads, batch, seq    the settings: every combination of threads, texts per batch,
                           and tokens per text. seq: () takes 128 tokens, or the
                           bundles' `max_length` if that is less
    rounds, runs           interleaved rounds per setting, half of them in each pass;
                           timed runs per round
    sustain    seconds for which each file then runs without a pause, at the first
               setting; None: skip this

    Raises BundleError for a folder that is not a bundle, DeviceError for a device that
    fails or cannot be reached, ExportError for a format that is unknown, or was named
    and cannot be written."""
    if not files:
        raise ArgumentError("files", "at least one bundle or file", "none")
    exported = ExportedFormats({}, {}, {})
    kind = device.device.partition(":")[0]
    bundles = [
        Bundle.load(file) for file in files if formats or Path(name_of(file)).is_dir()
    ]
    lengths = [bundle.manifest.max_length for bundle in bundles]
    seq = seq or (min([arguments.DEFAULT_SEQ, *lengths]),)
    with ExitStack() as stack:
        if formats:
            if kind not in ("local", "ssh"):
                raise DeviceError(
                    "--formats: exported files are raced on local or ssh, not on "
                    f"{device.device}"
                )
            scratch = Path(
                stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="compress-bench.")
                )
            )
            if max(seq) > min(lengths):
                raise DeviceError(
                    f"--seq {max(seq)}: exported files take at most the max_length of "
                    f"their bundle, {min(lengths)}"
                )
            exported = export_formats(
                bundles,
                formats,
                scratch,
                precision=precision,
                data=data,
                length=max(seq),
                rows=max(batch),
                say=say,
            )
        elif data is not None:
            raise DeviceError(
                "--data: only calibrates exported files; expected --formats too"
            )
        chosen = exported.files or arguments.list_files(
            [Path(name_of(file)) for file in files], precision
        )
        settings = [Setting(*values) for values in product(threads, batch, seq)]
        opened = stack.enter_context(open_chosen(device, say=say))
        result = measure(
            opened,
            chosen,
            settings,
            rounds=rounds,
            runs=runs,
            seconds=sustain,
        )
    absent = [each for each, reason in exported.left_out.items() if reason == ABSENT]
    install = install_command(*absent) if absent else ""
    return replace(
        result,
        formats=exported.known,
        left_out=exported.left_out,
        install=install,
    )


def choose_formats(
    requested: str,
    *,
    precision: str,
    calibrated: bool,
    rows: int,
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the precisions of each format to race, and the reason why every other
    format of `all` is left out.

    calibrated  whether there are data; rows: the largest batch

    Raises ExportError for a format that is unknown, or was named and does not run here.
    """
    elsewhere = {
        each.name: each.race for each in formats.known() if isinstance(each.race, str)
    }
    timed = [each for each in formats.known() if each.name not in elsewhere]
    known = [each.name for each in timed]
    named = known
    if requested != ALL:
        named = [name.strip() for name in requested.split(",")]
    for name in named:
        if name not in known:
            others = f"expected all, or some of {', '.join(known)}."
            reason = elsewhere.get(name, others + did_you_mean(name, known))
            raise ExportError(f"--formats {name}: cannot be timed here: {reason}")
    asked = [name.strip() for name in precision.split(",") if name]
    _refuse_unwritten(asked, [each for each in timed if each.name in named])
    chosen: dict[str, list[str]] = {}
    left_out = elsewhere if requested == ALL else {}
    for each in timed:
        if each.name not in named:
            continue
        race = each.race
        assert isinstance(race, Race), "the others are timed elsewhere"
        usual = (*race.precisions, *(race.with_data if calibrated else ()))
        precisions = [one for one in asked or usual if one in each.precisions]
        if _needs_install(each):
            left_out[each.name] = ABSENT
        elif rows > 1 and race.one_row:
            left_out[each.name] = (
                f"takes one row at a time; expected --batch 1, not {rows}"
            )
        elif race.needs_data and not calibrated:
            left_out[each.name] = (
                "is calibrated on rows of the task; expected --data with them"
            )
        elif not precisions:
            left_out[each.name] = (
                f"writes {', '.join(each.precisions)}; expected one of these as "
                f"--precision, not {precision}"
            )
        else:
            chosen[each.name] = precisions
    if left_out and (requested != ALL or not chosen):
        name, reason = next(iter(left_out.items()))
        raise ExportError(
            f"--formats {name}: {reason}"
            + (f": {install_command(name)}" if reason == ABSENT else "")
        )
    if calibrated:
        _refuse_data(chosen, timed)
    return chosen, left_out


def _refuse_unwritten(precisions: Sequence[str], formats: Sequence[Format]) -> None:
    """Raise ExportError for a precision in which none of these formats is written."""
    written = {one for each in formats for one in each.precisions}
    if unknown := [one for one in precisions if one not in written]:
        names = ", ".join(each.name for each in formats)
        raise ExportError(
            f"--formats {names}: writes {', '.join(sorted(written))}; expected some of "
            f"these as --precision, not {unknown[0]}"
        )


def _refuse_data(
    chosen: Mapping[str, Sequence[str]], formats: Sequence[Format]
) -> None:
    """Raise ExportError if no chosen file is calibrated on data."""
    races = [(each.race, chosen[each.name]) for each in formats if each.name in chosen]
    for race, precisions in races:
        assert isinstance(race, Race), "the others are timed elsewhere"
        if race.needs_data or {*race.with_data} & {*precisions}:
            return
    raise ExportError(
        f"--data: no file of {', '.join(chosen)} is calibrated; expected a format and "
        "a precision that is, such as --formats openvino --precision int8"
    )


def _needs_install(format: Format) -> bool:
    extra = format.extra
    return extra is not None and extra.required and bool(find_missing(extra.name))


@dataclass(frozen=True)
class ExportedFormats:
    """Files of several formats by name: `files`, and `known`, the facts about each;
    `left_out`: format -> why it is left out."""

    files: dict[str, Path]
    known: dict[str, RacedFormat]
    left_out: dict[str, str]


def export_formats(
    bundles: Sequence[Bundle],
    formats: str,
    folder: Path,
    *,
    precision: str,
    data: DataLike | None,
    length: int,
    rows: int,
    say: Say,
) -> ExportedFormats:
    """Export each bundle to the named formats, or with `all` to every one that can be,
    in subfolders of `folder`.

    length  tokens of files with a fixed length; rows: the largest batch

    Raises ExportError for a format that is unknown, or was named and cannot be
    exported, or if none can be.
    """
    from compress.commands.export import export
    from compress.exporters.writers.context import FixedOptions

    chosen, left_out = choose_formats(
        formats,
        precision=precision,
        calibrated=data is not None,
        rows=rows,
    )
    files = dict[str, Path]()
    known = dict[str, RacedFormat]()
    fixed = FixedOptions((length,))
    for bundle, (to, every) in product(bundles, chosen.items()):
        groups = [every]
        while groups:
            precisions = groups.pop(0)
            say(f"{bundle.path}: exporting to {to} {', '.join(precisions)}")
            out = folder / f"{len(files)}-{to}"
            try:
                made = export(
                    str(bundle.path),
                    out,
                    to=to,
                    precisions=precisions,
                    fixed=fixed,
                    data=data,
                )
            except CompressError as error:
                if formats != ALL:
                    raise
                if len(precisions) > 1:  # some may be possible
                    groups = [[each] for each in precisions]
                else:
                    left_out[f"{to} {precisions[0]}"] = str(error)
                continue
            for each in made.files:
                if (
                    each.difference is None
                    or each.precision not in precisions
                    or each.file.endswith(OTHER_ORT)
                ):
                    continue
                name = f"{bundle.path}:{to} {each.precision}"
                size = sum(made.sizes[part] for part in (each.file, *each.with_files))
                files[name] = made.path / each.file
                known[name] = RacedFormat(
                    to,
                    each.precision,
                    size,
                    each.difference.largest,
                    each.difference.logit,
                )
    if not files:
        raise ExportError(
            f"--formats {formats}: none can be exported: {'; '.join(left_out.values())}"
        )
    return ExportedFormats(files, known, left_out)


def bench_visitors(
    measure: Callable[[], BenchResult],
    visitors: int,
    *,
    device: str,
    say: Say,
) -> Iterator[BenchResult]:
    """Call `measure` for several browsers, one after the other; yield each result.

    Each browser gets its own link, and a name such as `browser 1`: two phones cannot be
    told apart by what a page over plain http reports. Raises the errors of `measure`,
    and DeviceError if the device is not a browser.
    """
    if device != "browser":
        raise DeviceError(
            f"--visitors {visitors}: only applies to --device browser, not {device}"
        )
    for name in (f"browser {number}" for number in range(1, visitors + 1)):
        say(f"{name} of {visitors}")
        yield replace(measure(), device=name)
