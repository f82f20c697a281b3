"""Which numbers the products of a graph read, on real rows: the ranges that static int8 needs.

The fp32 graph is run with those tensors as further outputs, and what they hold is counted as it comes: memory is
bounded by TOKENS tokens of one batch, whatever the number of rows.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime

from compress.bench.runner import session_options
from compress.errors import ExportError
from compress.export.session import UNOPENED, read_model
from compress.quantize.histogram import Histogram, Method
from compress.quantize.products import products

if TYPE_CHECKING:
    from compress.export.predictor import Row

TOKENS = 512
"""In a batch."""
WINDOW = 1024
"""Rows that are held at a time, to make batches of equal lengths: padding would be counted as activations."""


def ranges(
    source: Path, rows: "Iterable[Row]", *, method: Method = "percentile", percentile: float = 99.99, threads: int = 1
) -> dict[str, tuple[float, float]]:
    """Lowest and highest value of each tensor that a product of the fp32 file `source` reads, by name: see
    `Histogram.range`. Zero is always inside.

    Raises ExportError for a file without products, no rows, or activations that are not finite.
    """
    return cut(observe(source, rows, threads=threads), method, percentile)


def cut(
    seen: Mapping[str, Histogram], method: Method = "percentile", percentile: float = 99.99
) -> dict[str, tuple[float, float]]:
    """The ranges of what was observed: all methods can be had from one pass over the rows."""
    return {name: histogram.range(method, percentile) for name, histogram in seen.items()}


def observe(source: Path, rows: "Iterable[Row]", *, threads: int = 1) -> dict[str, Histogram]:
    """What each tensor that a product reads holds on the rows; each row counts as if run alone."""
    model = read_model(source)
    names = list(dict.fromkeys(product.reads for product in products(model.graph)))
    if not names:
        raise ExportError(f"{source}: no matrix product with constant weights; expected the fp32 file of a bundle")
    seen = {name: Histogram() for name in names}
    for values in watch(model, names, rows, threads=threads, source=source):
        for name, value in values.items():
            try:
                seen[name].add(value)
            except ValueError:
                raise ExportError(f"{source}: {name} is not finite on these rows; its weights are broken") from None
    if not any(histogram.counts.any() for histogram in seen.values()):
        raise ExportError(f"{source}: calibration needs at least one row")
    return seen


def watch(
    model: onnx.ModelProto, names: Sequence[str], rows: "Iterable[Row]", *, threads: int = 1, source: Path
) -> Iterator[dict[str, Any]]:
    """The values of these tensors, batch after batch of rows of one length; `source` is named in errors."""
    shown = copy.deepcopy(model)
    have = {value.name for value in shown.graph.output}
    types = {name: onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names}
    shown.graph.output.extend(value for name, value in types.items() if name not in have)
    try:
        session = onnxruntime.InferenceSession(
            shown.SerializeToString(), session_options(threads, {}), providers=["CPUExecutionProvider"]
        )
    except UNOPENED as error:
        raise ExportError(f"{source}: onnxruntime {onnxruntime.__version__} cannot open it: {error}") from None
    inputs = [node.name for node in session.get_inputs()]
    for batch in _batches(rows, inputs, source):
        yield dict(zip(names, session.run(list(names), batch), strict=True))


def _batches(rows: "Iterable[Row]", inputs: Sequence[str], source: Path) -> Iterator[dict[str, Any]]:
    held: list[Row] = []
    for row in rows:
        if missing := [name for name in inputs if name not in row]:
            raise ExportError(f"{source}: a row has {', '.join(row)}; expected {', '.join(missing)} too")
        held.append(row)
        if len(held) == WINDOW:
            yield from _of_equal_lengths(held, inputs)
            held = []
    yield from _of_equal_lengths(held, inputs)


def _of_equal_lengths(rows: "Sequence[Row]", inputs: Sequence[str]) -> Iterator[dict[str, Any]]:
    lengths = sorted({len(row[inputs[0]]) for row in rows})
    for length in lengths:
        alike = [row for row in rows if len(row[inputs[0]]) == length]
        size = max(1, TOKENS // max(1, length))
        for at in range(0, len(alike), size):
            yield {name: np.array([row[name] for row in alike[at : at + size]], np.int64) for name in inputs}
