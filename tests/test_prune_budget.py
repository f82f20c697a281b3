"""From a budget to a shape: predicted, cut, asked, measured, told."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file

from compress.commands import distill
from compress.config.reference import Call
from compress.config.term import Term
from compress.errors import PruneError
from compress.latency.model import Estimate, ShapeTimer
from compress.pruning import budget
from compress.pruning.budget import NAME, Decision, count_parameters, losses
from compress.pruning.importance import compute_importance
from compress.records.latency import FEWEST_SHAPES, Latency, Setting
from compress.slicing.cut import slice_model
from compress.slicing.plan import SlicePlan
from compress.slicing.rules import FAMILIES
from compress.slicing.select import choose, magnitude
from compress.slicing.sizes import Sizes, resize_config
from tests import command, learning, pruning_given, tiny
from tests.latencies import steady
from tests.pruning_given import pruned

pytestmark = pytest.mark.usefixtures("hastened")

SETTING = Setting(seq=16)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return pruning_given.given(tmp_path_factory.mktemp("given"))


def cost(config: Any) -> float:
    """A device that takes so many ms: 1 for the whole model here."""
    sizes = Sizes.from_config(config)
    return sizes.layers * (4 * sizes.hidden**2 + 2 * sizes.hidden * sizes.ffn) / 4 / (4 * 32**2 + 2 * 32 * 64)


@dataclass(frozen=True)
class FakeTimer:
    """Predictions are `cost`; files take `slower` times that."""

    slower: float = 1.0
    about: str = "a fake, int8"

    def predict(self, configs: Mapping[str, Any]) -> dict[str, Estimate]:
        return {name: Estimate(cost(config), 0.01) for name, config in configs.items()}

    def measure(self, configs: Mapping[str, Any]) -> dict[str, float]:
        return {name: cost(config) * (1 if name == budget.WHOLE else self.slower) for name, config in configs.items()}


def timed(monkeypatch: pytest.MonkeyPatch, timer: FakeTimer) -> None:
    monkeypatch.setattr(budget, "ShapeTimer", lambda *_: timer)


def decided(run: Path) -> Decision:
    return Decision.read(run / NAME)


@pytest.fixture(scope="module")
def halved(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was asked for twice the speed."""
    folder = tmp_path_factory.mktemp("halved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESS_HOME", str(folder / "home"))
        timed(patch, FakeTimer())
        return pruned(given, folder / "run", speedup=2)


# The shape that is taken


def test_the_shape_keeps_the_budget_and_fills_it(halved: Path) -> None:
    found = decided(halved)
    assert (found.limit_ms, found.whole_ms) == (0.5, 1.0)
    assert found.chosen.ms is not None
    assert found.chosen.ms <= 0.5
    losses = [each.loss for each in found.candidates]
    assert losses == sorted(losses), "the nearest to the model's answers first"
    assert found.chosen == found.candidates[0], "as predictions are right, the first keeps the budget"
    every = budget.shape_grid(tiny.bert(layers=4).config, SlicePlan.from_model(tiny.bert(layers=4)))
    fits = {
        name: sizes
        for name, sizes in every.items()
        if cost(resize_config(tiny.bert().config, sizes)) <= 0.5 / budget.MARGIN
    }
    assert {each.name for each in found.candidates} == set(budget.largest_shapes(fits))
    config = json.loads((halved / "stages" / "recover" / "model" / "config.json").read_text(encoding="utf-8"))
    assert Sizes(**found.chosen.sizes).plain() == found.chosen.sizes
    assert (config["num_hidden_layers"], config["intermediate_size"]) == (
        found.chosen.sizes["layers"], found.chosen.sizes["ffn"],
    )  # fmt: skip


