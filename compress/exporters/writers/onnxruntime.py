"""Export for onnxruntime: the bundle itself, ORT files for phones, the web layout, and
texts in, labels out.

onnx   the bundle with fp32, int8 and the chosen precisions
web    the layout that transformers.js loads: config.json, tokenizer.json,
       onnx/model_quantized.onnx, ...
text   one file that takes a string and answers with a label, or the words' labels: see
       `compress.exporters.tokenizer.text_model`
ort    the format of onnxruntime's small builds for phones, with the list of operators
       that such a build needs. onnxruntime writes it as it opens a file: `.ort` holds
       the graph optimised for the CPU provider; `.with_runtime_opt.ort` a less
       optimised one, for providers that take parts of the graph (CoreML, NNAPI), with
       the other optimisations recorded, to be replayed if
       `session.enable_saved_runtime_optimizations` is 1. Optimisations that only x86
       has are left out; optimisations that one of our files disables are disabled while
       it is written, as an .ort file cannot undo them.
"""

import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from compress.data.audit import texts as texts_of
from compress.data.task import TaskData
from compress.errors import ExportError
from compress.exporters.artifact import revise_card
from compress.exporters.manifest import BUNDLE_FILES, Precision
from compress.exporters.session import (
    RunFeeds,
    create_session,
    onnx_run,
    open_session,
    quiet_logging,
    read_certificate,
    read_model,
    session_entries,
    session_options,
)
from compress.exporters.tokenizer.text_model import text_file
from compress.exporters.writers.context import ExportContext, ExportedFile, ExportResult
from compress.records.run_report import REPORT

if TYPE_CHECKING:
    from compress.data.encoder import Text


def open_file(context: ExportContext, file: Path) -> RunFeeds:
    """Open an ONNX or ORT file."""
    if file.suffix == ".onnx":
        return onnx_run(file)
    session = create_session(file, session_options(1, {}), file)
    return lambda row: session.run(None, dict(row))


def open_text_file(context: ExportContext, file: Path) -> RunFeeds:
    """Open a text file; its rows are texts."""
    session = open_session(file, threads=1)
    return lambda row: session.run(context.bundle.task.graph_outputs, dict(row))


ONNX_NOTES = {"fp16": "for GPU and WebGPU", "w8": "for size", "q4": "for size"}
VERDICTS = {
    ("fp16",): (
        "fp16: onnxruntime's CPU provider computes most of it in float32, behind "
        "casts: on an x86 CPU it saves space, not time. It is for GPUs and WebGPU"
    ),
    ("w8", "q4"): (
        "w8, q4: for a smaller file where int8 activations cost too much score; int8 "
        "is faster on a CPU"
    ),
}


def write_onnx(
    context: ExportContext, folder: Path, precisions: Sequence[Precision]
) -> ExportResult:
    """Write the whole bundle to `folder`, or only the new files if that is the bundle
    itself."""
    source = context.bundle
    if source.manifest.kind == "generative":
        names = sorted(
            path.relative_to(source.path).as_posix()
            for path in source.path.rglob("*.onnx")
        )
        source.copy_to(folder)
        return ExportResult(
            tuple(
                ExportedFile(name, "int8" if "quantized" in name else "fp32", None)
                for name in names
            )
        )
    # at another opset, every file of the bundle is made again
    own = source.files() if context.remade else {}
    wanted = [
        precision
        for precision in BUNDLE_FILES
        if precision in ("fp32", "int8", *precisions, *own)
    ]
    files = [
        _describe(context, precision, ONNX_NOTES.get(precision, ""))
        for precision in wanted
    ]
    bundle = source if folder == source.path else source.copy_to(folder)
    # drop the certificates of files that are not in this bundle
    if context.remade and REPORT in bundle.manifest.files:
        report = replace(bundle.report(), certificates=())
        remade = {str(each): BUNDLE_FILES[each] for each in BUNDLE_FILES if each in own}
        bundle = revise_card(bundle.attach(REPORT, report.to_json()), (), remade)
    for precision in wanted:
        if context.onnx(precision) != source.path / BUNDLE_FILES[precision]:
            bundle = bundle.put(precision, context.onnx(precision))
    verdicts = [
        verdict for group, verdict in VERDICTS.items() if set(group) & set(precisions)
    ]
    return ExportResult(tuple(files), tuple(verdicts))


