"""How long a stage trains whose end is open, at which rate, and that a resumed one decides the same."""

import itertools
import json
import math
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.config.recipe import Recipe
from compress.errors import CompressError, RecipeError
from compress.training import schedule
from compress.training.schedule import Length, learning_rate
from compress.training.stage import Trained
from tests import learning


def history(scores: list[float], *, every: int, distances: list[float] | None = None) -> list[dict[str, float]]:
    points = [{"step": every * (at + 1), "eval_score": score} for at, score in enumerate(scores)]
    for point, distance in zip(points, distances or [], strict=False):
        point["eval_distance"] = distance
    return points


def plan(per_epoch: int, *, batch: int = 32, rows: int = 500, per_query: float = 1, **changes: Any) -> Length:
    return Length.plan(learning.stage(batch=batch, **changes), per_epoch, rows=rows, per_query=per_query)


LENGTH = Length(least=90, most=900, every=10, gain=0.01)


def test_the_rate_falls_once_nothing_has_improved_for_a_quarter_of_the_steps() -> None:
    rising = [0.5 + 0.01 * at for at in range(20)]
    assert LENGTH.decay_start(history(rising, every=10)) is None
    flat = rising + [rising[-1]] * 20
    start = LENGTH.decay_start(history(flat, every=10))
    assert start is not None
    assert 200 / (1 - schedule.SCORE_PATIENCE) <= start <= 220 / (1 - schedule.SCORE_PATIENCE) + 10
    assert LENGTH.decay_start(history(flat[: start // 10], every=10)) == start, "what comes later changes nothing"
    assert LENGTH.decay_start(history(flat[: start // 10 - 1], every=10)) is None


def test_a_distance_that_still_shrinks_goes_on_training() -> None:
    scores = [0.9] * 60
    shrinking, still = [0.95**at for at in range(60)], [0.5] * 60
    assert LENGTH.decay_start(history(scores, every=10, distances=shrinking)) is None
    assert LENGTH.decay_start(history(scores, every=10, distances=still)) == 70, "at three quarters of the least"


def test_a_single_evaluation_never_ends_the_hold() -> None:
    length = plan(125, effort="quick", rows=800)
    assert length.every > schedule.SCORE_PATIENCE * 3 * length.every, "the steps alone would let it"
    scores = [0.84, 0.8725, 0.865, 0.84]
    assert length.decay_start(history(scores[:3], every=length.every)) is None
    assert length.decay_start(history(scores, every=length.every)) == 4 * length.every


def test_noise_below_the_standard_error_is_no_improvement() -> None:
    noisy = [0.8 + random.Random(at).uniform(-0.005, 0.005) for at in range(60)]
    start = LENGTH.decay_start(history(noisy, every=10))
    assert start is not None
    assert start < 200


@pytest.mark.parametrize("seed", range(40))
def test_every_length_ends_within_its_limits_and_at_rate_zero(seed: int) -> None:
    draw = random.Random(seed)
    per_epoch, rows, batch = draw.choice([1, 7, 130, 2000]), draw.choice([0, 10, 872, 20_000]), draw.choice([1, 8, 64])
    scores = [draw.random() ** draw.choice([0.1, 1]) for _ in range(draw.randrange(80))]
    length = plan(per_epoch, batch=batch, rows=rows)
    assert 1 <= length.least <= length.most <= max(schedule.MOST_AUTO_STEPS, schedule.EPOCHS * per_epoch)
    start = length.decay_start(history(scores, every=length.every))
    end = length.end(start)
    assert min(length.least, length.most) - 1 <= end <= length.most
    factors = [length.factor(step, start) for step in range(end + 1)]
    assert factors[-1] == 0 or end == 1
    assert all(0 <= factor <= 1 for factor in factors)
    top = factors.index(max(factors))
    assert factors[:top] == sorted(factors[:top])
    assert factors[top:] == sorted(factors[top:], reverse=True)


def test_more_effort_is_longer() -> None:
    lengths = [plan(100, effort=effort) for effort in schedule.EFFORTS]
    for shorter, longer in itertools.pairwise(lengths):
        assert shorter.least < longer.least
        assert shorter.most < longer.most


@pytest.mark.parametrize(("per_epoch", "least"), [(100, 400), (2000, 2000)])
def test_rows_that_are_worth_it_are_all_seen_once(per_epoch: int, least: int) -> None:
    whole, usual = (plan(per_epoch, corpus=whole) for whole in (True, False))
    assert (whole.least, usual.least) == (least, 400)
    assert (whole.every, whole.most) == (usual.every, usual.most)


def test_the_rows_of_a_query_count_as_one() -> None:
    """As many queries are seen at least as rows that stand alone, or all of them once."""
    assert [plan(n, per_query=8).least for n in (100, 727, 10_000)] == [400, 727, 3200]
    assert plan(727, effort="quick", per_query=8).least == 291
    assert plan(727, per_query=8).most == plan(727).most


def test_variants_are_read_longer() -> None:
    varied, usual = (plan(3000, augment=augment) for augment in ("tinybert.near_words", None))
    assert (varied.least, varied.most) == schedule.VARIED
    assert (varied.least > usual.least, varied.most < usual.most, varied.gain) == (True, True, usual.gain)
    few = plan(2, rows=0, augment="tinybert.near_words")
    assert (few.least, few.most) == (2 * schedule.EPOCHS, 2 * schedule.EPOCHS_OF_ROWS)


def test_the_rate_goes_with_the_width() -> None:
    assert learning_rate(768) == 5e-5
    assert learning_rate(384) == 1e-4


class Plateau:
    """Scores that rise until a step and then stay, as those of a model do; they depend on the step alone."""

    def __init__(self, path: Path, until: int) -> None:
        self.path, self.until = path, until

    def __call__(self, student: Any) -> Mapping[str, float]:
        lines = (self.path / "log.jsonl").read_text(encoding="utf-8").splitlines()
        step = json.loads(lines[-1])["step"]
        return {"score": min(step, self.until) / 10}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(schedule, "LEAST_AUTO_STEPS", 9)
    monkeypatch.setattr(schedule, "MOST_AUTO_STEPS", 40)
    yield


def trained(path: Path, *, until: int, stop: int | None = None) -> tuple[dict[str, torch.Tensor], Trained]:
    stage = learning.stage(steps=None, epochs="auto", checkpoint=2)
    step = learning.step(dropout=True)
    if stop is not None:
        learning.interrupt(step, stop)
    facts = learning.train(step, stage, path, score=Plateau(path, until))
    return learning.weights(step), facts


@pytest.mark.usefixtures("short")
def test_an_open_ended_stage_ends_with_its_evidence_and_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    whole, facts = trained(tmp_path / "whole", until=12)
    assert 12 < facts.steps < 40
    log = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    rates = [entry["learning_rate"] for entry in log if "learning_rate" in entry]
    assert rates[-1] < 0.35 * max(rates)
    decay = math.ceil(facts.steps * (1 - schedule.DECAY))
    assert facts.best_step is not None
    assert facts.best_step > decay, "of the hold, the luckiest of many noisy scores would be kept"
    for kill in (random.Random(0).randrange(1, 12), decay, facts.steps - 1):
        path = tmp_path / str(kill)
        with pytest.raises(KeyboardInterrupt):
            trained(path, until=12, stop=kill)
        torch.manual_seed(99)
        again, resumed = trained(path, until=12)
        assert (resumed.steps, resumed.best_step, resumed.score) == (facts.steps, facts.best_step, facts.score)
        assert all(torch.equal(again[name], tensor) for name, tensor in whole.items()), f"killed after step {kill}"


@pytest.mark.usefixtures("short")
def test_a_stage_that_always_improves_ends_at_the_most(tmp_path: Path) -> None:
    _, facts = trained(tmp_path, until=10_000)
    assert facts.steps == 40


def test_published_numbers_take_the_place_of_auto() -> None:
    usual, paper = Recipe.load("distilbert"), Recipe.load("distilbert", paper=True)
    assert (usual.training[0].epochs, usual.training[0].lr) == ("auto", "auto")
    assert (paper.training[0].epochs, paper.training[0].lr) == (3, 5e-5)
    assert (usual.teacher.epochs, paper.teacher.epochs) == ("auto", 3)
    assert Recipe.load("distilbert", ["stages.0.epochs=7"], paper=True).training[0].epochs == 7


@pytest.mark.parametrize("name", ["minilm", "minilm-v1", "minilm-assistant"])
def test_published_stages_on_text_are_as_long_as_the_papers(name: str) -> None:
    """400,000 steps on 512 tokens, 4,000 of them warm-up (Sec. 4.1 of both MiniLM papers); ours are three epochs."""
    found = [each for each in Recipe.load(name, paper=True).training if each.data == "text"]
    assert {(each.steps, each.max_length, each.warmup) for each in found} == {(400_000, 512, 0.01)}
    assert {each.epochs for each in Recipe.load(name).training if each.data == "text"} == {3}


def test_steps_override_an_open_length() -> None:
    assert not Recipe.load("distilbert", ["stages.0.steps=30"]).training[0].open_ended


@pytest.mark.parametrize(
    ("line", "where"), [("{epoks: 3}", "published.epoks"), ("3", "published"), ("{epochs: -1}", "epochs")]
)
def test_published_numbers_are_checked(line: str, where: str, tmp_path: Path) -> None:
    text = Path(__file__).parents[2].joinpath("recipes", "hinton.yaml").read_text(encoding="utf-8")
    mine = tmp_path / "mine.yaml"
    mine.write_text(text.replace("published: {epochs: 3, lr: 5.0e-5}", f"published: {line}"), encoding="utf-8")
    with pytest.raises(RecipeError) as error:
        Recipe.load(mine, paper=True)
    assert any(where in problem for problem in error.value.problems)


class Clock:
    """A clock that goes on by a second whenever it is asked, as if every step took one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(schedule, "time", self)

    def perf_counter(self) -> float:
        self.now += 1
        return self.now


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("epochs", "seconds", "steps"), [("auto", 24, 24), (30, 24, 24), ("auto", 0, 2), (10, 1e6, 30)]
)
def test_a_time_limit_ends_a_stage_with_its_rate_at_zero(
    tmp_path: Path, epochs: Any, seconds: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch)
    stage = learning.stage(steps=None, epochs=epochs)
    facts = learning.train(learning.step(), stage, tmp_path, score=Plateau(tmp_path, 10_000), seconds=seconds)
    assert abs(facts.steps - steps) <= 2
    assert facts.best_step is not None
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    rates = [entry["learning_rate"] for entry in log if "learning_rate" in entry]
    assert steps <= 2 or rates[-1] < 0.4 * max(rates)


@pytest.mark.usefixtures("short")
def test_a_resumed_stage_keeps_the_decision_of_its_time_limit(tmp_path: Path) -> None:
    stage = learning.stage(steps=None, epochs="auto", checkpoint=2)
    record = tmp_path / "stages" / "lesson" / "limit.json"
    record.parent.mkdir(parents=True)
    record.write_text('{"start": 24}', encoding="utf-8")
    facts = learning.train(learning.step(), stage, tmp_path, score=Plateau(tmp_path, 10_000), seconds=1e6)
    assert facts.steps == 32


def test_the_time_that_is_left_is_split_over_the_stages_that_are_left() -> None:
    limit = schedule.TimeLimit(time.monotonic() + 90, ("teacher", "one", "two"), 2, 0.0)
    assert limit.seconds("teacher") == pytest.approx(30, abs=1)
    assert limit.seconds("two") == pytest.approx(90, abs=1)
    assert schedule.TimeLimit(0, ("one",), 2, 0.0).seconds("one") == 0
    assert limit.seconds("teacher_lm") == pytest.approx(22.5, abs=1), "one more"


def test_a_step_that_takes_longer_than_there_is_time_is_refused(tmp_path: Path) -> None:
    stage = learning.stage(steps=4, batch=16, micro_batch=1)
    expected = r"stage lesson: one step, of 16 passes, takes about .* --minutes leaves 0.0; .* a smaller batch"
    with pytest.raises(CompressError, match=expected):
        learning.train(learning.step(), stage, tmp_path, seconds=1e-6)
    assert learning.train(learning.step(), stage, tmp_path, seconds=60).steps == 4
