"""The straight line of pruning: a model and what is to be left of it in, a smaller, recovered, measured bundle out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import PartialState
from pydantic import ValidationError
from rich.console import Console

from compress.benchmark.devices import open_device
from compress.commands import preflight
from compress.commands.distill import distill, load_functions, on_cpu
from compress.config.loader import names
from compress.config.options import DataOptions, LengthOptions, PruneOptions, RunOptions, SettingOptions
from compress.config.recipe import BUDGETS, SIZES, Recipe, Stage, Target
from compress.config.reference import options as options_of
from compress.data.objects import data_path, teacher_path
from compress.errors import PruneError
from compress.exporters.artifact import Bundle

if TYPE_CHECKING:
    from compress.data.objects import DataLike, TeacherLike


def prune(
    *,
    model: "TeacherLike",
    data: "DataLike",
    out: str | Path,
    recipe: str | Path | Recipe = "prune-taylor",
    target: PruneOptions = PruneOptions(),
    setting: SettingOptions = SettingOptions(),
    columns: DataOptions = DataOptions(),
    max_drop: float | None = None,
    length: LengthOptions = LengthOptions(),
    options: RunOptions = RunOptions(),
    console: Console | None = None,
) -> Bundle:
    """Prune `model`, let it recover with its unpruned self as teacher, ship it as a bundle in `out`/bundle, measured.

    model    a checkpoint with a head for the task, an alias or encoder that is fine-tuned first, or a bundle's folder
    recipe   name, path of a .yaml, or a Recipe, with stages that prune
    target   what is to be left, or what it may cost, of which the sizes are then found (see `pruning.budget`); nothing
             named: the recipe's own target
    setting  the device, and the forward there, that a latency or speed-up is of
    The rest is as for `distill`.

    Raises PruneError for what cannot be left of this model, and a CompressError that says what to do for the rest.
    """
    model, data = teacher_path(model), data_path(data)
    recipe = preflight.load_recipe(recipe, options.overrides, length)
    preflight.check(recipe, teacher=model, out=out, data=data, options=options)
    recipe = load_functions(recipe, PartialState(cpu=on_cpu()).num_processes, options.allow_code)
    recipe = aimed(recipe, asdict(target), asdict(setting))
    if recipe.target.limits_time:
        _reach(recipe.target.device)
    return distill(
        teacher=model, recipe=recipe, data=data, out=out, columns=columns, max_drop=max_drop,
        length=length.minutes_alone, options=replace(options, overrides=None, allow_code=None), console=console,
    )  # fmt: skip


def _reach(name: str) -> None:
    """Raise DeviceError for a device that is not there, before hours of training; one that asks the user is passed."""
    if name.partition(":")[0] not in ("browser", "adb"):
        with open_device(name, say=lambda _: None):
            pass


def aimed(recipe: Recipe, asked: Mapping[str, float | None], setting: Mapping[str, Any]) -> Recipe:
    """Return the recipe with what is asked for as its target; where nothing is asked, the recipe keeps its own.

    Settings that are not the default take the place of the recipe's own. Raises PruneError.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    _check(given)
    learns = [
        stage for stage in recipe.training if stage.step is not None and "sizes" in options_of(stage.step.function)
    ]
    if not recipe.pruning and not learns:
        known = [name for name in names() if name.startswith("prune-")]
        raise PruneError(f"recipe {recipe.name}: has no stage that prunes; recipes that have: {', '.join(known)}")
    if not recipe.pruning:
        return _with_learned_sizes(recipe, learns[0], given)
    aim = given or {**recipe.target.sizes, **recipe.target.budgets}
    if not aim:
        raise PruneError(
            f"nothing to prune to: give sizes ({_options(SIZES)}), as counts or shares of the model's, or a budget "
            f"({_options(BUDGETS)})"
        )
    own = recipe.target.model_dump(exclude={*SIZES, *BUDGETS}, exclude_unset=True)
    own |= {name: value for name, value in setting.items() if value != Target.model_fields[name].default}
    count = {"max_params": int(aim["max_params"])} if "max_params" in aim else {}
    try:
        target = Target.model_validate({**own, **aim, **count})
    except ValidationError as error:
        said = [f"{_options([str(each['loc'][0])])}: {each['msg']}, found {each['input']!r}" for each in error.errors()]
        raise PruneError("\n".join(said)) from error
    return recipe.model_copy(update={"target": target})


def _check(given: Mapping[str, float]) -> None:
    """Raise PruneError for settings that exclude each other, and for numbers out of range."""
    sizes, budgets = ([name for name in of if name in given] for of in (SIZES, BUDGETS))
    if sizes and budgets:
        raise PruneError(
            f"{_options(sizes)} and {_options(budgets)}: sizes, and a budget that decides the sizes; give one of them"
        )
    if {"max_latency_ms", "speedup"} <= set(given):
        raise PruneError("--max-latency-ms and --speedup: both say how fast it is to be; give one of them")
    for name, value in given.items():
        limit = 1 if name in ("speedup", "max_params") else 0
        if not limit < value < math.inf:
            raise PruneError(f"{_options([name])} {value:g}: expected a number above {limit}")


def _with_learned_sizes(recipe: Recipe, stage: Stage, given: Mapping[str, float]) -> Recipe:
    """Return a recipe whose step learns what to prune, with these sizes as its target."""
    assert stage.step is not None, "it was asked for its options"
    if budgets := [name for name in BUDGETS if name in given]:
        raise PruneError(
            f"{_options(budgets)}: {stage.step.by} learns what to prune under sizes; prune-taylor finds sizes for a "
            "budget"
        )
    if not given:
        return recipe
    changed = stage.model_copy(
        update={"step": replace(stage.step, options={**stage.step.options, "sizes": dict(given)})}
    )
    return recipe.model_copy(update={"stages": tuple(changed if each is stage else each for each in recipe.stages)})


def _options(settings: Sequence[str]) -> str:
    return ", ".join(f"--{each.replace('_', '-')}" for each in settings)
