"""Where a study lives: killed processes, full disks and lost databases, and what is told of storages that fail."""

import sqlite3
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import TrialState
from sqlalchemy import event

from compress.errors import SearchError
from compress.nas import storage as storages
from compress.nas.storage import RETRIES, StorageError, open_storage
from compress.nas.study import close_study, join_study
from compress.nas.trial import count_scored
from tests.nas.toy import Toy, ToyEvaluator, begin, hasty, run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "study.db"


def test_a_file_is_created_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "new #1 ?{x}%20" / "study.db"
    study = begin(path)
    run(study, ToyEvaluator(rungs=2), trials=3)
    close_study(study)
    assert [path.name] == [each.name for each in path.parent.iterdir()]
    study = begin(path)
    assert count_scored(study.trials) == 3
    close_study(study)


def test_a_file_of_another_study_is_refused(path: Path) -> None:
    close_study(begin(path))
    before = path.read_bytes()
    with pytest.raises(SearchError, match=r"holds study toy, not 'other'"):
        begin(path, "other")
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"my notes", b'{"op_code":0,"worker_id":"x"}\n' * 100])
def test_another_file_is_refused_unchanged(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(StorageError, match=r"study\.db: cannot be opened: file is not a database"):
        open_storage(path)
    assert path.read_bytes() == content


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be opened: unable to open database file"):
        open_storage(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        open_storage(tmp_path / "file" / "study.db")


def test_a_worker_creates_no_file(path: Path) -> None:
    with pytest.raises(StorageError):
        join_study(path)
    assert not path.exists()


def limit_size(storage: BaseStorage, pages: int | None) -> None:
    """Let the file grow by so many pages; None: as far as it wants. SQLite then says that the disk is full."""
    engine = storage._backend.engine  # type: ignore[attr-defined]

    def restrict(connection: Any, *_: object) -> None:
        (now,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count={now + pages if pages is not None else 1_000_000}")

    event.listen(engine, "connect", restrict)
    engine.dispose()


@pytest.mark.parametrize("pages", [0, 3])
def test_a_study_continues_after_a_full_disk(path: Path, pages: int, capfd: pytest.CaptureFixture[str]) -> None:
    study = begin(path)
    run(study, ToyEvaluator(), trials=3)
    limit_size(study._storage, pages)
    with pytest.raises(StorageError, match="database or disk is full"):
        run(study, ToyEvaluator(), trials=500)
    scored = count_scored(sorted_trials(path))
    assert scored >= 3
    close_study(study)
    study = begin(hasty(path))
    run(study, ToyEvaluator(), trials=scored + 5)
    assert count_scored(study.trials) == scored + 5
    assert all(trial.state.is_finished() for trial in study.trials)
    close_study(study)
    assert capfd.readouterr().err == ""


def sorted_trials(path: Path) -> list[optuna.trial.FrozenTrial]:
    study = join_study(path)
    close_study(study)
    return study.trials


def test_a_removed_file_is_reported(path: Path) -> None:
    study = begin(path)
    path.unlink()
    with pytest.raises(StorageError):
        run(study, ToyEvaluator(), trials=2)
    close_study(study)


# ---- trials whose process is gone


def abandon(study: optuna.Study, **attributes: str) -> None:
    """Leave a trial running."""
    with warnings.catch_warnings(action="ignore"):
        trial = study.ask()
    Toy().suggest(trial)
    for name, value in attributes.items():
        trial.set_user_attr(name, value)


def test_the_trials_of_others_keep_running(path: Path) -> None:
    study = begin(path, owner="me")
    abandon(study)
    abandon(study, owner="somebody")
    again = begin(path, owner="me")
    assert {trial.state for trial in again.trials} == {TrialState.RUNNING}
    close_study(study)
    close_study(again)


def test_a_killed_searchs_trial_is_retried_a_few_times(path: Path) -> None:
    for _ in range(RETRIES):
        study = begin(path, owner="me")
        abandon(study, owner="me")
        close_study(study)
    evaluator, study = ToyEvaluator(), begin(path, owner="me")
    run(study, evaluator, trials=1)
    assert [trial.state for trial in study.trials] == [TrialState.FAIL] * RETRIES + [TrialState.COMPLETE]
    assert len({(*trial.params.items(),) for trial in study.trials}) == 1
    assert evaluator.seen == [(Toy().key(study.trials[0].params), 0)]
    for _ in range(RETRIES + 1):
        abandon(study, owner="me")
        close_study(study)
        study = begin(path, owner="me")
    assert study.trials[-1].state == TrialState.FAIL, "a shape that kills every process is not queued for ever"
    close_study(study)


def test_a_live_trial_is_not_taken_from_its_process(path: Path) -> None:
    """One trial takes longer than the grace, and another process looks for dead ones all the time."""
    before = threading.enumerate()
    study, other = begin(hasty(path)), begin(hasty(path))

    def look(choice: object) -> None:
        for _ in range(10):
            time.sleep(0.5)
            with storages.quiet():
                optuna.storages.fail_stale_trials(other)

    run(study, ToyEvaluator(begin=look), trials=1)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE]
    assert not [each for each in threading.enumerate() if each not in before]
    for each in (study, other):
        close_study(each)


def test_a_killed_trial_is_queued_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes notice at the same time that a trial is stale; each is slow between reading and writing it."""
    storage = hasty(path)
    study = begin(storage)
    trial = storage.create_new_trial(study._study_id)
    check = RDBStorage.check_trial_is_updatable

    def check_slowly(self: RDBStorage, *state: Any) -> None:
        check(self, *state)
        time.sleep(0.2)

    monkeypatch.setattr(RDBStorage, "check_trial_is_updatable", check_slowly)

    def fail() -> bool:
        other = hasty(path)
        try:
            return other.set_trial_state_values(trial, TrialState.FAIL)
        except UpdateFinishedTrialError:
            return False
        finally:
            storages.close_storage(other)

    with ThreadPoolExecutor(4) as pool:
        done = [pool.submit(fail) for _ in range(4)]
        assert sorted(each.result() for each in done) == [False, False, False, True]
    close_study(study)


# ---- databases


def nobody_listens() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_an_unreachable_database_is_reported() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StorageError) as error:
        open_storage(f"postgresql://me:secret@127.0.0.1:{nobody_listens()}/study")
    assert "postgresql://me:***@127.0.0.1" in str(error.value)
    assert "Connection refused" in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "where", ["me:s@cret@127.0.0.1:{}/x", "127.0.0.1:{}/x?passwd=s@cret", "127.0.0.1:{}/x?options=-c cret"]
)
def test_no_message_about_a_database_shows_a_password(where: str) -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StorageError) as error:
        open_storage("postgresql://" + where.format(nobody_listens()))
    assert "cret" not in str(error.value)


@pytest.mark.parametrize("url", ["nothing://x", "postgresql://host:port/db", "grpc://me:secret@host:1"])
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(StorageError, match=r"is not the address of a storage; expected .*") as error:
        open_storage(url)
    assert "secret" not in str(error.value)


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storages, "find_spec", lambda name: None)
    with pytest.raises(
        StorageError, match=r"needs the package psycopg: pip install 'psycopg\[binary\]>=3\.2'"
    ) as error:
        open_storage("postgresql://me:secret@host/db")
    assert "secret" not in str(error.value)


def test_the_driver_of_a_postgresql_url_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"psycopg", "psycopg2"}
    monkeypatch.setattr(storages, "find_spec", lambda name: name in there or None)
    assert storages._locate("postgresql://h/d", True)[0] == "postgresql+psycopg://h/d"
    assert storages._locate("postgres://h/d", True)[0] == "postgresql+psycopg://h/d"
    assert storages._locate("postgresql+psycopg2://h/d", True)[0] == "postgresql+psycopg2://h/d"
    there.remove("psycopg")
    assert storages._locate("postgresql://h/d", True)[0] == "postgresql+psycopg2://h/d"


def test_the_users_logging_is_unchanged(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    optuna.logging.set_verbosity(optuna.logging.INFO)
    filters = list(warnings.filters)
    study = begin(path)
    run(study, ToyEvaluator(fails=lambda choice: int(choice["layers"]) % 2 == 1), trials=3)
    close_study(study)
    assert optuna.logging.get_verbosity() == optuna.logging.INFO
    assert warnings.filters == filters
    assert capfd.readouterr().err == ""


def test_a_locked_file_times_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storages, "LOCK_SECONDS", 1)
    study = begin(path)
    with sqlite3.connect(path, isolation_level=None) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StorageError, match="database is locked"):
            run(study, ToyEvaluator(), trials=1)
        holder.execute("ROLLBACK")
    holder.close()
    run(study, ToyEvaluator(), trials=1)
    assert count_scored(study.trials) == 1
    close_study(study)
