"""List the students that a teacher allows, and their sizes, before anything is trained or even downloaded.

Models are built on the meta device, from the teacher's config.json alone: no weights, no time. Sizes are those of the
model without its head, which every task has its own of.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedConfig, PreTrainedModel

from compress.config.loader import names
from compress.config.recipe import INITS, Recipe, Stage, StudentSpec
from compress.config.reference import Call
from compress.errors import ObjectiveError, PruneError, StudentError, TeacherError
from compress.models import heads
from compress.models.checkpoints import config_folder
from compress.models.flops import TOKENS, ModelSize, measure_size
from compress.models.student import build
from compress.models.teacher import load_config
from compress.reporting.terminal import print_wide
from compress.slicing.shape import Shape, setting_name
from compress.slicing.sizes import Sizes, resize_config
from compress.training.objective import Objective

DEPTHS, WIDTHS = (1.0, 0.5, 0.25), (1.0, 0.5, 0.25)
"""Shares of the teacher's layers, and of its width, heads and FFN, that are listed beside the recipes' own students."""


@dataclass(frozen=True)
class Buildable:
    """A student, and the recipes (or the settings, for any recipe) that make it."""

    by: tuple[str, ...]
    size: ModelSize


@dataclass(frozen=True)
class Refused:
    recipe: str
    why: str


@dataclass(frozen=True)
class Listing:
    """All students of a teacher, the recipes' first, each by size; and the recipes it does not allow."""

    teacher: str
    size: ModelSize
    recipes: tuple[Buildable, ...]
    variants: tuple[Buildable, ...]
    refused: tuple[Refused, ...]


def students_of(teacher: str, recipes: Sequence[Recipe] | None = None) -> Listing:
    """List every student that `recipes` (all of ours) and shares of its size make of a teacher: alias, folder or hub
    id.

    Only config.json is read. Raises TeacherError.
    """
    config = _config(teacher)
    own: list[tuple[str, PreTrainedModel]] = []
    variants: list[tuple[str, PreTrainedModel]] = []
    refused: list[Refused] = []
    with torch.device("meta"):
        tutor = heads.create(config, "encoder", None)
        for recipe in [Recipe.load(name) for name in names()] if recipes is None else recipes:
            try:
                own += _of_recipe(recipe, tutor)
            except (StudentError, PruneError, ObjectiveError, TeacherError) as error:
                refused.append(Refused(recipe.name, str(error)))
        for settings in _variants(config):
            try:
                student = _build(StudentSpec(**settings), tutor)
            except StudentError:
                continue  # not a size this teacher has a share of
            variants.append((" ".join(f"student.{size}={value}" for size, value in settings.items()), student))
        return Listing(teacher, measure_size(tutor), _group(own), _group(variants), tuple(refused))


def _of_recipe(recipe: Recipe, tutor: PreTrainedModel) -> list[tuple[str, PreTrainedModel]]:
    """Teaching assistants, then the student. Raises StudentError, PruneError, ObjectiveError, TeacherError."""
    if recipe.pruning:
        sizes = recipe.target.sizes  # without any, it is what one asks for
        smaller = resize_config(tutor.config, Sizes.from_request(tutor.config, **sizes))
        return [(recipe.name, heads.create(smaller, "encoder", None))] if sizes else []
    found: list[tuple[str, PreTrainedModel]] = []
    for stage in recipe.training:
        spec, learns_on = stage.student or (None if found else recipe.student), stage.teacher == "previous"
        if spec is not None:
            source = found[-1][1] if learns_on and found else tutor
            found.append((f"{recipe.name}: {stage.name}", _build(spec, source)))
        _check(stage, found[-1][1], found[-2][1] if learns_on and len(found) > 1 else tutor)
    return [*found[:-1], (recipe.name, found[-1][1])]


def _build(spec: StudentSpec, tutor: PreTrainedModel) -> PreTrainedModel:
    """Build with weights: a function that fills them may look at values, and refuses some only then."""
    if isinstance(spec.init, str) and spec.init not in INITS:
        return heads.create(_config(spec.init), "encoder", None)
    if isinstance(spec.init, Call):
        spec = spec.model_copy(update={"init": "scratch"})
    return build(spec, tutor, head="encoder")


def _config(checkpoint: str) -> PreTrainedConfig:
    config: PreTrainedConfig = load_config(config_folder(checkpoint))
    return config


