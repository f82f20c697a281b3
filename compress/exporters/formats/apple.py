"""Export files for iPhones, iPads and Macs: Core ML packages (.mlpackage), which Core ML gives to CPU, GPU and Neural
Engine as it chooses.

The program is an "ML program", made by torch.export. It reads one row of a fixed number of tokens, int32, padded with
attention_mask 0: the bundle's max_length, or a given length (iOS 17, macOS 14); or any of several lengths, which
Core ML calls enumerated shapes (iOS 18, macOS 15). The Neural Engine needs fixed shapes.

    fp32   as it is; not for the Neural Engine, which computes in float16
    fp16   weights and activations float16; the mask is bounded: float32's lowest number would be minus infinity
    w8     weights int8, a scale per output, embedding tables too; computed in float16
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compress.errors import ExportError
from compress.exporters.formats import ExportContext, ExportedFile, ExportResult, converting, import_extra, quiet
from compress.exporters.formats.mil import Program
from compress.exporters.formats.mobile import SHORTEST_TEXT
from compress.exporters.onnx import LOOKS_BACK, TracedModel
from compress.exporters.session import read_model
from compress.slicing.shape import positions

PACKAGES = {"fp32": "model.mlpackage", "fp16": "model_fp16.mlpackage", "w8": "model_w8.mlpackage"}
INSIDE = ("Data/com.apple.CoreML/model.mlmodel", "Data/com.apple.CoreML/weights/weight.bin", "Manifest.json")
SYSTEMS = {1: ("iOS17", "iOS 17 or macOS 14"), 2: ("iOS18", "iOS 18 or macOS 15")}
"""The first systems that support one length, and several."""
SWIFT = """let url = Bundle.main.url(forResource: "{stem}", withExtension: "mlmodelc")!  // Xcode compiles the package
let model = try MLModel(contentsOf: url)
func row(_ numbers: [Int32]) -> MLMultiArray {{
    let array = try! MLMultiArray(shape: [1, {length}], dataType: .int32)
    for at in 0..<{length} {{ array[at] = NSNumber(value: at < numbers.count ? numbers[at] : 0) }}
    return array
}}
let ids: [Int32] = [{ids}]  // of your text, by tokenizer.json
let inputs = try MLDictionaryFeatureProvider(dictionary: [{inputs}])
let logits = try model.prediction(from: inputs).featureValue(for: "{output}")!.multiArrayValue!"""
ROWS = {"input_ids": "row(ids)", "attention_mask": "row(ids.map { _ in 1 })", "token_type_ids": "row([])"}
READ_LAST = {"xlnet", *LOOKS_BACK}
UNRUN = (
    "Core ML runs on Apple's systems alone: nothing of it was run here, or timed. What was compared with the fp32 ONNX "
    "file is each package as it was written, read back, and computed in NumPy, operator by operator, rounded to "
    "float16 after each where it is kept so"
)


def write_coreml(
    context: ExportContext, folder: Path, precisions: Sequence[str], *, lengths: Sequence[int] = ()
) -> ExportResult:
    """Write each precision as .mlpackage; read it back, and check its interface, and its answers against the fp32 file.

    lengths   of the rows that the packages read, in tokens; empty: the bundle's max_length
    """
    if (family := context.bundle.manifest.model_type) in READ_LAST:
        raise ExportError(
            f"{context.name}: {family} reads its answer off the last token, which padding to a fixed length moves; "
            "--for onnx and --for ort take every family"
        )
    taken = _check_lengths(context, sorted(set(lengths)) or [context.bundle.manifest.max_length])
    with quiet():  # without coremltools' progress bars, and its warnings of untested versions
        import_extra("coremltools", "coreml")
    rows = [row for row in context.trial_rows() if row["input_ids"].shape[1] <= taken[-1]]
    names, outputs = list(rows[0]), [each.name for each in read_model(context.onnx("fp32")).graph.output]
    system, since = SYSTEMS[min(len(taken), 2)]
    made, computed = [], list[str]()
    with quiet():
        program = _export(context, names, taken)
        for precision in precisions:
            package = folder / PACKAGES[precision]
            with converting(context, "Core ML"):
                _convert(context, program, package, names, outputs, lengths=taken, precision=precision, system=system)
            found = Program(package)
            _check(found, names, outputs, taken)
            apart = context.differs(context.pad_rows(found, taken), rows=rows)
            counted = sorted(Counter(found.operators).items())
            computed.append(f"{precision}: operators: {', '.join(f'{count} {name}' for name, count in counted)}")
            main, *others = (f"{package.name}/{inside}" for inside in INSIDE)
            made.append(ExportedFile(main, precision, apart, f"open {package.name}", tuple(others)))
    shapes = f"{taken[0]} tokens" if len(taken) == 1 else f"{', '.join(map(str, taken))} tokens, the shortest that fits"
    verdicts = (f"for {since} and later; one row, int32, padded with attention_mask 0 to {shapes}", *computed, UNRUN)
    ids = ", ".join(map(str, rows[0]["input_ids"][0]))
    code = SWIFT.format(
        stem=PACKAGES[precisions[0]].partition(".")[0], length=taken[-1], ids=ids, output=outputs[0],
        inputs=", ".join(f'"{name}": {ROWS[name]}' for name in names),
    )  # fmt: skip
    return ExportResult(tuple(made), verdicts, packages=("coremltools", "onnxruntime"), code=code)


def _check_lengths(context: ExportContext, lengths: list[int]) -> list[int]:
    least = SHORTEST_TEXT.get(context.bundle.manifest.model_type, 2)
    most = positions(context.model()) or context.bundle.manifest.max_length
    if wrong := [length for length in lengths if not least <= length <= most]:
        raise ExportError(f"--seq {wrong[0]}: {context.name} reads {least} to {most} tokens; expected lengths within")
    return lengths


def _export(context: ExportContext, names: Sequence[str], lengths: Sequence[int]) -> Any:
    """Trace the model, for one length or any up to the longest."""
    model = TracedModel(context.model()).eval()
    several = {1: torch.export.Dim("tokens", min=lengths[0], max=lengths[-1])} if len(lengths) > 1 else None
    sample = tuple(torch.ones(1, lengths[-1], dtype=torch.int32) for _ in names)
    shapes = None if several is None else tuple(several for _ in names)
    with converting(context, "Core ML"):
        exported = torch.export.export(model, sample, dynamic_shapes=shapes, strict=False)
        return exported.run_decompositions({})


def _convert(
    context: ExportContext,
    program: Any,
    package: Path,
    names: Sequence[str],
    outputs: Sequence[str],
    *,
    lengths: Sequence[int],
    precision: str,
    system: str,
) -> None:
    ct = import_extra("coremltools", "coreml")
    shapes = [(1, length) for length in lengths]
    shape = shapes[0] if len(shapes) == 1 else ct.EnumeratedShapes(shapes, default=shapes[-1])
    converted = ct.convert(
        program,
        convert_to="mlprogram",
        inputs=[ct.TensorType(name=name, shape=shape, dtype=np.int32) for name in names],
        outputs=[ct.TensorType(name=name, dtype=np.float32) for name in outputs],
        minimum_deployment_target=getattr(ct.target, system),
        compute_precision=ct.precision.FLOAT32 if precision == "fp32" else ct.precision.FLOAT16,
        skip_model_load=True,
    )
    if precision == "w8":
        optimize = import_extra("coremltools.optimize.coreml", "coreml")
        each = optimize.OpLinearQuantizerConfig(mode="linear_symmetric", dtype="int8", granularity="per_channel")
        converted = optimize.linear_quantize_weights(converted, optimize.OptimizationConfig(global_config=each))
    manifest = context.bundle.manifest
    converted.short_description = f"{manifest.model_type}, exported by compress"
    converted.user_defined_metadata["compress.max_length"] = str(lengths[-1])
    if manifest.kind == "task" and context.bundle.task.labels:
        converted.user_defined_metadata["compress.labels"] = json.dumps(context.bundle.task.labels)
    converted.save(str(package))
    (package / "executorch_debug_handle_mapping.json").unlink(missing_ok=True)  # no part of a package of Core ML


def _check(found: Program, names: Sequence[str], outputs: Sequence[str], lengths: Sequence[int]) -> None:
    """Raise ExportError where the interface of a package that was read back is not the requested one."""
    described = found.spec.description
    arrays = {each.name: each.type.multiArrayType for each in described.input}
    shapes = {
        name: [
            kind.ArrayDataType.Name(kind.dataType),
            *sorted(tuple(each.shape) for each in kind.enumeratedShapes.shapes or [kind]),
        ]
        for name, kind in arrays.items()
    }
    wanted = {name: ["INT32", *((1, length) for length in lengths)] for name in names}
    if shapes != wanted or [each.name for each in described.output] != list(outputs):
        raise ExportError(
            f"coremltools wrote a package that reads {shapes} and gives {[each.name for each in described.output]}; "
            f"expected {wanted} and {list(outputs)}: this version of it is not supported"
        )
