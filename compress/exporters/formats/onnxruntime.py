"""Export for onnxruntime: the bundle itself, ORT files for phones, the web layout, and texts in, labels out.

onnx   the bundle with the precisions asked for besides fp32 and int8, which it always has
web    the layout that transformers.js loads: config.json, tokenizer.json, onnx/model_quantized.onnx, ...
text   one file that takes a string and answers with a label, or the words' labels: see `compress.exporters.tokenizer`
ort    what onnxruntime's small builds for phones load, with the list of operators that such a build needs. It is
       written by onnxruntime as it opens a file: `.ort` holds the graph as optimised for the CPU provider,
       `.with_runtime_opt.ort` one optimised less, for providers that take parts of the graph (CoreML, NNAPI), with
       the rest of the optimisations recorded, to be replayed where `session.enable_saved_runtime_optimizations` is 1.
       Nothing that only x86 has is baked in. The optimisers that a file of ours wants off are off while it is
       written: in an .ort file they could not be taken back.
"""

import logging
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnxruntime

from compress.data.task import TaskData
from compress.errors import ExportError
from compress.exporters.artifact import FILES, Precision
from compress.exporters.formats import ExportContext, ExportedFile, ExportResult
from compress.exporters.session import (
    Run,
    certificate,
    create_session,
    onnx_run,
    quiet_logging,
    read_model,
    session_entries,
    session_options,
)
from compress.exporters.tokenizer import text_file
from compress.records.run_report import REPORT

if TYPE_CHECKING:
    from compress.exporters.predictor import Text

NOTES = {"fp16": "for GPU and WebGPU", "w8": "for size", "q4": "for size"}
VERDICTS = {
    "fp16": "fp16: onnxruntime's CPU provider computes most of it in float32, behind casts: on an x86 CPU it saves "
    "space, not time. It is for GPUs and WebGPU",
    "w8": "w8, q4: for a smaller file where int8 activations cost too much score; int8 is faster on a CPU",
}


def write_onnx(context: ExportContext, folder: Path, precisions: Sequence[Precision]) -> ExportResult:
    """Write all of the bundle to `folder`; where that is the bundle itself, the new files alone."""
    given = context.bundle
    if given.manifest.kind == "generative":
        files = sorted(path.relative_to(given.path).as_posix() for path in given.path.rglob("*.onnx"))
        given.copy_to(folder)
        return ExportResult(
            tuple(ExportedFile(name, "int8" if "quantized" in name else "fp32", None) for name in files)
        )
    had = given.files() if context.remade else {}  # at another opset, whatever the bundle has is made anew
    wanted = [precision for precision in FILES if precision in ("fp32", "int8", *precisions, *had)]
    made = []
    for precision in wanted:
        path = context.onnx(precision)
        apart, note = context.differs(onnx_run(path)), NOTES.get(precision, "")
        made.append(ExportedFile(FILES[precision], precision, apart, note, certificate=certificate(path)))
    bundle = given if folder == given.path else given.copy_to(folder)
    if context.remade and REPORT in bundle.manifest.files:  # certificates of files that are not in this bundle
        bundle = bundle.attach(REPORT, replace(bundle.report(), certificates=()).to_json())
    for precision in wanted:
        if context.onnx(precision) != given.path / FILES[precision]:
            bundle = bundle.put(precision, context.onnx(precision))
    weights = "w8" if {"w8", "q4"} & set(precisions) else ""
    said = [VERDICTS[key] for key in ("fp16" if "fp16" in precisions else "", weights) if key]
    return ExportResult(tuple(made), tuple(said))


DTYPES = {"fp32": "fp32", "int8": "q8", "fp16": "fp16", "q4": "q4"}
"""The `dtype` under which transformers.js looks for a file; `w8` has none."""
WEB_VERDICTS = {
    "int8": "int8: for wasm. Its logits differ a little between wasm and native processors on the very same file, so "
    "certify it there: compress quantize --device browser",
    "fp16": "fp16: for WebGPU; wasm computes it in float32, slower than the int8 file",
}


def write_web(context: ExportContext, folder: Path, precisions: Sequence[Precision]) -> ExportResult:
    """Copy the ONNX files by their names on the hub; `dtype: "q8"` of transformers.js is int8."""
    made = []
    for precision in precisions:
        source = context.onnx(precision)
        target = folder / FILES[precision]
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, target)
        dtype = f'transformers.js: dtype "{DTYPES[precision]}"' if precision in DTYPES else "onnxruntime-web only"
        proof = certificate(source)
        apart = context.differs(onnx_run(source))
        made.append(ExportedFile(FILES[precision], precision, apart, dtype, certificate=proof))
    return ExportResult(tuple(made), tuple(verdict for each, verdict in WEB_VERDICTS.items() if each in precisions))


def write_text(context: ExportContext, folder: Path, precisions: Sequence[Precision]) -> ExportResult:
    """Write a file for each precision: `model_text.onnx` is int8, the others have theirs in their names."""
    if context.bundle.manifest.kind != "task":
        raise ExportError(f"{context.name}: gives vectors, no labels; expected a model for a task")
    if context.remade:
        raise ExportError("--opset: a text file has its bundle's own; expected no --opset")
    bundle = context.bundle
    texts = [] if context.load_data is None else _all_texts(context.load_data(bundle))
    made, verdicts = [], []
    for precision in precisions:
        name = "model_text.onnx" if precision == "int8" else f"model_text_{precision}.onnx"
        found = text_file(bundle, folder / name, precision=precision, texts=texts)
        made.append(ExportedFile(name, precision, None, "text in", certificate=certificate(bundle.files()[precision])))
        given = f", and all {found.given:,} texts of the data" if found.given else ""
        verdicts.append(
            f"{name}: reads {found.hard} hard texts{given} as the tokenizer does; needs no custom operators: any full "
            "build of onnxruntime runs it, for Python, mobile or the web"
        )
    return ExportResult(tuple(made), tuple(verdicts))


