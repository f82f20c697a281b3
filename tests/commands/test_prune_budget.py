"""Pruning to a budget: shapes are predicted, cut, compared and measured, and the best within the budget is trained."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from compress.config.recipe import Target
from compress.config.reference import Call
from compress.config.term import Term
from compress.errors import PruneError
from compress.io import write_json
from compress.jobs.stages import StageModels
from compress.latency.model import Estimate, ShapeTimer
from compress.pruning import budget
from compress.pruning.budget import SHAPE_FILE, Decision
from compress.pruning.importance import compute_importance
from compress.pruning.shapes import largest_shapes, losses, shape_grid
from compress.records.latency import FEWEST_SHAPES, Latency, Setting
from compress.slicing.cut import slice_model
from compress.slicing.plan import SlicePlan
from compress.slicing.select import choose
from compress.slicing.sizes import Sizes, resize_config
from compress.training import stage as training_stage
from compress.training.schedule import TimeLimit
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
    """Predictions are `cost`; files take `slower` times that. `loads` are the factors of other processes' work on
    measuring the whole model, on predictions, and on each race."""

    slower: float = 1.0
    about: str = "a fake, int8"
    loads: Sequence[float] = (1.0, 1.0, 1.0)

    def predict(self, configs: Mapping[str, Any]) -> dict[str, Estimate]:
        return {name: Estimate(self.loads[1] * cost(config), 0.01) for name, config in configs.items()}

    def measure(self, configs: Mapping[str, Any]) -> dict[str, float]:
        load = self.loads[0 if [*configs] == [budget.WHOLE_SHAPE] else 2]
        slower = {budget.WHOLE_SHAPE: 1.0}
        return {name: load * cost(config) * slower.get(name, self.slower) for name, config in configs.items()}


def timed(monkeypatch: pytest.MonkeyPatch, timer: FakeTimer) -> None:
    monkeypatch.setattr(budget, "ShapeTimer", lambda *_: timer)


def decided(run: Path) -> Decision:
    return Decision.read(run / SHAPE_FILE)


@pytest.fixture(scope="module")
def halved(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Any, ...]]:
    """A run with twice the speed as its budget, and the arguments of its `decide`."""
    folder, arguments = tmp_path_factory.mktemp("halved"), list[tuple[Any, ...]]()
    decide = budget.decide
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESS_HOME", str(folder / "home"))
        patch.setattr(budget, "decide", lambda *given: arguments.append(given) or decide(*given))
        timed(patch, FakeTimer())
        return pruned(given, folder / "run", speedup=2), arguments[0]


@pytest.fixture
def decide(halved: tuple[Path, tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Decision]:
    """Decide under another budget, with another timer, for the model and rows of that run."""
    recipe, teacher, context, run, margin = halved[1]
    monkeypatch.setenv("COMPRESS_HOME", str(halved[0].parent / "home"))  # where importance is cached

    def decide(timer: FakeTimer | None = None, console: Console | None = None, **limits: float) -> Decision:
        timed(monkeypatch, timer or FakeTimer())
        changed = recipe.model_copy(update={"target": Target.model_validate(limits)})
        decision = budget.decide(changed, teacher, replace(context, console=console or context.console), run, margin)
        assert decision is not None
        return decision

    return decide


# The chosen shape


def test_the_shape_keeps_the_budget_and_fills_it(halved: tuple[Path, Any]) -> None:
    run, found = halved[0], decided(halved[0])
    assert (found.limit_ms, found.whole_ms) == (0.5, 1.0)
    assert found.chosen.ms is not None
    assert found.chosen.ms <= 0.5
    losses = [each.loss for each in found.candidates]
    assert losses == sorted(losses), "the closest to the model's answers first"
    assert found.chosen == found.candidates[0], "as predictions are right, the first keeps the budget"
    every = shape_grid(tiny.bert(layers=4).config, SlicePlan.from_model(tiny.bert(layers=4)))
    fits = {
        name: sizes
        for name, sizes in every.items()
        if cost(resize_config(tiny.bert().config, sizes)) <= 0.5 / budget.BUDGET_MARGIN
    }
    assert {each.name for each in found.candidates} == set(largest_shapes(fits))
    config = json.loads((run / "stages" / "recover" / "model" / "config.json").read_text(encoding="utf-8"))
    assert Sizes(**found.chosen.sizes).plain() == found.chosen.sizes
    assert (config["num_hidden_layers"], config["intermediate_size"]) == (
        found.chosen.sizes["layers"], found.chosen.sizes["ffn"],
    )  # fmt: skip


def test_a_limit_in_milliseconds_gives_the_same_shape(
    halved: tuple[Path, Any], decide: Callable[..., Decision]
) -> None:
    assert decide(max_latency_ms=0.5) == replace(decided(halved[0]), budget={"max_latency_ms": 0.5})


def test_a_speed_up_does_not_depend_on_when_other_processes_run(
    halved: tuple[Path, Any], decide: Callable[..., Decision]
) -> None:
    """The whole model was measured beside other work, the other shapes mostly without."""
    found, quiet = decide(FakeTimer(loads=(2.0, 1.2, 1.0)), speedup=2), decided(halved[0])
    assert (found.chosen.name, found.limit_ms, found.whole_ms) == (quiet.chosen.name, 1.0, 2.0)
    assert [each.name for each in found.candidates] == [each.name for each in quiet.candidates]
    assert found.chosen.ms == pytest.approx(2 * (quiet.chosen.ms or 0))
    assert found.chosen.predicted_ms == pytest.approx(2 * (quiet.chosen.predicted_ms or 0))


def test_smaller_shapes_are_tried_once_if_files_are_slower_than_predicted(decide: Callable[..., Decision]) -> None:
    found = decide(FakeTimer(slower=1.4), speedup=2)
    assert found.chosen.ms is not None
    assert found.chosen.predicted_ms is not None
    assert found.chosen.ms <= 0.5
    assert found.chosen.predicted_ms <= 0.5 / budget.BUDGET_MARGIN / 1.3
    assert found.chosen != found.candidates[0]
    assert len({each.name for each in found.candidates}) == len(found.candidates), "each shape once"


def test_the_fastest_is_chosen_if_no_shape_keeps_the_budget(decide: Callable[..., Decision]) -> None:
    every = shape_grid(tiny.bert(layers=4).config, SlicePlan.from_model(tiny.bert(layers=4)))
    least = min(cost(resize_config(tiny.bert().config, sizes)) for sizes in every.values())
    console = Console(record=True, file=io.StringIO(), width=400)
    found = decide(FakeTimer(slower=1.4), console, max_latency_ms=1.07 * least)
    assert found.chosen.ms == pytest.approx(1.4 * least)
    assert f"which takes {found.chosen.ms:.3g} ms" in console.export_text()


def test_a_resumed_run_keeps_its_decision(
    given: dict[str, Any], halved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = decided(halved[0])
    monkeypatch.setattr(budget, "decide", lambda *_: pytest.fail("decided again"))
    assert decided(pruned(given, halved[0], speedup=2, resume=True)) == first


@pytest.mark.parametrize(
    ("limits", "parts"),
    [
        ({"max_latency_ms": 1e-6}, ["no shape of", "runs in 1e-06 ms", "The nearest", "ask for at least"]),
        ({"max_latency_ms": 2.0}, ["itself takes 1 ms", "nothing to prune"]),
        ({"max_params": 100}, ["the smallest shape of", "compress trim"]),
        ({"max_params": 10**9}, ["nothing to prune"]),
    ],
)
def test_an_impossible_budget_is_refused(
    limits: dict[str, float], parts: list[str], decide: Callable[..., Decision]
) -> None:
    with pytest.raises(PruneError) as error:
        decide(**limits)
    assert [part for part in parts if part not in str(error.value)] == [], str(error.value)


@pytest.mark.parametrize(
    ("budget_given", "words"),
    [
        ({"speedup": 900}, "ask for at most .* times its speed"),
        ({"max_params": 100}, "the smallest shape of"),
        ({"max_params": 10**9}, "itself has .*: there is nothing to prune"),
        ({"max_latency_ms": 1000}, "itself takes .*: there is nothing to prune"),
    ],
)
def test_a_budget_that_no_shape_or_the_whole_model_keeps_is_refused_before_the_teacher_is_trained(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget_given: dict[str, float], words: str
) -> None:
    timed(monkeypatch, FakeTimer())
    untrained = {**given, "model": tiny.checkpoint(tmp_path / "encoder", tiny.bert(2).bert)}
    monkeypatch.setattr(training_stage, "train", lambda *_, **__: pytest.fail("something is trained"))
    with pytest.raises(PruneError, match=words):
        pruned(untrained, tmp_path / "run", **budget_given)


def test_a_budget_of_parameters_opens_no_device(
    decide: Callable[..., Decision], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "open_device", lambda *_, **__: pytest.fail("opened"))
    found = decide(max_params=20_000)
    assert found.chosen.parameters <= 2e4
    assert (found.where, found.limit_ms, found.chosen.ms) == (None, None, None)


# Its parts


def test_the_grid_has_only_possible_shapes() -> None:
    model = tiny.bert(layers=4)
    every = shape_grid(model.config, SlicePlan.from_model(model))
    whole = Sizes.from_config(model.config)
    assert str(whole) in every
    assert all(sizes.within(whole) and sizes.head_size == 8 for sizes in every.values())
    assert {sizes.layers for sizes in every.values()} == {1, 2, 3, 4}
    assert len(every) == 4 * 4 * 8
    assert list(largest_shapes(every)) == [str(whole)]
    shallow = {name: sizes for name, sizes in every.items() if sizes.layers < 4 or sizes.ffn < 32}
    assert {(every[name].layers, every[name].ffn) for name in largest_shapes(shallow)} == {(3, 64), (4, 24)}


def test_losses_compare_with_the_whole_models_answers() -> None:
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


# Devices


class Counted:
    """A device on which latency is proportional to a file's size."""

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


