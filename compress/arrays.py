"""Name the arrays that functions take and return, and choose evenly from them."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from datasets import Dataset

Array = NDArray[Any]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.integer]
"""Whole numbers of any size."""
Longs = NDArray[np.int64]
Flags = NDArray[np.bool_]


def spaced(total: int, count: int) -> Longs:
    """Choose at most `count` of the numbers below `total`, evenly spaced, including the
    first and the last."""
    few = max(0, min(count, total))
    return np.unique(np.linspace(0, total - 1, few, dtype=np.int64))


def whole_numbers(rows: "Dataset", column: str) -> Longs:
    """Return a column without a Python object for each row."""
    table = rows.select_columns(column).with_format("arrow")[:]
    return np.asarray(table[column].to_numpy(), np.int64)