def test_milliseconds_are_a_budget_as_well(
    given: dict[str, Any], halved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(monkeypatch, FakeTimer())
    by_time = decided(pruned(given, tmp_path / "run", max_latency_ms=0.5))
    assert by_time == replace(decided(halved), budget={"max_latency_ms": 0.5})


def test_where_files_are_slower_than_predicted_smaller_shapes_are_tried_once(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(monkeypatch, FakeTimer(slower=1.4))
    found = decided(pruned(given, tmp_path / "run", speedup=2))
    assert found.chosen.ms is not None
    assert found.chosen.predicted_ms is not None
    assert found.chosen.ms <= 0.5
    assert found.chosen.predicted_ms <= 0.5 / budget.MARGIN / 1.3
    assert found.chosen != found.candidates[0]
    assert len({each.name for each in found.candidates}) == len(found.candidates), "each shape once"


def test_where_no_smaller_shape_is_left_the_fastest_is_taken(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = budget.shape_grid(tiny.bert(layers=4).config, SlicePlan.from_model(tiny.bert(layers=4)))
    least = min(cost(resize_config(tiny.bert().config, sizes)) for sizes in every.values())
    timed(monkeypatch, FakeTimer(slower=1.4))
    found = decided(pruned(given, tmp_path / "run", max_latency_ms=1.07 * least))
    assert found.chosen.ms == pytest.approx(1.4 * least)


def test_a_budget_that_is_missed_even_so_is_told(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Erratic(FakeTimer):
        def measure(self, configs: Mapping[str, Any]) -> dict[str, float]:
            return {name: 1.0 if name == budget.WHOLE else 0.6 for name in configs}

    timed(monkeypatch, Erratic())
    from rich.console import Console

    pruned(given, tmp_path / "run", speedup=2, console=Console(width=400))
    said = capsys.readouterr().out
    assert "no measured shape takes 0.5 ms; choosing the fastest" in said
    assert "which takes 0.6 ms" in said


def test_a_resumed_run_decides_nothing_anew(
    given: dict[str, Any], halved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = decided(halved)
    monkeypatch.setattr(budget, "decide", lambda *_: pytest.fail("decided again"))
    assert decided(pruned(given, halved, speedup=2, resume=True)) == first


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"max_latency_ms": 1e-6}, ["no shape of", "takes 1e-06 ms", "The nearest", "ask for no less"]),
        ({"max_latency_ms": 2.0}, ["itself takes 1 ms", "nothing to prune"]),
        ({"max_params": 100}, ["the smallest shape of", "compress trim"]),
        ({"max_params": 1e9}, ["nothing to prune"]),
    ],
)
def test_a_budget_that_cannot_be_is_told_with_the_nearest_that_can(
    asked: dict[str, float], said: list[str], given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(monkeypatch, FakeTimer())
    with pytest.raises(PruneError) as error:
        pruned(given, tmp_path / "run", **asked)
    assert [part for part in said if part not in str(error.value)] == [], str(error.value)


def test_parameters_are_a_budget_that_no_device_is_asked_for(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "open_device", lambda *_, **__: pytest.fail("opened"))
    run = pruned(given, tmp_path / "run", max_params=2e4)
    found = decided(run)
    saved = load_file(run / "stages" / "recover" / "model" / "model.safetensors")
    assert sum(tensor.numel() for tensor in saved.values()) == found.chosen.parameters <= 2e4
    assert (found.where, found.limit_ms, found.chosen.ms) == (None, None, None)


# What it rests on


@pytest.mark.parametrize("family", [name for name in tiny.FAMILIES if name in FAMILIES])
def test_parameters_are_counted_without_cutting(family: str) -> None:
    model = tiny.model(family, layers=3)
    plan, rated = SlicePlan.from_model(model), magnitude(model)
    for sizes in list(budget.shape_grid(model.config, plan).values())[::17]:
        small = slice_model(model, choose(plan, rated, sizes))
        assert count_parameters(model, plan, sizes) == sum(each.numel() for each in small.parameters()), str(sizes)


def test_the_grid_is_of_shapes_that_the_model_allows() -> None:
    model = tiny.bert(layers=4)
    every = budget.shape_grid(model.config, SlicePlan.from_model(model))
    whole = Sizes.from_config(model.config)
    assert str(whole) in every
    assert all(sizes.within(whole) and sizes.head_size == 8 for sizes in every.values())
    assert {sizes.layers for sizes in every.values()} == {1, 2, 3, 4}
    assert len(every) == 4 * 4 * 8
    assert list(budget.largest_shapes(every)) == [str(whole)]
    shallow = {name: sizes for name, sizes in every.items() if sizes.layers < 4 or sizes.ffn < 32}
    assert {(every[name].layers, every[name].ffn) for name in budget.largest_shapes(shallow)} == {(3, 64), (4, 24)}


def test_the_loss_of_a_cut_model_is_against_the_whole_models_answers() -> None:
    model, rows, collate = tiny.bert(labels=3, layers=3), learning.rows(), learning.collate()
    plan = SlicePlan.from_model(model)
    rated = compute_importance(Call("molchanov.taylor"), model, plan, rows, collate, batch=8)
    whole = Sizes.from_config(model.config)
    shapes = {"whole": whole, "less": replace(whole, ffn=48), "least": replace(whole, ffn=1, layers=1)}
    terms = [Term("hinton.soft_targets")]
    found = losses(model, shapes, rated, rows, collate, layers=None, terms=terms, kind="classification")
    assert found["whole"] == pytest.approx(0.0, abs=1e-6)
    assert 1e-6 < found["less"] < found["least"]
    by_hand = slice_model(model, choose(plan, rated, shapes["less"])).eval()
    total = 0.0
    for row in rows:
        batch = {name: tensor for name, tensor in collate([row]).items() if name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            p, q = (each(**batch).logits.log_softmax(-1) for each in (model, by_hand))
        total += float((p.exp() * (p - q)).sum())
    assert found["less"] == pytest.approx(total / len(rows), rel=1e-4)


# A device that is asked


class Counted:
    """A device on which a file takes what its size says."""

    name = "fake"

    def __init__(self) -> None:
        self.asked = 0

    def facts(self) -> dict[str, str]:
        return {"cpu": "none", "temperature": str(self.asked)}

    def race(self, files: Mapping[str, Path], settings: Sequence[Setting], *, rounds: int, runs: int) -> list[Latency]:
        self.asked += len(files)
        return [
            steady(name, setting, file.stat().st_size / 1e6) for setting in settings for name, file in files.items()
        ]


def test_shapes_are_measured_once_for_each_device_and_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.latency.model.SAMPLES", 6)
    model = tiny.bert(layers=3)
    shapes = budget.shape_grid(model.config, SlicePlan.from_model(model))
    configs = {name: resize_config(model.config, sizes) for name, sizes in list(shapes.items())[::5]}
    device, said = Counted(), list[str]()
    timer = ShapeTimer(device, SETTING, "int8", "classification", segments=True, say=said.append)
    first = timer.predict(configs)
    asked = device.asked
    assert asked >= 6
    assert set(first) == set(configs)
    assert any("6 shapes on fake, int8, 1 thread, batch 1, 16 tokens" in line for line in said)
    assert replace(timer, device=Counted()).predict(configs) == first
    assert device.asked == asked, "kept"
    monkeypatch.setattr("compress.latency.model.WORTH_KEEPING", -1.0)
    again = Counted()
    replace(timer, device=again, setting=Setting(seq=8)).predict(configs)
    asked = again.asked
    assert asked, "of another setting nothing was known"
    replace(timer, device=again, setting=Setting(seq=8)).predict(configs)
    assert again.asked > asked, "a predictor that is far off is not kept"


def asked_for_twice_the_speed(
    given: dict[str, Any], out: Path, monkeypatch: pytest.MonkeyPatch, *shipped_ms: float, noisy: bool = False
) -> command.Result:
    """Prune where files that ship take these milliseconds, one after the other, and the whole model 1."""
    left = list(shipped_ms)

    def race(files: Mapping[str, Path], device: Any, setting: Setting) -> dict[str, Latency]:
        assert files[budget.SHIPPED] == out / "bundle" / "onnx" / "model_quantized.onnx"
        times = {budget.SHIPPED: left.pop(0), budget.WHOLE: 1.0}
        found = {name: steady(name, setting, times[name]) for name in files}
        return {name: replace(each, noisy=noisy, noise="busy" if noisy else "") for name, each in found.items()}

    timed(monkeypatch, FakeTimer())
    monkeypatch.setattr(budget, "race", race)
    words = ["--recipe", given["recipe"], "--data", given["data"], "--gate", "warn", "--seq", "16", "--speedup", "2"]
    resumed = ["--resume"] if out.exists() else []
    told = command.run("prune", given["model"], *words, "--out", str(out), *resumed)
    assert told.code or not left
    return told


def test_what_ships_is_measured_and_held_against_the_budget(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the whole model, which now takes what it takes."""
    told = asked_for_twice_the_speed(given, tmp_path / "run", monkeypatch, 0.45)
    assert told.code == 0, told.err
    assert "2.22 times as fast as the unpruned model: within 0.5 ms" in " ".join(told.out.split())
    found = decided(tmp_path / "run")
    assert (found.shipped_ms, found.whole_ms, found.limit_ms, found.over) == (0.45, 1.0, 0.5, 1.0)
    assert "10.0% OVER the limit of 0.5 ms" in replace(found, shipped_ms=0.55).verdict()
    assert Decision.read(tmp_path / "run" / "bundle" / NAME) == found
    assert "target:\n  layers" in (tmp_path / "run" / "bundle" / "recipe.yaml").read_text(encoding="utf-8")


def test_where_what_ships_is_too_slow_a_smaller_shape_is_trained(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted on its way there, it goes on there."""
    run = tmp_path / "run"

    def interrupted(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        stages = distill.StageModels.run_stages
        patch.setattr(
            distill.StageModels, "run_stages",
            lambda models, some, **given: stages(models, some, **given) if some[0].name == "half" else interrupted(),
        )  # fmt: skip
        assert asked_for_twice_the_speed(given, run, patch, 0.6).code == 130
    shipped = (run / "bundle" / "report.json").stat().st_mtime_ns
    told = asked_for_twice_the_speed(given, run, monkeypatch, 0.45)
    assert told.code == 0, told.err
    first, second = (Decision.read(run / name) for name in (NAME, "shape-2.json"))
    assert (first.over, second.over) == (pytest.approx(1.2), 1.0)
    assert first.chosen.ms is not None and second.chosen.ms is not None
    assert second.chosen.ms <= 0.5 / budget.MARGIN / 1.2 < first.chosen.ms
    assert (run / "bundle" / "report.json").stat().st_mtime_ns > shipped
    assert Decision.read(run / "bundle" / NAME) == second
    ours, last = (
        load_file(folder / "model.safetensors") for folder in (run / "bundle", run / "stages" / "recover-2" / "model")
    )
    assert all(torch.equal(ours[name], tensor) for name, tensor in last.items())


@pytest.mark.parametrize(("noisy", "attempts"), [(True, 1), (False, 2)])
def test_attempts_end(
    noisy: bool, attempts: int, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine tells nothing; one that is always a little too slow is not tried for ever."""
    monkeypatch.setattr(budget, "ATTEMPTS", 2)
    told = asked_for_twice_the_speed(given, tmp_path / "run", monkeypatch, *[0.52] * attempts, noisy=noisy)
    assert told.code == 0, told.err
    assert len(list((tmp_path / "run").glob("shape*.json"))) == attempts
    assert "4.0% OVER the limit of 0.5 ms" in " ".join(told.out.split())


@pytest.mark.slow
def test_a_speed_asked_for_on_this_machine(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it: shapes measured, predicted, cut, measured again; the second time what was measured is known.

    However busy the machine is: nothing here depends on the times being good ones.
    """
    monkeypatch.setattr("compress.latency.model.SAMPLES", FEWEST_SHAPES)
    monkeypatch.setattr("compress.latency.measure.SWEEPS", 2)
    monkeypatch.setattr(budget, "FINALISTS", 2)
    monkeypatch.setattr("compress.latency.model.WORTH_KEEPING", float("inf"))
    monkeypatch.setattr("compress.latency.measure.AGREE", float("inf"))
    words = ["--recipe", given["recipe"], "--data", given["data"], "--gate", "warn", "--seq", "32", "--speedup", "1.3"]
    first = command.run("prune", given["model"], *words, "--out", str(tmp_path / "one"))
    assert first.code == 0, first.err
    assert "each predicted from the others" in " ".join(first.out.split())
    assert "budget: " in first.out

    def interrupted(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("compress.commands.distill.prune_stage", interrupted)
    second = command.run("prune", given["model"], *words, "--out", str(tmp_path / "two"))
    assert second.code == 130, second.err
    assert "pruning to" in second.out
    assert "each predicted from the others" not in " ".join(second.out.split())
