"""ONNX for onnxruntime: the bundle itself, with the precisions asked for besides fp32 and int8."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from compress.export.bundle import FILES, Bundle, Precision
from compress.export.formats.outcome import Made, Outcome
from compress.export.formats.subject import Subject, certificate
from compress.export.trial import onnx_run

PRECISIONS = tuple(FILES)
DEFAULT = ("fp32", "int8")
NOTES = {
    "fp16": "for GPU and WebGPU",
    "w8": "for size",
    "q4": "for size",
}


def write(subject: Subject, folder: Path, precisions: Sequence[str]) -> Outcome:
    """The bundle in `folder`; fp32 and int8 are always in it."""
    outcome = _made(subject, precisions)
    bundle = subject.bundle.copied(folder)
    if subject.remade:
        bundle = _without_certificates(bundle)
    _put(subject, bundle, precisions)
    return outcome


def into(subject: Subject, precisions: Sequence[str]) -> Outcome:
    """The same in the bundle itself, file by file."""
    outcome = _made(subject, precisions)
    _put(subject, subject.bundle, precisions)
    return outcome


def _made(subject: Subject, precisions: Sequence[str]) -> Outcome:
    paths = {precision: subject.onnx(precision) for precision in _wanted(subject, precisions)}
    return Outcome(
        files=tuple(
            Made(
                FILES[precision],
                precision,
                subject.differs(onnx_run(path)),
                NOTES.get(precision, ""),
                certificate=certificate(path),
            )
            for precision, path in paths.items()
        ),
        verdicts=verdicts(precisions),
    )


def verdicts(precisions: Sequence[str]) -> tuple[str, ...]:
    """What to use each precision for."""
    said = []
    if "fp16" in precisions:
        said.append(
            "fp16: onnxruntime's CPU provider computes most of it in float32, behind casts: on an x86 CPU it saves "
            "space, not time. It is for GPUs and WebGPU"
        )
    if {"w8", "q4"} & set(precisions):
        said.append(
            "w8, q4: products are computed in float32 from weights expanded on the fly; int8 is faster on a CPU, these "
            "are for a smaller file where int8 activations cost too much score"
        )
    return tuple(said)


def _wanted(subject: Subject, precisions: Sequence[str]) -> list[Precision]:
    """At another opset, whatever the bundle has is made anew."""
    had = subject.bundle.files() if subject.remade else {}
    return [precision for precision in FILES if precision in (*DEFAULT, *precisions, *had)]


def _put(subject: Subject, bundle: Bundle, precisions: Sequence[str]) -> None:
    for precision in _wanted(subject, precisions):
        path = subject.onnx(precision)
        if path != subject.bundle.path / FILES[precision]:
            bundle = bundle.put(precision, path)


def _without_certificates(bundle: Bundle) -> Bundle:
    """The files they were of are not in this bundle."""
    from compress.report.evidence import NAME, report_of

    if not (bundle.path / NAME).is_file():
        return bundle
    return bundle.attach(NAME, replace(report_of(bundle), certificates=()).to_json())
