"""Studies: creating and continuing them, which shapes are evaluated, the pruning rule, interruptions."""

import math
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.trial import TrialState

from compress.errors import SearchError
from compress.nas import study as studies
from compress.nas.record import read_trials
from compress.nas.space import ShapeChoice
from compress.nas.study import SAMPLERS, code_version, join_study, open_study
from compress.nas.trial import (
    ALIKE,
    REDUCTION,
    Standing,
    costs_of,
    count_scored,
    outcome,
    pareto_front,
    reason_to_prune,
)
from tests.nas.toy import OF, Toy, ToyEvaluator, begin, milliseconds, run, score

QUIET: Callable[[str], None] = lambda line: None  # noqa: E731


@pytest.fixture
def storage() -> BaseStorage:
    return InMemoryStorage()


# ---- creating, continuing, refusing


def test_directions_follow_the_objectives(storage: BaseStorage) -> None:
    study = begin(storage, objectives=("score", "latency", "file_mb"))
    assert [direction.name for direction in study.directions] == ["MAXIMIZE", "MINIMIZE", "MINIMIZE"]
    assert study.metric_names == ["score", "latency", "file_mb"]


def test_an_unknown_sampler_creates_no_study(storage: BaseStorage) -> None:
    with pytest.raises(SearchError, match=r"no sampler 'nsga'\. Did you mean 'nsga2'"):
        begin(storage, sampler="nsga")
    assert not optuna.get_all_study_names(storage)


def test_a_study_of_another_search_is_refused_unchanged(storage: BaseStorage) -> None:
    study = begin(storage, limits={"latency": 12.0})
    run(study, ToyEvaluator(), trials=2)
    before = study.user_attrs
    with pytest.raises(SearchError) as error:
        open_study(
            storage, "toy", {**OF, "teacher": "bert-base", "device": "ssh:phone"}, objectives=("score",), say=QUIET,
            limits={"latency": 9.0},
        )  # fmt: skip
    for difference in (
        "teacher: was minilm, now bert-base",
        "device: was absent, now ssh:phone",
        "objectives: was score, latency, now score",
        "limit of latency: was 12, now 9",
    ):
        assert difference in str(error.value)
    assert "data" not in str(error.value)
    assert study.user_attrs == before