def test_shapes_are_measured_once_per_device_and_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.latency.model.SAMPLES", FEWEST_SHAPES)
    model = tiny.bert(layers=3)
    shapes = shape_grid(model.config, SlicePlan.from_model(model))
    configs = {name: resize_config(model.config, sizes) for name, sizes in list(shapes.items())[::5]}
    device, said = Counted(), list[str]()
    timer = ShapeTimer(device, SETTING, "int8", "classification", segments=True, say=said.append)
    first = timer.predict(configs)
    asked = device.asked
    assert asked >= FEWEST_SHAPES
    assert set(first) == set(configs)
    assert any(f"{FEWEST_SHAPES} shapes on fake, int8, 1 thread, batch 1, 16 tokens" in line for line in said)
    assert replace(timer, device=Counted()).predict(configs) == first
    assert device.asked == asked, "kept"
    monkeypatch.setattr("compress.latency.model.WORTH_KEEPING", -1.0)
    again = Counted()
    replace(timer, device=again, setting=Setting(seq=8)).predict(configs)
    asked = again.asked
    assert asked, "of another setting nothing was known"
    replace(timer, device=again, setting=Setting(seq=8)).predict(configs)
    assert again.asked > asked, "a predictor that is far off is not kept"


def prune_to_twice_the_speed(
    given: dict[str, Any], out: Path, monkeypatch: pytest.MonkeyPatch, *shipped_ms: float, busy: str = ""
) -> command.Result:
    """Prune, where shipped files take these milliseconds, each in a measurement, and the whole model 1."""
    takes = iter(shipped_ms)

    def race(files: Mapping[str, Path], device: Any, setting: Setting) -> dict[str, Latency]:
        assert files[budget.SHIPPED_SHAPE] == out / "bundle" / "onnx" / "model_quantized.onnx"
        times = {budget.SHIPPED_SHAPE: next(takes), budget.WHOLE_SHAPE: 1.0}
        return {name: replace(steady(name, setting, times[name]), busy=busy) for name in files}

    timed(monkeypatch, FakeTimer())
    monkeypatch.setattr(budget, "race", race)
    words = ["--recipe", given["recipe"], "--data", given["data"], "--gate", "warn", "--seq", "16", "--speedup", "2"]
    return command.run("prune", given["model"], *words, "--out", str(out), *(["--resume"] if out.exists() else []))


