"""A model for another runtime: one file per format, each with

    PRECISIONS   those it can write, the ones it writes unless asked first: `DEFAULT` of them
    write(subject, folder, precisions) -> Outcome

and this, which gives all of them the same frame: the folder is whole or not there, has the tokenizer, and an
`export.json` that says what each file is, how far its answers are from fp32's, and what made it.
"""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from compress.errors import ExportError, did_you_mean
from compress.exporters import manifest
from compress.exporters.artifact import check_writable
from compress.exporters.checkpoint import Shipped, Source, Writer
from compress.exporters.formats import onnx
from compress.exporters.formats.outcome import Made, Outcome, far_off
from compress.exporters.formats.subject import Subject, copy_tokenizer
from compress.exporters.manifest import Stamp
from compress.io import filled
from compress.provenance import versions

if TYPE_CHECKING:
    from compress.data.task import TaskData
    from compress.exporters.artifact import Bundle
    from compress.exporters.int8 import Ranges
    from compress.records.certificate import Tried

Format = Literal["onnx", "ort", "web", "text", "openvino", "executorch", "litert"]
FORMATS: tuple[Format, ...] = get_args(Format)
NAME = "export.json"


@dataclass(frozen=True)
class About:
    """What an export is of."""

    name: str
    model_type: str
    max_length: int


@dataclass(frozen=True)
class Exported:
    """What is in the folder; `sizes` in bytes, by file; `tried`: what was raced before."""

    path: Path
    to: Format
    files: tuple[Made, ...]
    sizes: Mapping[str, int]
    verdicts: tuple[str, ...]
    warnings: tuple[str, ...]
    tried: "tuple[Tried, ...]" = ()


def export(
    source: Source,
    out: Path | None,
    *,
    to: Format = "onnx",
    precisions: Sequence[str] = (),
    opset: int | None = None,
    load_data: "Callable[[Bundle], TaskData] | None" = None,
    calibrate: "Callable[[Bundle, Path], Ranges] | None" = None,
    command: str = "",
) -> Exported:
    """Write what `source` holds for another runtime into the folder `out`, or, for `onnx`, into the bundle itself.

    precisions   what the weights are held in; the format's own choice where none is given
    opset        ONNX anew from the weights, at this opset; none: the bundle's own files
    load_data    loads examples of a bundle's task, whose texts a text file is checked on
    calibrate    finds the ranges of a bundle's fp32 file, for static int8
    command      what is written down as the command that did it

    Raises ExportError for a precision or opset that cannot be, a missing extra, a model that this format cannot hold,
    or a file whose answers are not the model's; nothing is left then.
    """
    writer, chosen = check(source, out, to=to, precisions=precisions, opset=opset)
    if isinstance(source, Writer):
        if to != "onnx" or precisions or out is None:
            raise ExportError(
                f"{source.name}: writes text, and is exported as ONNX in fp32 and int8 only; expected --for onnx, "
                "--out and no --precision"
            )
        return _generative(source, out, opset, command)
    with Subject.opened(source, opset=opset, load_data=load_data, calibrate=calibrate) as subject:
        if out is None:
            return _in_place(subject, chosen, command)
        with filled(out) as folder:
            outcome = writer.write(subject, folder, chosen)
            if to not in ("onnx", "text"):  # which copies all there is, and has it inside
                copy_tokenizer(subject.folder, folder)
            exported = _exported(out, folder, to, outcome, subject.warnings)
            onnx.add(folder, NAME, _as_json(exported, outcome, folder, subject, command))
    return exported


def check(
    source: Source, out: Path | None, *, to: Format, precisions: Sequence[str], opset: int | None
) -> tuple[Any, list[str]]:
    """Raise ExportError for a format, precision or folder that cannot be; return the format's module, and the
    precisions that it is to write."""
    if to not in FORMATS:
        raise ExportError(f"--for {to}: no such format.{did_you_mean(to, FORMATS)}")
    writer = importlib.import_module(f"{__name__}.{to}")
    chosen = list(dict.fromkeys(precisions or writer.DEFAULT))
    for precision in chosen:
        if precision not in writer.PRECISIONS:
            raise ExportError(f"--precision {precision}: --for {to} writes {', '.join(writer.PRECISIONS)}")
    if out is not None:
        _check_free(out, to, source)
    elif to == "onnx" and opset is None and isinstance(source, Shipped):
        check_writable(source.bundle.path)
    else:
        raise ExportError("expected --out with the folder to write: only new precisions go into a bundle itself")
    return writer, chosen


def _generative(source: Writer, out: Path, opset: int | None, command: str) -> Exported:
    with filled(out) as folder:
        outcome = onnx.write_generative(source, folder, opset)
        exported = _exported(out, folder, "onnx", outcome, ())
        about = About(source.name, source.model.config.model_type, source.max_length)
        onnx.add(folder, NAME, _as_json(exported, outcome, folder, about, command))
    return exported


def _in_place(subject: Subject, precisions: Sequence[str], command: str) -> Exported:
    outcome = onnx.into(subject, precisions)
    exported = _exported(subject.folder, subject.folder, "onnx", outcome, subject.warnings)
    onnx.add(subject.folder, NAME, _as_json(exported, outcome, subject.folder, subject, command))
    return exported


def _check_free(out: Path, to: Format, source: Source) -> None:
    """Raises ExportError where something is that is no export, and that the export would take the place of."""
    origin = source.bundle.path if isinstance(source, Shipped) else Path(source.name)
    if origin.exists() and origin.resolve().is_relative_to(out.resolve()):
        raise ExportError(
            f"--out {out}: holds the model itself, which the export would replace; expected another folder"
        )
    if to != "onnx" and (out / manifest.NAME).is_file():
        raise ExportError(f"--out {out}: is a bundle, and --for {to} writes none; expected a new folder")
    ours = any((out / name).is_file() for name in (NAME, manifest.NAME, manifest.CONTENTS_NAME))
    if (out.exists() and not out.is_dir()) or (out.is_dir() and any(out.iterdir()) and not ours):
        raise ExportError(f"{out}: exists and is no export; expected a new folder, or an export to replace")


def _exported(path: Path, folder: Path, to: Format, outcome: Outcome, warned: Sequence[str]) -> Exported:
    names = [name for made in outcome.files for name in (made.file, *made.with_files)]
    sizes = {name: (folder / name).stat().st_size for name in names}
    warnings = (*warned, *outcome.warnings, *far_off(outcome.files))
    return Exported(path, to, outcome.files, sizes, outcome.verdicts, warnings)


def _as_json(exported: Exported, outcome: Outcome, folder: Path, subject: About | Subject, command: str) -> str:
    files = []
    for made in exported.files:
        for name in (made.file, *made.with_files):
            of_model = asdict(made) if name == made.file else {"precision": made.precision}
            known = {key: value for key, value in of_model.items() if key not in ("file", "with_files") and value}
            if "certificate" in known:
                known["certificate"] = json.loads(known["certificate"])
            files.append({"file": name, **asdict(Stamp.of(folder / name)), **known})
    record = {
        "format": 1,
        "for": exported.to,
        "source": Path(subject.name).name or subject.name,
        "model_type": subject.model_type,
        "max_length": subject.max_length,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "versions": versions(("compress", "torch", "transformers", *outcome.packages)),
        "files": files,
        "verdicts": exported.verdicts,
        "warnings": exported.warnings,
    }
    return json.dumps(record, indent=2, ensure_ascii=False) + "\n"
