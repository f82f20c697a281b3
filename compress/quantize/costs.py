"""What it costs to leave products in float32, raced on the device: each shape of weight, or all that were kept."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import onnx

from compress.bench.device import Device
from compress.bench.protocol import Setting
from compress.quantize.mixed import FloatCost, Make, Mixed
from compress.quantize.products import Product

TOKENS = 64
ROUNDS, RUNS = 4, 8
LEAST = 1e-3
"""Of the file's latency, that a product costs at least: less is not told from nothing."""


def raced(
    make: Make, products: Sequence[Product], graph: onnx.GraphProto, device: Device, *, max_length: int
) -> dict[str, float]:
    """Milliseconds that each product costs more in float32 than in int8: one row of TOKENS tokens, one thread.

    Products of one shape are left in float32 together, against all-int8, and share the difference.
    """
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    alike: dict[str, list[str]] = {}
    for each in products:
        kind = "x".join(map(str, shapes[each.weight])) + (" head" if each.gemm else "")
        alike.setdefault(kind, []).append(each.name)
    with tempfile.TemporaryDirectory() as scratch:
        files = {kind: Path(scratch) / f"{at}.onnx" for at, kind in enumerate(("int8", *alike))}
        for kind, file in files.items():
            make(file, alike.get(kind, ()))
        times = device.race(files, [Setting(1, 1, min(TOKENS, max_length))], rounds=ROUNDS, runs=RUNS)
    p50 = {time.name: time.p50_ms for time in times}
    return {
        name: max((p50[kind] - p50["int8"]) / len(names), LEAST * p50["int8"])
        for kind, names in alike.items()
        for name in names
    }


def priced(mixed: Mixed, make: Make, device: Device, *, max_length: int) -> Mixed:
    """Race the file with its products in float32 against the same file with all in int8: one row of TOKENS tokens, one
    thread. As it was where nothing stays in float32."""
    if not mixed.keep:
        return mixed
    setting = Setting(1, 1, min(TOKENS, max_length))
    with tempfile.TemporaryDirectory() as scratch:
        kept, whole = (Path(scratch) / name for name in ("kept.onnx", "whole.onnx"))
        make(kept, mixed.keep)
        make(whole, ())
        times = device.race({"kept": kept, "whole": whole}, [setting], rounds=ROUNDS, runs=RUNS)
        megabytes = (kept.stat().st_size - whole.stat().st_size) / 1e6
    p50 = {time.name: time.p50_ms for time in times}
    cost = FloatCost(p50["kept"] - p50["whole"], megabytes, str(setting), mixed.whole.least_limit)
    return replace(mixed, cost=cost)
