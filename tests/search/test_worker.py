"""Workers: who may join a study, what they are given, and that several lose and repeat nothing."""

import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from compress.errors import SearchError
from compress.nas import config as identity
from compress.nas.outcomes import counted, outcome
from compress.nas.study import close_study, join_study, run_trials
from compress.nas.worker import work
from tests.search.toy import OF, PULSE, Toy, ToyJudge, started, worker

QUIET: Callable[[str], None] = lambda line: None  # noqa: E731


def toy(identity: Mapping[str, str]) -> tuple[Toy, ToyJudge]:
    assert identity == OF
    return Toy(), ToyJudge()


def test_a_worker_needs_the_address_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    study = started(path, limits={"latency": 12.0})
    run_trials(study, Toy(), ToyJudge(), trials=2, say=QUIET, pulse=PULSE)
    study.set_user_attr("trials", 8)
    work(path, None, toy, say=QUIET, pulse=PULSE)
    assert counted(study.trials) == 8
    assert any(outcome(trial) == "too slow" for trial in study.trials)  # the limits were in the study


def test_a_worker_draws_other_shapes_than_the_search_and_other_workers(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    drawn = [started(path).sampler, join_study(path, say=QUIET).sampler]
    study = started(path, sampler="random")
    shapes = []
    for sampler in drawn:
        study.sampler = sampler
        trial = study.ask()
        shapes.append((trial.suggest_int("layers", 1, 800), trial.suggest_int("hidden", 1, 3200)))
    assert shapes[0] != shapes[1]


def test_a_storage_without_a_study_is_told(tmp_path: Path) -> None:
    with pytest.raises(SearchError, match=r"journal\.log: holds no study yet; begin it first, then start workers"):
        work(tmp_path / "journal.log", None, toy, say=QUIET)


def test_of_several_studies_one_must_be_named(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    started(url, "one")
    started(url, "two").set_user_attr("trials", 1)
    with pytest.raises(SearchError, match=r"holds 2 studies; name one of one, two"):
        work(url, None, toy, say=QUIET)
    with pytest.raises(SearchError, match=r"holds no study 'three', but one, two"):
        work(url, "three", toy, say=QUIET)
    assert counted(work(url, "two", toy, say=QUIET, pulse=PULSE).trials) == 1


def test_a_worker_with_other_code_is_refused_and_the_study_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.log"
    started(path)
    before = path.read_bytes()
    monkeypatch.setattr(identity, "code_version", lambda: "9.9.9+0123456789ab")
    with pytest.raises(SearchError, match=r"begun by compress .*, this is 9\.9\.9\+0123456789ab.*Install here"):
        work(path, None, toy, say=QUIET)
    assert path.read_bytes() == before


def test_a_study_of_somebody_else_s_is_refused(tmp_path: Path) -> None:
    import optuna

    study = started(tmp_path / "journal.log")
    optuna.create_study(storage=study._storage, study_name="theirs")
    with pytest.raises(SearchError, match="study 'theirs' was not begun by `compress search`"):
        work(tmp_path / "journal.log", "theirs", toy, say=QUIET)


@pytest.mark.slow
def test_two_processes_share_a_journal_and_one_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    study = started(path)
    study.set_user_attr("trials", 30)
    with worker(path, "stall") as doomed, worker(path) as other:
        assert doomed.stdout is not None and other.stdout is not None
        doomed.stdout.readline()
        doomed.kill()
        doomed.wait()
        other.communicate(timeout=60)
    assert other.returncode == 0
    run_trials(study, Toy(), ToyJudge(), say=QUIET, pulse=PULSE)
    assert nothing_lost(path, 30)


def nothing_lost(storage: Path | str, wanted: int) -> bool:
    """Every trial is over, numbers run without gaps, and the killed worker's was run again with its parameters."""
    study = started(storage)
    trials = study.trials
    close_study(study)
    assert [trial.number for trial in trials] == list(range(len(trials)))
    assert all(trial.state.is_finished() for trial in trials)
    lost = [trial for trial in trials if outcome(trial) is None]
    assert len(lost) == 1
    again = [trial for trial in trials if trial.user_attrs.get("again") == lost[0].number]
    assert [trial.params for trial in again] == [lost[0].params]
    assert outcome(again[0]) == "complete"
    assert wanted <= counted(trials) <= wanted + 1
    keys = Counter(trial.user_attrs["key"] for trial in trials if outcome(trial) == "complete")
    assert set(keys.values()) == {1}
    assert len({trial.user_attrs["owner"]["pid"] for trial in trials}) >= 2
    return True


# ---- through a proxy


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The address of a gRPC proxy, and that of the database behind it."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    url = f"sqlite:///{tmp_path / 'study.db'}"
    code = f"from compress.nas.storage import serve; serve({url!r}, '127.0.0.1', {port})"
    environment = {**os.environ, "GRPC_VERBOSITY": "NONE"}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"grpc://127.0.0.1:{port}", url
        finally:
            process.kill()


@pytest.mark.slow
def test_a_worker_through_a_proxy(proxy: tuple[str, str]) -> None:
    address, url = proxy
    study = started(address)
    study.set_user_attr("trials", 6)
    with worker(address) as process:
        process.communicate(timeout=60)
    assert process.returncode == 0
    behind = started(url)
    assert counted(behind.trials) == 6
    assert all(trial.user_attrs["beat"] for trial in behind.trials)
