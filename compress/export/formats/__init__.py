"""A bundle for another runtime: one file per format, each with

    PRECISIONS   those it can write, the ones it writes unless asked first: `DEFAULT` of them
    write(subject, folder, precisions) -> Outcome

and this, which gives all of them the same frame: the folder is whole or not there, has the tokenizer, and an
`export.json` that says what each file is, how far its answers are from fp32's, and what made it.
"""

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from compress.errors import ExportError, did_you_mean
from compress.export import manifest as manifests
from compress.export.bundle import Bundle
from compress.export.formats.outcome import Made, Outcome, far_off, versions
from compress.export.formats.subject import Subject, copy_tokenizer
from compress.export.manifest import Stamp
from compress.files import filled

if TYPE_CHECKING:
    from compress.export.predictor import Row

Format = Literal["onnx", "ort", "web", "openvino", "executorch", "litert"]
FORMATS: tuple[Format, ...] = get_args(Format)
NAME = "export.json"


@dataclass(frozen=True)
class Exported:
    """What is in the folder; `sizes` in bytes, by file."""

    path: Path
    to: Format
    files: tuple[Made, ...]
    sizes: Mapping[str, int]
    verdicts: tuple[str, ...]
    warnings: tuple[str, ...]


def export(
    bundle: Bundle,
    out: Path | None,
    *,
    to: Format = "onnx",
    precisions: Sequence[str] = (),
    opset: int | None = None,
    rows: "Sequence[Row]" = (),
    command: str = "",
) -> Exported:
    """Writes the bundle for another runtime into the folder `out`, or, for `onnx`, into the bundle itself.

    precisions   what the weights are held in; the format's own choice where none is given
    opset        ONNX anew from the weights, at this opset; none: the bundle's own files
    rows         encoded examples, for formats that calibrate
    command      what is written down as the command that did it

    Raises ExportError for a precision or opset that cannot be, a missing extra, a model that this format cannot hold,
    or a file whose answers are not the model's; nothing is left then.
    """
    if to not in FORMATS:
        raise ExportError(f"--for {to}: no such format.{did_you_mean(to, FORMATS)}")
    writer = importlib.import_module(f"{__name__}.{to}")
    chosen = _chosen(precisions or writer.DEFAULT, writer.PRECISIONS, to)
    if out is None and to != "onnx":
        raise ExportError(f"--for {to}: expected --out with the folder to write")
    if out is not None:
        _free(out)
    with Subject.opened(bundle, rows=rows) as given:
        subject = given if opset is None else given.at_opset(opset)
        if out is None:
            return _in_place(subject, chosen, writer, command)
        with filled(out) as folder:
            outcome = writer.write(subject, folder, chosen)
            if to != "onnx":  # a bundle has it
                copy_tokenizer(bundle.path, folder)
            exported = _exported(out, folder, to, outcome, subject.warnings)
            _record(exported, outcome, folder, bundle, command)
            if to == "onnx":
                Bundle.load(folder).attach(NAME, (folder / NAME).read_text(encoding="utf-8"))
    return exported


def _in_place(subject: Subject, precisions: Sequence[str], writer: Any, command: str) -> Exported:
    bundle = subject.bundle
    if subject.remade:
        raise ExportError(f"{bundle.path}: --opset makes another bundle; expected --out with its folder")
    outcome = writer.into(subject, precisions)
    exported = _exported(bundle.path, bundle.path, "onnx", outcome, subject.warnings)
    Bundle.load(bundle.path).attach(NAME, _as_json(exported, outcome, bundle.path, bundle, command))
    return exported


def _chosen(precisions: Sequence[str], known: Sequence[str], to: str) -> list[str]:
    for precision in precisions:
        if precision not in known:
            raise ExportError(f"--precision {precision}: --for {to} writes {', '.join(known)}")
    return list(dict.fromkeys(precisions))


def _free(out: Path) -> None:
    """Raises ExportError where something is that is neither an export nor a bundle."""
    ours = any((out / name).is_file() for name in (NAME, manifests.NAME))
    if (out.exists() and not out.is_dir()) or (out.is_dir() and any(out.iterdir()) and not ours):
        raise ExportError(f"{out}: exists and is no export; expected a new folder, or an export to replace")


def _exported(path: Path, folder: Path, to: Format, outcome: Outcome, warned: Sequence[str]) -> Exported:
    names = [name for made in outcome.files for name in (made.file, *made.with_files)]
    sizes = {name: (folder / name).stat().st_size for name in names}
    warnings = (*warned, *outcome.warnings, *far_off(outcome.files))
    return Exported(path, to, outcome.files, sizes, outcome.verdicts, warnings)


def _record(exported: Exported, outcome: Outcome, folder: Path, bundle: Bundle, command: str) -> None:
    (folder / NAME).write_text(_as_json(exported, outcome, folder, bundle, command), encoding="utf-8")


def _as_json(exported: Exported, outcome: Outcome, folder: Path, bundle: Bundle, command: str) -> str:
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
        "source": bundle.path.name,
        "model_type": bundle.manifest.model_type,
        "max_length": bundle.manifest.max_length,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "versions": versions(("compress", "torch", "transformers", *outcome.packages)),
        "files": files,
        "verdicts": exported.verdicts,
        "warnings": exported.warnings,
    }
    return json.dumps(record, indent=2, ensure_ascii=False) + "\n"