def _all_texts(data: TaskData) -> "list[Text]":
    """Return the different texts, or pairs, of every split, in their order; words as one text, with spaces between."""
    pair = ("question", "context") if data.task.kind == "qa" else ("text", "text_pair")
    columns = pair if data.task.pair else ("words",) if data.task.kind == "tagging" else ("text",)
    splits = [split for split in (data.train, data.validation, data.test) if split is not None]
    rows = [row for split in splits for row in zip(*(split[name][:] for name in columns), strict=True)]
    if data.task.pair:
        return list(dict.fromkeys(rows))
    return list(dict.fromkeys(text if isinstance(text, str) else " ".join(text) for (text,) in rows))


OPERATORS = "required_operators_and_types.config"
DISABLED = "optimization.disable_specified_optimizers"
NCHWC = "NchwcTransformer"
"""Lays convolutions out for x86; onnxruntime's own converter leaves it out of portable files, too."""


def write_ort(context: ExportContext, folder: Path, precisions: Sequence[Precision]) -> ExportResult:
    """Write both styles of each precision, and one list of operators for all of them."""
    made: list[ExportedFile] = []
    fixed: list[Path] = []
    for precision in precisions:
        source = context.onnx(precision)
        stem = Path(FILES[precision]).stem
        proof = certificate(source)
        for name, runtime in ((f"{stem}.ort", False), (f"{stem}.with_runtime_opt.ort", True)):
            _convert(source, folder / name, runtime=runtime)
            apart = context.differs(_run_ort(folder / name))
            note = "for CoreML, NNAPI" if runtime else "for the CPU"
            made.append(ExportedFile(name, precision, apart, note, certificate=proof))
        fixed.append(folder / f"{stem}.ort")
    _list_operators(folder, made)
    verdicts = [verdict for each in precisions for verdict in _mobile_verdicts(context.onnx(each), each)]
    listed = ExportedFile(OPERATORS, "", None, "for a build of it")
    return ExportResult(files=(*made, listed), verdicts=tuple(verdicts))


def _convert(source: Path, target: Path, *, runtime: bool) -> None:
    entries = session_entries(read_model(source))
    # A list of disabled optimisers replaces what the entry says, hence both in one
    disabled = [name for name in entries.pop(DISABLED, "").split(";") if name] + [NCHWC]
    options = session_options(1, entries)
    options.optimized_model_filepath = str(target)
    options.add_session_config_entry("session.save_model_format", "ORT")
    if runtime:
        options.add_session_config_entry("optimization.minimal_build_optimizations", "save")
    create_session(source, options, source, disabled_optimizers=disabled)


def _run_ort(path: Path) -> Run:
    session = onnxruntime.InferenceSession(path, session_options(1, {}), providers=["CPUExecutionProvider"])
    return lambda row: session.run(None, dict(row))


def _list_operators(folder: Path, made: Sequence[ExportedFile]) -> None:
    from onnxruntime.tools.ort_format_model import create_config_from_models

    with (
        quiet_logging(logging.WARNING),
        warnings.catch_warnings(action="ignore", category=ResourceWarning),
    ):  # it closes no file
        create_config_from_models([folder / each.file for each in made], folder / OPERATORS, True)
    target = folder / OPERATORS
    lines = target.read_text(encoding="utf-8").splitlines()  # which name the folder on this machine
    kept = [line if not line.startswith("# - ") else f"# - {Path(line[4:]).name}" for line in lines]
    target.write_text("\n".join(kept) + "\n", encoding="utf-8")


def _mobile_verdicts(source: Path, precision: str) -> list[str]:
    """Put what onnxruntime's mobile usability check finds for NNAPI and CoreML into one sentence each.

    The check goes by operator types alone; it can be too hopeful, hardly too strict.
    """
    from onnxruntime.tools.mobile_helpers import usability_checker as check
    from onnxruntime.tools.onnx_model_utils import ModelProtoWithShapeInfo, optimize_model

    with tempfile.TemporaryDirectory() as scratch, quiet_logging(logging.WARNING):
        basic = Path(scratch) / "basic.onnx"
        optimize_model(source, basic, use_external_initializers=True)
        shaped = ModelProtoWithShapeInfo(basic)
        model = shaped.model_with_shape_info
        found = {
            "NNAPI (Android)": check.check_nnapi_partitions(model, False),
            "CoreML (iOS)": check.check_coreml_partitions(model, False, "coreml_supported_mlprogram_ops.md"),
        }
        del shaped
    return [_verdict(precision, provider, info) for provider, info in found.items()]


def _verdict(precision: str, provider: str, info: Any) -> str:
    names = ", ".join(sorted(name.rpartition(":")[2] for name in info.unsupported_ops))
    taken = f"{info.num_supported_nodes} of {info.num_nodes} nodes in {info.num_partitions} parts, even at fixed shapes"
    if info.suitability().name == "YES":
        return (
            f"{precision}: {provider} can take it: {taken}. Fix the shapes (make_dynamic_shape_fixed) and time it there"
        )
    advice = "use the CPU provider" if info.suitability().name == "NO" else "time it against the CPU provider"
    return f"{precision}: {provider} would take {taken}; it cannot do {names}: {advice}"
