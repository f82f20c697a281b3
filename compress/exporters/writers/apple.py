"""Export files for iPhones, iPads and Macs: Core ML packages (.mlpackage) and Core AI
assets (.aimodel), which Apple's systems run on CPU, GPU or Neural Engine as they
choose.

The programs are made by torch.export. They read one row of a fixed number of tokens,
int32, padded with attention_mask 0: the bundle's max_length, or a given length; or any
of several lengths, which are enumerated shapes in Core ML (iOS 18, macOS 15), and one
function each in Core AI. The Neural Engine needs fixed shapes. Core AI replaces Core ML
from iOS 27 and macOS 27 on.

    fp32   unchanged; not for the Neural Engine, which computes in float16
    fp16   weights and activations float16; the mask is bounded: float32's lowest number
           would be minus infinity
    w8     weights int8, a scale per output, embedding tables too; computed in float16
    p6, p4 weights of 6 or 4 bits that look up one of 64 or 16 values per tensor, found
           by k-means; computed in float16
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.errors import ExportError
from compress.exporters.onnx import TracedModel
from compress.exporters.session import RunFeeds, quiet
from compress.exporters.writers import aimodel, mil
from compress.exporters.writers.context import (
    ExportContext,
    ExportedFile,
    ExportResult,
    converting,
    import_extra,
)
from compress.models.padding import refuse_last_token
from compress.slicing.shape import positions


@dataclass(frozen=True)
class _Target:
    """A format of Apple's.

    name      what it is called; extra: what installs its converter, of these packages
    files     precision -> the file, which is a folder; inside: the files in it, the
              main one first
    systems   the first systems that support one length, and several
    convert   writes a file; read: reads it back; check: raises ExportError if it is not
              what was requested
    """

    name: str
    extra: str
    packages: tuple[str, ...]
    files: Mapping[str, str]
    inside: tuple[str, ...]
    systems: tuple[str, str]
    convert: "Callable[[_Request, Path, str], None]"
    read: Callable[[Path], Any]
    check: "Callable[[Any, _Request], None]"


@dataclass(frozen=True)
class _Request:
    """The interface of a file: the names of its inputs and outputs, and its lengths, in
    ascending order."""

    context: ExportContext
    names: Sequence[str]
    outputs: Sequence[str]
    lengths: Sequence[int]

    def trace(self, *, half: bool = False) -> Any:
        """Trace the model, for one length or any up to the longest; `half`: in float16,
        except for its outputs."""
        model = self.context.model()
        traced = _Half(model.half()) if half else TracedModel(model)
        shortest = self.lengths[0]
        longest = self.lengths[-1]
        several = (
            {1: torch.export.Dim("tokens", min=shortest, max=longest)}
            if shortest < longest
            else None
        )
        sample = tuple(torch.ones(1, longest, dtype=torch.int32) for _ in self.names)
        shapes = None if several is None else tuple(several for _ in self.names)
        return torch.export.export(
            traced.eval(), sample, dynamic_shapes=shapes, strict=False
        )

    def describe(self) -> dict[str, str]:
        """Return the entries of the metadata."""
        described = {"compress.max_length": str(self.lengths[-1])}
        manifest = self.context.bundle.manifest
        if manifest.kind == "task" and self.context.bundle.task.labels:
            described["compress.labels"] = json.dumps(self.context.bundle.task.labels)
        return described


class _Half(TracedModel):
    """A model in float16 with float32 outputs."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
    ) -> Any:
        return tuple(
            each.float()
            for each in super().forward(input_ids, attention_mask, token_type_ids)
        )


def write_coreml(
    context: ExportContext, folder: Path, precisions: Sequence[str]
) -> ExportResult:
    """Write each precision as .mlpackage; read it back, and check its interface, and
    its answers against the fp32 file."""
    return _write(CORE_ML, context, folder, precisions)


def write_coreai(
    context: ExportContext, folder: Path, precisions: Sequence[str]
) -> ExportResult:
    """Write each precision as .aimodel, as `write_coreml` does."""
    return _write(CORE_AI, context, folder, precisions)


def open_coreml(context: ExportContext, file: Path) -> RunFeeds:
    """Read a file of a .mlpackage; rows are padded to its lengths."""
    package = mil.MilProgram(file.parents[2])
    return context.pad_rows(package, context.lengths())