def test_a_smaller_shape_is_trained_if_the_shipped_file_is_too_slow(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted before the second attempt, the run continues with it."""
    run = tmp_path / "run"

    def interrupt(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        stages = StageModels.run_stages
        patch.setattr(
            StageModels, "run_stages",
            lambda models, some, **given: stages(models, some, **given) if some[0].name == "half" else interrupt(),
        )  # fmt: skip
        assert prune_to_twice_the_speed(given, run, patch, 0.6).code == 130
    shipped = (run / "bundle" / "report.json").stat().st_mtime_ns
    told = prune_to_twice_the_speed(given, run, monkeypatch, 0.45)
    assert told.code == 0, told.err
    assert "2.22 times as fast as the unpruned model: within 0.5 ms" in " ".join(told.out.split())
    first, second = (Decision.read(run / name) for name in (SHAPE_FILE, "shape-2.json"))
    assert (first.over, second.over) == (pytest.approx(1.2), 1.0)
    assert (second.shipped_ms, second.whole_ms, second.limit_ms) == (0.45, 1.0, 0.5)
    assert "10.0% OVER the limit of 0.5 ms" in replace(second, shipped_ms=0.55).verdict()
    assert first.chosen.ms is not None and second.chosen.ms is not None
    assert second.chosen.ms <= 0.5 / budget.BUDGET_MARGIN / 1.2 < first.chosen.ms
    assert (run / "bundle" / "report.json").stat().st_mtime_ns > shipped
    assert Decision.read(run / "bundle" / SHAPE_FILE) == second
    assert "target:\n  layers" in (run / "bundle" / "recipe.yaml").read_text(encoding="utf-8")
    ours, last = (
        load_file(folder / "model.safetensors") for folder in (run / "bundle", run / "stages" / "recover-2" / "model")
    )
    assert all(torch.equal(ours[name], tensor) for name, tensor in last.items())


def test_a_file_that_seems_too_slow_on_a_busy_machine_is_measured_again(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = prune_to_twice_the_speed(given, tmp_path / "run", monkeypatch, 0.7, 0.6, 0.45, busy="others: 1 of 2 CPUs")
    assert told.code == 0, told.err
    assert Decision.read(tmp_path / "run" / SHAPE_FILE).shipped_ms == 0.45
    assert not (tmp_path / "run" / "shape-2.json").exists()


@pytest.mark.parametrize(("noisy", "attempts"), [(True, 1), (False, 2)])
def test_attempts_end(
    noisy: bool, attempts: int, halved: tuple[Path, tuple[Any, ...]], decide: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A noisy measurement decides nothing, and a file that is always a little too slow ends the attempts."""
    monkeypatch.setattr(budget, "ATTEMPTS", 2)
    timed(monkeypatch, FakeTimer())
    recipe, teacher, context, run, _ = halved[1]
    run, printed = replace(run, path=tmp_path), io.StringIO()
    context = replace(context, console=Console(file=printed), time_limit=TimeLimit(0.0, (), minutes=0.7, began=0.0))
    for attempt, changed in enumerate(budget.resolve_budget(recipe, teacher, context, run), start=1):
        file = tmp_path / (SHAPE_FILE if attempt == 1 else f"shape-{attempt}.json")
        write_json(file, asdict(replace(Decision.read(file), shipped_ms=0.52, noisy=noisy)))
        assert changed.target.sizes
        assert [stage.name.endswith("-2") for stage in changed.stages] == [attempt == 2] * 4
    assert len(list(tmp_path.glob("shape*.json"))) == attempt == attempts
    assert printed.getvalue().count("--minutes 0.7") == attempts - 1, "warned of the time that the first has taken"


@pytest.mark.slow
def test_a_speedup_on_this_machine(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes are really measured, predicted, cut and measured again; nothing depends on how good the times are."""
    monkeypatch.setattr("compress.latency.model.SAMPLES", FEWEST_SHAPES)
    monkeypatch.setattr("compress.latency.measure.SWEEPS", 2)
    monkeypatch.setattr(budget, "FINALISTS", 2)
    monkeypatch.setattr("compress.latency.model.WORTH_KEEPING", float("inf"))
    monkeypatch.setattr("compress.latency.measure.AGREE", float("inf"))
    words = ["--recipe", given["recipe"], "--data", given["data"], "--gate", "warn", "--seq", "32", "--speedup", "1.3"]
    told = command.run("prune", given["model"], *words, "--out", str(tmp_path / "run"))
    assert told.code == 0, told.err
    assert "each predicted from the others" in " ".join(told.out.split())
    assert "budget: " in told.out
