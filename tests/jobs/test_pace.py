"""A run fits into its minutes: rows that decide and are read, the end of training, and what cannot fit."""

import io
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from compress.config.reference import Call
from compress.data import load_task
from compress.data.collate import Collate
from compress.data.task import TaskData
from compress.errors import CompressError, RecipeError
from compress.jobs import pace as paces
from compress.jobs.pace import limit_time, measure_pace, refuse_long_steps
from compress.models.teacher import load
from compress.training.context import TrainingContext
from compress.training.run import Run
from compress.training.schedule import Length, Pace, TimeLimit
from tests import learning, tiny


@pytest.fixture
def context(tmp_path: Path, home: Path) -> TrainingContext:
    """A task with more rows than little time allows, and its teacher."""
    data = load_task(tiny.reviews(tmp_path / "data", train=4000, dev=600))
    teacher = load("tiny", Path(tiny.checkpoint(tmp_path / "teacher")), data.task)
    console = Console(file=io.StringIO(), width=200)
    tokenizer = teacher.tokenizer
    return TrainingContext(data, None, tokenizer, Collate(tokenizer), False, console, base_teacher=teacher)


def limited(
    context: TrainingContext, folder: Path, pace: Pace, monkeypatch: Any, minutes: float = 2, **more: Any
) -> TrainingContext:
    monkeypatch.setattr(paces, "measure_pace", lambda *_: pace)
    folder.mkdir(exist_ok=True)
    run = Run(folder, seed=0, main=True, **more)
    return limit_time(context, [learning.stage()], run, minutes=minutes, began=time.monotonic())


def sizes(data: TaskData) -> tuple[int, ...]:
    return tuple(len(split) for split in (data.train, data.validation))


