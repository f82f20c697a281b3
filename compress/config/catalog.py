"""`compress recipes`: which recipe to choose, as a table by what one needs for it. Imports neither torch nor more."""

from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from compress.config.recipe import INITS, Recipe, StudentSpec

PURPOSES: Final = {
    "prompted": "Without labels: a prompted language model gives them",
    "task": "From labels of the task",
    "corpus": "With unlabelled text besides, for one task or for many",
    "pretraining": "Pre-training on text of your own",
}
FURTHER: Final = (
    "One in full, with its citations: compress recipes tinybert",
    "Which is taken where none is named, and why: compress recipes auto",
    "What each makes of a teacher, in size and cost: compress students minilm",
)


def purpose(recipe: Recipe) -> str:
    """Return what the recipe trains on, a key of PURPOSES; prompted, where `needs` names a prompt."""
    if "prompt" in (recipe.needs or ""):
        return "prompted"
    if any(stage.kind == "pretrain" for stage in recipe.stages):
        return "pretraining"
    return "corpus" if any(stage.data == "text" for stage in recipe.stages) else "task"


def student(recipe: Recipe) -> str:
    """`bert, 4 layers, 312 wide`: what the recipe ends with; sizes that are its teacher's are left out."""
    if recipe.pruning:
        return "the teacher, pruned"
    spec = ([stage.student for stage in recipe.training if stage.student is not None] or [recipe.student])[-1]
    if isinstance(spec.init, str) and spec.init not in INITS:
        return f"the checkpoint {spec.init}"
    family = () if spec.family == "teacher" else (spec.family,)
    return ", ".join((*family, *_sizes(spec))) or "as the teacher"


def _sizes(spec: StudentSpec) -> Iterable[str]:
    for size, unit in (("layers", "layers"), ("hidden", "wide"), ("embedding", "wide embedding")):
        count = getattr(spec, size)
        if count is not None:
            share = "half" if count == 0.5 else f"{count:g} of"
            yield f"{count:g} {unit}" if count >= 1 else f"{share} the {'width' if size == 'hidden' else unit}"


def shown(recipes: Sequence[Recipe]) -> Group:
    """Lay out one table for each purpose."""
    parts: list[Text | Table] = []
    for key, title in PURPOSES.items():
        group = [recipe for recipe in recipes if purpose(recipe) == key]
        if group:
            parts += [Text(f" {title}", style="bold"), _table(group), Text()]
    parts += [Text(f" {line}") for line in FURTHER]
    return Group(*parts)


def _table(recipes: Sequence[Recipe]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("recipe", no_wrap=True)
    for name in ("student", "needs", "cost", "choose it when"):
        table.add_column(name)
    for each in recipes:
        table.add_row(each.name, student(each), each.needs, each.cost, each.choose or each.about)
    return table


def plain(recipe: Recipe) -> dict[str, object]:
    """Return the fields that a list shows, for JSON."""
    said = {"name": recipe.name, "about": recipe.about, "purpose": purpose(recipe), "student": student(recipe)}
    guidance = {"needs": recipe.needs, "cost": recipe.cost, "choose": recipe.choose}
    return {**said, **guidance, **recipe.paper.model_dump()}
