"""Export LiteRT's files (.tflite), formerly TensorFlow Lite, for phones and boards,
from torch.

LiteRT has fixed shapes, as its XNNPACK delegate needs them: the file has a signature
per length (`tokens_32`, `tokens_128`, ... up to the bundle's max_length), all on the
same weights. Use the shortest that the text fits into, and pad it with attention_mask
0. Inputs are int32, one row.

    fp32   as it is
    int8   weights int8, one scale per output, embedding tables too; activations
           quantised at run time
    w8     weights int8, computed in float32
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from compress.exporters.onnx import TracedModel
from compress.exporters.session import RunFeeds, quiet
from compress.exporters.writers.context import (
    ExportContext,
    ExportedFile,
    ExportResult,
    converting,
    import_extra,
)

LITERT_FILES = {
    "fp32": "model.tflite",
    "int8": "model_quantized.tflite",
    "w8": "model_w8.tflite",
}
LITERT_RECIPES = {"int8": "dynamic_wi8_afp32", "w8": "weight_only_wi8_afp32"}


def lengths(longest: int) -> list[int]:
    """List the signatures' lengths: 32, 128, 512, ... below the longest, and the
    longest. Each costs a copy of the graph, and of the weights if the delegate packs
    them.
    """
    found = []
    length = 32
    while length < longest:
        found.append(length)
        length *= 4
    return [*found, longest]


def write_litert(
    context: ExportContext, folder: Path, precisions: Sequence[str]
) -> ExportResult:
    """Write each precision as .tflite, and run it in LiteRT's interpreter."""
    with quiet():
        import_extra("litert_torch", "litert")
        exact = _convert(context)
        files = []
        for precision in precisions:
            target = folder / LITERT_FILES[precision]
            source = exact
            if precision != "fp32":
                recipe = getattr(
                    import_extra("ai_edge_quantizer.recipe", "litert"),
                    LITERT_RECIPES[precision],
                )
                quantizer = import_extra(
                    "ai_edge_quantizer.quantizer", "litert"
                ).Quantizer(str(exact), recipe())
                source = exact.with_name(target.name)
                quantizer.quantize().export_model(str(source))
            # not moved: the quantiser writes executable files
            shutil.copyfile(source, target)
            files.append(
                ExportedFile(
                    target.name,
                    precision,
                    context.differs(open_file(context, target)),
                )
            )
    named = ", ".join(
        f"tokens_{length}" for length in lengths(context.bundle.manifest.max_length)
    )
    verdict = (
        f"shapes are fixed: signatures {named}, one row each, on the same weights; pad "
        "to the shortest that holds the text, attention_mask 0. Inputs are int32"
    )
    packages = ("litert-torch", "ai-edge-quantizer", "ai-edge-litert", "onnxruntime")
    interface = context.interface().fix(context.bundle.manifest.max_length, "int32")
    return ExportResult(
        tuple(files), (verdict,), packages=packages, interface=interface
    )


def _convert(context: ExportContext) -> Path:
    """Convert the model to an fp32 file with all signatures."""
    converter = import_extra("litert_torch", "litert")
    wrapped = TracedModel(context.model()).eval()
    target = context.scratch / LITERT_FILES["fp32"]
    with converting(context, "LiteRT"):
        signatures = converter
        for length in lengths(context.bundle.manifest.max_length):
            sample = {
                name: torch.ones(1, length, dtype=torch.int64)
                for name in context.trial_rows()[0]
            }
            signatures = signatures.signature(
                f"tokens_{length}", wrapped, sample_kwargs=sample
            )
        signatures.convert().export(str(target))
    return target


def open_file(context: ExportContext, file: Path) -> RunFeeds:
    """Load a file into LiteRT's interpreter; rows are padded to its lengths."""
    interpreter = import_extra("ai_edge_litert.interpreter", "litert").Interpreter(
        str(file), num_threads=1
    )
    runners = {
        int(name.removeprefix("tokens_")): interpreter.get_signature_runner(name)
        for name in interpreter.get_signature_list()
    }

    def run(row: Mapping[str, Any]) -> list[Any]:
        found = runners[row["input_ids"].shape[1]](**row)
        return [found[name] for name in sorted(found)]

    return context.pad_rows(run, sorted(runners))
