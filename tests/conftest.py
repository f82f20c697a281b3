"""Determinism: no network, and the same random numbers in every test, whatever ran before."""

import os
import random
import sys

import numpy as np
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Light tests do not pay for importing torch."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
