"""ExecuTorch: a .pte file for phones and boards, its products given to XNNPACK.

    fp32   as it is
    int8   products dynamic int8, one scale per output; embedding tables int8 rows with a scale each, in plain torch
           operators: XNNPACK takes no tables, and as float32 they would be most of a small encoder's file

Texts of any length up to the bundle's run without padding; the batch is one row. What XNNPACK does not take runs on
kernels that can be many times slower, so the share it takes is part of the verdict.
"""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.exporters.formats import ExportContext, ExportedFile, ExportResult, converting, quiet, required
from compress.exporters.session import Run
from compress.exporters.weight_only import SMALL

PRECISIONS = ("fp32", "int8")
DEFAULT = ("fp32", "int8")
EXTRA = "executorch"
FILES = {"fp32": "model.pte", "int8": "model_quantized.pte"}
FREE = (
    "getitem",
    "view",
    "expand",
    "unsqueeze",
    "squeeze",
    "select",
    "slice",
    "sym_size",
    "permute",
    "alias",
    "to_copy",
)
"""Parts of names of operators that move no numbers, or few: left out of the count of work."""

SHORTEST = {"mobilebert": 3}
"""Tokens that a text must have, where it is not 2: MobileBERT's trigrams are put together otherwise for two."""


class Int8Rows(nn.Module):
    """An embedding table as int8 rows with a float32 scale each: ids (...) -> (..., D)."""

    scales_V1: Tensor
    numbers_VD: Tensor

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        weight_VD = table.weight.detach().float()
        scales_V1 = (weight_VD.abs().amax(1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        self.register_buffer("scales_V1", scales_V1)
        self.register_buffer("numbers_VD", (weight_VD / scales_V1).round().to(torch.int8))

    def forward(self, ids: Tensor) -> Tensor:
        numbers = nn.functional.embedding(ids, self.numbers_VD)
        return numbers.to(torch.float32) * nn.functional.embedding(ids, self.scales_V1)


def write(context: ExportContext, folder: Path, precisions: Sequence[str]) -> ExportResult:
    """Write each precision as .pte, and run it in ExecuTorch's own runtime."""
    with quiet():
        required("executorch.exir", EXTRA)
    shortest = SHORTEST.get(context.bundle.manifest.model_type, 2)
    rows = [row for row in context.trial_rows() if row["input_ids"].shape[1] >= shortest]
    names = list(rows[0])
    made, verdicts = [], []
    for precision in precisions:
        with quiet():
            buffer, left, taken = _program(context, names, precision)
            (folder / FILES[precision]).write_bytes(buffer)
            apart = context.differs(_run(folder / FILES[precision], names), rows=rows)
        made.append(
            ExportedFile(
                FILES[precision], precision, apart, f"XNNPACK takes {taken} of {taken + left.total()} operators"
            )
        )
        verdicts.append(
            f"{precision}: XNNPACK takes {taken} of {taken + left.total()} operators that compute; left to portable "
            f"kernels, which can be many times slower: {', '.join(f'{count} {name}' for name, count in left.items())}"
        )
    verdicts.append(f"one row per run, of {shortest} to {context.bundle.manifest.max_length} tokens, without padding")
    return ExportResult(tuple(made), tuple(verdicts), packages=("executorch", "torchao", "onnxruntime"))


def _program(context: ExportContext, names: Sequence[str], precision: str) -> tuple[bytes, "Counter[str]", int]:
    """Return the file's bytes, the operators left to portable kernels, and how many XNNPACK takes."""
    from compress.exporters.onnx import TracedModel

    partition = required("executorch.backends.xnnpack.partition.xnnpack_partitioner", EXTRA)
    exir = required("executorch.exir", EXTRA)
    model = context.model()
    if precision == "int8":
        model = with_int8_rows(model)
    sample = tuple(torch.from_numpy(array) for array in context.trial_rows()[-1].values())
    tokens = torch.export.Dim(
        "tokens", min=SHORTEST.get(context.bundle.manifest.model_type, 2), max=context.bundle.manifest.max_length
    )
    shapes = tuple({1: tokens} for _ in names)
    with converting(context, "ExecuTorch"):
        program = torch.export.export(TracedModel(model).eval(), sample, dynamic_shapes=shapes, strict=False)
        if precision == "int8":
            program = _dynamic_int8(program, sample, shapes)
        edge = exir.to_edge_transform_and_lower(program, partitioner=[partition.XnnpackPartitioner()])
        left, taken = delegation(edge.exported_program().graph_module)
        return edge.to_executorch().buffer, left, taken


def _dynamic_int8(program: Any, sample: tuple[Tensor, ...], shapes: Any) -> Any:
    recipe = required("executorch.backends.xnnpack.quantizer.xnnpack_quantizer", EXTRA)
    steps = required("torchao.quantization.pt2e.quantize_pt2e", EXTRA)
    quantizer = recipe.XNNPACKQuantizer()
    quantizer.set_global(recipe.get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True))
    prepared = steps.prepare_pt2e(program.module(), quantizer)
    prepared(*sample)
    return torch.export.export(steps.convert_pt2e(prepared), sample, dynamic_shapes=shapes, strict=False)


def with_int8_rows(model: nn.Module) -> nn.Module:
    """Copy the model with its input table, and its positions where they are a table, as `Int8Rows`."""
    changed = copy.deepcopy(model)
    words = changed.get_input_embeddings()  # type: ignore[operator]
    for name, module in list(changed.named_modules()):
        table = type(module) is nn.Embedding and module.weight.numel() >= SMALL
        if table and (module is words or name.endswith("position_embeddings")):
            owner, _, attribute = name.rpartition(".")
            setattr(changed.get_submodule(owner), attribute, Int8Rows(module))
    return changed


def delegation(graph: Any) -> tuple["Counter[str]", int]:
    """Count the operators that compute: those left out, by name, and how many a delegate has."""
    debug = required("executorch.devtools.backend_debug", EXTRA)
    operators: Mapping[str, Any] = debug.get_delegation_info(graph).delegation_by_operator
    work = {name: seen for name, seen in operators.items() if not any(free in name for free in FREE)}
    short = {name: name.removeprefix("aten_").removesuffix("_default").removesuffix("_tensor") for name in work}
    left = Counter({short[name]: seen.non_delegated for name, seen in work.items() if seen.non_delegated})
    return left, sum(seen.delegated for seen in work.values())


def _run(path: Path, names: Sequence[str]) -> Run:
    runtime = required("executorch.runtime", EXTRA)
    required("executorch.kernels.quantized", EXTRA)
    method = runtime.Runtime.get().load_program(path).load_method("forward")

    def run(row: Any) -> list[Any]:
        return [each.numpy() for each in method.execute([torch.from_numpy(row[name]) for name in names])]

    return run
