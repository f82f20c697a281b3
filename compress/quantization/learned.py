"""Static int8 of a model that was trained for it: its config holds the ranges (compress.papers.q8bert)."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compress.errors import ExportError
from compress.exporters.session import read_model
from compress.quantization.graph import products
from compress.quantization.static import quantize_static

KEY = "activation_ranges"
REPEATED = re.compile(r"_\d+(?=\.|$)")
"""What the exporter adds to a layer's name where the layer is called again."""


def learned_ranges(config: Any) -> Mapping[str, Sequence[float]]:
    """Layer -> [low, high] of what it read in quantisation-aware training; empty without it."""
    found: Mapping[str, Sequence[float]] = getattr(config, KEY, None) or {}
    return found


def quantize_learned(
    source: Path, target: Path, learned: Mapping[str, Sequence[float]], *, keep: Sequence[str] = ()
) -> None:
    """Writes `source`, the fp32 file of such a model, as static int8 with its own ranges.

    Layers without a range stay in float32, as they were in training; so do those of `keep`. Raises ExportError when
    `source` has none of the layers.
    """
    ranges, exact = {}, list(keep)
    for product in products(read_model(source).graph):
        found = learned.get(module(product.name)) or learned.get(REPEATED.sub("", module(product.name)))
        if found is None:
            exact.append(product.name)
        else:
            ranges[product.reads] = (found[0], found[1])
    if not ranges:
        raise ExportError(
            f"{source}: none of its products is a layer with a learned range ({', '.join(list(learned)[:3])}, ...); "
            "expected the file that to_onnx writes of the trained model"
        )
    quantize_static(source, target, ranges, keep=list(dict.fromkeys(exact)))


def module(name: str) -> str:
    """`/model/bert/encoder/layer.0/output/dense/MatMul` -> `bert.encoder.layer.0.output.dense`."""
    return ".".join(name.strip("/").split("/")[1:-1])
