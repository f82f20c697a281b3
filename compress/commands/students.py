"""List the students that a teacher allows, and their sizes, before anything is trained or even downloaded.

Models are built on the meta device, from the teacher's config.json alone: no weights, no time. Sizes are those of the
model without its head, which every task has its own of.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Group
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
                student = _built(StudentSpec(**settings), tutor)
            except StudentError:
                continue  # not a size this teacher has a share of
            variants.append((" ".join(f"student.{size}={value}" for size, value in settings.items()), student))
        return Listing(teacher, measure_size(tutor), _grouped(own), _grouped(variants), tuple(refused))


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
            found.append((f"{recipe.name}: {stage.name}", _built(spec, source)))
        _check(stage, found[-1][1], found[-2][1] if learns_on and len(found) > 1 else tutor)
    return [*found[:-1], (recipe.name, found[-1][1])]


def _built(spec: StudentSpec, tutor: PreTrainedModel) -> PreTrainedModel:
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


def _grouped(found: Iterable[tuple[str, PreTrainedModel]]) -> tuple[Buildable, ...]:
    """Make one line per model, the costliest first."""
    alike: dict[str, tuple[PreTrainedModel, list[str]]] = {}
    for name, model in found:
        alike.setdefault(model.config.to_json_string(), (model, []))[1].append(name)
    lines = [Buildable(tuple(by), measure_size(model)) for model, by in alike.values()]
    return tuple(sorted(lines, key=lambda line: -line.size.flops_per_token))


def as_json(listing: Listing) -> str:
    return json.dumps(asdict(listing), indent=1)


def shown(listing: Listing) -> Group:
    """Lay out a table, and below it the recipes that this teacher does not allow."""
    table = Table(
        title=f"Students of {listing.teacher}", caption=_CAPTION, box=None, pad_edge=False, collapse_padding=True
    )
    table.add_column("recipes", min_width=16)
    table.add_column("model", no_wrap=True)
    for name in ("ffn", "heads", "params", "tables", "layers", "MFLOP", "MB", "int8", "size", "FLOPs"):
        table.add_column(name, justify="right")
    table.add_row(*_cells("the teacher", listing.size, listing.size), style="bold")
    for each in listing.recipes:
        table.add_row(*_cells(", ".join(each.by), each.size, listing.size))
    table.add_row()
    for each in listing.variants:
        table.add_row(*_cells("any", each.size, listing.size))
    refused = [f"{each.recipe}: {each.why}" for each in listing.refused]
    return Group(table, *(["", "Not from this teacher:"] if refused else []), *refused)


_CAPTION = (
    f"Without heads. Parameters in millions, those of embedding tables apart; MFLOP per token, of {TOKENS}; size and "
    "FLOPs as shares of the teacher's. Any recipe makes the last ones: --set student.layers=..., student.hidden, "
    "student.heads, student.ffn."
)


def _cells(name: str, size: ModelSize, teacher: ModelSize) -> tuple[str, ...]:
    millions = (size.parameters, size.embedding_parameters, size.encoder_parameters)
    return (
        name,
        f"{size.family} {size.layers}x{size.hidden}",
        str(size.ffn),
        str(size.heads),
        *(f"{count / 1e6:.1f}" for count in millions),
        f"{size.flops_per_token / 1e6:.1f}",
        f"{size.fp32_mb:.0f}",
        f"{size.int8_mb:.0f}",
        f"{size.parameters / teacher.parameters:.0%}",
        f"{size.flops_per_token / teacher.flops_per_token:.0%}",
    )