def test_without_minutes_nothing_changes(context: TrainingContext, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", seed=0, main=True)
    assert limit_time(context, [learning.stage()], run, minutes=None, began=0.0) is context


@pytest.mark.parametrize(("minutes", "length"), [(2, {"steps": 60}), (None, {"epochs": "auto"})])
def test_layers_that_are_trained_in_turn_need_all_steps(
    minutes: float | None, length: dict[str, Any], context: TrainingContext, tmp_path: Path
) -> None:
    stage = learning.stage(**{"steps": None} | length, step=Call("mobilebert.Progressive"))
    run = Run(tmp_path / "run", seed=0, main=True)
    with pytest.raises(RecipeError, match=r"mobilebert\.Progressive trains one layer after the other"):
        limit_time(context, [stage], run, minutes=minutes, began=time.monotonic())


def test_many_rows_are_announced_with_what_is_shorter(
    context: TrainingContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 steps of 8 rows are twice the rows; each takes 2.5 forwards of 0.18 s."""
    monkeypatch.setattr(paces, "MANY_ROWS", 4000)
    monkeypatch.setattr(paces, "measure_pace", lambda *_: Pace(0.18))
    run = Run(tmp_path / "run", seed=0, main=True)
    limit_time(context, [learning.stage(steps=1000, batch=8)], run, minutes=None, began=0.0)
    said = context.console.file.getvalue()
    assert "4,000 rows take up to 1.0 hours: 2.0 passes over them" in said
    assert "--effort quick" in said and "--minutes 60" in said


def test_rows_are_as_many_as_there_is_time_for(
    context: TrainingContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 50 ms a row a teacher answers 2,400 rows in two minutes; 48 could be scored in a tenth, and 200 are."""
    slow = limited(context, tmp_path / "run", Pace(0.05), monkeypatch)
    assert sizes(slow.data) == (2400, 200)
    assert set(slow.data.validation["label"]) == {0, 1}, "evenly spaced"
    said = slow.console.file.getvalue()  # type: ignore[attr-defined]
    assert "--minutes 2 leaves time for 2,400 of the 4,000 rows of train" in said
    assert "200 of the 600 rows of validation, which know an accuracy of 90 % to 4.2 points" in said
    fast = limited(context, tmp_path / "fast", Pace(0.001), monkeypatch)
    assert sizes(fast.data) == (4000, 600)


def test_training_ends_early_enough_to_ship(
    context: TrainingContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet, busy = (
        limited(context, tmp_path / name, Pace(0.001, slowness), monkeypatch, minutes=4).time_limit
        for name, slowness in (("quiet", 1.0), ("busy", 2.0))
    )
    assert quiet is not None and busy is not None
    assert quiet.seconds("lesson") == pytest.approx(240 - 60 - 1.8, abs=1)
    assert busy.seconds("lesson") == pytest.approx(240 - 120 - 1.8, abs=1)


def test_a_time_that_leaves_none_to_train_is_refused(
    context: TrainingContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RecipeError, match=r"--minutes 2: .* shipping takes about 242 s: .* expected at least 5\.0"):
        limited(context, tmp_path / "run", Pace(0.001, 4.0), monkeypatch)
    assert list((tmp_path / "run").iterdir()) == [], "the folder can be used again"


def test_a_resumed_run_keeps_its_rows(
    context: TrainingContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = limited(context, tmp_path / "run", Pace(0.05), monkeypatch)
    again = limited(context, tmp_path / "run", Pace(0.001), monkeypatch, before=100.0)
    assert sizes(again.data) == sizes(first.data)
    assert again.data.train["text"] == first.data.train["text"]
    assert again.time_limit is not None and again.time_limit.spent > 1, "what was spent before counts"


def test_the_pace_is_that_of_the_teacher(context: TrainingContext) -> None:
    assert context.base_teacher is not None
    found = measure_pace(context.base_teacher, context, [learning.stage()])
    assert 0 < found.seconds_per_row < 1
    assert found.slowness >= 1


def test_a_teacher_answers_first_only_what_it_can_early() -> None:
    limit = TimeLimit(0.0, (), minutes=2, began=0.0, pace=Pace(0.01))
    assert limit.answers_in_time(1799)
    assert not limit.answers_in_time(1801)
    assert not replace(limit, pace=None).answers_in_time(1)


def test_a_stage_that_was_cut_short_says_how_long_it_needs(context: TrainingContext) -> None:
    limited = replace(context, time_limit=TimeLimit(0.0, (), minutes=4, began=0.0))
    length = Length(least=1500, most=3000, every=100)
    said = "--minutes 4 left time for 2 of 1,500 steps; allow about 79 minutes."
    assert limited.explain_short(2, length, 6.0) == said
    assert limited.explain_short(750, length, 6.0) == ""
    assert context.explain_short(2, length, 6.0) == ""


def test_a_step_that_takes_longer_than_its_stage_may_is_refused_before_anything_is_trained(
    context: TrainingContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row takes 0.3 s, and learning from it 2.5 times as long; two stages share a minute, and the batches of each."""
    assert context.base_teacher is not None
    monkeypatch.setattr(paces, "time_call", lambda run: run() or 0.3 * paces.TIMED_TEXTS)
    now = time.monotonic()
    limit = TimeLimit(now + 60, ("lesson", "more"), minutes=1, began=now)
    limited = replace(context, time_limit=limit)

    def check(batch: int, **more: float) -> None:
        run = Run(tmp_path, seed=0, main=True, **more)
        stages = [learning.stage(batch=batch), learning.stage(name="more", batch=4)]
        refuse_long_steps(context.base_teacher, limited, stages, run)

    check(batch=32)
    message = (
        r"stage lesson: one step, of 48 rows, takes about 0.6 minutes, and --minutes 1 leaves 0.5; give at least 2"
    )
    with pytest.raises(CompressError, match=message):
        check(batch=48)
    check(batch=48, before=10.0)


def test_a_batch_of_tokens_is_timed_by_its_rows(context: TrainingContext, monkeypatch: pytest.MonkeyPatch) -> None:
    assert context.base_teacher is not None
    monkeypatch.setattr(paces, "time_call", lambda run: run() or 0.3 * paces.TIMED_TEXTS)
    limit = TimeLimit(time.monotonic() + 30, ("lesson",), minutes=1, began=0.0)
    stage = learning.stage(tokens=3200, max_length=32)
    found = paces._find_long_step(context.base_teacher, [stage], limit)
    assert "one step, of 100 rows, takes about 1.2 minutes" in found
