"""A model for another runtime: one file per format, each with

    PRECISIONS   those it can write, the ones it writes unless asked first: `DEFAULT` of them
    write(subject, folder, precisions) -> Outcome

and this, which gives all of them the same frame: the folder is whole or not there, has the tokenizer, and an
`export.json` that says what each file is, how far its answers are from fp32's, and what made it.
"""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from compress.errors import ExportError, did_you_mean
from compress.exporters import manifest
from compress.exporters import manifest as manifests
from compress.exporters.artifact import check_writable
from compress.exporters.checkpoint import Shipped, Source, Writer
from compress.exporters.formats import onnx
from compress.exporters.formats.outcome import Made, Outcome, far_off
from compress.exporters.formats.subject import Subject, copy_tokenizer
from compress.exporters.formats.tuned import Race, RealRows, tuned
from compress.exporters.manifest import Stamp
from compress.io import filled
from compress.provenance import versions

if TYPE_CHECKING:
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
    race: Race | None = None,
    rows: RealRows | None = None,
    command: str = "",
    say: Callable[[str], None] = lambda _: None,
) -> Exported:
    """Writes what `source` holds for another runtime into the folder `out`, or, for `onnx`, into the bundle itself.

    precisions   what the weights are held in; the format's own choice where none is given
    opset        ONNX anew from the weights, at this opset; none: the bundle's own files
    race         a bundle's files are first raced, and the fastest taken: see `tuned`
    rows         examples of the task: int8 is calibrated on them, and judged in a race
    command      what is written down as the command that did it
    say          is told what is being done

    Raises ExportError for a precision or opset that cannot be, a missing extra, a model that this format cannot hold,
    or a file whose answers are not the model's; nothing is left then.
    """
    if to not in FORMATS:
        raise ExportError(f"--for {to}: no such format.{did_you_mean(to, FORMATS)}")
    writer = importlib.import_module(f"{__name__}.{to}")
    chosen = _chosen(precisions or writer.DEFAULT, writer.PRECISIONS, to)
    if out is None and not (to == "onnx" and opset is None and isinstance(source, Shipped)):
        raise ExportError("expected --out with the folder to write: only new precisions go into a bundle itself")
    if out is not None:
        _free(out, to, source)
    elif isinstance(source, Shipped):
        check_writable(source.bundle.path)
    if race is not None:
        if opset is not None:
            raise ExportError(
                "--tune and --opset: the race is between graphs at our own opset; expected one of the two"
            )
        with tuned(source, race, rows, in_place=out is None, say=say) as (fastest, tried):
            made = export(fastest, out, to=to, precisions=precisions, rows=rows, command=command, say=say)
            return replace(made, tried=tuple(tried))
    if isinstance(source, Writer):
        if to != "onnx" or precisions or out is None:
            raise ExportError(
                f"{source.name}: writes text, and is exported as ONNX in fp32 and int8 only; expected --for onnx, "
                "--out and no --precision"
            )
        return _generative(source, out, opset, command)
    with Subject.opened(source, opset=opset, rows=rows) as subject:
        if out is None:
            return _in_place(subject, chosen, command)
        with filled(out) as folder:
            outcome = writer.write(subject, folder, chosen)
            if to not in ("onnx", "text"):  # which copies all there is, and has it inside
                copy_tokenizer(subject.folder, folder)
            exported = _exported(out, folder, to, outcome, subject.warnings)
            onnx.add(folder, NAME, _as_json(exported, outcome, folder, subject, command))
    return exported


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


def _chosen(precisions: Sequence[str], known: Sequence[str], to: str) -> list[str]:
    for precision in precisions:
        if precision not in known:
            raise ExportError(f"--precision {precision}: --for {to} writes {', '.join(known)}")
    return list(dict.fromkeys(precisions))


def _free(out: Path, to: Format, source: Source) -> None:
    """Raises ExportError where something is that is no export, and that the export would take the place of."""
    origin = source.bundle.path if isinstance(source, Shipped) else Path(source.name)
    if origin.exists() and origin.resolve().is_relative_to(out.resolve()):
        raise ExportError(
            f"--out {out}: holds the model itself, which the export would replace; expected another folder"
        )
    if to != "onnx" and (out / manifests.NAME).is_file():
        raise ExportError(f"--out {out}: is a bundle, and --for {to} writes none; expected a new folder")
    ours = any((out / name).is_file() for name in (NAME, manifests.NAME, manifest.CONTENTS_NAME))
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
