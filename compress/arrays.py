"""Name the arrays that functions take and return, and choose evenly from them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


def spaced(total: int, count: int) -> NDArray[np.int64]:
    """Choose at most `count` of the numbers below `total`, evenly spaced, the first and
    the last among them."""
    few = max(0, min(count, total))
    return np.unique(np.linspace(0, total - 1, few, dtype=np.int64))
