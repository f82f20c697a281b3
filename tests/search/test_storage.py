"""Where a study lives: what is told of storages that are not there, and journals that survive what happens to files."""

import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import optuna
import psutil
import pytest
from optuna.trial import TrialState

from compress.nas import storage
from compress.nas import storage as lines
from compress.nas.outcomes import counted
from compress.nas.storage import ATTEMPTS, Pulse, StorageError, me, open_storage, quiet, sweep
from compress.nas.study import open_study, run_trials
from tests.search.toy import OF, PULSE, Toy, ToyJudge, started

QUIET: Callable[[str], None] = lambda line: None  # noqa: E731


def journal_of(folder: Path, trials: int = 3) -> Path:
    path = folder / "journal.log"
    run_trials(started(path), Toy(), ToyJudge(), trials=trials, say=QUIET, pulse=PULSE)
    return path


def test_a_journal_is_made_where_it_is_asked_for_and_read_again(tmp_path: Path) -> None:
    path = journal_of(tmp_path / "runs" / "new")
    assert [path.name] == [each.name for each in path.parent.iterdir()]  # no lock left
    assert counted(started(path).trials) == 3


def test_a_torn_last_line_is_cut_off_and_told(tmp_path: Path) -> None:
    path = journal_of(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"op_code":4,"worker')
    said: list[str] = []
    study = started(path, say=said.append)
    assert path.read_bytes().startswith(whole)
    assert [line for line in said if "20 bytes" in line and "cut short" in line], said
    run_trials(study, Toy(), ToyJudge(), trials=5, say=QUIET, pulse=PULSE)
    assert all(json.loads(line) for line in path.read_text().splitlines())
    assert counted(started(path).trials) == 5


def test_a_torn_line_longer_than_a_block_is_cut_off(tmp_path: Path) -> None:
    path = journal_of(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"op_code":4,"x":"' + b"x" * 10_000)
    open_storage(path, say=QUIET)
    assert path.read_bytes() == whole


def test_a_journal_that_is_one_torn_line_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    path.write_bytes(b'{"op_co')
    assert counted(started(path).trials) == 0


def test_a_line_torn_while_a_study_is_open_is_cut_before_the_next_one(tmp_path: Path) -> None:
    """Another process was killed in the middle of a line: ours must not be glued to it."""
    path = tmp_path / "journal.log"
    study = started(path)
    with path.open("ab") as file:
        file.write(b'{"op_code":4,"wor')
    run_trials(study, Toy(), ToyJudge(), trials=2, say=QUIET, pulse=PULSE)
    assert all(json.loads(line) for line in path.read_text().splitlines())
    assert counted(started(path).trials) == 2


def test_the_line_of_a_live_writer_is_not_cut(tmp_path: Path) -> None:
    """While somebody has the lock and half a line is written, opening waits."""
    path = journal_of(tmp_path)
    lock = path.with_name(f"{path.name}.lock")
    lock.touch()
    line = b'{"op_code":2,"worker_id":"w","study_id":0,"user_attr":{"note":"mine"}}\n'
    with path.open("ab", buffering=0) as file:
        file.write(line[:30])
        opening = threading.Thread(target=open_storage, args=(path,), kwargs={"say": QUIET})
        opening.start()
        opening.join(0.3)
        assert opening.is_alive()
        file.write(line[30:])
    lock.unlink()
    opening.join()
    assert started(path).user_attrs["note"] == "mine"


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LOCK_GRACE", 3)
    path = journal_of(tmp_path)
    path.with_name(f"{path.name}.lock").touch()
    began = time.monotonic()
    assert counted(started(path).trials) == 3
    assert 3 <= time.monotonic() - began < 10


def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes, without a newline at the end")
    with pytest.raises(StorageError, match=r"notes\.txt: is not the journal of a study; give another file"):
        open_storage(path)
    assert path.read_text() == "my notes, without a newline at the end"


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = journal_of(tmp_path)
    rows = path.read_text().splitlines()
    path.write_text("\n".join([*rows[:4], rows[4][:9], *rows[5:]]) + "\n")
    with pytest.raises(StorageError, match=r"journal\.log: line 5 cannot be read"):
        open_storage(path)


def test_folders_are_no_journals(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"is a folder; a study's journal is a file, as .*journal\.log"):
        open_storage(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        open_storage(tmp_path / "file" / "journal.log")


@contextmanager
def full_disk(after: int) -> Iterator[None]:
    """A disk that takes `after` more lines of journals, and half of one more."""
    append, left = lines._append, [after]

    class Full:
        def __init__(self, file: lines.FileIO) -> None:
            self.file = file

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def write(self, data: memoryview) -> int:
            if len(data) < 40:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(data[: len(data) // 2]) or 0

    def appended(file: lines.FileIO, data: bytes) -> None:
        left[0] -= 1
        append(Full(file) if left[0] < 0 else file, data)  # type: ignore[arg-type]

    with mock.patch.object(lines, "_append", appended):
        yield


@pytest.mark.parametrize("after", [0, 5, 12])
def test_a_full_disk_is_told_and_the_study_goes_on_when_there_is_space(tmp_path: Path, after: int) -> None:
    path = journal_of(tmp_path)
    before = path.read_bytes()
    study = started(path)
    with full_disk(after), pytest.raises(StorageError, match=r"journal\.log: cannot be written \(No space left"):
        run_trials(study, Toy(), ToyJudge(), trials=8, say=QUIET, pulse=PULSE)
    assert path.read_bytes().startswith(before)
    assert all(json.loads(line) for line in path.read_text().splitlines())
    study = started(path)
    run_trials(study, Toy(), ToyJudge(), trials=8, say=QUIET, pulse=PULSE)
    assert counted(study.trials) == 8
    assert all(trial.state.is_finished() for trial in study.trials)


def test_a_journal_removed_under_a_study_is_told(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    study = started(path)
    path.unlink()
    with pytest.raises(StorageError, match="cannot be read"):
        run_trials(study, Toy(), ToyJudge(), trials=2, say=QUIET, pulse=PULSE)
    assert not path.exists()


# ---- trials whose worker is gone


def abandon(study: optuna.Study, **owner: object) -> optuna.Trial:
    """A trial that runs, of another process."""
    with quiet():
        trial = study.ask()
    trial.suggest_int("layers", 1, 8)
    trial.suggest_int("hidden", 1, 32)
    trial.set_user_attr("owner", {**me(), **owner})
    return trial


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_trial_of_a_process_that_is_gone_is_run_again_with_the_same_parameters(tmp_path: Path) -> None:
    study = started(tmp_path / "journal.log")
    lost = abandon(study, pid=ended_process())
    said: list[str] = []
    sweep(study, PULSE, said.append)
    sweep(study, PULSE, said.append)
    assert [trial.state for trial in study.trials] == [TrialState.FAIL, TrialState.WAITING]
    assert len(said) == 1
    assert "is gone; the same shape is queued again" in said[0]
    run_trials(study, Toy(), ToyJudge(), trials=1, say=QUIET, pulse=PULSE)
    assert study.trials[1].params == lost.params
    assert study.trials[1].state == TrialState.COMPLETE


def test_a_process_that_took_over_the_number_is_not_the_worker(tmp_path: Path) -> None:
    study = started(tmp_path / "journal.log")
    abandon(study, started=float(me()["started"]) - 3600)
    sweep(study, PULSE, QUIET)
    assert study.trials[0].state == TrialState.FAIL


def test_a_trial_that_an_error_ended_in_this_process_is_run_again(tmp_path: Path) -> None:
    study = started(tmp_path / "journal.log")
    other = threading.Thread(target=abandon, args=(study,))
    other.start()
    other.join()
    abandon(study)
    said: list[str] = []
    sweep(study, PULSE, said.append)
    assert [trial.state.name for trial in study.trials] == ["FAIL", "FAIL", "WAITING", "WAITING"]
    assert all("an error ended it; the same shape is queued again" in line for line in said)


def test_a_trial_of_another_thread_is_left_alone(tmp_path: Path) -> None:
    study = started(tmp_path / "journal.log")
    seen: list[TrialState] = []

    def look(choice: object) -> None:
        one = threading.Thread(target=sweep, args=(study, PULSE, QUIET))
        one.start()
        one.join()
        seen.append(study.trials[-1].state)

    run_trials(study, Toy(), ToyJudge(begin=look), trials=1, say=QUIET, pulse=PULSE)
    assert seen == [TrialState.RUNNING]


def test_a_killed_child_that_nobody_waited_for_is_gone(tmp_path: Path) -> None:
    study = started(tmp_path / "journal.log")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        abandon(study, pid=child.pid, started=time.time())
        sweep(study, PULSE, QUIET)
        assert study.trials[0].state == TrialState.RUNNING
        child.kill()
        time.sleep(0.1)
        sweep(study, PULSE, QUIET)
        assert study.trials[0].state == TrialState.FAIL


def test_the_trial_of_a_live_worker_is_left_alone_wherever_it_is(tmp_path: Path) -> None:
    study = started(tmp_path / "journal.log")
    parent = psutil.Process().parent()
    assert parent is not None
    abandon(study, pid=parent.pid, started=parent.create_time())
    abandon(study, host="elsewhere", pid=1).set_user_attr("beat", time.time() - PULSE.grace / 2)
    study.ask()  # in the moment before its worker puts its name to it
    sweep(study, PULSE, QUIET)
    assert {trial.state for trial in study.trials} == {TrialState.RUNNING}


def test_a_worker_of_another_host_is_gone_when_its_beat_stops(tmp_path: Path) -> None:
    study = started(tmp_path / "journal.log")
    lost = abandon(study, host="elsewhere", pid=me()["pid"])
    lost.set_user_attr("beat", time.time() - 2 * PULSE.grace)
    said: list[str] = []
    sweep(study, PULSE, said.append)
    assert [trial.state for trial in study.trials] == [TrialState.FAIL, TrialState.WAITING]
    assert "on elsewhere has been silent for 120 s" in said[0]


def test_a_trial_that_nobody_put_a_name_to_is_swept_in_time(tmp_path: Path) -> None:
    study = started(tmp_path / "journal.log")
    study.ask()
    time.sleep(0.01)
    sweep(study, Pulse(interval=1, grace=0), QUIET)
    assert [trial.state for trial in study.trials] == [TrialState.FAIL]  # it had no parameters to queue


def test_a_shape_that_kills_every_worker_is_given_up(tmp_path: Path) -> None:
    study = started(tmp_path / "journal.log")
    for _ in range(ATTEMPTS):
        abandon(study, pid=ended_process())
        sweep(study, PULSE, QUIET)
    assert [trial.state for trial in study.trials] == [TrialState.FAIL] * ATTEMPTS
    assert study.trials[-1].user_attrs["again"] == 0


def test_a_live_worker_shows_that_it_lives(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    study = started(path)
    beats: list[float] = []

    def watch(choice: object) -> None:
        for _ in range(2):
            beats.append(study.trials[-1].user_attrs["beat"])
            time.sleep(1.2)

    run_trials(study, Toy(), ToyJudge(begin=watch), trials=1, say=QUIET, pulse=Pulse(interval=1))
    assert beats[1] > beats[0]
    assert [thread.name for thread in threading.enumerate() if "beat" in thread.name] == []


# ---- databases and proxies


def test_a_study_in_a_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    run_trials(started(url), Toy(), ToyJudge(rungs=2), trials=6, say=QUIET, pulse=PULSE)
    study = started(url)
    assert counted(study.trials) == 6
    lost = abandon(study, pid=ended_process())
    sweep(study, PULSE, QUIET)
    assert study.trials[-1].state == TrialState.WAITING
    run_trials(study, Toy(), ToyJudge(), trials=7, say=QUIET, pulse=PULSE)
    assert study.trials[-1].params == lost.params


def nobody_listens() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_a_database_that_is_not_there() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StorageError) as told:
        open_storage(f"postgresql://me:secret@127.0.0.1:{nobody_listens()}/study")
    assert "postgresql://me:***@127.0.0.1" in str(told.value)
    assert "Connection refused" in str(told.value)
    assert "see that the server runs" in str(told.value)
    assert "secret" not in str(told.value)


@pytest.mark.parametrize(
    "where", ["me:s@cret@127.0.0.1:{}/x", "127.0.0.1:{}/x?passwd=s@cret", "127.0.0.1:{}/x?options=-c cret"]
)
def test_no_message_about_a_database_shows_a_password(where: str) -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StorageError) as told:
        open_storage("postgresql://" + where.format(nobody_listens()))
    assert "cret" not in str(told.value)


@pytest.mark.parametrize("url", ["nothing://x", "postgresql://host:port/db", "grpc://host", "grpc://me:secret@host:1"])
def test_what_is_no_address_is_told(url: str) -> None:
    with pytest.raises(StorageError, match=r"is not the address of a (storage|proxy); expected .*") as told:
        open_storage(url)
    assert "secret" not in str(told.value)


def test_a_missing_driver_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "find_spec", lambda name: None)
    with pytest.raises(StorageError, match=r"needs the package psycopg: pip install 'psycopg\[binary\]>=3\.2'") as told:
        open_storage("postgresql://me:secret@host/db")
    assert "secret" not in str(told.value)


def test_the_driver_of_a_postgresql_url_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"psycopg", "psycopg2"}
    monkeypatch.setattr(storage, "find_spec", lambda name: name in there or None)
    assert storage._with_driver("postgresql://h/d") == "postgresql+psycopg://h/d"
    assert storage._with_driver("postgres://h/d") == "postgresql+psycopg://h/d"
    assert storage._with_driver("postgresql+psycopg2://h/d") == "postgresql+psycopg2://h/d"
    there.remove("psycopg")
    assert storage._with_driver("postgresql://h/d") == "postgresql+psycopg2://h/d"


def test_a_proxy_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("grpc")
    monkeypatch.setattr(storage, "CONNECT_SECONDS", 0.3)
    with pytest.raises(StorageError, match=r"nothing answers there within 0\.3 s; start it beside the database"):
        open_storage(f"grpc://127.0.0.1:{nobody_listens()}")


def test_proxies_stand_in_front_of_databases() -> None:
    for url in ("journal.log", "grpc://localhost:1"):
        with pytest.raises(StorageError, match="a proxy stands in front of a database"):
            storage.serve(url)


def test_the_user_s_logging_is_left_as_it_was(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    optuna.logging.set_verbosity(optuna.logging.INFO)
    filters = list(warnings.filters)
    journal_of(tmp_path)
    assert optuna.logging.get_verbosity() == optuna.logging.INFO
    assert warnings.filters == filters
    assert capfd.readouterr().err == ""


def test_open_study_takes_a_storage_that_is_open(tmp_path: Path) -> None:
    opened = open_storage(tmp_path / "journal.log")
    study = open_study(opened, "toy", OF, objectives=("score",), say=QUIET)
    assert study.study_name == "toy"
