"""A stated time: what each part may take of it, and stages that fit into theirs."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from compress.config.stages import Stage
from compress.config.term import Term
from compress.errors import DamagedError, SearchError
from compress.nas import finalists
from compress.nas.context import load_student_state
from compress.nas.time_budget import PLAIN_PARTS, SPARE, SUPERNET, TimeBudget, count_steps
from compress.training.run import Run
from compress.training.stage import Trained

DAMAGES = ["", "[" * 20_000, '{"teacher": 1', "[]", "\0\0"]
DATA: Any = SimpleNamespace(train=range(320))


def stage(name: str = "one", **more: Any) -> Stage:
    given = {"distill": name, "lr": 1e-3, "batch": 32, "epochs": 10, "objective": [Term("hinton.soft_targets")]}
    return Stage.model_validate(given | more)


def takes(step: float, fixed: float = 1.0) -> Any:
    """A training in which a step takes so many seconds, and everything else `fixed`."""

    def train(stage: Stage, run: Run) -> None:
        assert (stage.evaluate, run.path.is_dir()) == (0, True)
        folder = run.result(stage.name)
        folder.mkdir(parents=True)
        spent = Trained(stage.steps or 0, 0, fixed + step * (stage.steps or 0), None, None)
        (folder / "training.json").write_text(json.dumps({"trained": asdict(spent)}))

    return train


@pytest.mark.parametrize("parts", [SUPERNET, PLAIN_PARTS])
def test_shares_sum_to_one(parts: dict[str, float]) -> None:
    assert sum(parts.values()) == pytest.approx(1)


def test_unused_time_goes_to_later_parts(tmp_path: Path) -> None:
    ledger = TimeBudget(tmp_path, {"a": 0.5, "b": 0.25, "c": 0.25}, 100.0)
    assert [ledger.left(name) for name in ("a", "b", "c")] == pytest.approx([50, 50, 100])
    (tmp_path / "costs.json").write_text(json.dumps({"before": 20.0, "a": 10.0}))
    assert ledger.left("a") == pytest.approx(80 * 0.5 - 10)
    assert ledger.left("b") == pytest.approx(70 / 2)
    assert ledger.left("c") == pytest.approx(70)
    (tmp_path / "costs.json").write_text(json.dumps({"before": 20.0, "a": 300.0}))
    assert ledger.left("b") == 0.0
    assert TimeBudget(tmp_path, {"a": 1.0}, None).left("a") is None


def test_interrupted_parts_count_too(tmp_path: Path) -> None:
    ledger = TimeBudget(tmp_path, {"a": 1.0}, None)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), ledger.part("a"):
            raise KeyboardInterrupt
    assert list(ledger.costs) == ["a"]
    assert list(TimeBudget(tmp_path, {"a": 1.0}, None).costs) == ["a"]


def test_steps_fit_the_time(tmp_path: Path) -> None:
    ledger = TimeBudget(tmp_path, {"a": 1.0}, 41.0 / SPARE)
    (fitted,) = ledger.fit("a", [stage()], DATA, takes(1.0))
    assert count_steps(stage(), DATA) == 100
    assert fitted.steps == 40
    one, other = TimeBudget(tmp_path / "..", {"a": 1.0}, None).fit(
        "a", [stage(), stage("two", steps=7)], DATA, takes(1.0)
    )
    assert (one.steps, other.steps) == (None, 7), "no time was stated"


def test_stages_share_the_time_by_length(tmp_path: Path) -> None:
    stages = [stage("long", steps=300), stage("short", steps=100)]
    both = TimeBudget(tmp_path, {"a": 1.0}, 202.0 / SPARE).fit("a", stages, DATA, takes(1.0))
    assert [each.steps for each in both] == [150, 50]
    (tmp_path / "more").mkdir()
    both = TimeBudget(tmp_path / "more", {"a": 1.0}, 5000.0).fit("a", stages, DATA, takes(1.0))
    assert [each.steps for each in both] == [300, 100]


def test_decided_steps_are_kept(tmp_path: Path) -> None:
    TimeBudget(tmp_path, {"a": 1.0}, 41.0 / SPARE).fit("a", [stage()], DATA, takes(1.0))

    def never(*_: object) -> None:
        raise AssertionError

    (again,) = TimeBudget(tmp_path, {"a": 1.0}, 9.0).fit("a", [stage()], DATA, never)
    assert again.steps == 40
    assert [path.name for path in tmp_path.iterdir()] == ["steps.json"]


def test_no_time_left_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(json.dumps({"preparation": 90.0}))
    with pytest.raises(SearchError, match=r"its 1 minutes are spent \(preparation 1.5\) before a. Nothing is"):
        TimeBudget(tmp_path, {"a": 1.0}, 60.0).fit("a", [stage()], DATA, takes(1.0))


def test_a_step_always_takes_time(tmp_path: Path) -> None:
    """Of two short trainings on a busy machine the longer one may end first."""
    (fitted,) = TimeBudget(tmp_path, {"a": 1.0}, 45.0 / SPARE).fit("a", [stage()], DATA, takes(0.0, fixed=24.0))
    assert fitted.steps == 50


def test_short_distillations_end_with_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    began = iter([0.0, 5.0, 10.0, 15.0])
    kept: list[int] = []
    said: list[str] = []
    fixed: dict[str, Any] = {
        "_fit_stages": lambda *_, **__: [], "train_student": lambda *_: None, "score_student": lambda *_: 0.5,
        "describe_choice": str, "time": SimpleNamespace(monotonic=lambda: next(began)),
    }  # fmt: skip
    for name, stand_in in fixed.items():
        monkeypatch.setattr(finalists, name, stand_in)
    context: Any = SimpleNamespace(
        time_budget=SimpleNamespace(left=lambda _: 10.0),
        search=SimpleNamespace(space=SimpleNamespace(short=None)),
        student_state=lambda number: SimpleNamespace(scores={}),
        update_student=lambda number, **_: kept.append(number),
        student_checkpoint=lambda *_: None,
        training=SimpleNamespace(console=Console(quiet=True)),
        evaluator=None,
        say=said.append,
    )
    points: Any = [SimpleNamespace(number=number, choice={}) for number in (3, 1, 4, 2)]
    finalists.distill_briefly(context, points)
    assert kept == [3, 1]
    assert said[-1:] == ["the time for short distillations is over: skipping trial 4 and all that follow"]


@pytest.mark.parametrize("content", DAMAGES, ids=lambda content: content[:9])
def test_damaged_time_records_are_named(tmp_path: Path, content: str) -> None:
    ledger = TimeBudget(tmp_path, PLAIN_PARTS, 600)
    uses = {"costs.json": lambda: ledger.costs, "steps.json": lambda: ledger.fit("final", [], DATA, takes(1))}
    for name, use in uses.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(DamagedError) as error:
            use()
        assert error.value.path == tmp_path / name
        (tmp_path / name).unlink()


@pytest.mark.parametrize("content", DAMAGES, ids=lambda content: content[:9])
def test_a_damaged_student_record_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "students" / "3" / "student.json"
    file.parent.mkdir(parents=True)
    file.write_text(content)
    with pytest.raises(DamagedError) as error:
        load_student_state(tmp_path, 3)
    assert error.value.path == file
