"""Export files for phones and boards, from torch: ExecuTorch (.pte) and LiteRT,
formerly TensorFlow Lite (.tflite).

ExecuTorch delegates matrix products to XNNPACK. Texts of any length up to the bundle's
run without padding; the batch is one row. What XNNPACK does not take runs on kernels
that can be many times slower, so the verdict names its share.

    fp32   as it is
    int8   products dynamic int8, one scale per output; embedding tables int8, one scale
           per row, in plain torch operators: XNNPACK takes no tables, and in float32
           they would be most of a small encoder's file

LiteRT has fixed shapes, as its XNNPACK delegate needs them: the file has a signature
per length (`tokens_32`, `tokens_128`, ... up to the bundle's max_length), all on the
same weights. Use the shortest that the text fits into, and pad it with attention_mask
0. Inputs are int32, one row.

    fp32   as it is
    int8   weights int8, one scale per output, embedding tables too; activations
           quantised at run time
    w8     weights int8, computed in float32
"""

import copy
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress import families
from compress.exporters.formats import (
    ExportContext,
    ExportedFile,
    ExportResult,
    converting,
    import_extra,
)
from compress.exporters.onnx import TracedModel
from compress.exporters.session import Run, quiet
from compress.exporters.weight_only import SMALL

EXECUTORCH_FILES = {"fp32": "model.pte", "int8": "model_quantized.pte"}
FREE = (
    *("getitem", "view", "expand", "unsqueeze", "squeeze", "select"),
    *("slice", "sym_size", "permute", "alias", "to_copy"),
)
"""Parts of the names of operators that only move data: they are not counted as work."""


class Int8Rows(nn.Module):
    """An embedding table as int8 rows with a float32 scale each: ids (...) -> (...,
    D)."""

    scales_V1: Tensor
    numbers_VD: Tensor

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        weight_VD = table.weight.detach().float()
        scales_V1 = (weight_VD.abs().amax(1, keepdim=True) / 127).clamp_min(
            torch.finfo(torch.float32).tiny
        )
        self.register_buffer("scales_V1", scales_V1)
        self.register_buffer(
            "numbers_VD", (weight_VD / scales_V1).round().to(torch.int8)
        )

    def forward(self, ids: Tensor) -> Tensor:
        numbers = nn.functional.embedding(ids, self.numbers_VD)
        return numbers.to(torch.float32) * nn.functional.embedding(ids, self.scales_V1)


def write_executorch(
    context: ExportContext, folder: Path, precisions: Sequence[str]
) -> ExportResult:
    """Write each precision as .pte, and run it in ExecuTorch's runtime."""
    with quiet():
        import_extra("executorch.exir", "executorch")
    shortest = families.find(context.bundle.manifest.model_type).shortest_text
    rows = [
        row for row in context.trial_rows() if row["input_ids"].shape[1] >= shortest
    ]
    names = list(rows[0])
    made, verdicts = [], []
    for precision in precisions:
        with quiet():
            buffer, left, taken = _program(context, names, precision)
            (folder / EXECUTORCH_FILES[precision]).write_bytes(buffer)
            apart = context.differs(
                _run_executorch(folder / EXECUTORCH_FILES[precision], names), rows=rows
            )
        share = f"XNNPACK takes {taken} of {taken + left.total()} operators"
        made.append(ExportedFile(EXECUTORCH_FILES[precision], precision, apart, share))
        verdicts.append(
            f"{precision}: {share} that compute; left to portable kernels, which can "
            "be many times slower: "
            f"{', '.join(f'{count} {name}' for name, count in left.items())}"
        )
    verdicts.append(
        f"one row per run, of {shortest} to {context.bundle.manifest.max_length} "
        "tokens, without padding"
    )
    return ExportResult(
        tuple(made), tuple(verdicts), packages=("executorch", "torchao", "onnxruntime")
    )


def _program(
    context: ExportContext, names: Sequence[str], precision: str
) -> tuple[bytes, "Counter[str]", int]:
    """Return the file's bytes, the operators left to portable kernels, and how many
    XNNPACK takes."""
    partition = import_extra(
        "executorch.backends.xnnpack.partition.xnnpack_partitioner", "executorch"
    )
    exir = import_extra("executorch.exir", "executorch")
    model = context.model()
    if precision == "int8":
        model = with_int8_rows(model)
    sample = tuple(
        torch.from_numpy(array) for array in context.trial_rows()[-1].values()
    )
    tokens = torch.export.Dim(
        "tokens",
        min=families.find(context.bundle.manifest.model_type).shortest_text,
        max=context.bundle.manifest.max_length,
    )
    shapes = tuple({1: tokens} for _ in names)
    with converting(context, "ExecuTorch"):
        program = torch.export.export(
            TracedModel(model).eval(), sample, dynamic_shapes=shapes, strict=False
        )
        if precision == "int8":
            program = _dynamic_int8(program, sample, shapes)
        edge = exir.to_edge_transform_and_lower(
            program, partitioner=[partition.XnnpackPartitioner()]
        )
        left, taken = delegation(edge.exported_program().graph_module)
        return edge.to_executorch().buffer, left, taken


