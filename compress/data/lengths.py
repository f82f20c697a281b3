"""Choose how many tokens of a row a model reads, `max_length: auto`, from the lengths
of the task's rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from compress.arrays import Array, whole_numbers
from compress.data.encoder import encoder_of
from compress.data.tokenize import encode

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from compress.data.task import Task

ROWS_SAMPLED: Final = 2000
"""Rows whose lengths are measured."""
LENGTH_STEP: Final = 64
"""Lengths are multiples of this number of tokens, which suits files of a fixed
length."""
READ_WHOLE: Final = 0.99
"""Share of the rows that are read whole, if the longest length allows it."""
LONGEST_CHOSEN: Final = 512
"""The longest length that is chosen: BERT's positions. Attention takes time in
proportion to the square of it."""
MOST_COUNTED: Final = 4096
"""The most tokens of a row that are counted."""


@dataclass(frozen=True)
class RowLengths:
    """The lengths of a random sample of a task's rows, in tokens, special tokens
    included.

    longest         the longest length that may be chosen
    windowed        long rows are read in several windows, none is cut
    limit           the most tokens of a row by a sentence encoder's checkpoint, or else
                    by the tokenizer's model_max_length; None without a limit
    teacher_length  tokens that a sentence encoder reads of a text, since texts of an
                    index may be longer than training texts; None for other tasks
    """

    tokens: Array
    longest: int
    windowed: bool
    teacher_length: int | None = None
    limit: int | None = None

    @staticmethod
    def measure(
        split: Dataset,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        positions: int | None,
        *,
        teacher_length: int | None = None,
        seed: int,
    ) -> RowLengths:
        """Measure up to ROWS_SAMPLED rows of a split.

        positions       tokens that the model has positions for, if limited
        teacher_length  tokens that a sentence encoder reads, if its checkpoint says so
        """
        encoder = encoder_of(tokenizer)
        limit = encoder.settings.model_max_length
        # on longer rows its vectors would not be the ones it was trained for
        if task.vectors and teacher_length is not None:
            limit = teacher_length
        longest = min(
            task.longest_row,
            positions or LONGEST_CHOSEN,
            limit or LONGEST_CHOSEN,
        )
        if len(split) > ROWS_SAMPLED:
            split = split.select(
                np.sort(
                    np.random.default_rng(seed).choice(
                        len(split), ROWS_SAMPLED, replace=False
                    )
                )
            )
        rows = encode(
            split,
            encoder,
            longest if task.tokenwise else MOST_COUNTED,
            preparation=task.preparation,
        )
        read = None
        if task.usual_length is not None:
            read = min(
                teacher_length or task.usual_length,
                positions or MOST_COUNTED,
                limit or MOST_COUNTED,
            )
        return RowLengths(
            whole_numbers(rows, "length"), longest, task.tokenwise, read, limit
        )

    @property
    def fitting(self) -> int:
        """Return the smallest multiple of LENGTH_STEP tokens that fits a share
        READ_WHOLE of the rows, at least the teacher's length."""
        needed = LENGTH_STEP * math.ceil(
            float(np.quantile(self.tokens, READ_WHOLE)) / LENGTH_STEP
        )
        return min(max(needed, self.teacher_length or 0), self.longest)

    def share_cut(self, max_length: int) -> float:
        """Return the share of rows that lose text at this length."""
        return 0.0 if self.windowed else float(np.mean(self.tokens > max_length))
