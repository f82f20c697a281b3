"""LiteRT, formerly TensorFlow Lite: a .tflite file, for Android above all.

    fp32   as it is
    int8   weights int8, one scale per output, embedding tables too; activations quantised as they come
    w8     weights int8, computed in float32

Shapes are fixed, as its XNNPACK delegate wants them: the file has a signature per length (`tokens_32`, `tokens_128`,
... up to the bundle's max_length), all on the same weights. Take the shortest that holds the text, and pad it with
attention_mask 0. Inputs are int32, one row.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compress.exporters.formats import ExportContext, ExportedFile, ExportResult, converting, quiet, required
from compress.exporters.session import Run, read_model

PRECISIONS = ("fp32", "int8", "w8")
DEFAULT = ("fp32", "int8")
EXTRA = "litert"
FILES = {"fp32": "model.tflite", "int8": "model_quantized.tflite", "w8": "model_w8.tflite"}
RECIPES = {"int8": "dynamic_wi8_afp32", "w8": "weight_only_wi8_afp32"}
SHORTEST, STEP = 32, 4
"""Lengths of the signatures: each costs a copy of the graph, and of the weights where the delegate lays them out."""


def lengths(longest: int) -> list[int]:
    """List the signatures' lengths: 32, 128, 512, ... below the longest, and that."""
    found, length = [], SHORTEST
    while length < longest:
        found.append(length)
        length *= STEP
    return [*found, longest]


def write(context: ExportContext, folder: Path, precisions: Sequence[str]) -> ExportResult:
    """Write each precision as .tflite, and run it in LiteRT's own interpreter."""
    with quiet():
        required("litert_torch", EXTRA)
        exact = _converted(context)
        per_token = [
            "sequence_length" in [size.dim_param for size in each.type.tensor_type.shape.dim]
            for each in read_model(context.onnx("fp32")).graph.output
        ]
        made = []
        for precision in precisions:
            target = folder / FILES[precision]
            if precision == "fp32":
                target.write_bytes(exact.read_bytes())
            else:
                _quantized(exact, target, precision)
            made.append(ExportedFile(target.name, precision, context.differs(_run(target, per_token))))
    named = ", ".join(f"tokens_{length}" for length in lengths(context.bundle.manifest.max_length))
    verdict = (
        f"shapes are fixed: signatures {named}, one row each, on the same weights; pad to the shortest that holds the "
        "text, attention_mask 0. Inputs are int32"
    )
    packages = ("litert-torch", "ai-edge-quantizer", "ai-edge-litert", "onnxruntime")
    return ExportResult(tuple(made), (verdict,), packages=packages)


def _converted(context: ExportContext) -> Path:
    """Convert the model to an fp32 file with all signatures."""
    from compress.exporters.onnx import TracedModel

    converter = required("litert_torch", EXTRA)
    wrapped = TracedModel(context.model()).eval()
    target = context.scratch / FILES["fp32"]
    with converting(context, "LiteRT"):
        signatures = converter
        for length in lengths(context.bundle.manifest.max_length):
            sample = {name: torch.ones(1, length, dtype=torch.int64) for name in context.trial_rows()[0]}
            signatures = signatures.signature(f"tokens_{length}", wrapped, sample_kwargs=sample)
        signatures.convert().export(str(target))
    return target


def _quantized(exact: Path, target: Path, precision: str) -> None:
    recipe = getattr(required("ai_edge_quantizer.recipe", EXTRA), RECIPES[precision])
    quantizer = required("ai_edge_quantizer.quantizer", EXTRA)
    made = exact.with_name(target.name)
    quantizer.Quantizer(str(exact), recipe()).quantize().export_model(str(made))
    shutil.copyfile(made, target)  # what it writes is executable


def _run(path: Path, per_token: Sequence[bool]) -> Run:
    interpreter = required("ai_edge_litert.interpreter", EXTRA).Interpreter(str(path), num_threads=1)
    runners = {
        int(name.removeprefix("tokens_")): interpreter.get_signature_runner(name)
        for name in interpreter.get_signature_list()
    }

    def run(row: Any) -> list[Any]:
        tokens = row["input_ids"].shape[1]
        length = min(each for each in runners if each >= tokens)
        padded = {name: np.pad(array, ((0, 0), (0, length - tokens))).astype(np.int32) for name, array in row.items()}
        found = runners[length](**padded)
        arrays = [found[name] for name in sorted(found)]
        return [each[:, :tokens] if cut else each for each, cut in zip(arrays, per_token, strict=True)]

    return run
