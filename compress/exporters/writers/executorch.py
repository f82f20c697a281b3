"""Export ExecuTorch's files (.pte) for phones and boards, from torch.

ExecuTorch delegates matrix products to XNNPACK. Texts of any length up to the bundle's
run without padding; the batch is one row. Operators that XNNPACK does not take run on
portable kernels, which can be many times slower, so the verdict names their share.

    fp32   as it is
    int8   products dynamic int8, one scale per output; embedding tables int8, one scale
           per row, in plain torch operators: XNNPACK takes no tables, and in float32
           they would be most of a small encoder's file
"""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.exporters.onnx import TracedModel
from compress.exporters.session import RunFeeds, quiet
from compress.exporters.weight_only import SMALL_WEIGHT
from compress.exporters.writers.context import (
    ExportContext,
    ExportedFile,
    ExportResult,
    converting,
    import_extra,
)

EXECUTORCH_FILES = {"fp32": "model.pte", "int8": "model_quantized.pte"}
FREE = (
    *("getitem", "view", "expand", "unsqueeze", "squeeze", "select"),
    *("slice", "sym_size", "permute", "alias", "to_copy"),
)
"""Parts of the names of operators that only move data, which are not counted as
computing."""


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
    shortest = context.shortest_text
    rows = [
        row for row in context.trial_rows() if row["input_ids"].shape[1] >= shortest
    ]
    names = list(rows[0])
    made = []
    verdicts = []
    for precision in precisions:
        with quiet():
            buffer, left, taken = _program(context, names, precision)
            (folder / EXECUTORCH_FILES[precision]).write_bytes(buffer)
            apart = context.differs(
                open_file(context, folder / EXECUTORCH_FILES[precision]), rows=rows
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
        tuple(made),
        tuple(verdicts),
        packages=("executorch", "torchao", "onnxruntime"),
        interface=context.interface().fix("tokens", "int64"),
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
        min=context.shortest_text,
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
    """Copy the model with its token table, and its positions if they are a table, as
    `Int8Rows`."""
    copied = copy.deepcopy(model)
    tokens = copied.get_input_embeddings()  # type: ignore[operator]  # nn.Module types what it lacks as Tensor
    for name, module in list(copied.named_modules()):
        table = type(module) is nn.Embedding and module.weight.numel() >= SMALL_WEIGHT
        if table and (module is tokens or name.endswith("position_embeddings")):
            copied.set_submodule(name, Int8Rows(module))
    return copied


def delegation(graph: Any) -> tuple["Counter[str]", int]:
    """Count the operators that compute: the ones that are not delegated, by name, and
    the number of delegated ones."""
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


def open_file(context: ExportContext, file: Path) -> RunFeeds:
    """Load a file into ExecuTorch's runtime."""
    names = list(context.trial_rows()[0])
    runtime = import_extra("executorch.runtime", "executorch")
    import_extra("executorch.kernels.quantized", "executorch")
    method = runtime.Runtime.get().load_program(file).load_method("forward")

    def run(row: Any) -> list[Any]:
        return [
            each.numpy()
            for each in method.execute([torch.from_numpy(row[name]) for name in names])
        ]

    return run
