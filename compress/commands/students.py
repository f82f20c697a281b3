"""List the students that a teacher allows, with their sizes, before anything is trained
or even downloaded.

Models are built on the meta device from the teacher's config.json alone. Sizes are for
models without a head, because each task has its own.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedConfig, PreTrainedModel

from compress.config.loader import names
from compress.config.recipe import Recipe
from compress.config.reference import Call
from compress.config.stages import INITS, Stage, StudentSpec
from compress.errors import ObjectiveError, PruneError, StudentError, TeacherError
from compress.kinds import Kind
from compress.kinds import names as names_of_kinds
from compress.models import heads
from compress.models.checkpoints import config_folder
from compress.models.flops import COUNTED_TOKENS, ModelSize, measure_size
from compress.models.loader import load_config
from compress.models.student import build
from compress.reporting.terminal import print_wide
from compress.slicing.plan import SlicePlan
from compress.slicing.shape import Shape, find_setting
from compress.slicing.sizes import Sizes, resize_config
from compress.training.objective import Objective

COMMON_KIND: Final = "classification"
"""The kind of task of the heads that are built, if the recipe allows it."""
NamedModel = tuple[str, PreTrainedModel]

DEPTHS = (1.0, 0.5, 0.25)
WIDTHS = (1.0, 0.5, 0.25)
"""Shares of the teacher's layers, and of its width, heads and FFN, that are listed in
addition to the recipes' students."""


@dataclass(frozen=True)
class Buildable:
    """A student, and the recipes (or the settings, for any recipe) that build it."""

    by: tuple[str, ...]
    size: ModelSize


@dataclass(frozen=True)
class Refused:
    recipe: str
    why: str


@dataclass(frozen=True)
class Listing:
    """All students of a teacher, largest first, from recipes and from variants; and the
    recipes that it does not allow."""

    teacher: str
    size: ModelSize
    recipes: tuple[Buildable, ...]
    variants: tuple[Buildable, ...]
    refused: tuple[Refused, ...]


def list_students(teacher: str, recipes: Sequence[Recipe] | None = None) -> Listing:
    """List every student that `recipes` (default: all of ours) and shares of the
    teacher's size yield.

    teacher  alias, folder or hub id; only its config.json is read

    Raises TeacherError.
    """
    config = _load_config(teacher)
    own: list[NamedModel] = []
    variants: list[NamedModel] = []
    refused: list[Refused] = []
    with torch.device("meta"):
        model = heads.create(config, "encoder", None)
        for recipe in (
            [Recipe.load(name) for name in names()] if recipes is None else recipes
        ):
            try:
                own += _build_students(recipe, model)
            except (StudentError, PruneError, ObjectiveError, TeacherError) as error:
                refused.append(Refused(recipe.name, str(error)))
        for settings in _variants(config):
            try:
                student = _build(StudentSpec(**settings), model)
            except StudentError:
                continue  # this teacher does not have such a share
            variants.append(
                (
                    " ".join(
                        f"student.{size}={value}" for size, value in settings.items()
                    ),
                    student,
                )
            )
        return Listing(
            teacher,
            measure_size(model),
            _group(own),
            _group(variants),
            tuple(refused),
        )


def _build_students(recipe: Recipe, teacher: PreTrainedModel) -> list[NamedModel]:
    """Build a recipe's teaching assistants, then its student. Raises what building and
    checking raise."""
    if recipe.pruning:
        SlicePlan.from_model(teacher)  # raises PruneError for a family without one
        sizes = recipe.target.sizes  # none: the user gives them
        smaller = resize_config(
            teacher.config, Sizes.from_request(teacher.config, **sizes)
        )
        return [(recipe.name, heads.create(smaller, "encoder", None))] if sizes else []
    found: list[NamedModel] = []
    for stage in recipe.training:
        spec = stage.student or (None if found else recipe.student)
        from_previous = stage.teacher == "previous"
        if spec is not None:
            source = found[-1][1] if from_previous and found else teacher
            found.append((f"{recipe.name}: {stage.name}", _build(spec, source)))
        student = found[-1][1]
        taught_by = found[-2][1] if from_previous and len(found) > 1 else teacher
        kind = _choose_kind(stage)
        heads.model_class(student.config, stage.head, kind)
        if stage.objective:
            shapes = (
                Shape.from_config(student.config),
                Shape.from_config(taught_by.config),
            )
            Objective(stage.objective, *shapes, kind=kind)
    return [*found[:-1], (recipe.name, found[-1][1])]


