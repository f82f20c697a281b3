"""An exam as tensors that are made once: what every subnet of a search is asked.

Shapes: B batch, L tokens, U tokens that occur, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.data.collate import Batching

if TYPE_CHECKING:
    from compress.evaluation.evaluator import Evaluator


@dataclass(frozen=True, eq=False)
class Sheets:
    """An exam's rows as padded batches on a device, longest first; which token ids occur; each batch's row numbers.

    For a quick first look take fewer examples: `Sheets.of(exam.spread(100), collate)`.
    """

    exam: Evaluator
    batches: tuple[dict[str, Tensor], ...]
    tokens_U: Tensor
    order_R: NDArray[np.int64]

    @staticmethod
    def of(exam: Evaluator, collate: Batching, *, batch: int = 64, device: torch.device | str = "cpu") -> Sheets:
        """Rows of like lengths share a batch, so that little is padded."""
        order_R = np.argsort(-np.asarray(exam.rows["length"][:]), kind="stable")
        rows = exam.rows.remove_columns("length")
        batches = []
        for start in range(0, len(order_R), batch):
            inputs = collate([rows[int(n)] for n in order_R[start : start + batch]])
            batches.append(
                {name: tensor.to(device) for name, tensor in inputs.items() if name not in ("labels", "index")}
            )
        tokens_U = torch.cat([inputs["input_ids"].flatten() for inputs in batches]).unique()
        return Sheets(exam, tuple(batches), tokens_U, order_R)

    def answers(self, logits: Sequence[Tensor]) -> NDArray[Any]:
        """The logits of the batches in the order of the exam's rows: (rows, outputs), or (tokens, outputs)."""
        parts: list[NDArray[Any]] = []
        for values, inputs in zip(logits, self.batches, strict=True):
            if values.dim() == 3:
                real_BL = inputs["attention_mask"].bool().cpu()
                parts += [row[real].numpy() for row, real in zip(values, real_BL, strict=True)]
            else:
                parts += list(values[:, None].numpy())
        return np.concatenate([parts[n] for n in np.argsort(self.order_R)])

    def score(self, logits: Sequence[Tensor]) -> float:
        """The task's own metric. Raises CompressError where the logits are not finite."""
        return self.exam.scores(self.answers(logits))[self.exam.task.metric]
