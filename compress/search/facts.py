"""What a shape weighs, from its config alone: parameters counted on a model without weights, the size of its file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from transformers import CONFIG_MAPPING

from compress import heads
from compress.bench.protocol import Setting
from compress.data.task import Kind
from compress.export.bundle import Precision
from compress.search.terms import Terms
from compress.shape import Shape
from compress.students.sharing import share, share_again

MATRICES: Final[Mapping[Precision, float]] = MappingProxyType(
    {"fp32": 4.0, "fp16": 2.0, "w8": 1.0 + 4 / 128, "int8": 1.0, "q4": 0.5 + 4.5 / 32}
)
"""Bytes of a number in a matrix or table, what its block's scale takes included; all others take four, fp16 two."""

NODES_MB = 0.025
"""Of the graph itself, for each layer: 0.01 to 0.035 in the files of 40 shapes (BERT, 2 to 6 layers of 128 to 512)."""


@dataclass(frozen=True)
class Facts:
    """Of a shape with its head. body_parameters: without the tables of words, positions and segments; each tied or
    shared weight counts once. file_mb: 10^6 bytes, estimated to a few percent."""

    parameters: int
    body_parameters: int
    flops_per_token: float
    file_mb: float

    def plain(self) -> dict[str, float]:
        """By the names of objectives and limits."""
        return {name: float(getattr(self, name)) for name in ("parameters", "flops_per_token", "file_mb")}


def facts(
    config: Any,
    precision: Precision = "int8",
    *,
    kind: Kind | None = "classification",
    seq: int = 128,
    shared: Mapping[str, int] | None = None,
) -> Facts:
    """Of a transformers config, without any weights, in milliseconds; kept for the next time it is asked.

    shared: how many different attention blocks, or FFNs, its layers use (`students.share`). flops_per_token: in `seq`
    tokens, of the whole model (exact for terms.EXACT families). Raises StudentError for what cannot be shared so.
    """
    key = json.dumps(config.to_dict(), sort_keys=True, default=str)
    total, tables, vectors = _counted(config.model_type, key, kind, tuple(sorted((shared or {}).items())))
    return Facts(
        parameters=total,
        body_parameters=total - tables,
        flops_per_token=Terms.of(config, Setting(seq=seq), kind).flops / seq,
        file_mb=_bytes(total, vectors, precision) / 1e6 + NODES_MB * Shape.of(config).layers,
    )


@lru_cache(maxsize=4096)
def _counted(family: str, text: str, kind: Kind | None, shared: tuple[tuple[str, int], ...]) -> tuple[int, int, int]:
    """Parameters: all, those of tables, those of vectors."""
    config = CONFIG_MAPPING[family].from_dict(json.loads(text))
    with torch.device("meta"):
        model = heads.create(config, "task" if kind else "encoder", kind)
        share_again(model)
        if shared:
            share(model, **dict(shared))
    tables = {id(each.weight): each.weight.numel() for each in model.modules() if isinstance(each, nn.Embedding)}
    sizes = [(each.numel(), each.dim()) for each in model.parameters()]
    return sum(size for size, _ in sizes), sum(tables.values()), sum(size for size, axes in sizes if axes < 2)


def _bytes(total: int, vectors: int, precision: Precision) -> float:
    return (total - vectors) * MATRICES[precision] + vectors * (2 if precision == "fp16" else 4)
