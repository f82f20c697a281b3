"""Set the sizes or the budget that a model is pruned to, before torch is imported."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from compress.config.loader import names
from compress.config.recipe import BUDGETS, MOST_SPEEDUP, TIMES, Recipe, Target
from compress.config.reference import options as options_of
from compress.config.stages import SIZES
from compress.errors import PruneError


def set_target(
    recipe: Recipe,
    values: Mapping[str, float],
    settings: Mapping[str, Any],
    overrides: Sequence[str] | None = None,
) -> Recipe:
    """Return the recipe with these values in its target, which keeps all others that
    they do not exclude: sizes exclude budgets, and one limit of the latency the other.

    Raises PruneError, also where a value replaces another one that
    the user gave among the recipe's `overrides`.
    """
    _check_numbers(values)
    if not recipe.pruning:
        _refuse_settings(settings)
        return _with_learned_sizes(recipe, values)
    if values and recipe.target.keep is not None:
        raise PruneError(
            f"--keep and {_options(list(values))}: a share of the score decides the "
            "sizes; give one of the two"
        )
    before = recipe.target.model_dump(exclude_unset=True)
    own = before
    for excluding, excluded in ((SIZES, BUDGETS), (BUDGETS, SIZES), (TIMES, TIMES)):
        if values.keys() & set(excluding):
            own = {name: own[name] for name in own if name not in excluded}
    try:
        validated = Target.model_validate({**own, **settings, **values})
    except ValidationError as error:
        problems = [
            f"{_options([str(each['loc'][0])])}: {each['msg']}, found {each['input']!r}"
            for each in error.errors()
        ]
        raise PruneError("\n".join(problems)) from error
    to_target = [stage for stage in recipe.pruning if stage.to is None]
    if to_target and not validated.sizes and not validated.budgets:
        raise PruneError(
            f"no target: give sizes ({_options(SIZES)}), as counts or shares of the "
            f"model's, or a budget ({_options(BUDGETS)})"
        )
    if not validated.needs_device:
        _refuse_settings(settings)
    replaced = {name for name in before if getattr(validated, name) != before[name]}
    for line in overrides or ():
        part, *name = line.partition("=")[0].split(".")
        if part == "target" and replaced.intersection(name or replaced):
            raise PruneError(
                f"--set {line} and {_options([*values, *settings])}: one replaces the "
                "other; give one of the two"
            )
    return recipe.model_copy(update={"target": validated})


def _refuse_settings(settings: Mapping[str, Any]) -> None:
    """Raise PruneError for a device or a shape of inputs where nothing is measured."""
    if settings:
        raise PruneError(
            f"{_options(list(settings))}: only for a limit of the latency, which is "
            "measured; this target needs no device: leave it out"
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
    if set(TIMES) <= set(values):
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
