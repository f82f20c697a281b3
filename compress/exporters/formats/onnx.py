"""ONNX for onnxruntime: the bundle (or the folder of embeddings) itself, with the precisions asked for besides fp32 and
int8, which are always in it."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from compress.exporters import manifest
from compress.exporters.artifact import FILES, Bundle
from compress.exporters.formats.outcome import Made, Outcome
from compress.exporters.formats.subject import OPSET, Subject, name_of
from compress.exporters.manifest import Contents
from compress.exporters.parity import onnx_run
from compress.exporters.session import certificate

if TYPE_CHECKING:
    from compress.exporters.checkpoint import Writer

PRECISIONS = tuple(FILES)
DEFAULT = ("fp32", "int8")
NOTES = {"fp16": "for GPU and WebGPU", "w8": "for size", "q4": "for size"}
VERDICTS = {
    "fp16": "fp16: onnxruntime's CPU provider computes most of it in float32, behind casts: on an x86 CPU it saves "
    "space, not time. It is for GPUs and WebGPU",
    "w8": "w8, q4: for a smaller file where int8 activations cost too much score; int8 is faster on a CPU",
}


def write(subject: Subject, folder: Path, precisions: Sequence[str]) -> Outcome:
    """All of the bundle in `folder`."""
    outcome = _made(subject, precisions)
    if subject.bundle is None:
        shutil.copytree(subject.folder, folder, dirs_exist_ok=True)
        for precision in _wanted(subject, precisions):
            if subject.onnx(precision) != subject.folder / name_of(precision):
                shutil.copyfile(subject.onnx(precision), folder / name_of(precision))
        return outcome
    bundle = subject.bundle.copied(folder)
    if subject.remade:
        bundle = _without_certificates(bundle)
    _put(subject, bundle, precisions)
    return outcome


def into(subject: Subject, precisions: Sequence[str]) -> Outcome:
    """The new files in the bundle itself, one by one."""
    outcome = _made(subject, precisions)
    assert subject.bundle is not None, "only a bundle that is there already"
    _put(subject, subject.bundle, precisions)
    return outcome


def write_generative(source: "Writer", folder: Path, opset: int | None) -> Outcome:
    """A model that writes text: encoder and decoders, in the precisions of its kind."""
    source.write(folder, opset=OPSET if opset is None else opset)
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.onnx"))
    return Outcome(tuple(Made(name, "int8" if "quantized" in name else "fp32", None) for name in files))


def add(folder: Path, name: str, text: str) -> None:
    """The file in a folder of any kind, and in its list of contents where it has one."""
    if (folder / manifest.NAME).is_file():
        Bundle.load(folder).attach(name, text)
        return
    (folder / name).write_text(text, encoding="utf-8")
    if (folder / manifest.CONTENTS_NAME).is_file():
        files = manifest.stamps(folder)
        del files[manifest.CONTENTS_NAME]
        kind = json.loads((folder / manifest.CONTENTS_NAME).read_text(encoding="utf-8"))["kind"]
        found = replace(Contents.read(folder, kind), files=files)
        (folder / manifest.CONTENTS_NAME).write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")


def _made(subject: Subject, precisions: Sequence[str]) -> Outcome:
    made = []
    for precision in _wanted(subject, precisions):
        path = subject.onnx(precision)
        apart, note = subject.differs(onnx_run(path)), NOTES.get(precision, "")
        made.append(Made(name_of(precision), precision, apart, note, certificate=certificate(path)))
    weights = "w8" if {"w8", "q4"} & set(precisions) else ""
    said = [VERDICTS[key] for key in ("fp16" if "fp16" in precisions else "", weights) if key]
    return Outcome(tuple(made), tuple(said))


def _wanted(subject: Subject, precisions: Sequence[str]) -> list[str]:
    """At another opset, whatever the bundle has is made anew."""
    had = subject.files if subject.remade else {}
    return [precision for precision in FILES if precision in (*DEFAULT, *precisions, *had)]


def _put(subject: Subject, bundle: Bundle, precisions: Sequence[str]) -> None:
    for precision in FILES:
        if precision not in _wanted(subject, precisions):
            continue
        path = subject.onnx(precision)
        if path != subject.folder / FILES[precision]:
            bundle = bundle.put(precision, path)


def _without_certificates(bundle: Bundle) -> Bundle:
    """The files they were of are not in this bundle."""
    from compress.exporters.evidence import report_of
    from compress.records.run_report import NAME

    if not (bundle.path / NAME).is_file():
        return bundle
    return bundle.attach(NAME, replace(report_of(bundle), certificates=()).to_json())