def _choose_kind(stage: Stage) -> Kind:
    """Choose a kind of task that the stage's objective serves, classification if it
    does."""
    for kind in (COMMON_KIND, *names_of_kinds()):
        if any(term.serves(kind) for term in stage.objective):
            return kind
    return COMMON_KIND


def _build(spec: StudentSpec, teacher: PreTrainedModel) -> PreTrainedModel:
    if isinstance(spec.init, str) and spec.init not in INITS:
        return heads.create(_load_config(spec.init), "encoder", None)
    # it may look at values, which the meta device does not have
    if isinstance(spec.init, Call):
        spec = spec.model_copy(update={"init": "scratch"})
    return build(spec, teacher, head="encoder")


def _load_config(checkpoint: str) -> PreTrainedConfig:
    config: PreTrainedConfig = load_config(config_folder(checkpoint))
    return config


def _variants(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    shape = Shape.from_config(config)
    for width, depth in product(WIDTHS, DEPTHS):
        sizes = {"layers": shape.layers * depth}
        if width != 1:
            sizes |= {
                size: getattr(shape, size) * width
                for size in ("hidden", "heads", "ffn")
            }
        whole = all(count >= 1 and count == int(count) for count in sizes.values())
        if (
            (depth, width) != (1, 1)
            and whole
            and all(find_setting(config, size) for size in sizes)
        ):
            yield {size: int(count) for size, count in sizes.items()}


def _group(found: Iterable[NamedModel]) -> tuple[Buildable, ...]:
    """Group equal models under the names of all recipes that build them; the most
    expensive comes first."""
    groups: dict[str, tuple[PreTrainedModel, list[str]]] = {}
    for name, model in found:
        groups.setdefault(model.config.to_json_string(), (model, []))[1].append(name)
    lines = [Buildable(tuple(by), measure_size(model)) for model, by in groups.values()]
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
    (
        "size",
        False,
        lambda size, teacher: f"{size.parameters / teacher.parameters:.0%}",
    ),
    (
        "FLOPs",
        True,
        lambda size, teacher: f"{size.flops_per_token / teacher.flops_per_token:.0%}",
    ),
)
"""Heading, whether it is shown without --wide, and the cell for a student's and the
teacher's size."""
_NOTE = (
    f"Without heads. params: millions; MFLOP: per token, of {COUNTED_TOKENS}; int8: MB "
    "of the "
    "file; FLOPs: of the teacher's. any: in any recipe, with --set student.layers=..., "
    "student.hidden, student.heads, student.ffn"
)
_WIDE_NOTE = (
    "tables, layers: parameters of the embedding tables, and of the rest; MB: of the "
    "fp32 file"
)


def print_listing(listing: Listing, console: Console, *, wide: bool = False) -> None:
    """Print a table of the students, then which cost more than the teacher, and which
    it does not allow.

    wide  print all columns, and the more expensive students in the table as well
    """
    columns = [(name, cell) for name, few, cell in _COLUMNS if few or wide]
    table = Table(
        title=f"Students of {listing.teacher}",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    table.add_column("recipes", width=NAMES_WIDTH)
    for name, _ in columns:
        table.add_column(
            name,
            justify="left" if name == "model" else "right",
            no_wrap=True,
        )

    def add(names: str, size: ModelSize, style: str = "") -> None:
        table.add_row(
            names, *(cell(size, listing.size) for _, cell in columns), style=style
        )

    limit = listing.size.flops_per_token
    expensive = [
        student for student in listing.recipes if student.size.flops_per_token > limit
    ]
    add("the teacher", listing.size, "bold")
    for student in listing.recipes:
        if wide or student not in expensive:
            add(", ".join(student.by), student.size)
    table.add_row()
    for student in listing.variants:
        add("any", student.size)
    if wide:
        print_wide(console, table)
    else:
        console.print(table)
    console.print(
        f"{_NOTE}. {_WIDE_NOTE if wide else 'More: --wide'}.", highlight=False
    )
    if expensive and not wide:
        names = ", ".join(name for student in expensive for name in student.by)
        console.print(f"More expensive than this teacher: {names}.", highlight=False)
    if listing.refused:
        console.print("\nNot from this teacher:")
    for refused in listing.refused:
        console.print(f"{refused.recipe}: {refused.why}", highlight=False)
