"""List the recipes by what they train on, for `compress recipes`. Imports neither torch
nor transformers."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

from compress.config.loader import folder
from compress.config.recipe import Recipe
from compress.config.stages import INITS
from compress.io import parse_json
from compress.kinds import find

PURPOSES: Final = {
    "prompted": "Without labels: a prompted language model provides them",
    "task": "With labels of the task",
    "pruning": "With labels of the task: cut the teacher itself",
    "vectors": "Sentence vectors, for search and clustering",
    "corpus": "With unlabelled text as well, for one task or for many",
    "writing": "Language models that write, from text alone",
    "pretraining": "Pre-training on your own text",
}
FURTHER: Final = (
    "tried: on real data, against the same student without the recipe's idea.",
    "A recipe in full, with its numbers and their sources: compress recipes tinybert",
    "The recipe that is chosen by default, and why: compress recipes auto",
    "The sizes and costs of their students: compress students minilm",
)


def purpose(recipe: Recipe) -> str:
    """Return what the recipe trains on, a key of PURPOSES."""
    if "prompt" in (recipe.needs or ""):
        return "prompted"
    if recipe.only_kind and find(recipe.only_kind).vectors:
        return "vectors"
    steps = [stage.step for stage in recipe.training if stage.step is not None]
    if recipe.pruning or any("sizes" in step.options for step in steps):
        return "pruning"
    texts = [stage.data == "text" for stage in recipe.stages]
    if all(texts) and any(stage.kind == "distill" for stage in recipe.stages):
        return "writing"
    if any(stage.kind == "pretrain" for stage in recipe.stages):
        return "pretraining"
    return "corpus" if any(texts) else "task"


def verdicts() -> dict[str, str]:
    """Read the verdict on each recipe that was tried against a control on real data:
    works, no better, or harmful."""
    found: dict[str, str] = parse_json(folder() / "verdicts.json")
    return found


def student(recipe: Recipe) -> str:
    """Describe the last student as family, layers and width, such as `bert, 4 x 312`,
    leaving out what it shares with the teacher."""
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
    """Yield the lines of a list, by purpose: the name of each recipe, what it makes,
    how long that takes, the verdict, and when to choose it."""
    judged = verdicts()
    for key, title in PURPOSES.items():
        yield f"{title}:"
        for recipe in recipes:
            if purpose(recipe) == key:
                facts = [student(recipe), time(recipe)]
                if recipe.name in judged:
                    facts.append(f"tried: {judged[recipe.name]}")
                yield f"  {recipe.name:20}{'; '.join(filter(None, facts))}"
                yield textwrap.indent(textwrap.fill(recipe.choose or "", 74), " " * 6)
        yield ""
    yield from FURTHER


def plain(recipe: Recipe) -> dict[str, object]:
    """Return a recipe's entry in the list, for JSON."""
    return {
        "name": recipe.name,
        "about": recipe.about,
        "purpose": purpose(recipe),
        "student": student(recipe),
        "needs": recipe.needs,
        "cost": recipe.cost,
        "choose": recipe.choose,
        "verdict": verdicts().get(recipe.name),
        **recipe.paper.model_dump(),
    }
