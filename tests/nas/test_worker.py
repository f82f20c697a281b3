"""Workers: who may join a study, that several lose and repeat nothing, and when they end."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import optuna
import pytest
from optuna.storages import InMemoryStorage

from compress.errors import SearchError
from compress.nas import worker
from compress.nas.storage import close_storage, open_storage
from compress.nas.study import close_study, join_study
from compress.nas.trial import count_scored, evaluate_trial, outcome
from tests.nas.toy import ToyEvaluator, begin, hasty, run, start_worker


def test_a_worker_needs_only_the_address() -> None:
    storage = InMemoryStorage()
    study = begin(storage, limits={"latency": 12.0})
    run(study, ToyEvaluator(), trials=2)
    study.set_user_attr("trials", 8)
    study.set_user_attr("over", False)
    study.enqueue_trial({"layers": 8, "hidden": 32})  # 40 ms; what a worker draws is another thing every time
    run(join_study(storage), ToyEvaluator(), worker=True)
    assert count_scored(study.trials) == 8
    assert any(outcome(trial) == "too slow" for trial in study.trials)  # the limits were in the study


def test_workers_draw_different_shapes() -> None:
    storage = InMemoryStorage()
    drawn = [begin(storage).sampler, join_study(storage).sampler, join_study(storage).sampler]
    study = begin(storage, sampler="random")
    shapes = set()
    for sampler in drawn:
        study.sampler = sampler
        trial = study.ask()
        shapes.add((trial.suggest_int("layers", 1, 800), trial.suggest_int("hidden", 1, 3200)))
    assert len(shapes) == 3


def test_a_worker_may_start_before_its_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its file, before its study, and before its trials."""
    monkeypatch.setattr(worker, "POLL_SECONDS", 0.01)
    storage, heard = tmp_path / "study.db", list[str]()
    inputs = worker.WorkerInputs("", "", "", "", bf16=False)

    def start(_: float) -> None:
        looks.append(1)
        if len(looks) == 2:
            close_storage(open_storage(storage))
        if len(looks) == 3:
            close_study(begin(storage))
        if len(looks) == 4:
            study = begin(storage)
            study.set_user_attr(worker.ATTRIBUTE, vars(inputs))
            close_study(study)

    looks = list[int]()
    monkeypatch.setattr(worker.time, "sleep", start)
    study = worker._join_when_started(str(storage), None, None, say=heard.append)
    assert worker.WorkerInputs.from_study(study) == inputs
    close_study(study)
    assert len(looks) == 4
    assert [line for line in heard if "waiting" in line] == heard[:1]


def test_one_of_several_studies_must_be_named() -> None:
    storage = InMemoryStorage()
    with pytest.raises(SearchError, match="contains no study yet; start the search first"):
        join_study(storage)
    begin(storage, "one")
    begin(storage, "two")
    with pytest.raises(SearchError, match=r"contains 2 studies; name one of one, two"):
        join_study(storage)
    with pytest.raises(SearchError, match=r"contains no study 'three', only one, two"):
        join_study(storage, "three")
    assert join_study(storage, "two").study_name == "two"


def test_a_worker_stops_with_the_search() -> None:
    storage = InMemoryStorage()
    study = begin(storage)
    study.set_user_attr("trials", None)

    def end(choice: object) -> None:
        study.set_user_attr("over", True)

    evaluator = ToyEvaluator(rungs=3, begin=end)
    said = run(join_study(storage), evaluator, worker=True)
    assert [rung for _, rung in evaluator.seen] == [0]
    assert "the search has ended" in said[-1]
    assert [outcome(trial) for trial in study.trials] == [None]


def test_a_late_worker_stops_at_once() -> None:
    storage = InMemoryStorage()
    run(begin(storage), ToyEvaluator(), seconds=0.1)
    late = join_study(storage)
    late.enqueue_trial({"layers": 1, "hidden": 1})
    evaluator = ToyEvaluator()
    run(late, evaluator, worker=True)
    assert evaluator.seen == []


def test_a_resumed_search_takes_workers_again() -> None:
    storage = InMemoryStorage()
    run(begin(storage), ToyEvaluator(), trials=2)

    def join(study: optuna.Study) -> None:
        if not evaluator.seen:
            run(join_study(storage), evaluator, worker=True)

    evaluator = ToyEvaluator()
    study = begin(storage)
    run(study, ToyEvaluator(), trials=6, watch=join)
    assert len(evaluator.seen) == 3
    assert count_scored(study.trials) == 6


@pytest.mark.parametrize("dead", [False, True])
def test_the_later_of_two_equal_draws_waits(monkeypatch: pytest.MonkeyPatch, dead: bool) -> None:
    storage = InMemoryStorage()
    study = begin(storage)
    for _ in range(2):
        study.enqueue_trial({"layers": 2, "hidden": 8})
    earlier, later = study.ask(), study.ask()
    if dead:
        monkeypatch.setattr("compress.nas.trial.DRAWING", 0.2)
    with ThreadPoolExecutor() as pool:
        verdict = pool.submit(evaluate_trial, study, later, ToyEvaluator(), {})
        with pytest.raises(TimeoutError):
            verdict.result(timeout=0.1)
        if not dead:
            assert evaluate_trial(study, earlier, ToyEvaluator(), {}).state == "complete"
        assert verdict.result(timeout=5).state == ("complete" if dead else "duplicate")


@pytest.mark.slow
def test_processes_share_a_file_and_one_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    study = begin(hasty(path))
    study.set_user_attr("trials", 30)
    with start_worker(path, "stall") as doomed, start_worker(path) as second, start_worker(path) as third:
        assert doomed.stdout is not None
        doomed.stdout.readline()
        doomed.kill()
        run(study, ToyEvaluator(begin=lambda choice: time.sleep(0.05)), trials=30)
        for each in (second, third):
            each.communicate(timeout=30)
            assert each.returncode == 0
    close_study(study)
    check_nothing_lost(path, 30)


def check_nothing_lost(storage: Path | str, wanted: int) -> None:
    """Every trial is over, numbers run without gaps, and the killed worker's was run again with its parameters."""
    study = begin(storage)
    trials = study.trials
    close_study(study)
    assert [trial.number for trial in trials] == list(range(len(trials)))
    assert all(trial.state.is_finished() for trial in trials)
    (lost,) = (trial for trial in trials if trial.state.name == "FAIL")
    (again,) = (trial for trial in trials if trial.system_attrs.get("failed_trial") == lost.number)
    assert again.params == lost.params
    assert outcome(again) == "complete"
    assert wanted <= count_scored(trials) <= wanted + 2
    keys = Counter(trial.user_attrs["key"] for trial in trials if outcome(trial) == "complete")
    assert set(keys.values()) == {1}
