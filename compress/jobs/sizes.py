"""Compare the sizes that a recipe asks for with the teacher's config.json, before torch
is imported.

What the config does not state is checked once the model is loaded.
"""

from collections.abc import Iterable

from compress import families
from compress.config.recipe import Recipe
from compress.config.reference import read_signal
from compress.config.stages import AnyStage, Stage, StudentSpec
from compress.config.term import LAYERED, layer_pairs
from compress.errors import ObjectiveError, RecipeError, StudentError
from compress.models import checkpoints
from compress.slicing.shape import sizes_of
from compress.slicing.sizes import count_size, select_layers


def check_sizes(recipe: Recipe, teacher: str) -> None:
    """Raise PruneError for a target with a size that is larger than the teacher's, and
    RecipeError for texts longer than its table of positions, or for a student whose
    layers cannot be copied from the teacher's, or compared with them."""
    config = checkpoints.read_config(teacher)
    own = sizes_of(config)
    for name, value in recipe.target.sizes.items():
        if name in own:
            count_size(name, value, own[name])
    family = families.find(str(config.get("model_type")))
    positions = own.get("positions") if family.bert_embedding else None
    if problems := long_stages(recipe, teacher, positions, recipe.named_stages):
        raise RecipeError(problems)
    theirs = own.get("layers")
    if theirs is None or recipe.pruning or "decoder_layers" in own:
        return
    problems = []
    spec = recipe.student
    for where, stage in recipe.named_stages:
        if not isinstance(stage, Stage):
            continue
        spec = stage.student or spec
        if spec is None or spec.layers is None or stage.teacher == "previous":
            continue
        share = theirs if spec.layers < 1 else 1
        try:
            _compare_layers(stage, spec, round(share * spec.layers), theirs)
        except (ObjectiveError, StudentError) as error:
            problems.append(f"{recipe.name}: {where} ({stage.name}): {error}")
    if problems:
        raise RecipeError(problems)


def long_stages(
    recipe: Recipe,
    teacher: str,
    positions: int | None,
    stages: Iterable[tuple[str, AnyStage]],
) -> list[str]:
    """Say which stages, given with their names, read longer texts than the teacher has
    positions."""
    return [
        f"{recipe.name}: {where}.max_length is {stage.max_length}; teacher {teacher} "
        f"has {positions} positions: --set "
        f"{where.replace('[', '.').rstrip(']')}.max_length={positions}"
        for where, stage in stages
        if positions is not None
        and stage.max_length != "auto"
        and stage.max_length > positions
    ]


def _compare_layers(stage: Stage, spec: StudentSpec, layers: int, theirs: int) -> None:
    if spec.init == "teacher" and spec.family == "teacher":
        select_layers(spec.copy_layers, layers, theirs)
    for term in stage.objective:
        if isinstance(term.loss, str) and read_signal(term.loss) in LAYERED:
            layer_pairs(term.layers, layers, theirs)
