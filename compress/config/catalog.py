"""`compress recipes`: the recipes by what one needs for them, a line each. Imports neither torch nor more."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from compress.config.recipe import INITS, Recipe, StudentSpec

PURPOSES: Final = {
    "prompted": "Without labels: a prompted language model gives them",
    "task": "From labels of the task",
    "vectors": "Sentence vectors, from texts without labels",
    "corpus": "With unlabelled text besides, for one task or for many",
    "pretraining": "Pre-training on text of your own",
}
FURTHER: Final = (
    "one in full, when to choose it, what it costs: compress recipes tinybert",
    "which is taken where none is named, and why: compress recipes auto",
    "what each makes of a teacher, in size and cost: compress students minilm",
)


def purpose(recipe: Recipe) -> str:
    """Return what the recipe trains on, a key of PURPOSES; prompted, where `needs` names a prompt; vectors, where all
    that it minimises serves tasks of sentence vectors only.
    """
    if "prompt" in (recipe.needs or ""):
        return "prompted"
    if recipe.only_kind == "embedding":
        return "vectors"
    if any(stage.kind == "pretrain" for stage in recipe.stages):
        return "pretraining"
    return "corpus" if any(stage.data == "text" for stage in recipe.stages) else "task"


def student(recipe: Recipe) -> str:
    """`bert, 4 x 312`: what the recipe ends with, as layers and width; what is its teacher's is left out."""
    if recipe.pruning:
        return "the teacher, pruned"
    spec = ([stage.student for stage in recipe.training if stage.student is not None] or [recipe.student])[-1]
    if isinstance(spec.init, str) and spec.init not in INITS:
        return f"the checkpoint {spec.init}"
    family = () if spec.family == "teacher" else (spec.family,)
    return ", ".join((*family, *_sizes(spec))) or "as the teacher"


def _sizes(spec: StudentSpec) -> Iterable[str]:
    if spec.layers is not None and spec.hidden is not None and min(spec.layers, spec.hidden) >= 1:
        yield f"{spec.layers:g} x {spec.hidden:g}"
        return
    for count, unit, share in (
        (spec.layers, "layers", "layers"),
        (spec.hidden, "wide", "width"),
        (spec.embedding, "wide embedding", "embedding"),
    ):
        if count is not None:
            yield f"{count:g} {unit}" if count >= 1 else f"{'half' if count == 0.5 else f'{count:g} of'} the {share}"


def lines(recipes: Sequence[Recipe]) -> Iterable[str]:
    """Yield a line for each recipe, those of one purpose together: its name, what it makes, and how long that takes."""
    cells = [(purpose(each), each.name, student(each), time(each)) for each in recipes]
    wide = [max(len(row[at]) for row in cells) + 2 for at in (1, 2)]
    yield f"{'recipe':{wide[0]}}{'student':{wide[1]}}time"
    for key, title in PURPOSES.items():
        yield from ("", f"{title}:")
        for _, name, model, cost in (row for row in cells if row[0] == key):
            yield f"{name:{wide[0]}}{model:{wide[1]}}{cost}"
    yield from ("", *FURTHER)


def time(recipe: Recipe) -> str:
    """`minutes`, or `days, hours`, with `GPU` where it needs one: what the recipe's cost comes to."""
    words = dict.fromkeys(re.findall(r"minutes|hours|days", recipe.cost or ""))
    return ", ".join([*words, *(["GPU"] if "GPU" in f"{recipe.needs} {recipe.cost}" else [])])


def plain(recipe: Recipe) -> dict[str, object]:
    """Return the fields that a list shows, for JSON."""
    said = {"name": recipe.name, "about": recipe.about, "purpose": purpose(recipe), "student": student(recipe)}
    guidance = {"needs": recipe.needs, "cost": recipe.cost, "choose": recipe.choose}
    return {**said, **guidance, **recipe.paper.model_dump()}