def _describe(
    context: ExportContext,
    precision: Precision,
    note: str,
    *,
    name: str = "",
    run: RunFeeds | None = None,
) -> ExportedFile:
    """Describe the file `name`, opened by `run`, that was made from the ONNX file of
    this precision: by default that file itself."""
    source = context.onnx(precision)
    difference = context.differs(run or onnx_run(source))
    return ExportedFile(
        name or BUNDLE_FILES[precision],
        precision,
        difference,
        note,
        certificate=read_certificate(source),
    )


DTYPES = {"fp32": "fp32", "int8": "q8", "fp16": "fp16", "q4": "q4"}
"""The `dtype` by which transformers.js selects a file; `w8` has none."""
WEB_VERDICTS = {
    "int8": "int8: for wasm. Its logits differ a little between wasm and native "
    "processors on the very same file, so certify it there: compress quantize --device "
    "browser",
    "fp16": "fp16: for WebGPU; wasm computes it in float32, slower than the int8 file",
}


def write_web(
    context: ExportContext, folder: Path, precisions: Sequence[Precision]
) -> ExportResult:
    """Copy the ONNX files by their names on the hub; `dtype: "q8"` of transformers.js
    is int8."""
    files = []
    for precision in precisions:
        target = folder / BUNDLE_FILES[precision]
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(context.onnx(precision), target)
        dtype = (
            f'transformers.js: dtype "{DTYPES[precision]}"'
            if precision in DTYPES
            else "onnxruntime-web only"
        )
        files.append(_describe(context, precision, dtype))
    return ExportResult(
        tuple(files),
        tuple(verdict for each, verdict in WEB_VERDICTS.items() if each in precisions),
        settings={"dtype": DTYPES.get(precisions[0], "fp32")},
    )


def write_text(
    context: ExportContext, folder: Path, precisions: Sequence[Precision]
) -> ExportResult:
    """Write a file for each precision: `model_text.onnx` is int8, the others have the
    precision in their names."""
    if context.bundle.manifest.task is None:
        raise ExportError(
            f"{context.name}: returns a vector for each token, and answers no text; "
            "expected a model for a task, or --pool for one vector of a text"
        )
    if context.remade:
        raise ExportError(
            "--opset: a text file has the opset of its bundle; expected no --opset"
        )
    load_data = context.options.load_data
    bundle = context.complete(precisions)
    texts = [] if load_data is None else _list_texts(load_data(bundle, labels=False))
    files = []
    verdicts = []
    for precision in precisions:
        name = (
            "model_text.onnx" if precision == "int8" else f"model_text_{precision}.onnx"
        )
        proof = text_file(bundle, folder / name, precision=precision, texts=texts)
        # whose logits `text_file` compares
        files.append(_describe(context, precision, "text in", name=name))
        own = f", and all {proof.given:,} texts of the data" if proof.given else ""
        verdicts.append(
            f"{name}: reads {proof.hard} hard texts{own} as the tokenizer does; needs "
            "no custom operators: any full build of onnxruntime runs it, for Python, "
            "mobile or the web"
        )
    return ExportResult(tuple(files), tuple(verdicts))


def _list_texts(data: TaskData) -> "list[Text]":
    """List the distinct texts, or pairs, of all splits, in order; words are joined to
    one text by spaces."""
    splits = [
        split for split in (data.train, data.validation, data.test) if split is not None
    ]
    rows = dict.fromkeys(row for split in splits for row in texts_of(split))
    if data.task.pair:
        return [(one, other) for one, other in rows]
    return [text for (text,) in rows]


OPERATORS_CONFIG = "required_operators_and_types.config"
DISABLED = "optimization.disable_specified_optimizers"
NCHWC = "NchwcTransformer"
"""The optimiser that lays out convolutions for x86, which onnxruntime's own converter
also leaves out of portable files."""


