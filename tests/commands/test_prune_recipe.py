"""Prune stages and targets in recipes: as strict as all else there."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from compress.commands.prune import set_target
from compress.config.options import GoalOptions, PruneOptions, SettingOptions
from compress.config.recipe import Recipe
from compress.config.stages import Prune
from compress.errors import PruneError, RecipeError
from compress.jobs.checks import load_functions
from compress.pruning.stage import interpolate_sizes, stage_sizes
from compress.slicing.sizes import Sizes
from tests import command, tiny
from tests.pruning_given import RECIPE

SETTING: dict[str, Any] = {}


def recipe(folder: Path, *overrides: str, **changes: Any) -> Recipe:
    tree = yaml.safe_load(RECIPE) | changes
    return Recipe.load(tiny.recipe(folder, yaml.safe_dump(tree, sort_keys=False)), overrides)


def problems(folder: Path, *overrides: str, **changes: Any) -> list[str]:
    with pytest.raises(RecipeError) as error:
        recipe(folder, *overrides, **changes)
    return error.value.problems


def test_a_recipe_with_prune_stages(tmp_path: Path) -> None:
    found = recipe(tmp_path, target={"layers": 2, "ffn": 0.5})
    assert [type(stage).__name__ for stage in found.stages] == ["Prune", "Stage", "Prune", "Stage"]
    assert [stage.name for stage in found.pruning] == ["half", "all"]
    assert [stage.name for stage in found.training] == ["between", "recover"]
    half = found.pruning[0]
    assert (half.importance.by, half.way, half.rows, half.rule) == ("molchanov.taylor", 0.5, 24, None)
    assert found.target.sizes == {"layers": 2, "ffn": 0.5}
    assert found.target.budgets == {}


def test_the_resolved_recipe_loads_to_an_equal_one(tmp_path: Path) -> None:
    found = recipe(tmp_path, "stages.half.importance={by: molchanov.taylor, targets: drawn}", target={"speedup": 2})
    (tmp_path / "again.yaml").write_text(found.to_yaml(), encoding="utf-8")
    again = Recipe.load(str(tmp_path / "again.yaml"))
    assert again == found.model_copy(update={"name": again.name})
    assert "speedup: 2.0" in found.to_yaml()


def test_prune_stages_are_set_by_name_and_number(tmp_path: Path) -> None:
    found = recipe(
        tmp_path, "stages.half.way=0.25", "stages.2.rows=8", "stages.all.copy_layers=even",
        "target.hidden=0.5", "stages.half.importance=theis.fisher",
    )  # fmt: skip
    first, last = found.pruning
    assert (first.way, first.importance.by, last.rows, last.rule) == (0.25, "theis.fisher", 8, "even")
    assert found.target.sizes == {"hidden": 0.5}


def test_all_problems_at_once_each_with_its_place_and_a_hint(tmp_path: Path) -> None:
    stages = [
        {"prune": "Half", "wya": 0.5, "importance": {"rate": 1}, "lr": 1e-3},
        {"prune": "all", "way": 1.5, "rows": 0, "copy_layers": "importence"},
        {"prune": "both", "distill": "both", "importance": "molchanov.taylor"},
    ]
    found = problems(tmp_path, stages=stages, target={"hiden": 0.5, "layers": -1, "device": 3})
    for expected in (
        "tiny.yaml: stages[0].wya: no such setting. Did you mean 'way'?",
        "tiny.yaml: stages[1].importance: is missing",
        "tiny.yaml: stages[1].way: Input should be less than or equal to 1, found 1.5",
        "tiny.yaml: stages[2]: expected exactly one of `distill: NAME`, `finetune: NAME`, `pretrain: NAME`, "
        "`prune: NAME`",
        "tiny.yaml: target.hiden: no such setting. Did you mean 'hidden'?",
        "tiny.yaml: target.layers: Input should be greater than 0, found -1",
    ):
        assert expected in found
    for place in ("stages[0].name", "stages[0].importance", "stages[0].lr", "stages[1].rows", "stages[1].copy_layers"):
        assert [problem for problem in found if problem.startswith(f"tiny.yaml: {place}")], place
    assert any(problem.startswith("tiny.yaml: target.device") for problem in found)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"student": {"layers": 2}}, "student: a recipe that prunes begins with the teacher itself"),
        ({"target": {"ffn": 0.5, "speedup": 2}}, "target: asks for ffn and speedup: give sizes, or a budget"),
        ({"target": {"max_latency_ms": 1, "speedup": 2}}, "target: asks for max_latency_ms and speedup"),
        ({"target": {"speedup": 1}}, "target.speedup: Input should be greater than 1"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert any(said in problem for problem in problems(tmp_path, **changes))


@pytest.mark.parametrize("ways", [(1.0, 1.0), (0.5, 0.4), (0.25, 0.5)])
def test_every_prune_stage_goes_further_and_the_last_all_of_the_way(tmp_path: Path, ways: tuple[float, float]) -> None:
    (found,) = problems(tmp_path, f"stages.half.way={ways[0]}", f"stages.all.way={ways[1]}")
    assert (
        f"`way` of the prune stages is {ways[0]:g}, {ways[1]:g}; expected increasing values, the last of them 1"
        in found
    )


def test_a_target_needs_a_stage_that_prunes() -> None:
    with pytest.raises(RecipeError, match=r"target: no stage prunes"):
        Recipe.load("distilbert", ["target.speedup=3"])


def test_a_stage_with_a_student_of_its_own_cannot_follow(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, "stages.recover.student={layers: 1}")
    assert "stage recover: student: a recipe that prunes begins with the teacher itself" in found


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{by: molchanov.tailor}", "Did you mean 'molchanov.taylor'?"),
        ("{by: molchanof.taylor}", "Did you mean 'molchanov'?"),
        ("{by: molchanov.taylor, target: labels}", "has no option 'target'. Did you mean 'targets'?"),
        ("{by: molchanov.taylor, targets: label}", "targets: Input should be"),
    ],
)
def test_importance_is_checked_before_anything_runs(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load_functions(recipe(tmp_path, f"stages.all.importance={line}"), 1, None)
    (found,) = refused.value.problems
    assert found.startswith("tiny: stages[2].importance: ")
    assert said in found


# What the command asks for


def test_the_commands_target_replaces_what_it_excludes_in_the_recipes(tmp_path: Path) -> None:
    found = recipe(tmp_path, target={"ffn": 0.5})
    assert set_target(found, PruneOptions().values, SettingOptions().values) == found
    assert set_target(found, PruneOptions(layers=2, keep="0.9").values, SETTING).target.sizes == {
        "layers": 2,
        "ffn": 0.5,
    }
    assert set_target(found, {"ffn": 32}, SETTING).target.sizes == {"ffn": 32}
    budget = set_target(found, {"speedup": 2.0, "max_params": 5e6}, SETTING | {"seq": 16}).target
    assert (budget.sizes, budget.budgets, budget.seq) == ({}, {"speedup": 2.0, "max_params": 5_000_000}, 16)


def test_settings_of_command_and_recipe_are_merged(tmp_path: Path) -> None:
    found = recipe(tmp_path, target={"precision": "fp32", "threads": 2, "ffn": 0.5})
    budget = set_target(found, {"speedup": 2.0}, SETTING | {"seq": 16}).target
    assert (budget.precision, budget.threads, budget.seq, budget.sizes) == ("fp32", 2, 16, {})


def test_a_budget_replaces_only_the_other_limit_of_the_same_cost(tmp_path: Path) -> None:
    found = recipe(tmp_path, target={"speedup": 2, "max_params": 5_000_000})
    assert set_target(found, {"max_params": 4e6}, SETTING).target.budgets == {"speedup": 2, "max_params": 4_000_000}
    assert set_target(found, {"max_latency_ms": 3}, SETTING).target.budgets == {
        "max_latency_ms": 3,
        "max_params": 5_000_000,
    }
    assert set_target(found, {"layers": 2}, SETTING).target.budgets == {}


def test_a_setting_that_equals_the_default_replaces_the_recipes(tmp_path: Path) -> None:
    found = recipe(tmp_path, target={"speedup": 2, "device": "ssh:pi", "threads": 2, "batch": 8, "seq": 16})
    target = set_target(found, {}, SettingOptions(device="local", threads=1, batch=1).values).target
    assert (target.device, target.threads, target.batch, target.seq) == ("local", 1, 1, 16)


def test_the_least_is_the_recipes_unless_it_is_given(tmp_path: Path) -> None:
    own = {"keep": 0.9, "least": "params"}
    for goal, least in (
        (GoalOptions(), "params"),
        (GoalOptions(keep="0.98"), "params"),
        (GoalOptions(keep="0.98", least="latency"), "latency"),
    ):
        assert recipe(tmp_path, *goal.overrides, target=own).target.least == least


@pytest.mark.parametrize(
    ("line", "asked", "setting"),
    [
        ("target.layers=1", {"speedup": 2}, {}),
        ("target={layers: 1}", {"speedup": 2}, {}),
        ("target.speedup=2", {"layers": 1}, {}),
        ("target.speedup=2", {"max_latency_ms": 3}, {}),
        ("target.layers=1", {"layers": 2}, {}),
        ("target.threads=2", {"speedup": 2}, {"threads": 1}),
    ],
)
def test_set_and_an_option_that_replaces_it_are_refused(
    tmp_path: Path, line: str, asked: dict[str, float], setting: dict[str, int]
) -> None:
    found = recipe(tmp_path, line)
    options = ", ".join(f"--{name.replace('_', '-')}" for name in (*asked, *setting))
    with pytest.raises(PruneError) as error:
        set_target(found, asked, SETTING | setting, [line])
    assert f"--set {line} and {options}: one replaces the other" in str(error.value)


def test_set_and_an_option_that_goes_with_it_are_merged(tmp_path: Path) -> None:
    for line in ("target.layers=1", "target={layers: 1}"):
        assert set_target(recipe(tmp_path, line), {"ffn": 32}, SETTING, [line]).target.sizes == {"layers": 1, "ffn": 32}


@pytest.mark.parametrize("target", [{"layers": 2}, {"max_params": 5_000_000}, {"keep": 0.95, "least": "params"}])
@pytest.mark.parametrize("setting", [{"device": "local"}, {"threads": 2}, {"seq": 16}])
def test_a_setting_is_refused_where_nothing_is_timed(
    tmp_path: Path, target: dict[str, Any], setting: dict[str, Any]
) -> None:
    with pytest.raises(PruneError, match=f"--{next(iter(setting))}: only for a limit of the latency"):
        set_target(recipe(tmp_path, target=target), {}, SETTING | setting)


def test_an_unknown_device_is_refused_before_anything_runs(tmp_path: Path) -> None:
    words = (
        "prune",
        tiny.checkpoint(tmp_path / "teacher"),
        "--data",
        tiny.reviews(tmp_path / "data"),
        "--speedup",
        "2",
    )
    result = command.run(*words, "--device", "nosuch", "--plan", "--out", str(tmp_path / "run"))
    assert result.code == 2 and "--device nosuch: no such device" in result.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("asked", "setting", "said"),
    [
        ({}, {}, "no target: give sizes (--layers, --hidden, --heads"),
        ({"layers": 2, "max_latency_ms": 3}, {}, "--layers and --max-latency-ms: a budget decides"),
        ({"max_latency_ms": 3, "speedup": 2}, {}, "--max-latency-ms and --speedup: both limit the latency"),
        ({"speedup": 1}, {}, "--speedup 1: expected a number above 1"),
        ({"max_params": 0.5}, {}, "--max-params 0.5: expected a number above 1"),
        ({"ffn": float("inf")}, {}, "--ffn inf: expected a number above 0"),
        ({"layers": 0}, {}, "--layers 0: expected a number above 0"),
        ({"max_latency_ms": float("nan")}, {}, "--max-latency-ms nan: expected a number above 0"),
    ],
)
def test_impossible_targets_are_refused(
    tmp_path: Path, asked: dict[str, float], setting: dict[str, Any], said: str
) -> None:
    with pytest.raises(PruneError) as error:
        set_target(recipe(tmp_path), asked, SETTING | setting)
    assert said in str(error.value)


def test_a_recipe_that_does_not_prune_names_those_that_do() -> None:
    with pytest.raises(PruneError, match=r"recipe tinybert: has no stage that prunes; .*prune-taylor"):
        set_target(Recipe.load("tinybert"), {"layers": 2}, SETTING)


def test_a_step_that_learns_gates_gets_the_commands_sizes(tmp_path: Path) -> None:
    stage = {"distill": "gates", "lr": 1e-3, "step": {"by": "cofi.Gated", "sizes": {"ffn": 0.5}, "warm": 0.2}}
    found = recipe(tmp_path, stages=[stage])

    def options(**asked: float) -> dict[str, Any]:
        call = set_target(found, asked, SETTING).training[0].step
        assert call is not None
        return dict(call.options)

    assert options() == {"sizes": {"ffn": 0.5}, "warm": 0.2}
    assert options(heads=0.5) == {"sizes": {"heads": 0.5}, "warm": 0.2}
    for budget in ({"speedup": 2}, {"max_params": 1e6}):
        with pytest.raises(PruneError, match="prune-taylor finds sizes for a budget"):
            options(**budget)


# Sizes on the way


@pytest.mark.parametrize(
    ("whole", "target", "half"),
    [
        ((12, 768, 12, 64, 3072), (6, 384, 6, 64, 1536), (9, 576, 9, 64, 2304)),
        ((6, 384, 12, 32, 1536), (4, 312, 12, 26, 1200), (5, 348, 12, 29, 1368)),
        ((6, 384, 12, 32, 1536), (6, 384, 6, 64, 768), (6, 384, 8, 48, 1152)),
        ((4, 64, 4, 16, 128), (4, 16, 1, 16, 128), (4, 48, 3, 16, 128)),
    ],
)
def test_halfway_sizes_are_possible(whole: tuple[int, ...], target: tuple[int, ...], half: tuple[int, ...]) -> None:
    begin, end = Sizes(*whole), Sizes(*target)
    assert interpolate_sizes(begin, end, 0.5) == Sizes(*half)
    assert interpolate_sizes(begin, end, 1.0) == end
    assert interpolate_sizes(begin, end, 0.0) == begin


def test_rotary_heads_change_by_whole_factors() -> None:
    begin = Sizes(4, 32, 2, 16, 64)
    for step in range(21):
        found = interpolate_sizes(begin, Sizes(3, 8, 2, 4, 32), step / 20, rotary=True)
        assert found.head_size in (16, 8, 4) and found.within(begin)
    assert interpolate_sizes(begin, Sizes(3, 16, 2, 8, 32), 0.5, rotary=True).head_size in (16, 8)
    assert interpolate_sizes(begin, Sizes(3, 16, 2, 8, 32), 0.5).head_size == 12


def test_a_rule_that_drops_modernberts_first_layer_is_refused(tmp_path: Path) -> None:
    config = tiny.config("modernbert", layers=4)
    for rule in ("even", "first"):
        found = recipe(tmp_path, f"stages.half.copy_layers={rule}", target={"layers": 2})
        assert stage_sizes(found.pruning[0], found, config).layers == 3
    found = recipe(tmp_path, "stages.half.copy_layers=last", target={"layers": 2})
    with pytest.raises(PruneError, match=r"layers \[1, 2, 3\]: the first layer of modernbert"):
        stage_sizes(found.pruning[0], found, config)
    assert stage_sizes(found.pruning[0], found, tiny.config("bert", layers=4)).layers == 3


def test_every_share_of_the_way_is_within_the_model_and_not_below_the_target() -> None:
    begin, end = Sizes(12, 768, 12, 64, 3072), Sizes(3, 312, 12, 26, 600)
    for step in range(21):
        found = interpolate_sizes(begin, end, step / 20)
        assert found.within(begin)
        assert end.within(found)
        assert found.attention == found.hidden


def test_untied_heads_and_width_are_interpolated_separately() -> None:
    begin, end = Sizes(6, 512, 8, 64, 2048), Sizes(6, 256, 2, 64, 2048)
    assert interpolate_sizes(begin, end, 0.5, tied=False) == Sizes(6, 384, 5, 64, 2048)


def test_grouped_heads_stay_in_groups_that_divide_the_width() -> None:
    begin, end = Sizes(6, 576, 9, 64, 1536), Sizes(6, 432, 3, 64, 768)
    assert interpolate_sizes(begin, end, 0.5, tied=False, together=3) == Sizes(6, 504, 6, 64, 1152)
    for step in range(21):
        found = interpolate_sizes(begin, end, step / 20, tied=False, together=3)
        assert end.within(found) and found.within(begin)
        assert found.heads % 3 == found.hidden % found.heads == 0


def test_prune_is_frozen_like_all_of_a_recipe(tmp_path: Path) -> None:
    stage = recipe(tmp_path).pruning[0]
    assert isinstance(stage, Prune)
    with pytest.raises(ValueError, match="frozen"):
        stage.way = 1.0  # type: ignore[misc]


def test_a_choice_of_recipes_is_refused(tmp_path: Path) -> None:
    words = ("prune", tiny.checkpoint(tmp_path / "teacher"), "--data", tiny.reviews(tmp_path / "data"), "--ffn", "0.5")
    result = command.run(*words, "--recipe", "auto", "--out", str(tmp_path / "run"))
    assert result.code == 2 and "prune-taylor" in result.err
    assert not (tmp_path / "run").exists()
