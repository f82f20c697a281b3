"""List the recipes by what they train on, for `compress recipes`. Imports neither torch
nor transformers."""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from compress.config.recipe import Recipe
from compress.config.stages import INITS
from compress.kinds import find

PURPOSES: Final = {
    "prompted": "Without labels: a prompted language model provides them",
    "task": "With labels of the task",
    "vectors": "Sentence vectors, from texts without labels",
    "corpus": "With unlabelled text as well, for one task or for many",
    "pretraining": "Pre-training on your own text",
}
FURTHER: Final = (
    "A recipe in full, when to choose it, what it costs: compress recipes tinybert",
    "The recipe that is chosen by default, and why: compress recipes auto",
    "The sizes and costs of their students: compress students minilm",
)


def purpose(recipe: Recipe) -> str:
    """Return what the recipe trains on, a key of PURPOSES."""
    if "prompt" in (recipe.needs or ""):
        return "prompted"
    if recipe.only_kind and find(recipe.only_kind).vectors:
        return "vectors"
    if any(stage.kind == "pretrain" for stage in recipe.stages):
        return "pretraining"
    return "corpus" if any(stage.data == "text" for stage in recipe.stages) else "task"


def student(recipe: Recipe) -> str:
    """Describe the last student as family, layers and width, such as `bert, 4 x 312`,
    without what is the teacher's."""
    if recipe.pruning:
        return "the teacher, pruned"
    spec = (
        [stage.student for stage in recipe.training if stage.student is not None]
        or [recipe.student]
    )[-1]
    if isinstance(spec.init, str) and spec.init not in INITS:
        return f"the checkpoint {spec.init}"
    parts = [] if spec.family == "teacher" else [spec.family]
    if (
        spec.layers is not None
        and spec.hidden is not None
        and min(spec.layers, spec.hidden) >= 1
    ):
        return ", ".join([*parts, f"{spec.layers:g} x {spec.hidden:g}"])
    for count, unit, share in (
        (spec.layers, "layers", "layers"),
        (spec.hidden, "wide", "width"),
        (spec.embedding, "wide embedding", "embedding"),
    ):
        if count is not None:
            parts.append(
                f"{count:g} {unit}"
                if count >= 1
                else f"{'half' if count == 0.5 else f'{count:g} of'} the {share}"
            )
    return ", ".join(parts) or "as the teacher"


def time(recipe: Recipe) -> str:
    """Summarise the recipe's cost: `minutes`, or `days, hours`, with `GPU` if it needs
    one."""
    words = dict.fromkeys(re.findall(r"minutes|hours|days", recipe.cost or ""))
    return ", ".join(
        [*words, *(["GPU"] if "GPU" in f"{recipe.needs} {recipe.cost}" else [])]
    )


def format_table(recipes: Sequence[Recipe]) -> Iterator[str]:
    """Yield the lines of a table, by purpose: the name of each recipe, what it makes,
    and how long that takes."""
    rows = [
        (purpose(recipe), recipe.name, student(recipe), time(recipe))
        for recipe in recipes
    ]
    widths = [max(len(row[at]) for row in rows) + 2 for at in (1, 2)]
    yield f"{'recipe':{widths[0]}}{'student':{widths[1]}}time"
    for key, title in PURPOSES.items():
        yield from ("", f"{title}:")
        for _, name, model, cost in (row for row in rows if row[0] == key):
            yield f"{name:{widths[0]}}{model:{widths[1]}}{cost}"
    yield from ("", *FURTHER)


def plain(recipe: Recipe) -> dict[str, object]:
    """Return the fields of a recipe in a list, for JSON."""
    return {
        "name": recipe.name,
        "about": recipe.about,
        "purpose": purpose(recipe),
        "student": student(recipe),
        "needs": recipe.needs,
        "cost": recipe.cost,
        "choose": recipe.choose,
        **recipe.paper.model_dump(),
    }
