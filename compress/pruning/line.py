"""The straight line of pruning: a model and what is to be left of it in, a smaller, recovered, measured bundle out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console

from compress import precision as precisions
from compress.data.task import Kind
from compress.errors import PruneError
from compress.export.bundle import Bundle
from compress.pipeline import distill
from compress.recipe import Recipe, Target
from compress.recipe_file import names
from compress.recipe_stage import BUDGETS, SIZES


def prune(
    *,
    model: str,
    data: str,
    out: str | Path,
    recipe: str | Recipe = "prune-taylor",
    layers: float | None = None,
    hidden: float | None = None,
    heads: float | None = None,
    ffn: float | None = None,
    embedding: float | None = None,
    bottleneck: float | None = None,
    max_latency_ms: float | None = None,
    speedup: float | None = None,
    max_params: float | None = None,
    device: str = "local",
    threads: int = 1,
    batch: int = 1,
    seq: int | None = None,
    overrides: Sequence[str] = (),
    text: Sequence[str] | None = None,
    label: str | None = None,
    kind: Kind | None = None,
    metric: str | None = None,
    seed: int = 0,
    precision: precisions.Precision = "auto",
    resume: bool = False,
    gate: Literal["refuse", "warn"] = "refuse",
    allow_pickle: bool = False,
    console: Console | None = None,
) -> Bundle:
    """Prune `model`, let it recover with its unpruned self as teacher, ship it as a bundle in `out`/bundle, measured.

    model    a checkpoint with a head for the task, an alias or encoder that is fine-tuned first, or a bundle's folder
    recipe   name, path of a .yaml, or a Recipe, with stages that prune; `overrides` as for `distill`
    layers, hidden, heads, ffn, embedding, bottleneck
             what is to be left: counts, or shares below 1 of the model's; what is not named stays
    max_latency_ms, speedup, max_params
             or what it may cost: the sizes are then found (`pruning.choice`). Milliseconds are of the int8 file's
             forward on `device` at `threads`, `batch` and `seq` tokens (the recipe's max_length by default); the
             speedup is over the unpruned model's own int8 file there
    The rest is as for `distill`.

    Raises PruneError for what cannot be left of this model, and a CompressError that says what to do for the rest.
    """
    sizes = {
        "layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn, "embedding": embedding,
        "bottleneck": bottleneck,
    }  # fmt: skip
    budgets = {"max_latency_ms": max_latency_ms, "speedup": speedup, "max_params": max_params}
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe, overrides)
    recipe = aimed(recipe, {**sizes, **budgets}, {"device": device, "threads": threads, "batch": batch, "seq": seq})
    return distill(
        teacher=model, recipe=recipe, data=data, out=out, text=text, label=label, kind=kind, metric=metric, seed=seed,
        precision=precision, resume=resume, gate=gate, allow_pickle=allow_pickle, console=console,
    )  # fmt: skip


def aimed(recipe: Recipe, asked: dict[str, float | None], setting: dict[str, str | int | None]) -> Recipe:
    """The recipe with what is asked as its target, instead of its own; its own where nothing is. Raises PruneError."""
    if not recipe.pruning:
        known = [name for name in names() if Recipe.load(name).pruning]
        raise PruneError(f"recipe {recipe.name}: has no stage that prunes; recipes that have: {', '.join(known)}")
    given = {name: value for name, value in asked.items() if value is not None}
    if not given and not (recipe.target.sizes or recipe.target.budgets):
        raise PruneError(
            f"nothing to prune to: give sizes ({_options(SIZES)}), as counts or shares of the model's, or a budget "
            f"({_options(BUDGETS)})"
        )
    sizes, budgets = ([name for name in of if name in given] for of in (SIZES, BUDGETS))
    if sizes and budgets:
        raise PruneError(
            f"{_options(sizes)} and {_options(budgets)}: sizes and a budget that decides the sizes; give one of them"
        )
    if {"max_latency_ms", "speedup"} <= set(given):
        raise PruneError("--max-latency-ms and --speedup: both say how fast it is to be; give one of them")
    for name, value in given.items():
        limit = 1 if name == "speedup" else 0
        if not value > limit:
            raise PruneError(f"{_options([name])} {value:g}: expected a number above {limit}")
    if not given:
        return recipe
    count = {"max_params": int(given["max_params"])} if "max_params" in given else {}
    return recipe.model_copy(update={"target": Target.model_validate({**given, **count, **setting})})


def _options(settings: Sequence[str]) -> str:
    return ", ".join(f"--{each.replace('_', '-')}" for each in settings)
