"""Prune a model to given sizes or a budget: cut, recover, ship and measure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from pydantic import ValidationError

from compress.arguments import with_keywords_of
from compress.benchmark.devices import open_device
from compress.commands import preflight
from compress.commands.distill import run_distillation
from compress.config.loader import names
from compress.config.options import PruneOptions, SettingOptions
from compress.config.recipe import BUDGETS, Recipe, Target
from compress.config.reference import options as options_of
from compress.config.stages import SIZES, Stage
from compress.errors import PruneError
from compress.exporters.artifact import Bundle
from compress.jobs.checks import join_processes, load_functions
from compress.jobs.request import DistillRequest, ForecastArguments, PruneArguments


@with_keywords_of(PruneArguments)
def prune(arguments: PruneArguments) -> Bundle:
    """Prune `model`, let it recover with its unpruned self as teacher, and ship it,
    measured, as a bundle in `out`.

    model    a checkpoint with a head for the task, an alias or encoder that is
             fine-tuned first, or a bundle's folder
    recipe   name, path of a .yaml, or a Recipe, with stages that prune
    target   the sizes to keep, or a budget or a share of the score for which sizes are
             found (see `pruning.budget`, `jobs.path`); default: the recipe's own
    setting  the device and the setting for a budget of latency or speed-up
    The other arguments are those of `distill`.

    Raises PruneError for a target that this model cannot reach, and a CompressError for
    anything else that is wrong."""
    request = preflight.distill_request(
        ForecastArguments(
            teacher=arguments.model,
            data=arguments.data,
            recipe=arguments.recipe,
            goal=arguments.target.goal,
            columns=arguments.columns,
            vocabulary=arguments.vocabulary,
            length=arguments.length,
            options=arguments.options,
            console=arguments.console,
        ),
        arguments.out,
    )
    request = resolve_target(request, arguments.target, arguments.setting)
    return run_pruning(request, arguments.max_drop)


def run_pruning(request: DistillRequest, max_drop: float | None = None) -> Bundle:
    """Distil a model into its pruned self, with a device that can be reached."""
    assert isinstance(request.recipe, Recipe), "its target was resolved"
    target = request.recipe.target
    by_hand = target.device.partition(":")[0] in ("browser", "adb")
    if target.needs_device and not by_hand:
        # fail before hours of training
        with open_device(target.device, say=lambda _: None):
            pass
    return run_distillation(request, max_drop)


def resolve_target(
    request: DistillRequest,
    target: PruneOptions,
    setting: SettingOptions,
) -> DistillRequest:
    """Return the request with this target in its recipe, and with the user's own
    functions loaded. Raises PruneError."""
    if not isinstance(request.recipe, Recipe):
        raise PruneError(
            "--recipe: a file of choices, or auto, chooses between recipes that do not "
            f"prune; expected one of {', '.join(_list_recipes())}, or a .yaml"
        )
    options = request.options
    processes = join_processes().num_processes
    recipe = load_functions(request.recipe, processes, options.allow_code)
    recipe = set_target(recipe, target.values, asdict(setting))
    return replace(request, recipe=recipe)


def set_target(
    recipe: Recipe,
    target: Mapping[str, float | None],
    setting: Mapping[str, Any],
) -> Recipe:
    """Return the recipe with this target; it keeps its own if `target` has no value.

    Settings that are not the default replace the recipe's own. Raises PruneError.
    """
    values = {name: value for name, value in target.items() if value is not None}
    _check_numbers(values)
    learns = [
        stage
        for stage in recipe.training
        if stage.step is not None and "sizes" in options_of(stage.step.function)
    ]
    if not recipe.pruning and not learns:
        raise PruneError(
            f"recipe {recipe.name}: has no stage that prunes; these have one: "
            f"{', '.join(_list_recipes())}"
        )
    if not recipe.pruning:
        return _with_learned_sizes(recipe, learns[0], values)
    if values and recipe.target.keep is not None:
        raise PruneError(
            f"--keep and {_options(list(values))}: a share of the score decides the "
            "sizes; give one of the two"
        )
    values = values or {**recipe.target.sizes, **recipe.target.budgets}
    given = [stage for stage in recipe.pruning if stage.to is not None]
    if not values and len(given) < len(recipe.pruning):
        raise PruneError(
            f"no target: give sizes ({_options(SIZES)}), as counts or shares of the "
            f"model's, or a budget ({_options(BUDGETS)})"
        )
    own = recipe.target.model_dump(exclude={*SIZES, *BUDGETS}, exclude_unset=True)
    own |= {
        name: value
        for name, value in setting.items()
        if value != Target.model_fields[name].default
    }
    count = {"max_params": int(values["max_params"])} if "max_params" in values else {}
    try:
        validated = Target.model_validate({**own, **values, **count})
    except ValidationError as error:
        problems = [
            f"{_options([str(each['loc'][0])])}: {each['msg']}, found {each['input']!r}"
            for each in error.errors()
        ]
        raise PruneError("\n".join(problems)) from error
    return recipe.model_copy(update={"target": validated})


def _list_recipes() -> list[str]:
    return [name for name in names() if name.startswith("prune-")]


def _check_numbers(values: Mapping[str, float]) -> None:
    """Raise PruneError for values that exclude each other, or are out of range."""
    sizes, budgets = (
        [name for name in of if name in values] for of in (SIZES, BUDGETS)
    )
    if sizes and budgets:
        raise PruneError(
            f"{_options(sizes)} and {_options(budgets)}: a budget decides the sizes; "
            "give one of the two"
        )
    if {"max_latency_ms", "speedup"} <= set(values):
        raise PruneError(
            "--max-latency-ms and --speedup: both limit the latency; give one of the "
            "two"
        )
    for name, value in values.items():
        limit = 1 if name in ("speedup", "max_params") else 0
        if not limit < value < math.inf:
            raise PruneError(
                f"{_options([name])} {value:g}: expected a number above {limit}"
            )


def _with_learned_sizes(
    recipe: Recipe,
    stage: Stage,
    values: Mapping[str, float],
) -> Recipe:
    """Set the sizes of a recipe whose step learns what to prune."""
    assert stage.step is not None, "the caller looked at its options"
    if budgets := [name for name in BUDGETS if name in values]:
        raise PruneError(
            f"{_options(budgets)}: {stage.step.by} only prunes to given sizes; "
            "prune-taylor finds sizes for a budget"
        )
    if not values:
        return recipe
    changed = stage.model_copy(
        update={
            "step": replace(
                stage.step, options={**stage.step.options, "sizes": dict(values)}
            )
        }
    )
    return recipe.model_copy(
        update={
            "stages": tuple(
                changed if each is stage else each for each in recipe.stages
            )
        }
    )


def _options(settings: Sequence[str]) -> str:
    return ", ".join(f"--{each.replace('_', '-')}" for each in settings)