def _check(stage: Stage, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    heads.model_class(student.config, stage.head, "classification")
    if stage.objective:
        Objective(
            stage.objective, Shape.from_config(student.config), Shape.from_config(teacher.config), kind="classification"
        )


def _variants(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    theirs = Shape.from_config(config)
    for width in WIDTHS:
        for depth in DEPTHS:
            sizes = {"layers": theirs.layers * depth}
            if width != 1:
                sizes |= {size: getattr(theirs, size) * width for size in ("hidden", "heads", "ffn")}
            whole = all(count >= 1 and count == int(count) for count in sizes.values())
            if (depth, width) != (1, 1) and whole and all(_has(config, size) for size in sizes):
                yield {size: int(count) for size, count in sizes.items()}


def _has(config: PreTrainedConfig, size: str) -> bool:
    try:
        return bool(setting_name(config, size))
    except KeyError:
        return False


def _group(found: Iterable[tuple[str, PreTrainedModel]]) -> tuple[Buildable, ...]:
    """Make one line per model, the costliest first."""
    alike: dict[str, tuple[PreTrainedModel, list[str]]] = {}
    for name, model in found:
        alike.setdefault(model.config.to_json_string(), (model, []))[1].append(name)
    lines = [Buildable(tuple(by), measure_size(model)) for model, by in alike.values()]
    return tuple(sorted(lines, key=lambda line: -line.size.flops_per_token))


NAMES_WIDTH = 27
_COLUMNS: Final[tuple[tuple[str, bool, Callable[[ModelSize, ModelSize], str]], ...]] = (
    ("model", True, lambda size, _: f"{size.family} {size.layers}x{size.hidden}"),
    ("ffn", False, lambda size, _: str(size.ffn)),
    ("heads", False, lambda size, _: str(size.heads)),
    ("params", True, lambda size, _: f"{size.parameters / 1e6:.1f}"),
    ("tables", False, lambda size, _: f"{size.embedding_parameters / 1e6:.1f}"),
    ("layers", False, lambda size, _: f"{size.encoder_parameters / 1e6:.1f}"),
    ("MFLOP", True, lambda size, _: f"{size.flops_per_token / 1e6:.1f}"),
    ("MB", False, lambda size, _: f"{size.fp32_mb:.0f}"),
    ("int8", True, lambda size, _: f"{size.int8_mb:.0f}"),
    ("size", False, lambda size, teacher: f"{size.parameters / teacher.parameters:.0%}"),
    ("FLOPs", True, lambda size, teacher: f"{size.flops_per_token / teacher.flops_per_token:.0%}"),
)
"""Heading, whether it is among the few, and what it says of a size beside the teacher's."""
_NOTE = (
    f"Without heads; params: millions; MFLOP: per token, of {TOKENS}; int8: MB of the file; FLOPs: over the teacher's. "
    "The ones of any recipe: --set student.layers=..., student.hidden, student.heads, student.ffn"
)
_WIDE_NOTE = "tables, layers: parameters of the embedding tables, and of all else; MB: of the fp32 file"


def show(listing: Listing, console: Console, *, wide: bool = False) -> None:
    """Print a table of the students that are no costlier than the teacher; then which are, and which it does not allow.

    wide  print all columns, and the costlier ones as well
    """
    columns = [(name, cell) for name, few, cell in _COLUMNS if few or wide]
    table = Table(title=f"Students of {listing.teacher}", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("recipes", width=NAMES_WIDTH)
    for name, _ in columns:
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)

    def add(names: str, size: ModelSize, style: str = "") -> None:
        table.add_row(names, *(cell(size, listing.size) for _, cell in columns), style=style)

    most = listing.size.flops_per_token
    costlier = [each for each in listing.recipes if each.size.flops_per_token > most]
    add("the teacher", listing.size, "bold")
    for each in listing.recipes:
        if wide or each not in costlier:
            add(", ".join(each.by), each.size)
    table.add_row()
    for each in listing.variants:
        add("any", each.size)
    if wide:
        print_wide(console, table)
    else:
        console.print(table)
    console.print(f"{_NOTE}. {_WIDE_NOTE if wide else 'More: --wide'}.", highlight=False)
    if costlier and not wide:
        names = ", ".join(name for each in costlier for name in each.by)
        console.print(f"Costlier than this teacher: {names}.", highlight=False)
    if listing.refused:
        console.print("\nNot from this teacher:")
    for refused in listing.refused:
        console.print(f"{refused.recipe}: {refused.why}", highlight=False)
