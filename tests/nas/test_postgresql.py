"""A study in a real PostgreSQL, in a folder and on a socket of its own. Skipped where its server is not installed."""

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from compress.errors import SearchError
from compress.nas.storage import StorageError, close_storage, open_storage, quiet
from compress.nas.study import close_study
from compress.nas.trial import count_scored
from compress.records.search_report import load_report
from tests import command
from tests.nas.shelved import Searched, weighing
from tests.nas.test_worker import check_nothing_lost
from tests.nas.toy import ToyEvaluator, begin, hasty, run, start_worker

pytest.importorskip("psycopg", reason="needs psycopg, of the extra postgresql")

USER = "compress"


def binary(name: str) -> str:
    """A program of PostgreSQL's, on the path or where Debian keeps it."""
    kept = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    found = shutil.which(name) or (str(kept[-1]) if kept else None)
    if found is None:
        pytest.skip(f"needs {name} of PostgreSQL: apt install postgresql")
    return found


class Server:
    """Started in a folder of its own; initdb and postgres refuse to run as root, and run as `postgres` then."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, folder / "data"
        self.prefix: list[str] = []
        if os.getuid() == 0:
            try:
                account = pwd.getpwnam("postgres")
            except KeyError:
                pytest.skip("needs the account `postgres`: PostgreSQL does not run as root")
            os.chown(folder, account.pw_uid, account.pw_gid)
            self.prefix = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"]
        initdb = [binary("initdb"), "-D", str(self.data), "-U", USER, "-A", "trust", "-E", "UTF8", "--no-sync"]
        subprocess.run([*self.prefix, *initdb], check=True, stdout=subprocess.DEVNULL, cwd=folder)
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://{USER}:secret@/postgres?host={self.folder}"

    def start(self) -> None:
        self._control("start", "-l", str(self.folder / "log"), "-o", f"-k {self.folder} -c listen_addresses= -F")

    def stop(self) -> None:
        self._control("stop", "-m", "immediate")

    def _control(self, *words: str) -> None:
        control = [binary("pg_ctl"), "-D", str(self.data), "-w", "-t", "30", *words]
        subprocess.run([*self.prefix, *control], check=True, stdout=subprocess.DEVNULL, cwd=self.folder)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    binary("initdb")
    folder = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))  # the path of a socket is short, and its folder is entered
    try:
        one = Server(folder)
        yield one
        one.stop()
    finally:
        shutil.rmtree(folder)


@dataclass(frozen=True)
class Database:
    """A database without studies; those begun in it are closed and deleted at the end."""

    url: str
    opened: list[optuna.Study] = field(default_factory=list)

    def begin(self, name: str = "toy", **options: object) -> optuna.Study:
        storage = hasty(self.url)
        try:
            self.opened.append(begin(storage, name, **options))
        except SearchError:
            close_storage(storage)
            raise
        return self.opened[-1]

    def empty(self) -> None:
        for study in self.opened:
            close_study(study)
        with quiet():
            storage = open_storage(self.url)
            for name in optuna.get_all_study_names(storage):
                optuna.delete_study(study_name=name, storage=storage)
            close_storage(storage)


@pytest.fixture
def database(server: Server) -> Iterator[Database]:
    one = Database(server.url)
    yield one
    one.empty()


@pytest.mark.slow
def test_two_workers_of_which_one_is_killed_lose_nothing(database: Database) -> None:
    study = database.begin()
    study.set_user_attr("trials", 24)
    with start_worker(database.url, "stall") as doomed, start_worker(database.url) as other:
        assert doomed.stdout is not None
        doomed.stdout.readline()
        doomed.kill()
        doomed.wait()
        said, _ = other.communicate(timeout=120)
    assert other.returncode == 0
    run(study, ToyEvaluator(), trials=24)  # what was lost when `other` was done already
    check_nothing_lost(database.url, 24)
    assert "secret" not in said


def test_studies_share_a_database(database: Database) -> None:
    for name in ("one", "two"):
        run(database.begin(name), ToyEvaluator(), trials=2)
    assert [count_scored(database.begin(name).trials) for name in ("one", "two")] == [2, 2]
    with pytest.raises(SearchError, match="study 'one' belongs to a different search") as told:
        database.begin("one", objectives=("score",))
    assert "secret" not in str(told.value)


@pytest.mark.slow
def test_workers_that_are_first_in_a_database_all_at_once_get_in(server: Server) -> None:
    """Each of them finds no tables, and makes them."""
    import psycopg

    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE fresh")
    code = f"from compress.nas.storage import open_storage; open_storage({server.url.replace('/postgres', '/fresh')!r})"
    workers = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) for _ in range(5)]
    assert [worker.communicate(timeout=60)[1] for worker in workers] == [""] * 5


def test_a_database_that_does_not_exist_or_refuses_is_told(server: Server) -> None:
    for wrong, said in (
        (server.url.replace("/postgres?", "/nowhere?"), 'database "nowhere" does not exist'),
        (server.url.replace(USER, "nobody", 1), 'role "nobody" does not exist'),
    ):
        with pytest.raises(StorageError) as told:
            open_storage(wrong)
        assert said in str(told.value)
        assert "secret" not in str(told.value)


@pytest.mark.slow
def test_a_server_that_goes_down_ends_the_search_and_not_the_study(server: Server, database: Database) -> None:
    study = database.begin()
    judge = ToyEvaluator()
    with pytest.raises(StorageError, match="study 'toy': lost the connection to its storage") as told:
        judge.begin = lambda choice: server.stop() if len(judge.seen) == 3 else None
        run(study, judge, trials=8)
    assert "secret" not in str(told.value)
    server.start()
    run(study, ToyEvaluator(), trials=8)  # the connections of before are not used
    assert count_scored(study.trials) == 8
    assert [trial.number for trial in study.trials if trial.state == TrialState.FAIL] == [3]
    (again,) = (trial for trial in study.trials if trial.system_attrs.get("failed_trial") == 3)
    assert again.params == study.trials[3].params


@pytest.mark.slow
def test_a_search_in_a_database_and_its_worker(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch, hastened: None
) -> None:
    shelf, out = Searched.fill(tmp_path / "shelf"), tmp_path / "study"
    monkeypatch.setattr("compress.benchmark.devices.open_device", weighing)
    words = shelf.words(out, storage=database.url, finalists="1")
    with monkeypatch.context() as patch:
        patch.setattr("compress.nas.phases.run_trials", _interrupted)
        assert command.run(*words).code == 130
    told = command.run("search", "--storage", database.url, "--worker")
    assert (told.code, "18 shapes scored" in told.out) == (0, True), told.err
    told = command.run(*words, "--resume")
    assert told.code == 0, told.err
    found = load_report(out)
    assert sum(point.state in ("complete", "pruned") for point in found.points) == 18, "nothing was left to score"
    assert "postgresql://" in (out / "run.json").read_text()


def _interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt
