"""Name the arrays that functions take and return."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
