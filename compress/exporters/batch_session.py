"""Run batches of rows, each with the same answer as alone.

For short rows, a call of onnxruntime costs more than the computation. Rows of equal
length need no padding, and onnxruntime answers each as it would alone, unless the file
chooses its scales by the whole batch, as int8 with dynamic ranges does. The graph of a
static embedding model is rewritten for rows of any length (`rewrite.batch`).

Batches are used only if random rows get the same answers in them, bit by bit, as alone.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime

from compress.arrays import Array, Floats
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
)
from compress.progress import show_progress

RunAlone = Callable[[Sequence[EncodedRow]], Floats]
"""Run rows one at a time, and return their outputs (rows, outputs)."""


@dataclass(frozen=True)
class BatchSession:
    """Hold a session that runs batches.

    outputs   the names of the outputs to compute; None for all
    padded    whether rows of a batch may differ in length
    """

    session: onnxruntime.InferenceSession
    outputs: Sequence[str] | None
    padded: bool

    @classmethod
    def from_session(
        cls, session: onnxruntime.InferenceSession, outputs: Sequence[str] | None
    ) -> "BatchSession":
        """Run batches of equal length in the session for single rows."""
        return cls(session, outputs, padded=False)

    @classmethod
    def from_file(
        cls, file: Path, outputs: Sequence[str] | None
    ) -> "BatchSession | None":
        """Open the ONNX file of a model of lookups for batches; None for another
        model. Raises ExportError for a file that cannot be opened."""
        model = read_model(file)
        changed = batch_rows(model)
        if changed is None:
            return None
        options = session_options(1, session_entries(model, file))
        session = create_session(changed.SerializeToString(), options, file)
        return cls(session, outputs, padded=True)

    def agrees(self, run_alone: RunAlone, vocabulary: int) -> bool:
        """Check whether random rows get the same answers in batches as from
        `run_alone`.

        vocabulary   the number of token ids
        """
        draw = np.random.default_rng(0)
        lengths = range(1, 65) if self.padded else np.repeat([2, 3, 8, 21, 40], 3)
        ids = [draw.integers(0, vocabulary, length).tolist() for length in lengths]
        ids.append([0] * len(ids[0]))
        types = [[at * 2 // len(row) for at in range(len(row))] for row in ids]
        tokens = TokenArrays.from_rows(ids, types)
        rows = [
            {
                "input_ids": row,
                "attention_mask": [1] * len(row),
                "token_type_ids": kinds,
            }
            for row, kinds in tokens.rows()
        ]
        try:
            return np.array_equal(self.run(tokens, threads=1), run_alone(rows))
        except BundleError:
            return False

    def run(self, tokens: TokenArrays, threads: int) -> Floats:
        """Compute the outputs (rows, outputs) of encoded rows, in order, on `threads`
        threads. Raises BundleError for rows that the file cannot be run on."""
        batches = list(self._cut(tokens.lengths))
        run = partial(self._run, tokens)
        try:
            with ThreadPoolExecutor(threads) as pool:
                answers = pool.map(run, batches)
                found = list(show_progress(answers, "scoring", len(batches), "batches"))
        except UNOPENED as error:
            raise BundleError(
                f"the model cannot be run: {runtime_reason(error)}"
            ) from None
        joined = np.concatenate(found)
        ordered = np.empty_like(joined)
        ordered[np.concatenate(batches)] = joined
        return ordered

    def _cut(self, lengths: Array) -> Iterator[Array]:
        """Yield the indices of the rows of each batch: of similar or equal length, and
        few enough for the processor's cache."""
        most_tokens = 2048 if self.padded else 512
        order = np.argsort(lengths, kind="stable")
        start = 0
        while start < len(order):
            shortest = lengths[order[start]]
            few = order[start : start + max(1, most_tokens // shortest)]
            longest = lengths[few[-1]]
            if self.padded:
                batch = few[: max(1, most_tokens // longest)]
            else:
                batch = few[lengths[few] == shortest]
            yield batch
            start += len(batch)

    def _run(self, tokens: TokenArrays, rows: Array) -> Floats:
        """Run the rows with these indices, padded to the longest of them."""
        begins_R1 = tokens.bounds[rows, None]
        lengths_R1 = tokens.bounds[rows + 1, None] - begins_R1
        place_L = np.arange(lengths_R1.max())
        inside = place_L < lengths_R1
        places = (begins_R1 + place_L)[inside]
        given = {"attention_mask": inside.astype(np.int64)}
        columns = {"input_ids": tokens.ids, "token_type_ids": tokens.types}
        for name, values in columns.items():
            if values is not None:
                given[name] = np.zeros(inside.shape, np.int64)
                given[name][inside] = values[places]
        names = [node.name for node in self.session.get_inputs()]
        (found,) = self.session.run(self.outputs, {name: given[name] for name in names})
        return np.asarray(found)
