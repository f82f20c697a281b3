"""Run a model of lookups on batches of rows, each answered as it is alone.

A call of onnxruntime for each row of a static model costs ten times what the model
computes. `rewrite.batch` makes a graph for batches. It is used only if it answers drawn
rows exactly as the file answers each of them alone.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from compress.arrays import Array
from compress.data.fast_tokens import TokenArrays
from compress.errors import BundleError
from compress.exporters.rewrite.batch import batch_rows
from compress.exporters.session import (
    UNOPENED,
    EncodedRow,
    create_session,
    read_model,
    runtime_reason,
    session_entries,
    session_options,
    vocabulary_size,
)

RunAlone = Callable[[Sequence[EncodedRow]], NDArray[np.float32]]
"""Run rows one at a time, and return their outputs (rows, outputs)."""


@dataclass(frozen=True)
class BatchSession:
    """Hold a session of the graph for batches, and the names of the outputs to compute;
    None for all."""

    session: onnxruntime.InferenceSession
    outputs: Sequence[str] | None

    @classmethod
    def open(
        cls, file: Path, outputs: Sequence[str] | None, run_alone: RunAlone
    ) -> "BatchSession | None":
        """Open an ONNX file for batches; None unless each row of a batch is answered
        exactly as `run_alone` answers it."""
        model = read_model(file)
        changed = batch_rows(model)
        if changed is None:
            return None
        options = session_options(1, session_entries(model, file))
        draw = np.random.default_rng(0)
        most = vocabulary_size(model, file)
        ids = [draw.integers(0, most, length).tolist() for length in range(1, 65)]
        ids.append([0, 0, 0])
        rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids]
        try:
            opened = cls(
                create_session(changed.SerializeToString(), options, file), outputs
            )
            together = opened._run(TokenArrays.from_rows(ids), np.arange(len(ids)))
        except UNOPENED:
            return None
        return opened if np.array_equal(together, run_alone(rows)) else None

    def run(self, tokens: TokenArrays, threads: int) -> NDArray[np.float32]:
        """Compute the outputs (rows, outputs) of encoded rows, in order, on `threads`
        threads. Raises BundleError for rows that the file cannot be run on."""
        batches = list(_cut_batches(tokens.lengths))
        run = partial(self._run, tokens)
        try:
            with ThreadPoolExecutor(threads) as pool:
                found = np.concatenate(list(pool.map(run, batches)))
        except UNOPENED as error:
            raise BundleError(
                f"the model cannot be run: {runtime_reason(error)}"
            ) from None
        ordered = np.empty_like(found)
        ordered[np.concatenate(batches)] = found
        return ordered

    def _run(self, tokens: TokenArrays, rows: Array) -> NDArray[np.float32]:
        """Run some rows, by their numbers, padded to the longest of them."""
        begins_R1 = tokens.bounds[rows, None]
        lengths_R1 = tokens.bounds[rows + 1, None] - begins_R1
        place_L = np.arange(lengths_R1.max())
        inside = place_L < lengths_R1
        ids = np.zeros(inside.shape, np.int64)
        ids[inside] = tokens.ids[(begins_R1 + place_L)[inside]]
        given = {"input_ids": ids, "attention_mask": inside.astype(np.int64)}
        names = [node.name for node in self.session.get_inputs()]
        (found,) = self.session.run(self.outputs, {name: given[name] for name in names})
        return np.asarray(found)


def _cut_batches(lengths: Array) -> Iterator[Array]:
    """Yield the numbers of rows of similar length, few enough for the processor's
    cache."""
    most_tokens = 2048  # padding included
    order = np.argsort(lengths, kind="stable")
    start = 0
    while start < len(order):
        few = order[start : start + max(1, most_tokens // lengths[order[start]])]
        batch = few[: max(1, most_tokens // lengths[few[-1]])]
        yield batch
        start += len(batch)
