"""The rows that importance is told from, as batches: the same however they are spread over processes.

Rows are sorted by length, so that little is padded, and every batch is split over the processes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.data.batches import Batching
from compress.errors import PruneError
from compress.importance.losses import Targets, summed


@dataclass(frozen=True)
class Batches:
    """Iterates over this process's part of each batch of `size` rows, on `device`.

    teacher: whom `targets: teacher` asks. bf16: forward passes in `computing` run under bfloat16 autocast.
    """

    rows: Dataset
    collate: Batching
    size: int = 32
    device: torch.device = torch.device("cpu")  # noqa: RUF009  # a constant
    bf16: bool = False
    teacher: nn.Module | None = None
    console: Console | None = None

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        order = np.argsort(np.asarray(self.rows["length"][:]), kind="stable")
        state = PartialState()
        begins = range(0, len(order), self.size)
        shown = state.is_main_process and self.console is not None
        for at in track(begins, "importance", console=self.console, disable=not shown, transient=True):
            mine = order[at : at + self.size][state.process_index :: state.num_processes]
            if len(mine):
                yield self._batch(mine)

    def turns(self, steps: int, *, seed: int = 0) -> Iterator[dict[str, Tensor]]:
        """So many batches of `size` rows in random order, each split evenly over the processes.

        Raises PruneError where that cannot be.
        """
        state = PartialState()
        if self.size % state.num_processes:
            raise PruneError(f"batch {self.size} cannot be split evenly over {state.num_processes} processes")
        draw = np.random.default_rng(seed)
        order = np.concatenate(
            [draw.permutation(len(self.rows)) for _ in range(-(-steps * self.size // len(self.rows)))]
        )
        for step in range(steps):
            whole = order[step * self.size : (step + 1) * self.size]
            yield self._batch(whole[state.process_index :: state.num_processes])

    def computing(self) -> torch.autocast:
        """In which forward passes run."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    def loss(self, student: PreTrainedModel, batch: dict[str, Tensor], targets: Targets) -> Tensor:
        """The sum of the losses of a batch's examples: see `losses`."""
        return summed(student, batch, targets, self.teacher)

    def _batch(self, chosen: np.ndarray) -> dict[str, Tensor]:
        found = self.collate([self.rows[int(row)] for row in chosen])
        return {name: tensor.to(self.device) for name, tensor in found.items()}
