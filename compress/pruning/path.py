"""Choose the cuts on a path of ever smaller shapes of a model.

Every cut is chosen anew: the units of the model as it is now are rated, it is cut to
shapes of about the same cost, and the shape whose answers are closest to its own before
the cut is next.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final

from transformers import PreTrainedModel

from compress.config.recipe import Recipe
from compress.config.stages import Prune
from compress.latency.model import ModelCost, model_cost
from compress.models.codebook import saved_bytes
from compress.models.teacher import Teacher
from compress.pruning.budget import (
    WHOLE_SHAPE,
    budget_setting,
    open_timer,
)
from compress.pruning.shapes import CutModel, shape_grid
from compress.records.path import Least, PathStudent
from compress.slicing.plan import SlicePlan
from compress.slicing.shape import Shape
from compress.slicing.sizes import resize_config
from compress.training.context import TrainingContext

FIRST_CUT = 1.8
CUT = 1.4
"""Ratios of costs: of the model to the first shape, and of each shape to the next
one."""
CUT_ROWS = 512
"""Rows on which units are rated and shapes compared before each cut."""
SHAPES_COMPARED = 12
"""Shapes of about the same cost that are compared before each cut."""


@dataclass(frozen=True)
class ShapeCosts:
    """The costs of a model's shapes, in the unit of the cost that is minimised.

    where    the device, its setting and the precision of latencies; '' for other costs
    costs    by the names of the shapes; whole: of the model itself
    """

    where: str
    costs: Mapping[str, float]
    whole: float


COUNTED: Final[Mapping[Least, Callable[[ModelCost], float]]] = {
    "mb": attrgetter("file_mb"),
    "params": attrgetter("parameters"),
}
"""The costs that are computed from a config; latency is measured instead."""


def compute_costs(
    model: PreTrainedModel,
    recipe: Recipe,
    context: TrainingContext,
) -> ShapeCosts:
    """Compute the cost that the recipe minimises, for the shapes of the model's
    grid."""
    grid = shape_grid(model.config, SlicePlan.from_model(model))
    configs = {name: resize_config(model.config, sizes) for name, sizes in grid.items()}
    configs[WHOLE_SHAPE] = model.config
    count = COUNTED.get(recipe.target.least)
    if count is not None:
        costs = {
            name: count(count_cost(config, recipe, context))
            for name, config in configs.items()
        }
        return ShapeCosts("", costs, costs.pop(WHOLE_SHAPE))
    with open_timer(recipe, context) as timer:
        predicted = timer.predict(configs)
        costs = {name: each.ms for name, each in predicted.items()}
        return ShapeCosts(timer.about, costs, costs.pop(WHOLE_SHAPE))


def count_cost(config: Any, recipe: Recipe, context: TrainingContext) -> ModelCost:
    """Compute the costs of a config as a file of the target's precision."""
    target = recipe.target
    found = model_cost(config, target.precision, kind=context.kind)
    if target.precision != "int8" or recipe.training[-1].table == "full":
        return found
    shape = Shape.from_config(config)
    saved = saved_bytes(shape.vocabulary, shape.embedding)
    return replace(found, file_mb=found.file_mb - saved / 1e6)


@dataclass(frozen=True)
class Cutter:
    """Chooses cuts.

    teacher  the model whose shapes are cut to; costs: of these shapes
    seed     of the run
    """

    recipe: Recipe
    teacher: Teacher
    context: TrainingContext
    costs: ShapeCosts
    seed: int

    def next(
        self,
        model: PreTrainedModel,
        limit: float,
        stage: Prune,
    ) -> PathStudent | None:
        """Choose the shape for a stage to cut to: its cost fills the limit, and its
        answers are closest to the model's. None if every shape costs more.

        Every process takes part, and gets the same shape.
        """
        cut = CutModel.open(
            model,
            stage,
            self.recipe,
            teacher=self.teacher,
            context=self.context,
            seed=self.seed,
        )
        whole = self.teacher.model
        grid = shape_grid(whole.config, SlicePlan.from_model(whole))
        costs = self.costs.costs
        fits = {
            each: sizes
            for each, sizes in grid.items()
            if costs[each] <= limit and sizes.within(cut.plan.sizes)
        }
        if not fits:
            return None
        setting = budget_setting(self.recipe)
        best, *_ = cut.compare(fits, setting, SHAPES_COMPARED)
        sizes = fits[best]
        size = count_cost(cut.config(sizes), self.recipe, self.context).file_mb
        parameters = cut.count_parameters(sizes)
        return PathStudent(stage.name, sizes.plain(), parameters, costs[best], size)
