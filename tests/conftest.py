"""Determinism: no network, one thread, caches of its own for every test, and the same random numbers in each."""

import gc
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import unshipped

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported: sums in the same order on every machine


@pytest.fixture(autouse=True, scope="session")
def frozen() -> None:
    """accelerate collects garbage before every training: 0.2 s over the modules, which never are any."""
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Light tests do not pay for importing torch."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or fills the caches of whoever runs it."""
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """End runs after their last stage by raising `unshipped.Trained`."""
    monkeypatch.setattr("compress.commands.ship.Bundle", unshipped.Unshipped)


@pytest.fixture
def hastened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ship as ever, but measure in the fewest rounds; for tests of what is shipped rather than of its figures."""
    unshipped.hasten(monkeypatch)
