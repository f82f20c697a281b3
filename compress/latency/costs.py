"""Count what a shape weighs from its config, and keep what was measured on one device in a folder."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn
from transformers import CONFIG_MAPPING

from compress.data.task import Kind
from compress.errors import DamagedError
from compress.exporters.artifact import Precision
from compress.io import write_json
from compress.latency.features import Terms
from compress.latency.measure import Sample
from compress.latency.model import LatencyModel
from compress.models import heads
from compress.models.sharing import share, share_again
from compress.records.latency import Setting
from compress.slicing.shape import Shape

MATRICES: Final[Mapping[Precision, float]] = MappingProxyType(
    {"fp32": 4.0, "fp16": 2.0, "w8": 1.0 + 4 / 128, "int8": 1.0, "q4": 0.5 + 4.5 / 32}
)
"""Bytes of a number in a matrix or table, what its block's scale takes included; all others take four, fp16 two."""

NODES_MB = 0.025
"""Megabytes of the graph per layer: 0.01 to 0.035 in the files of 40 shapes (BERT, 2 to 6 layers of 128 to 512)."""


@dataclass(frozen=True)
class ModelCost:
    """The cost of a shape with its head.

    body_parameters: without the tables of words, positions and segments; each tied or shared weight counts once.
    file_mb: 10^6 bytes, estimated to a few percent.
    """

    parameters: int
    body_parameters: int
    flops_per_token: float
    file_mb: float

    def plain(self) -> dict[str, float]:
        """Return the figures by the names of objectives and limits."""
        return {name: float(getattr(self, name)) for name in ("parameters", "flops_per_token", "file_mb")}


def model_cost(
    config: Any,
    precision: Precision = "int8",
    *,
    kind: Kind | None = "classification",
    seq: int = 128,
    shared: Mapping[str, int] | None = None,
) -> ModelCost:
    """Compute the cost of a transformers config without any weights, which takes milliseconds. Cached.

    shared: how many different attention blocks, or FFNs, its layers use (`sharing.share`). flops_per_token: in `seq`
    tokens, of the whole model (exact for `features.EXACT` families). Raises StudentError for what cannot be shared so.
    """
    key = json.dumps(config.to_dict(), sort_keys=True, default=str)
    total, tables, vectors = _count_parameters(config.model_type, key, kind, tuple(sorted((shared or {}).items())))
    size = (total - vectors) * MATRICES[precision] + vectors * (2 if precision == "fp16" else 4)
    return ModelCost(
        parameters=total,
        body_parameters=total - tables,
        flops_per_token=Terms.from_config(config, Setting(seq=seq), kind).flops / seq,
        file_mb=size / 1e6 + NODES_MB * Shape.from_config(config).layers,
    )


@lru_cache(maxsize=4096)
def _count_parameters(
    family: str, text: str, kind: Kind | None, shared: tuple[tuple[str, int], ...]
) -> tuple[int, int, int]:
    """Count parameters: all, those of tables, those of vectors."""
    config = CONFIG_MAPPING[family].from_dict(json.loads(text))
    with torch.device("meta"):
        model = heads.create(config, "task" if kind else "encoder", kind)
        share_again(model)
        if shared:
            share(model, **dict(shared))
    tables = {id(each.weight): each.weight.numel() for each in model.modules() if isinstance(each, nn.Embedding)}
    sizes = [(each.numel(), each.dim()) for each in model.parameters()]
    return sum(size for size, _ in sizes), sum(tables.values()), sum(size for size, axes in sizes if axes < 2)


@dataclass(frozen=True)
class LatencyTable:
    """Measurements of one device. models: by precision; beside: the teacher's files and the anchors, by name."""

    models: Mapping[Precision, LatencyModel]
    beside: Mapping[str, Sample]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for precision, model in self.models.items():
            model.save(folder / f"{precision}.json")
        write_json(folder / "beside.json", {name: asdict(each) for name, each in self.beside.items()})

    @staticmethod
    def load(folder: Path, precisions: Sequence[Precision]) -> "LatencyTable | None":
        """Load what `save` wrote; None where it did not come to its end. Raises DamagedError."""
        if not (folder / "beside.json").is_file():
            return None
        try:
            beside = TypeAdapter(dict[str, Sample]).validate_json((folder / "beside.json").read_bytes())
        except ValidationError:
            remedy = f"Remove {folder} and repeat the command with --resume: the shapes are measured again"
            raise DamagedError(folder / "beside.json", ["it cannot be read"], remedy) from None
        return LatencyTable({each: LatencyModel.from_json(folder / f"{each}.json") for each in precisions}, beside)

    def to_json(self) -> str:
        """Write the models alone, for a worker's study."""
        return json.dumps({precision: each.to_json() for precision, each in self.models.items()})

    @staticmethod
    def from_json(text: str) -> "LatencyTable":
        return LatencyTable({name: LatencyModel.from_json(each) for name, each in json.loads(text).items()}, {})

    def teacher(self, precision: Precision) -> Sample | None:
        return self.beside.get(f"teacher {precision}")
