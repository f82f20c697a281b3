"""A whole search whose study is in PostgreSQL, and a worker that is given its address alone."""

from pathlib import Path

import pytest

from compress.nas import record
from tests import command
from tests.nas.shelved import Searched, weighing
from tests.nas.test_postgresql import Database, database, server  # noqa: F401 fixtures

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("hastened")]


def test_a_search_in_a_database_and_its_worker(
    tmp_path: Path,
    database: Database,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shelf, out = Searched.fill(tmp_path / "shelf"), tmp_path / "study"
    monkeypatch.setattr("compress.benchmark.devices.open_device", weighing)
    words = shelf.words(out, storage=database.url)
    with monkeypatch.context() as patch:
        patch.setattr("compress.commands.search.run_trials", _interrupted)
        assert command.run(*words).code == 130
    told = command.run("search", "--storage", database.url, "--worker")
    assert (told.code, "18 shapes scored" in told.out) == (0, True), told.err
    told = command.run(*words, "--resume")
    assert told.code == 0, told.err
    found = record.load_report(out)
    assert sum(point.state in ("complete", "pruned") for point in found.points) == 18, "nothing was left to score"
    assert "postgresql://" in (out / "run.json").read_text()


def _interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt
