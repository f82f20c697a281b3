"""Whether another file of a model answers as the fp32 one does: made-up rows, and the largest difference on them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from compress.errors import ExportError
from compress.exporters.session import open_session, read_model, vocabulary_size

LENGTHS = (2, 3, 7, 16, 33, 64, 100, 128)
SEGMENTS = "token_type_ids"

Row = Mapping[str, NDArray[np.int64]]
"""One row, without padding: input name -> (1, tokens)."""

Run = Callable[[Row], Sequence[NDArray[np.float32]]]
"""Answers a row: the arrays of the fp32 file's outputs, in its order, (1, ...)."""


@dataclass(frozen=True)
class Difference:
    """The largest |logit - fp32's logit| over rows; `logit`: the largest |logit| of fp32 there."""

    largest: float
    logit: float
    rows: int

    @property
    def relative(self) -> float:
        """To the largest logit, or to 1."""
        return self.largest / max(1.0, self.logit)


def rows_for(path: Path, max_length: int) -> list[Row]:
    """Rows of random tokens, the same each time, of up to `max_length` tokens, with the inputs that the ONNX file
    `path` has; of two segments where it has them. Raises ExportError where it is no text encoder's."""
    model = read_model(path)
    names = [each.name for each in model.graph.input]
    vocabulary, draw = vocabulary_size(model, path), np.random.default_rng(0)
    rows: list[Row] = []
    for length in LENGTHS:
        if length > max_length:
            break
        ids = draw.integers(0, vocabulary, (1, length))
        known = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        known[SEGMENTS] = np.arange(length)[None] * 2 // length
        if unknown := [name for name in names if name not in known]:
            raise ExportError(
                f"{path}: reads {', '.join(unknown)}; expected a text encoder's file, which reads {', '.join(known)}"
            )
        rows.append({name: known[name] for name in names})
    return rows


def onnx_run(path: Path) -> Run:
    """The file under onnxruntime, on the CPU, one thread."""
    session = open_session(path, threads=1)
    return lambda row: session.run(None, dict(row))


def difference(exact: Run, other: Run, rows: Sequence[Row]) -> Difference:
    """NaN when any logit of `other` is."""
    apart, sizes = [], []
    for row in rows:
        for one, two in zip(exact(row), other(row), strict=True):
            with np.errstate(invalid="ignore"):  # inf - inf
                apart.append(np.abs(np.asarray(two, np.float32) - one).max())
            sizes.append(np.abs(one).max())
    return Difference(float(np.max(apart)), float(np.max(sizes)), len(rows))