def open_coreai(context: ExportContext, file: Path) -> RunFeeds:
    """Read a file of an .aimodel; rows are padded to its lengths."""
    return context.pad_rows(aimodel.CoreAiProgram(file.parent), context.lengths())


def _write(
    target: _Target,
    context: ExportContext,
    folder: Path,
    precisions: Sequence[str],
) -> ExportResult:
    refuse_last_token(context.name, context.bundle.manifest.model_type)
    taken = _check_lengths(context)
    # silence the converters' progress bars, and their warnings about untested versions
    with quiet():
        import_extra(target.packages[0].replace("-", "_"), target.extra)
    rows = [
        row for row in context.trial_rows() if row["input_ids"].shape[1] <= taken[-1]
    ]
    request = _Request(
        context,
        list(rows[0]),
        [output.name for output in context.interface().outputs],
        taken,
    )
    made = []
    computed = list[str]()
    with quiet():
        for precision in precisions:
            package = folder / target.files[precision]
            with converting(context, target.name):
                target.convert(request, package, precision)
            found = target.read(package)
            target.check(found, request)
            apart = context.differs(context.pad_rows(found, taken), rows=rows)
            counted = sorted(Counter(found.operators).items())
            computed.append(
                f"{precision}: operators: "
                f"{', '.join(f'{count} {name}' for name, count in counted)}"
            )
            main, *others = (f"{package.name}/{inside}" for inside in target.inside)
            made.append(
                ExportedFile(
                    main, precision, apart, f"open {package.name}", tuple(others)
                )
            )
    shapes = (
        f"{taken[0]} tokens"
        if len(taken) == 1
        else f"{', '.join(map(str, taken))} tokens, the shortest that fits"
    )
    since = target.systems[len(taken) > 1]
    verdicts = (
        f"for {since} and later; one row, int32, padded with attention_mask 0 to "
        f"{shapes}",
        *computed,
        UNRUN.format(name=target.name),
    )
    settings = {
        "stem": target.files[precisions[0]].partition(".")[0],
        "function": "main" if len(taken) == 1 else f"main_tokens_{taken[-1]}",
    }
    return ExportResult(
        tuple(made),
        verdicts,
        packages=(*target.packages, "onnxruntime"),
        interface=context.interface().fix(taken[-1], "int32"),
        settings=settings,
    )


def _check_lengths(context: ExportContext) -> list[int]:
    lengths = context.lengths()
    least = context.shortest_text
    most = positions(context.model()) or context.bundle.manifest.max_length
    if wrong := [length for length in lengths if not least <= length <= most]:
        raise ExportError(
            f"--seq {wrong[0]}: {context.name} reads {least} to {most} tokens; "
            "expected lengths within"
        )
    return lengths


def _convert_coreml(request: _Request, package: Path, precision: str) -> None:
    ct = import_extra("coremltools", "coreml")
    shapes = [(1, length) for length in request.lengths]
    shape = (
        shapes[0]
        if len(shapes) == 1
        else ct.EnumeratedShapes(shapes, default=shapes[-1])
    )
    converted = ct.convert(
        request.trace().run_decompositions({}),
        convert_to="mlprogram",
        inputs=[
            ct.TensorType(name=name, shape=shape, dtype=np.int32)
            for name in request.names
        ],
        outputs=[
            ct.TensorType(name=name, dtype=np.float32) for name in request.outputs
        ],
        minimum_deployment_target=ct.target.iOS17
        if len(shapes) == 1
        else ct.target.iOS18,
        compute_precision=ct.precision.FLOAT32
        if precision == "fp32"
        else ct.precision.FLOAT16,
        skip_model_load=True,
    )
    if precision not in ("fp32", "fp16"):
        optimize = import_extra("coremltools.optimize.coreml", "coreml")
        if precision == "w8":
            shrink = optimize.linear_quantize_weights
            each = optimize.OpLinearQuantizerConfig(
                mode="linear_symmetric", dtype="int8", granularity="per_channel"
            )
        else:
            shrink = optimize.palettize_weights
            each = optimize.OpPalettizerConfig(
                mode="kmeans", nbits=int(precision.removeprefix("p"))
            )
        converted = shrink(converted, optimize.OptimizationConfig(global_config=each))
    converted.short_description = (
        f"{request.context.bundle.manifest.model_type}, exported by compress"
    )
    converted.user_defined_metadata.update(request.describe())
    converted.save(str(package))
    # not part of a Core ML package
    (package / "executorch_debug_handle_mapping.json").unlink(missing_ok=True)


