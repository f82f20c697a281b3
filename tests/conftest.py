"""Determinism: no network, one thread, caches of its own for every test, and the same random numbers in each."""

import gc
import os
import random
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests import unshipped

if TYPE_CHECKING:
    from tests.command import Shelf

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported: sums in the same order on every machine
if sys.dont_write_bytecode:
    # torch and transformers would be compiled anew by every process that a test starts: half of the time of importing
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(Path(__file__).parents[1] / "build" / "bytecode")
    sys.dont_write_bytecode = False
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # what a shell starts in the background ignores Ctrl-C, and so would the processes that tests start and interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = (
    "tests/nas/test_pipeline.py", "tests/test_documents.py", "tests/commands/test_every_recipe.py",
    "tests/exporters/test_text.py", "tests/commands/test_prune_budget.py", "tests/jobs/test_phases.py",
    "tests/commands/test_demo.py", "tests/exporters/test_tune.py", "tests/exporters/test_families.py",
    "tests/quantization/test_pipeline.py", "tests/commands/test_embedding.py", "tests/commands/test_processes.py",
    "tests/commands/test_pipeline.py", "tests/exporters/test_every_teacher.py", "tests/commands/test_prune.py",
    "tests/papers/test_dynabert.py", "tests/training/test_train.py", "tests/commands/test_trim.py",
    "tests/campaign/test_corpus.py", "tests/campaign/test_damage.py", "tests/campaign/test_disks.py",
    "tests/campaign/test_kill.py", "tests/campaign/test_hostile.py",
)  # fmt: skip
"""Files that take longest: where several processes share the files, nobody should begin one of them last."""


UNIX = (
    "benchmark/test_agent.py", "campaign", "cli/test_output_paths.py", "data/test_cache.py", "data/test_limits.py",
    "data/test_sources.py",
    "exporters/test_bundle.py", "nas/test_postgresql.py", "test_portable.py",
    "test_durability.py", "test_outputs.py", "test_processes.py", "test_resume.py",
)  # fmt: skip
"""Files that kill processes, limit memory or refuse rights in ways that Windows does not have."""
collect_ignore = list(UNIX) if sys.platform == "win32" else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Share the tests among one process more than there are processors: some wait for other processes, or a clock."""
    return (os.cpu_count() or 1) + 1


@pytest.fixture(autouse=True, scope="session")
def frozen() -> None:
    """accelerate collects garbage before every training: 0.2 s over the modules, which never are any."""
    gc.freeze()


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> "Shelf":
    """A tiny teacher, data and recipe, which tests only read."""
    from tests.command import Shelf

    return Shelf.fill(tmp_path_factory.mktemp("shelf"))


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
    monkeypatch.setattr("compress.jobs.shipping.Bundle", unshipped.Unshipped)


@pytest.fixture
def hastened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ship as ever, but run no file for its time; for tests of what is shipped rather than of its figures."""
    unshipped.hasten(monkeypatch)