def write_ort(
    context: ExportContext, folder: Path, precisions: Sequence[Precision]
) -> ExportResult:
    """Write both styles of each precision, and one list of operators for all of
    them."""
    from onnxruntime.tools.ort_format_model import create_config_from_models

    files = []
    verdicts = list[str]()
    for precision in precisions:
        source = context.onnx(precision)
        stem = Path(BUNDLE_FILES[precision]).stem
        for suffix, note in (
            (".ort", "for the CPU"),
            (".with_runtime_opt.ort", "for CoreML, NNAPI"),
        ):
            target = folder / f"{stem}{suffix}"
            _convert(source, target, runtime=suffix != ".ort")
            run = open_file(context, target)
            files.append(_describe(context, precision, note, name=target.name, run=run))
        verdicts += _check_mobile(source, precision)
    config = folder / OPERATORS_CONFIG
    # onnxruntime's tool does not close its files
    with (
        quiet_logging(logging.WARNING),
        warnings.catch_warnings(action="ignore", category=ResourceWarning),
    ):
        create_config_from_models([folder / each.file for each in files], config, True)
    # the comments name the folder on this machine
    lines = config.read_text(encoding="utf-8").splitlines()
    lines = [
        line if not line.startswith("# - ") else f"# - {Path(line[4:]).name}"
        for line in lines
    ]
    config.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return ExportResult(
        (*files, ExportedFile(OPERATORS_CONFIG, "", None, "for a build of it")),
        tuple(verdicts),
    )


def _convert(source: Path, target: Path, *, runtime: bool) -> None:
    entries = session_entries(read_model(source))
    # A list of disabled optimisers replaces the entry's list, so both are given
    # together
    disabled = [name for name in entries.pop(DISABLED, "").split(";") if name] + [NCHWC]
    options = session_options(1, entries)
    options.optimized_model_filepath = str(target)
    options.add_session_config_entry("session.save_model_format", "ORT")
    if runtime:
        options.add_session_config_entry(
            "optimization.minimal_build_optimizations", "save"
        )
    create_session(source, options, source, disabled_optimizers=disabled)


def _check_mobile(source: Path, precision: str) -> Iterator[str]:
    """Report the result of onnxruntime's mobile usability check for NNAPI and CoreML,
    in one sentence each.

    The check looks at operator types alone: it may be too optimistic, but hardly too
    strict.
    """
    from onnxruntime.tools.mobile_helpers import usability_checker as check
    from onnxruntime.tools.onnx_model_utils import (
        ModelProtoWithShapeInfo,
        optimize_model,
    )

    with tempfile.TemporaryDirectory() as scratch, quiet_logging(logging.WARNING):
        basic = Path(scratch) / "basic.onnx"
        optimize_model(source, basic, use_external_initializers=True)
        shaped = ModelProtoWithShapeInfo(basic)
        model = shaped.model_with_shape_info
        found = {
            "NNAPI (Android)": check.check_nnapi_partitions(model, False),
            "CoreML (iOS)": check.check_coreml_partitions(
                model, False, "coreml_supported_mlprogram_ops.md"
            ),
        }
        del shaped
    for provider, info in found.items():
        parts = (
            f"{info.num_supported_nodes} of {info.num_nodes} nodes in "
            f"{info.num_partitions} parts"
        )
        suitable = info.suitability().name
        if suitable == "YES":
            advice = "Fix the shapes (make_dynamic_shape_fixed) and time it there"
            yield (
                f"{precision}: {provider} can take it: {parts}, even at fixed shapes. "
                f"{advice}"
            )
        else:
            names = ", ".join(
                sorted(name.rpartition(":")[2] for name in info.unsupported_ops)
            )
            advice = (
                "use the CPU provider"
                if suitable == "NO"
                else "time it against the CPU provider"
            )
            yield (
                f"{precision}: {provider} would take {parts}, even at fixed shapes; it "
                f"cannot do {names}: {advice}"
            )