def _check_coreml(found: mil.MilProgram, request: _Request) -> None:
    described = found.spec.description
    arrays = {each.name: each.type.multiArrayType for each in described.input}
    shapes = {
        name: [
            kind.ArrayDataType.Name(kind.dataType),
            *sorted(
                tuple(each.shape) for each in kind.enumeratedShapes.shapes or [kind]
            ),
        ]
        for name, kind in arrays.items()
    }
    wanted = {
        name: ["INT32", *((1, length) for length in request.lengths)]
        for name in request.names
    }
    _compare(
        "coremltools",
        (shapes, [each.name for each in described.output]),
        (wanted, list(request.outputs)),
    )


def _convert_coreai(request: _Request, package: Path, precision: str) -> None:
    converter = import_extra("coreai_torch", "coreai")
    exported = request.trace(half=precision != "fp32").run_decompositions(
        converter.get_decomp_table()
    )
    names = {"input_names": list(request.names), "output_names": list(request.outputs)}
    program = (
        converter.TorchConverter().add_exported_program(exported, **names).to_coreai()
    )
    if precision not in ("fp32", "fp16"):
        optimize = import_extra("coreai_opt.coreai_utils", "coreai")
        if precision == "w8":
            program = optimize.quantize_weights(program, optimize.DType.INT8)
        else:
            bits = int(precision.removeprefix("p"))
            # the fast mode rounds weights times 10,000 in float16, whose range 6.6 then
            # exceeds
            exact = {"enable_fast_kmeans_mode": False, "num_kmeans_workers": 1}
            program = optimize.palettize_weights(program, None, bits, **exact)
    if len(request.lengths) > 1:
        shapes = {
            f"tokens_{length}": dict.fromkeys(request.names, (1, length))
            for length in request.lengths
        }
        program.set_static_shape_config("main", shapes)
    metadata = import_extra("coreai.runtime", "coreai").AIModelAssetMetadata()
    metadata.model_description = (
        f"{request.context.bundle.manifest.model_type}, exported by compress"
    )
    for key, value in request.describe().items():
        metadata.set_custom(key, value)
    program.save_asset(package, metadata)


def _check_coreai(found: aimodel.CoreAiProgram, request: _Request) -> None:
    several = len(request.lengths) > 1
    wanted = {
        f"main_tokens_{length}" if several else "main": dict.fromkeys(
            request.names, ((1, length), "si32")
        )
        for length in request.lengths
    }
    given = {name: list(request.outputs) for name in wanted}
    _compare("coreai-torch", (found.functions, found.outputs), (wanted, given))


def _compare(package: str, found: tuple[Any, Any], wanted: tuple[Any, Any]) -> None:
    """Raise ExportError if the interface of a file that was read back is not the
    requested one."""
    if found != wanted:
        raise ExportError(
            f"{package} wrote a file that reads {found[0]} and returns {found[1]}; "
            f"expected {wanted[0]} and {wanted[1]}: this version of it is not supported"
        )


UNRUN = (
    "{name} runs on Apple's systems alone: the files were not run here, or timed. To "
    "compare it with the fp32 ONNX file, each written file was read back and computed "
    "in NumPy, operator by operator, rounding float16 values after each"
)
CORE_ML = _Target(
    name="Core ML",
    extra="coreml",
    packages=("coremltools",),
    files={"fp32": "model.mlpackage"}
    | {name: f"model_{name}.mlpackage" for name in ("fp16", "w8", "p6", "p4")},
    inside=(
        "Data/com.apple.CoreML/model.mlmodel",
        "Data/com.apple.CoreML/weights/weight.bin",
        "Manifest.json",
    ),
    systems=("iOS 17 or macOS 14", "iOS 18 or macOS 15"),
    convert=_convert_coreml,
    read=mil.MilProgram,
    check=_check_coreml,
)
CORE_AI = _Target(
    name="Core AI",
    extra="coreai",
    packages=("coreai-torch", "coreai-opt"),
    files={"fp32": "model.aimodel"}
    | {name: f"model_{name}.aimodel" for name in ("fp16", "w8", "p6", "p4")},
    inside=("main.mlirb", "main.hash", "metadata.json"),
    systems=("iOS 27 or macOS 27",) * 2,
    convert=_convert_coreai,
    read=aimodel.CoreAiProgram,
    check=_check_coreai,
)
