"""ORT format: what onnxruntime's small builds for phones load, with the list of operators such a build needs.

Written by onnxruntime itself as it opens a file: `.ort` holds the graph as optimised for the CPU provider, and
`.with_runtime_opt.ort` one optimised less, for providers that take parts of the graph (CoreML, NNAPI), with the rest of
the optimisations recorded, to be replayed where `session.enable_saved_runtime_optimizations` is 1. Nothing that only
x86 has is baked in. The optimisers that a file of ours wants off are off while it is written: in an .ort file they
could not be taken back.
"""

import logging
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime

from compress.exporters.artifact import FILES, Precision
from compress.exporters.formats import ExportContext, ExportedFile, ExportResult
from compress.exporters.session import (
    Run,
    certificate,
    create_session,
    quiet_logging,
    read_model,
    session_entries,
    session_options,
)

PRECISIONS = tuple(FILES)
DEFAULT = ("fp32", "int8")
OPERATORS = "required_operators_and_types.config"
DISABLED = "optimization.disable_specified_optimizers"
NCHWC = "NchwcTransformer"
"""Lays convolutions out for x86; onnxruntime's own converter leaves it out of portable files, too."""

RUNTIME_NOTE = "for CoreML, NNAPI"


def write(context: ExportContext, folder: Path, precisions: Sequence[Precision]) -> ExportResult:
    """Write both styles of each precision, and one list of operators for all of them."""
    made: list[ExportedFile] = []
    fixed: list[Path] = []
    for precision in precisions:
        source = context.onnx(precision)
        stem = Path(FILES[precision]).stem
        proof = certificate(source)
        for name, runtime in ((f"{stem}.ort", False), (f"{stem}.with_runtime_opt.ort", True)):
            _convert(source, folder / name, runtime=runtime)
            apart = context.differs(_run(folder / name))
            made.append(
                ExportedFile(name, precision, apart, RUNTIME_NOTE if runtime else "for the CPU", certificate=proof)
            )
        fixed.append(folder / f"{stem}.ort")
    _list_operators(folder, made)
    verdicts = [verdict for each in precisions for verdict in mobile_verdicts(context.onnx(each), each)]
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


def _run(path: Path) -> Run:
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


def mobile_verdicts(source: Path, precision: str) -> list[str]:
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