def _dynamic_int8(program: Any, sample: tuple[Tensor, ...], shapes: Any) -> Any:
    recipe = import_extra(
        "executorch.backends.xnnpack.quantizer.xnnpack_quantizer", "executorch"
    )
    steps = import_extra("torchao.quantization.pt2e.quantize_pt2e", "executorch")
    quantizer = recipe.XNNPACKQuantizer()
    quantizer.set_global(
        recipe.get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True)
    )
    prepared = steps.prepare_pt2e(program.module(), quantizer)
    prepared(*sample)
    return torch.export.export(
        steps.convert_pt2e(prepared), sample, dynamic_shapes=shapes, strict=False
    )


def with_int8_rows(model: nn.Module) -> nn.Module:
    """Copy the model with its token table, and its positions where they are a table, as
    `Int8Rows`."""
    copied = copy.deepcopy(model)
    tokens = copied.get_input_embeddings()  # type: ignore[operator]  # nn.Module types what it lacks as Tensor
    for name, module in list(copied.named_modules()):
        table = type(module) is nn.Embedding and module.weight.numel() >= SMALL
        if table and (module is tokens or name.endswith("position_embeddings")):
            copied.set_submodule(name, Int8Rows(module))
    return copied


def delegation(graph: Any) -> tuple["Counter[str]", int]:
    """Count the operators that compute: those that are not delegated, by name, and the
    number of those that are."""
    debug = import_extra("executorch.devtools.backend_debug", "executorch")
    operators: Mapping[str, Any] = debug.get_delegation_info(
        graph
    ).delegation_by_operator
    work = {
        name: counts
        for name, counts in operators.items()
        if not any(free in name for free in FREE)
    }
    short = {
        name: name.removeprefix("aten_")
        .removesuffix("_default")
        .removesuffix("_tensor")
        for name in work
    }
    left = Counter(
        {
            short[name]: counts.non_delegated
            for name, counts in work.items()
            if counts.non_delegated
        }
    )
    return left, sum(counts.delegated for counts in work.values())


def _run_executorch(path: Path, names: Sequence[str]) -> Run:
    runtime = import_extra("executorch.runtime", "executorch")
    import_extra("executorch.kernels.quantized", "executorch")
    method = runtime.Runtime.get().load_program(path).load_method("forward")

    def run(row: Any) -> list[Any]:
        return [
            each.numpy()
            for each in method.execute([torch.from_numpy(row[name]) for name in names])
        ]

    return run


LITERT_FILES = {
    "fp32": "model.tflite",
    "int8": "model_quantized.tflite",
    "w8": "model_w8.tflite",
}
LITERT_RECIPES = {"int8": "dynamic_wi8_afp32", "w8": "weight_only_wi8_afp32"}
SHORTEST, STEP = 32, 4
"""Lengths of the signatures: each costs a copy of the graph, and of the weights where
the delegate packs them."""


def lengths(longest: int) -> list[int]:
    """List the signatures' lengths: 32, 128, 512, ... below the longest, and that."""
    found, length = [], SHORTEST
    while length < longest:
        found.append(length)
        length *= STEP
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
            # not moved: what the quantiser writes is executable
            shutil.copyfile(source, target)
            files.append(
                ExportedFile(
                    target.name,
                    precision,
                    context.differs(_run_litert(context, target)),
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
    return ExportResult(tuple(files), (verdict,), packages=packages)


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


def _run_litert(context: ExportContext, path: Path) -> Run:
    interpreter = import_extra("ai_edge_litert.interpreter", "litert").Interpreter(
        str(path), num_threads=1
    )
    runners = {
        int(name.removeprefix("tokens_")): interpreter.get_signature_runner(name)
        for name in interpreter.get_signature_list()
    }

    def run(row: Mapping[str, Any]) -> list[Any]:
        found = runners[row["input_ids"].shape[1]](**row)
        return [found[name] for name in sorted(found)]

    return context.pad_rows(run, sorted(runners))
