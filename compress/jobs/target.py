"""Set the sizes or the budget that a model is pruned to, before torch is imported."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from compress.config.loader import names
from compress.config.recipe import BUDGETS, MOST_SPEEDUP, Recipe, Target
from compress.config.reference import options as options_of
from compress.config.stages import SIZES
from compress.errors import PruneError


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
    if not recipe.pruning:
        _refuse_settings(setting)
        return _with_learned_sizes(recipe, values)
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
    if not validated.budgets and validated.keep is None:
        _refuse_settings(setting)
    return recipe.model_copy(update={"target": validated})


def _refuse_settings(setting: Mapping[str, Any]) -> None:
    """Raise PruneError for a device or a shape of inputs where nothing is measured."""
    for name, value in setting.items():
        if value != Target.model_fields[name].default:
            raise PruneError(
                f"{_options([name])}: is for a budget, which is measured; given sizes "
                "need no device: leave it out"
            )


def list_pruning() -> list[str]:
    """List the recipes that prune."""
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
        most = MOST_SPEEDUP if name == "speedup" else math.inf
        if not limit < value < most:
            upto = f", and below {most}" if most < math.inf else ""
            raise PruneError(
                f"{_options([name])} {value:g}: expected a number above {limit}{upto}"
            )


def _with_learned_sizes(recipe: Recipe, values: Mapping[str, float]) -> Recipe:
    """Set the sizes of a recipe whose step learns what to prune."""
    learns = [
        stage
        for stage in recipe.training
        if stage.step is not None and "sizes" in options_of(stage.step.function)
    ]
    if not learns:
        raise PruneError(
            f"recipe {recipe.name}: has no stage that prunes; these have one: "
            f"{', '.join(list_pruning())}"
        )
    stage = learns[0]
    assert stage.step is not None, "its options were read"
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