def test_a_study_of_other_code_is_refused_unchanged(storage: BaseStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    study = begin(storage)
    before = study.user_attrs
    monkeypatch.setattr(studies, "code_version", lambda: "9.9.9+0123456789ab")
    with pytest.raises(SearchError, match=r"created by compress \S+, this is 9\.9\.9\+0123456789ab.*Install"):
        begin(storage)
    assert study.user_attrs == before


def test_code_version_depends_on_every_python_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    (package / "inner" / "a.py").write_text("a = 1\n")
    monkeypatch.setattr(studies, "__file__", str(package / "nas" / "study.py"))
    versions = []
    for name, text in [("inner/a.py", "a = 1\n"), ("inner/a.py", "a = 2\n"), ("inner/b.py", "a = 2\n")]:
        (package / name).write_text(text)
        versions.append(code_version.__wrapped__())
    (package / "notes.txt").write_text("no code")
    assert len(set(versions)) == 3
    assert code_version.__wrapped__() == versions[-1]


def test_a_foreign_study_is_refused(storage: BaseStorage) -> None:
    study = begin(storage)
    foreign = optuna.create_study(storage=study._storage, study_name="theirs")
    foreign.add_trial(optuna.create_trial(value=1.0))
    with pytest.raises(SearchError, match="study 'theirs' was not created by `compress search`"):
        begin(study._storage, "theirs")


def test_an_interrupted_creation_is_completed(storage: BaseStorage) -> None:
    study = begin(storage)
    directions = ["maximize", "minimize"]
    optuna.create_study(storage=study._storage, study_name="early", directions=directions)
    assert begin(study._storage, "early").user_attrs["identity"]["of"] == OF


def test_a_study_continues_where_it_stopped(storage: BaseStorage) -> None:
    run(begin(storage, sampler="random"), ToyEvaluator(), trials=4)
    evaluator, seen = ToyEvaluator(), list[int]()
    study = begin(storage, sampler="random")
    run(study, evaluator, trials=8, watch=lambda study: seen.append(count_scored(study.trials)))
    assert seen == [5, 6, 7, 8]
    params = [trial.params for trial in study.trials]
    assert params[:4] != params[4:8], "the first shapes are not drawn again"
    assert len(evaluator.seen) == 4
    assert begin(storage, sampler="tpe", seed=8).user_attrs["sampler"] == "tpe"


# ---- samplers and seeds


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_runs_under_limits_and_several_objectives(storage: BaseStorage, sampler: str) -> None:
    study = begin(storage, sampler=sampler, limits={"latency": 12.0})
    run(study, ToyEvaluator(rungs=2, error_ms=0.1), trials=14)
    assert count_scored(study.trials) == 14
    assert pareto_front(study)


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_the_same_seed_draws_the_same_shapes(tmp_path: Path, sampler: str) -> None:
    drawn = []
    for seed in (3, 3, 4):
        study = begin(None, sampler=sampler, seed=seed)
        run(study, ToyEvaluator(), trials=20)
        drawn.append([trial.params for trial in study.trials])
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


# ---- which shapes are evaluated


def test_trials_are_read_back_as_records(storage: BaseStorage) -> None:
    study = begin(storage, limits={"latency": 20.0})
    run(study, ToyEvaluator(rungs=2, error_ms=0.2), trials=10)
    point = next(point for point in read_trials(study, "short") if point.state == "complete")
    choice = dict(point.choice)
    assert point.scores == {"short": pytest.approx(score(choice) - 0.05)}
    assert point.predicted_ms == pytest.approx(milliseconds(choice))
    assert point.predicted_error_ms == 0.2
    assert point.parameters == choice["layers"] * choice["hidden"] ** 2
    assert point.file_mb == choice["hidden"]
    assert point.started is not None and point.started >= 0
    assert point.seconds is not None
    assert len(read_trials(study)) == len(study.trials)


def test_a_shape_outside_the_latency_is_not_scored(storage: BaseStorage) -> None:
    study = begin(storage, limits={"latency": 8.0})
    evaluator = ToyEvaluator(error_ms=0.5)
    run(study, evaluator, trials=20)
    slow = [trial for trial in study.trials if outcome(trial) == "too slow"]
    assert slow
    for trial in study.trials:
        if outcome(trial) != "duplicate":
            assert (outcome(trial) == "too slow") == (milliseconds(trial.params) + 2 * 0.5 > 8)  # surely within it
            assert (trial.constraints["latency"] > 0) == (outcome(trial) == "too slow")
    assert not {Toy().key(trial.params) for trial in slow} & {shape for shape, _ in evaluator.seen}
    assert slow[0].state == TrialState.PRUNED
    assert "limit 8" in slow[0].user_attrs["reason"]


def test_a_shape_outside_any_other_limit_is_not_scored(storage: BaseStorage) -> None:
    study = begin(storage, limits={"parameters": 300.0, "file_mb": 20.0})
    evaluator = ToyEvaluator()
    run(study, evaluator, trials=10)
    assert any("parameters" in trial.user_attrs["reason"] for trial in study.trials if outcome(trial) == "too slow")
    for shape, _ in evaluator.seen:
        layers, hidden = map(int, shape.split("x"))
        assert layers * hidden**2 <= 300
        assert hidden <= 20


def test_a_duplicate_copies_the_results_of_its_twin(storage: BaseStorage) -> None:
    evaluator = ToyEvaluator(shapes=Toy(layers=2, hidden=3))
    study = begin(storage, sampler="random", limits={"latency": 2.6})
    said = run(study, evaluator, trials=50)
    twins = [trial for trial in study.trials if outcome(trial) == "duplicate"]
    assert twins
    assert len(evaluator.seen) == len(set(evaluator.seen))
    for trial in twins:
        first = study.trials[trial.user_attrs["twin"]]
        assert (trial.params, trial.values, trial.constraints) == (first.params, first.values, first.constraints)
        assert first.number < trial.number
    assert {outcome(study.trials[trial.user_attrs["twin"]]) for trial in twins} == {"complete", "too slow"}
    assert "the space has no more than these 6 shapes" in said[-1]
    assert not [trial for trial in pareto_front(study) if outcome(trial) == "duplicate"]


def test_a_shape_that_another_worker_evaluates_is_a_duplicate(storage: BaseStorage) -> None:
    study = begin(storage)
    study.enqueue_trial({"layers": 2, "hidden": 4})
    evaluator = ToyEvaluator()

    def second(choice: ShapeChoice) -> None:
        if not evaluator.seen and len(study.trials) == 1:
            study.enqueue_trial({"layers": 2, "hidden": 4})
            other = threading.Thread(target=lambda: run(join_study(storage), inner, worker=True))
            other.start()
            other.join()

    inner = ToyEvaluator()
    evaluator.begin = second
    run(study, evaluator, trials=1)
    assert inner.seen == []
    assert [outcome(trial) for trial in study.trials] == ["complete", "duplicate"]
    assert study.trials[1].state == TrialState.PRUNED


def test_a_space_without_new_shapes_ends_the_search(storage: BaseStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "MOST_REJECTED", 10)

    class Sizeless(Toy):
        def size(self) -> int:
            return 1000

    study = begin(storage, sampler="random")
    said = run(study, ToyEvaluator(shapes=Sizeless(layers=1, hidden=3)), trials=50)
    assert "the last 10 shapes were duplicates" in said[-1]
    assert count_scored(study.trials) == 3


def test_the_closest_of_shapes_outside_the_limits_is_named(
    storage: BaseStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studies, "MOST_REJECTED", 30)
    study = begin(storage, limits={"latency": 1.0})
    evaluator = ToyEvaluator()
    with pytest.raises(SearchError) as error:
        run(study, evaluator, trials=10)
    closest = min(study.trials, key=lambda trial: milliseconds(trial.params))
    assert re.search(r"none of \d+ shapes is within latency 1\.", str(error.value))
    assert f"The closest is trial {closest.number} (layers " in str(error.value)
    assert f"latency {milliseconds(closest.params):.4g}, limit 1" in str(error.value)
    assert evaluator.seen == []


def test_a_score_below_its_limit_is_not_on_the_front(storage: BaseStorage) -> None:
    study = begin(storage, limits={"score": 0.6})
    run(study, ToyEvaluator(), trials=20)
    assert all(trial.values[0] >= 0.6 for trial in pareto_front(study))
    with pytest.raises(SearchError, match=r"is within score 0\.999\. The closest .*: score 0\.\d+, at least 0\.999"):
        run(begin(None, limits={"score": 0.999}), ToyEvaluator(), trials=5)


def test_a_failed_shape_does_not_end_the_search(storage: BaseStorage) -> None:
    study = begin(storage)
    run(study, ToyEvaluator(fails=lambda choice: int(choice["layers"]) % 3 == 1), trials=20)
    failed = [trial for trial in study.trials if outcome(trial) == "failed"]
    assert failed
    assert {trial.state for trial in failed} == {TrialState.FAIL}
    assert {trial.user_attrs["reason"] for trial in failed} == {
        f"layers {trial.params['layers']}: no such slice" for trial in failed
    }
    assert count_scored(study.trials) == 20


def test_failures_in_a_row_end_the_search(storage: BaseStorage) -> None:
    study = begin(storage)
    with pytest.raises(SearchError, match=r"5 trials in a row failed; the last: layers \d: no such slice"):
        run(study, ToyEvaluator(fails=lambda choice: True), trials=20)
    assert len(study.trials) == 5


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_non_finite_score_is_a_failure(storage: BaseStorage, wrong: float) -> None:
    class Nan(ToyEvaluator):
        def score(self, choice: ShapeChoice, rung: int) -> float:
            return wrong

    study = begin(storage)
    with pytest.raises(SearchError, match=f"its score at rung 0 is {wrong}"):
        run(study, Nan(), trials=20)


def test_one_objective_is_enough(storage: BaseStorage) -> None:
    study = begin(storage, objectives=("score",), limits={"latency": 14.0})
    run(study, ToyEvaluator(rungs=3), trials=20)
    (best,) = pareto_front(study)
    assert best.value == max(trial.value for trial in study.trials if trial.value is not None)
    assert any(outcome(trial) == "pruned" for trial in study.trials)


def test_time_ends_a_search(storage: BaseStorage) -> None:
    began = time.monotonic()
    said = run(begin(storage), ToyEvaluator(begin=lambda choice: time.sleep(0.05)), seconds=0.3)
    assert time.monotonic() - began < 2
    assert said[-1].startswith("the time is over")


# ---- rungs


def standings(*pairs: tuple[float, float]) -> list[Standing]:
    return [Standing(score, (ms,)) for score, ms in pairs]


def test_possible_front_members_are_promoted() -> None:
    before = standings((0.9, 10), (0.8, 9), (0.85, 9.5), (0.88, 9.8), (0.5, 3))
    assert not reason_to_prune(Standing(0.3, (2.0,)), before)  # the smallest, whatever it scores
    assert not reason_to_prune(Standing(0.6, (3.1,)), before)  # better than all that cost no more
    assert not reason_to_prune(Standing(0.95, (20.0,)), before)


def test_the_worse_of_similar_cost_are_pruned() -> None:
    before = standings((0.9, 10), (0.8, 9), (0.85, 9.5), (0.88, 9.8), (0.5, 3))
    assert (
        reason_to_prune(Standing(0.7, (10.0,)), before)
        == "0.7 ranks 5 of 5 that cost about the same; the best 2 continue"
    )
    assert not reason_to_prune(Standing(0.89, (10.5,)), before)  # beaten, but among the best


def test_without_rivals_nothing_is_pruned() -> None:
    assert not reason_to_prune(Standing(0.1, (10.0,)), [])
    assert not reason_to_prune(Standing(0.1, (10.0,)), standings(*[(0.9, 9.9)] * (REDUCTION - 1)))
    assert reason_to_prune(Standing(0.1, (10.0,)), standings(*[(0.9, 9.9)] * REDUCTION))


def test_without_rivals_of_similar_cost_cheaper_ones_count() -> None:
    before = standings((0.6, 1), (0.7, 2), (0.8, 3))
    assert reason_to_prune(Standing(0.5, (100.0,)), before) == "0.5 ranks 4 of 4 that cost no more; the best 2 continue"
    assert not reason_to_prune(Standing(0.75, (100.0,)), before)


def test_similarity_is_required_in_every_cost() -> None:
    near = 10 * ALIKE * 0.99
    before = [Standing(0.9, (10.0, 1.0)), Standing(0.9, (10.0, 1.0)), Standing(0.9, (10.0, 1.0))]
    assert reason_to_prune(Standing(0.5, (near, 1.1)), before)
    assert not reason_to_prune(Standing(0.5, (near, 0.5)), before)


def test_pruning_loses_nothing_of_the_front(storage: BaseStorage) -> None:
    """Every pruned trial of a whole study must be one that the rule allows."""
    study, evaluator = begin(storage, sampler="random"), ToyEvaluator(rungs=3)
    run(study, evaluator, trials=60)
    pruned = [trial for trial in study.trials if outcome(trial) == "pruned"]
    complete = [trial for trial in study.trials if outcome(trial) == "complete"]
    assert pruned and complete
    assert {trial.state for trial in pruned} == {TrialState.PRUNED}
    assert sum(rung == 2 for _, rung in evaluator.seen) == len(complete) < 40
    for trial in pruned:
        scores = trial.user_attrs["scores"]
        assert len(scores) < 3
        assert any(
            other.number < trial.number
            and len(other.user_attrs.get("scores", ())) >= len(scores)
            and other.user_attrs["scores"][len(scores) - 1] >= scores[-1]
            and costs_of(other.user_attrs, ("latency",)) <= costs_of(trial.user_attrs, ("latency",))
            for other in study.trials
        )
    true = {Toy().key(trial.params): (score(trial.params), milliseconds(trial.params)) for trial in study.trials}
    best = [
        one for one in true.values() if not any(a >= one[0] and b <= one[1] and (a, b) != one for a, b in true.values())
    ]
    found = {true[Toy().key(trial.params)] for trial in complete}
    assert set(best) <= found  # scores keep their order from rung to rung here: nothing of the front is lost


# ---- interrupted, killed


def test_an_interrupted_shape_is_queued_again(storage: BaseStorage) -> None:
    def interrupt(choice: ShapeChoice) -> None:
        if len(evaluator.seen) == 3:
            raise KeyboardInterrupt

    evaluator = ToyEvaluator(begin=interrupt)
    study = begin(storage)
    for _ in range(4):  # as often as one likes: it is not the shape that is to blame
        with pytest.raises(KeyboardInterrupt):
            run(study, evaluator, trials=6)
    assert study.trials[-1].state == TrialState.WAITING
    study = begin(storage)
    run(study, ToyEvaluator(), trials=6)
    lost = [trial for trial in study.trials if outcome(trial) is None]
    assert len(lost) == 4
    assert {(*trial.params.values(),) for trial in lost} == {(*study.trials[7].params.values(),)}
    assert outcome(study.trials[7]) == "complete"
    assert count_scored(study.trials) == 6
    assert [point.reason for point in read_trials(study) if point.number == lost[0].number] == [
        "its worker was stopped before it was scored"
    ]


def test_an_overtaken_trial_counts_once(storage: BaseStorage) -> None:
    """A process pauses for so long that its trial is queued again; then it wakes up."""
    study = begin(storage)

    def swept(choice: ShapeChoice) -> None:
        if len(study.trials) == 1:
            study.tell(0, state=TrialState.FAIL)
            study.enqueue_trial(study.trials[0].params)

    said = run(study, ToyEvaluator(begin=swept), trials=3)
    assert any("taken for dead" in line for line in said)
    assert count_scored(study.trials) == 3
    assert study.trials[1].params == study.trials[0].params
